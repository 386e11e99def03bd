//! Workers that may die: starts one, watches its log, and starts the next where it ended.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tilewright::autotune::{Journal, JournalEvent};
use tilewright::terminal;

use crate::cli::{CliError, Result};
use crate::signals;

/// How a worker is watched.
pub struct Watch<'a> {
    pub log: &'a Path,
    /// How long one run of a candidate may take.
    pub limit: Duration,
    /// What the worker does, for messages.
    pub what: String,
}

/// Set by signals that ask to stop.
static STOPPED: AtomicBool = AtomicBool::new(false);

/// Runs workers until one ends well; gives the last line of its output.
///
/// # Errors
/// A worker that fails and not by a candidate's fault; a signal that asks to stop.
pub fn supervise(start: &dyn Fn() -> Command, watch: &Watch) -> Result<String> {
    static LISTENING: Once = Once::new();
    // Where nothing can listen, signals end the process, whose log is on disk all the same.
    LISTENING.call_once(|| drop(signals::listen(|_| STOPPED.store(true, Ordering::Relaxed))));
    loop {
        let before = Journal::read(watch.log).len();
        let mut worker = start()
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| CliError::Failure(format!("no worker starts for {}: {error}", watch.what)))?;
        // Read while it runs: a pipe holds little.
        let output = worker.stdout.take().map(|pipe| reader(pipe, false)).transpose();
        // Whoever asked for a log sees what the worker does while it does it.
        let logs = std::env::var_os("TILEWRIGHT_LOG").is_some_and(|value| !value.is_empty());
        let messages = worker.stderr.take().map(|pipe| reader(pipe, logs)).transpose();
        let (output, messages) = match (output, messages) {
            (Ok(output), Ok(messages)) => (output, messages),
            (Err(error), _) | (_, Err(error)) => {
                stop(&mut worker);
                return Err(CliError::Failure(format!("cannot start a thread to read what a worker says: {error}")));
            }
        };
        let ended = wait(&mut worker, watch);
        let text =
            |thread: Option<std::thread::JoinHandle<String>>| thread.and_then(|t| t.join().ok()).unwrap_or_default();
        let (output, messages) = (text(output), text(messages));
        match ended? {
            End::Done(status) if status.success() => {
                let line = output.lines().last().unwrap_or_default();
                return Ok(line.to_string());
            }
            End::Done(status) => {
                let events = Journal::read(watch.log);
                match Journal::running(&events) {
                    Some(config) => drop_candidate(watch, config, format!("it ended the process ({status})"))?,
                    // It has named the culprit itself.
                    None if names_a_culprit(&events[before.min(events.len())..]) => {}
                    None => return Err(failure(watch, &messages, status)),
                }
            }
            End::Hung(config) => {
                let why = format!("it did not end within {:.0} s", watch.limit.as_secs_f64());
                drop_candidate(watch, &config, why)?;
            }
        }
    }
}

/// Reads to the end; passes the lines on to standard error as they come, where they are a log.
fn reader(
    pipe: impl std::io::Read + Send + 'static,
    pass_on: bool,
) -> std::io::Result<std::thread::JoinHandle<String>> {
    std::thread::Builder::new().spawn(move || {
        let mut text = String::new();
        let mut lines = BufReader::new(pipe);
        let mut line = Vec::new();
        // What came before an error is worth having.
        while matches!(lines.read_until(b'\n', &mut line), Ok(1..)) {
            let read = String::from_utf8_lossy(&line);
            if pass_on {
                terminal::say(read.trim_end_matches('\n'));
            }
            text.push_str(&read);
            line.clear();
        }
        text
    })
}

fn failure(watch: &Watch, messages: &str, status: ExitStatus) -> CliError {
    match messages.trim().trim_start_matches("error: ") {
        "" => CliError::Failure(format!(
            "{}: the process that tuned it ended without a word ({status})\n  help: the same command goes on where it was; TILEWRIGHT_LOG=info shows what it does",
            watch.what
        )),
        text => CliError::Failure(format!("{}: {text}", watch.what)),
    }
}

/// Whether a signal asked to stop.
pub fn is_stopped() -> bool {
    STOPPED.load(Ordering::Relaxed)
}

/// Whether a worker that failed has made progress that a new one can build on.
fn names_a_culprit(events: &[JournalEvent]) -> bool {
    matches!(events.last(), Some(JournalEvent::Dropped { why, .. }) if why.contains("did not end within") || why.contains("CUDA_ERROR"))
}

fn drop_candidate(watch: &Watch, config: &str, why: String) -> Result<()> {
    let event = JournalEvent::Dropped { config: config.to_string(), why };
    Journal::append(watch.log, &event).map_err(|error| CliError::file("write", watch.log, error))
}

enum End {
    Done(ExitStatus),
    /// A candidate that runs too long; the worker was stopped.
    Hung(String),
}

fn wait(worker: &mut Child, watch: &Watch) -> Result<End> {
    let mut seen = 0;
    let mut since = Instant::now();
    loop {
        let status = worker.try_wait().map_err(|error| CliError::Failure(format!("the worker is lost: {error}")))?;
        if let Some(status) = status {
            return Ok(End::Done(status));
        }
        if STOPPED.load(Ordering::Relaxed) {
            stop(worker);
            let message = format!("stopped while tuning {}: the same command goes on where it was", watch.what);
            return Err(CliError::Stopped(message));
        }
        std::thread::sleep(Duration::from_millis(20));
        // Events are few: reading all of them again costs nothing.
        let events = Journal::read(watch.log);
        if events.len() != seen {
            (seen, since) = (events.len(), Instant::now());
        }
        // The worker itself may notice first, and says more then.
        if let Some(config) = Journal::running(&events)
            && since.elapsed() > watch.limit + Duration::from_secs(1)
        {
            let config = config.to_string();
            stop(worker);
            return Ok(End::Hung(config));
        }
    }
}

fn stop(worker: &mut Child) {
    // It may have ended by itself just now.
    let _ = worker.kill();
    let _ = worker.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Supervises a worker in the shell; `$LOG` is its log.
    fn worker(script: &str) -> (Result<String>, Vec<JournalEvent>) {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log.jsonl");
        std::fs::write(&log, "{\"job\":\"test\"}\n").unwrap();
        let start = || {
            let mut command = Command::new("sh");
            command.args(["-c", script]).env("LOG", &log);
            command
        };
        let watch = Watch { log: &log, limit: Duration::from_millis(200), what: "a test".to_string() };
        let outcome = supervise(&start, &watch);
        (outcome, Journal::read(&log))
    }

    fn dropped(events: &[JournalEvent]) -> Vec<(&str, &str)> {
        events
            .iter()
            .filter_map(|event| match event {
                JournalEvent::Dropped { config, why } => Some((config.as_str(), why.as_str())),
                _ => None,
            })
            .collect()
    }

    #[test]
    fn a_candidate_that_ends_the_worker_is_dropped_and_the_next_worker_goes_on() {
        let script = r#"grep -q dropped $LOG && echo progress && echo done && exit 0
            echo '{"start":"a"}' >> $LOG; kill -SEGV $$"#;
        let (outcome, events) = worker(script);
        assert_eq!(outcome.unwrap(), "done");
        let dropped = dropped(&events);
        assert!(dropped.len() == 1 && dropped[0].0 == "a" && dropped[0].1.contains("ended the process"), "{dropped:?}");
    }

    #[test]
    fn a_candidate_that_does_not_end_is_stopped() {
        let script = r#"grep -q dropped $LOG && echo done && exit 0
            echo '{"start":"slow"}' >> $LOG; exec sleep 60"#;
        let (outcome, events) = worker(script);
        assert_eq!(outcome.unwrap(), "done");
        assert!(matches!(dropped(&events)[..], [("slow", why)] if why.contains("did not end within")), "{events:?}");
    }

    #[test]
    fn a_failure_that_is_no_candidates_is_told() {
        let (outcome, _) = worker("echo 'error: no device' >&2; exit 1");
        assert_eq!(outcome.unwrap_err().to_string(), "error: a test: no device");
        let message = worker("kill -SEGV $$").0.unwrap_err().to_string();
        assert!(
            message.contains("a test: the process that tuned it ended") && message.contains("signal: 11"),
            "{message}"
        );
    }
}
