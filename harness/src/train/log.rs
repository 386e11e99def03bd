//! The log of a run: one JSON object per line (JSON Lines).

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Error, Result};
use crate::report::{Axis, Plot, Point, Series};

/// A log line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum Line {
    /// A training step.
    Step(StepLine),
    /// Validation loss after a step, in nats per token.
    Evaluation { step: u64, loss: f64 },
}

/// Log entry of a training step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepLine {
    pub step: u64,
    /// Mean over the batch, in nats per token.
    pub loss: f64,
    /// Learning rate.
    pub rate: f64,
    /// Gradient norm before clipping; null if it overflowed and the step was skipped.
    pub norm: Option<f64>,
    /// Duration of the step in seconds.
    pub seconds: f64,
    pub tokens_per_second: f64,
    /// Model FLOP utilization (MFU): FLOP of the model's matmuls, over the peak FLOP of all ranks' devices in this
    /// time.
    pub mfu: Option<f64>,
}

impl Line {
    /// The step of the entry.
    pub fn step(&self) -> u64 {
        match self {
            Line::Step(line) => line.step,
            Line::Evaluation { step, .. } => *step,
        }
    }
}

/// A log opened for appending.
pub struct Log {
    path: PathBuf,
    file: File,
}

impl Log {
    /// Opens the log at `path` to continue after step `step`: lines of later steps are removed, since these steps are
    /// repeated.
    ///
    /// # Errors
    /// Errors of the file system; a file that is not a log, which stays unchanged.
    pub fn open_after(path: &Path, step: u64) -> Result<Log> {
        // The text of retained lines stays unchanged.
        let text = read_text(path)?;
        let lines = parse(&text).map_err(Error::file("use", path))?;
        let kept_lines: Vec<&str> =
            lines.iter().filter(|(_, line)| line.step() <= step).map(|(text, _)| *text).collect();
        crate::files::replace(path, |file| kept_lines.iter().try_for_each(|line| writeln!(file, "{line}")))
            .and_then(|()| crate::files::append(path))
            .map(|file| Log { path: path.to_path_buf(), file })
            .map_err(Error::file("write", path))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Appends a complete line in one write.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn push(&mut self, line: &Line) -> io::Result<()> {
        self.file.write_all(format!("{}\n", serde_json::to_string(line)?).as_bytes())
    }
}

/// Reads all lines; empty if the file does not exist. A truncated last line is skipped. Numbers may differ from the
/// logged ones in their last digit.
///
/// # Errors
/// A file that cannot be read, or is not a log.
pub fn read(path: &Path) -> Result<Vec<Line>> {
    let text = read_text(path)?;
    let lines = parse(&text).map_err(Error::file("use", path))?;
    Ok(lines.into_iter().map(|(_, line)| line).collect())
}

/// Parses the lines, each with its text. Text after the last newline is a truncated line; a power failure can leave
/// zeros at the end.
fn parse(text: &str) -> io::Result<Vec<(&str, Line)>> {
    let text = text.trim_end_matches('\0');
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let parse = |(number, line)| match serde_json::from_str(line) {
        Ok(parsed) => Ok((line, parsed)),
        Err(_) => Err(not_a_log(&format!("line {} is not a log line", number + 1))),
    };
    whole.lines().enumerate().map(parse).collect()
}

fn not_a_log(why: &str) -> io::Error {
    let help = "\n  help: move the file away; the run then continues with a new log";
    io::Error::new(io::ErrorKind::InvalidData, format!("{why}{help}"))
}

fn read_text(path: &Path) -> Result<String> {
    match crate::files::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            Err(Error::file("use", path)(not_a_log(&error.to_string())))
        }
        other => other.map_err(Error::file("read", path)),
    }
}

/// Plot of training and validation loss over steps.
pub fn curve(lines: &[Line]) -> Plot {
    let training = lines.iter().filter_map(|line| match line {
        Line::Step(line) => Some((line.step as f64, line.loss)),
        Line::Evaluation { .. } => None,
    });
    let validation = lines.iter().filter_map(|line| match line {
        Line::Step(_) => None,
        Line::Evaluation { step, loss } => Some((*step as f64, *loss)),
    });
    let series = vec![
        Series::new("training", training.map(Point::from)),
        Series::new("validation", validation.map(Point::from)),
    ];
    Plot::lines("loss", "Loss", Axis::linear("step"), Axis::linear("nats per token"), series)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> Line {
        Line::Step(StepLine {
            step,
            loss: 0.1 + step as f64,
            rate: 1e-3,
            norm: (step != 2).then_some(0.3),
            seconds: 0.5,
            tokens_per_second: 1e4,
            mfu: None,
        })
    }

    #[test]
    fn lines_round_trip_and_later_steps_are_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.jsonl");
        assert_eq!(read(&path).unwrap(), []);
        let mut log = Log::open_after(&path, 0).unwrap();
        let mut lines: Vec<Line> = (1..=4).map(step).collect();
        lines.insert(2, Line::Evaluation { step: 2, loss: 0.25 });
        lines.iter().for_each(|line| log.push(line).unwrap());
        assert_eq!(read(&path).unwrap(), lines);

        std::io::Write::write_all(&mut log.file, b"{\"what\":\"step\",\"st").unwrap();
        let mut log = Log::open_after(&path, 3).unwrap();
        log.push(&step(4)).unwrap();
        assert_eq!(read(&path).unwrap(), lines);
        assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count(), 5);

        // After a power failure.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, format!("{text}\0\0\0")).unwrap();
        assert_eq!(read(&path).unwrap(), lines);

        let svg = curve(&lines).to_svg();
        assert!(svg.contains("validation") && svg.contains("nats per token"));
    }

    #[test]
    fn a_file_that_is_not_a_log_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.jsonl");
        let line = serde_json::to_string(&step(1)).unwrap();
        for (bytes, why) in [
            (format!("{line}\nsomebody's notes\n{line}\n").into_bytes(), "line 2 is not a log line"),
            (b"a\xff\n".to_vec(), "byte 1 is not valid UTF-8"),
        ] {
            std::fs::write(&path, &bytes).unwrap();
            for outcome in [Log::open_after(&path, 9).map(drop), read(&path).map(drop)] {
                let message = outcome.unwrap_err().to_string();
                assert!(
                    message.contains("log.jsonl") && message.contains(why) && message.contains("help: move"),
                    "{message}"
                );
            }
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
        }
    }

    /// Links are followed, as for other output files.
    #[test]
    fn a_log_may_be_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.jsonl");
        std::os::unix::fs::symlink("elsewhere", &path).unwrap();
        let mut log = Log::open_after(&path, 0).unwrap();
        log.push(&step(1)).unwrap();
        let mut log = Log::open_after(&path, 1).unwrap();
        log.push(&step(2)).unwrap();
        assert!(std::fs::symlink_metadata(&path).unwrap().is_symlink());
        assert_eq!(read(&dir.path().join("elsewhere")).unwrap(), [step(1), step(2)]);
    }
}
