//! The files that a command can write, as arguments that commands share.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;

use super::{Machine, Report, format};
use crate::files;

/// Files for what a command finds. Flatten it into a command's arguments; call [`Outputs::check`] before a long
/// measurement and [`Outputs::write`] after it.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Files")]
pub struct Outputs {
    /// Write tables and machine as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the table as CSV; where a command has several, the later ones go to FILE with their name in it
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Write the tables in Markdown
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Write the tables for LaTeX, with the package booktabs
    #[arg(long, value_name = "FILE")]
    pub latex: Option<PathBuf>,
    /// Write the plot as SVG; where a command has several, the later ones go to FILE with their name in it
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Write tables and plots as one HTML page
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Write all of these into a folder, which is made where there is none
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// The commit that this program was built from; without it, that of the repository that the program lies in
    #[arg(long, value_name = "ID")]
    pub commit: Option<String>,
    /// Files that the command reads, which it must not write: see [`Outputs::apart_from`].
    #[arg(skip)]
    pub inputs: Vec<PathBuf>,
}

/// Why a file was not written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot make the folder {}: {source}", path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error("{0}\n  help: name another file")]
    Clash(#[from] files::Clash),
    #[error("cannot write the output: {0}")]
    Print(#[from] io::Error),
}

impl Outputs {
    /// Whether any file is asked for.
    pub fn any(&self) -> bool {
        let files = [&self.json, &self.csv, &self.markdown, &self.latex, &self.plot, &self.html, &self.out];
        files.into_iter().any(Option::is_some)
    }

    /// The same files of a command that reads `inputs`: none of them may be written.
    pub fn apart_from<'a>(&self, inputs: impl IntoIterator<Item = &'a PathBuf>) -> Outputs {
        Outputs { inputs: inputs.into_iter().cloned().collect(), ..self.clone() }
    }

    /// Finds out before a measurement that a file's folder is missing, that nothing can be written there, or that one file has
    /// two purposes. Makes the folder of `--out`.
    ///
    /// # Errors
    /// The first file or folder that cannot be written.
    pub fn check(&self) -> Result<(), Error> {
        self.check_beside([])
    }

    /// As [`Outputs::check`], for a command that writes `others` too.
    ///
    /// # Errors
    /// As there.
    pub fn check_beside<'a>(&'a self, others: impl IntoIterator<Item = &'a PathBuf>) -> Result<(), Error> {
        if let Some(folder) = &self.out {
            fs::create_dir_all(folder).map_err(|source| Error::Folder { path: folder.clone(), source })?;
            check(&folder.join("report"))?;
        }
        let files = [&self.json, &self.csv, &self.markdown, &self.latex, &self.plot, &self.html];
        let mut files: Vec<&Path> = files.into_iter().flatten().map(PathBuf::as_path).collect();
        files.extend(others.into_iter().map(PathBuf::as_path));
        files::check_distinct(&files, &self.inputs())?;
        files.into_iter().try_for_each(check)
    }

    fn inputs(&self) -> Vec<&Path> {
        self.inputs.iter().map(PathBuf::as_path).collect()
    }

    /// Prints the report for people to `out`, then writes the files that were asked for and names them.
    ///
    /// # Errors
    /// A file or `out` cannot be written. Every file is there as a whole or as it was before.
    pub fn write(&self, report: Report, out: &mut dyn Write) -> Result<(), Error> {
        let report = self.with_machine(report);
        write!(out, "{}", report.to_text())?;
        for path in self.write_files(&report)? {
            writeln!(out, "wrote {}", path.display())?;
        }
        Ok(())
    }

    /// The report with this machine in it, unless it has one.
    pub fn with_machine(&self, mut report: Report) -> Report {
        report.machine.get_or_insert_with(|| Machine::ask(self.commit.as_deref()));
        report
    }

    /// Writes the files without a word, and returns their names in the order in which they were written.
    ///
    /// # Errors
    /// As [`Outputs::write`].
    pub fn write_files(&self, report: &Report) -> Result<Vec<PathBuf>, Error> {
        if let Some(folder) = &self.out {
            fs::create_dir_all(folder).map_err(|source| Error::Folder { path: folder.clone(), source })?;
        }
        let mut written = Vec::new();
        for (path, text) in self.files(report) {
            // Names inside a folder are known only now.
            files::check_distinct(&[&path], &self.inputs())?;
            files::replace(&path, |file| file.write_all(text.as_bytes()))
                .map_err(|source| Error::Write { path: path.clone(), source })?;
            written.push(path);
        }
        Ok(written)
    }

    /// Every file with its content.
    fn files(&self, report: &Report) -> Vec<(PathBuf, String)> {
        let named = |file: &Option<PathBuf>, extension: &str| {
            let in_folder = self.out.as_ref().map(|folder| folder.join(format!("{}.{extension}", report.name)));
            [file.clone(), in_folder].into_iter().flatten()
        };
        let json = || format!("{:#}\n", report.to_json());
        let mut files: Vec<(PathBuf, String)> = Vec::new();
        files.extend(named(&self.json, "json").map(|path| (path, json())));
        files.extend(named(&self.markdown, "md").map(|path| (path, report.to_markdown())));
        files.extend(named(&self.latex, "tex").map(|path| (path, report.to_latex())));
        files.extend(named(&self.html, "html").map(|path| (path, report.to_html())));
        let tables: Vec<(String, String)> =
            report.tables().map(|table| (table.name.clone(), format::data::csv(table))).collect();
        files.extend(several(self.csv.as_deref(), self.out.as_deref(), "csv", &tables));
        files.extend(several(self.plot.as_deref(), self.out.as_deref(), "svg", &report.images()));
        files
    }
}

fn check(path: &Path) -> Result<(), Error> {
    files::check_writable(path).map_err(|source| Error::Write { path: path.to_path_buf(), source })
}

/// Places for several things of one format. The first gets the file that was named, later ones that file with their own
/// name in it; in a folder each is named after itself.
fn several(
    file: Option<&Path>,
    folder: Option<&Path>,
    extension: &str,
    things: &[(String, String)],
) -> Vec<(PathBuf, String)> {
    let beside = |path: &Path, name: &str| {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let end = path.extension().map(|e| format!(".{}", e.to_string_lossy())).unwrap_or_default();
        path.with_file_name(format!("{stem}-{name}{end}"))
    };
    let mut files = Vec::new();
    for (i, (name, text)) in things.iter().enumerate() {
        let named = file.map(|path| if i == 0 { path.to_path_buf() } else { beside(path, name) });
        let in_folder = folder.map(|folder| folder.join(format!("{name}.{extension}")));
        files.extend([named, in_folder].into_iter().flatten().map(|path| (path, text.clone())));
    }
    files
}
