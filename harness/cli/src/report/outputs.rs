//! Command-line arguments for the output files of measuring commands.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use tilewright_runtime::terminal;

use super::{Machine, Report, format};
use crate::{CliError, files};

/// Output files of a command. Flatten it into the arguments of a command; call [`Outputs::check`] before a long
/// measurement and [`Outputs::write`] after it.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Files")]
pub struct Outputs {
    /// Write tables, plots and machine as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the table as CSV; if there are several, later ones go to FILE with their name appended, or all to a pipe or
    /// device
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,
    /// Write the tables as Markdown
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Write the tables as LaTeX, for the package booktabs
    #[arg(long, value_name = "FILE")]
    pub latex: Option<PathBuf>,
    /// Write the plot as SVG; if there are several, later ones go to FILE with their name appended
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Write tables and plots as one HTML page
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Write all of these formats to a folder, which is created if needed
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Commit to record for this program [default: that of the repository that contains the program]
    #[arg(long, value_name = "ID")]
    pub commit: Option<String>,
    /// Input files of the command, which it must not overwrite: see [`Outputs::protecting_inputs`].
    #[arg(skip)]
    pub inputs: Vec<PathBuf>,
}

/// Error of writing a file.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot create the folder {}: {source}", path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error("{0}\n  help: choose another file")]
    Clash(#[from] files::Clash),
    /// Two options that do not go together.
    #[error("{0}")]
    Options(String),
    #[error("cannot write the output: {0}")]
    Print(#[from] io::Error),
}

impl Outputs {
    /// Whether any file is requested.
    pub fn any(&self) -> bool {
        let files = [&self.json, &self.csv, &self.markdown, &self.latex, &self.plot, &self.html, &self.out];
        files.into_iter().any(Option::is_some)
    }

    /// The same outputs, with `inputs` protected: none of them may be overwritten.
    pub fn protecting_inputs<'a>(&self, inputs: impl IntoIterator<Item = &'a PathBuf>) -> Outputs {
        Outputs { inputs: inputs.into_iter().cloned().collect(), ..self.clone() }
    }

    /// Checks before a measurement that all folders exist, that files can be written, and that no file is used twice.
    /// Creates the folder of `--out` only if it is to have one of the other files.
    ///
    /// # Errors
    /// The first file or folder that cannot be written.
    pub fn check(&self) -> Result<(), Error> {
        self.check_with([])
    }

    /// As [`Outputs::check`], for a command that also writes `others`, each with its option.
    ///
    /// # Errors
    /// As [`Outputs::check`]; one of `others` that a file of `--out` may replace.
    pub fn check_with<'a>(
        &'a self,
        others: impl IntoIterator<Item = (&'static str, &'a PathBuf)>,
    ) -> Result<(), Error> {
        let mut files: Vec<(&str, &Path)> = self.options().collect();
        for (option, path) in others {
            if let Some(folder) = self.out.as_ref().filter(|folder| may_be_replaced(path, folder)) {
                return Err(Error::Options(format!(
                    "{option} {} is in the folder of --out {}, which gets files of this kind: one may replace it\n  \
                     help: name a file in another folder, or one with another extension",
                    path.display(),
                    folder.display()
                )));
            }
            files.push((option, path.as_path()));
        }
        if let Some(folder) = &self.out {
            let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
            let has_file = files.iter().any(|(_, file)| absolute(file).starts_with(absolute(folder)));
            let found = match (folder.is_dir(), has_file) {
                (false, false) => files::check_folder(folder),
                _ => fs::create_dir_all(folder),
            };
            found.map_err(|source| Error::Folder { path: folder.clone(), source })?;
            if folder.is_dir() {
                check(&folder.join("report"))?;
            }
        }
        for (at, &(option, path)) in files.iter().enumerate() {
            files::check_distinct(&[path], &self.inputs())?;
            let same = files[..at].iter().find(|&&(_, other)| files::check_distinct(&[path, other], &[]).is_err());
            if let Some((other, _)) = same {
                let message = format!("cannot write {}: {other} and {option} name the same file", path.display());
                return Err(Error::Options(format!("{message}\n  help: name another file")));
            }
        }
        files.into_iter().try_for_each(|(_, path)| check(path))
    }

    /// The files that options name, without those of `--out`.
    pub fn named(&self) -> impl Iterator<Item = &Path> {
        self.options().map(|(_, path)| path)
    }

    fn options(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let files = [
            ("--json", &self.json),
            ("--csv", &self.csv),
            ("--markdown", &self.markdown),
            ("--latex", &self.latex),
            ("--plot", &self.plot),
            ("--html", &self.html),
        ];
        files.into_iter().filter_map(|(option, path)| Some((option, path.as_deref()?)))
    }

    fn inputs(&self) -> Vec<&Path> {
        self.inputs.iter().map(PathBuf::as_path).collect()
    }

    /// Refuses `--plot`, for a command whose reports have tables only.
    ///
    /// # Errors
    /// `--plot` is given.
    pub fn expect_no_plot(&self) -> crate::Result<()> {
        match &self.plot {
            None => Ok(()),
            Some(_) => Err(CliError::usage(
                "--plot is unused: this command draws no plot",
                "omit it; --csv, --json, --markdown, --latex and --html write the tables",
            )),
        }
    }

    /// Prints the report to `out`, or to standard error if a file is standard output; then writes the requested files and prints
    /// their names. Says on standard error that the report has no plot for `--plot`.
    ///
    /// # Errors
    /// A file or `out` cannot be written. Each file is either complete or as it was before.
    pub fn write(&self, report: Report, out: &mut dyn Write) -> Result<(), Error> {
        let report = self.with_machine(report);
        let mut stderr = io::stderr();
        let out: &mut dyn Write = if self.named().any(files::is_stdout) { &mut stderr } else { out };
        write!(out, "{}", report.to_text())?;
        for path in self.write_files(&report)? {
            writeln!(out, "wrote {}", path.display())?;
        }
        if let Some(path) = self.plot.as_ref().filter(|_| report.images().is_empty()) {
            let path = path.display();
            terminal::print_stderr(format_args!("note: --plot {path} is not written: these results have no plot"));
        }
        Ok(())
    }

    /// Adds this machine to the report, unless it has one.
    pub fn with_machine(&self, mut report: Report) -> Report {
        report.machine.get_or_insert_with(|| Machine::probe(self.commit.as_deref()));
        report
    }

    /// Writes the files without printing, and returns their names in order. Where one cannot be written, the others are.
    ///
    /// # Errors
    /// As [`Outputs::write`]: the first of them.
    pub fn write_files(&self, report: &Report) -> Result<Vec<PathBuf>, Error> {
        if let Some(folder) = &self.out {
            fs::create_dir_all(folder).map_err(|source| Error::Folder { path: folder.clone(), source })?;
        }
        let mut written: Vec<PathBuf> = Vec::new();
        let write = |(path, text): (PathBuf, String)| -> Result<PathBuf, Error> {
            // File names in a folder, and those of several tables, are known only here.
            files::check_distinct(&[&path], &self.inputs())?;
            if written.iter().any(|other| files::check_distinct(&[&path, other], &[]).is_err()) {
                let message = format!("cannot write {}: another output of these options has this name", path.display());
                return Err(Error::Options(format!("{message}\n  help: name another file, or another folder")));
            }
            written.push(path.clone());
            files::replace(&path, |file| file.write_all(text.as_bytes()))
                .map_err(|source| Error::Write { path: path.clone(), source })?;
            Ok(path)
        };
        let results: Vec<_> = self.files(report).into_iter().map(write).collect();
        results.into_iter().collect()
    }

    /// Paths and contents of all files.
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
        files.extend(numbered_files(self.csv.as_deref(), self.out.as_deref(), "csv", &tables));
        files.extend(numbered_files(self.plot.as_deref(), self.out.as_deref(), "svg", &report.images()));
        files
    }
}

/// Whether a file is directly in the folder of `--out`, and has the extension of a format that is written there: it itself,
/// the file that it links to, or one that links to it.
fn may_be_replaced(path: &Path, folder: &Path) -> bool {
    let target = files::resolve_links(path).unwrap_or_default();
    let inside = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut same = inside.filter(|inside| files::check_distinct(&[inside, path], &[]).is_err());
    is_in_folder(path, folder) || is_in_folder(&target, folder) || same.any(|inside| is_in_folder(&inside, folder))
}

fn is_in_folder(path: &Path, folder: &Path) -> bool {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let is_inside = match (fs::canonicalize(parent), fs::canonicalize(folder)) {
        (Ok(parent), Ok(folder)) => parent == folder,
        _ => parent == folder,
    };
    let formats = ["json", "csv", "md", "tex", "svg", "html"];
    is_inside && path.extension().is_some_and(|extension| formats.iter().any(|format| extension == *format))
}

fn check(path: &Path) -> Result<(), Error> {
    files::check_writable(path).map_err(|source| Error::Write { path: path.to_path_buf(), source })
}

/// Paths for several outputs of one format. The first one gets the named file, later ones the named file with their own
/// name appended; in a folder each has its own name. A pipe or a device gets all of them, with an empty line between.
fn numbered_files(
    file: Option<&Path>,
    folder: Option<&Path>,
    extension: &str,
    things: &[(String, String)],
) -> Vec<(PathBuf, String)> {
    let with_name_suffix = |path: &Path, name: &str| {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let end = path.extension().map(|e| format!(".{}", e.to_string_lossy())).unwrap_or_default();
        path.with_file_name(format!("{stem}-{name}{end}"))
    };
    let mut files = Vec::new();
    let stream = file.filter(|path| !things.is_empty() && files::is_stream(path));
    files.extend(stream.map(|path| {
        let texts: Vec<&str> = things.iter().map(|(_, text)| text.as_str()).collect();
        (path.to_path_buf(), texts.join("\n"))
    }));
    let file = file.filter(|_| stream.is_none());
    for (i, (name, text)) in things.iter().enumerate() {
        let named = file.map(|path| if i == 0 { path.to_path_buf() } else { with_name_suffix(path, name) });
        let in_folder = folder.map(|folder| folder.join(format!("{name}.{extension}")));
        files.extend([named, in_folder].into_iter().flatten().map(|path| (path, text.clone())));
    }
    files
}
