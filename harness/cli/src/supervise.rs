//! Supervises workers that may crash or hang: starts a worker, polls its log, and after a crash or a timeout starts
//! another one that continues from the log.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tilewright_runtime::autotune::{Journal, JournalEvent};
use tilewright_runtime::terminal;

use crate::signals;
use crate::{CliError, Result};

/// How a worker is supervised.
pub struct Watch<'a> {
    pub log: &'a Path,
    /// Timeout of one run of a candidate.
    pub limit: Duration,
    /// Name of the problem, for messages.
    pub title: String,
}

/// Set by a signal that asks to stop.
static STOPPED: AtomicBool = AtomicBool::new(false);

/// Runs workers until one succeeds, and returns the last line of its output.
///
/// # Errors
/// A worker cannot be started, a worker fails and no candidate is the cause, or a signal asks to stop.
pub fn supervise(start: &dyn Fn() -> Command, watch: &Watch) -> Result<String> {
    static LISTENING: Once = Once::new();
    // Without a handler, signals terminate the process; the log on disk stays valid.
    LISTENING.call_once(|| drop(signals::listen(|_| STOPPED.store(true, Ordering::Relaxed))));
    loop {
        let before = Journal::read(watch.log).len();
        let mut worker = start()
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| CliError::Failure(format!("cannot start a worker for {}: {error}", watch.title)))?;
        // Read concurrently: the buffer of a pipe is small.
        let output = worker.stdout.take().map(|pipe| reader(pipe, false)).transpose();
        // With TILEWRIGHT_LOG, the worker's log is printed as it is written.
        let logs = std::env::var_os("TILEWRIGHT_LOG").is_some_and(|value| !value.is_empty());
        let messages = worker.stderr.take().map(|pipe| reader(pipe, logs)).transpose();
        let (output, messages) = match (output, messages) {
            (Ok(output), Ok(messages)) => (output, messages),
            (Err(error), _) | (_, Err(error)) => {
                stop(&mut worker);
                return Err(CliError::Failure(format!("cannot start a thread to read a worker's output: {error}")));
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
                    Some(config) => drop_candidate(watch, config, format!("it crashed the worker ({status})"))?,
                    // The worker has logged the candidate that made it fail.
                    None if dropped_a_candidate(&events[before.min(events.len())..]) => {}
                    None => return Err(failure(watch, &messages, status)),
                }
            }
            End::Hung(config) => {
                let why = format!("it timed out after {:.0} s", watch.limit.as_secs_f64());
                drop_candidate(watch, &config, why)?;
            }
        }
    }
}

/// Starts a thread that reads to the end; with `echo`, it also prints each line to standard error.
fn reader(pipe: impl std::io::Read + Send + 'static, echo: bool) -> std::io::Result<std::thread::JoinHandle<String>> {
    std::thread::Builder::new().spawn(move || {
        let mut text = String::new();
        let mut lines = BufReader::new(pipe);
        let mut line = Vec::new();
        // A read error ends the loop; the output before it is kept.
        while matches!(lines.read_until(b'\n', &mut line), Ok(1..)) {
            let read = String::from_utf8_lossy(&line);
            if echo {
                terminal::print_stderr(read.trim_end_matches('\n'));
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
            "{}: the worker exited without a message ({status})\n  help: the same command continues from the log; \
             TILEWRIGHT_LOG=info shows what the worker does",
            watch.title
        )),
        text => CliError::Failure(format!("{}: {text}", watch.title)),
    }
}

/// Whether a signal asked to stop.
pub fn is_stopped() -> bool {
    STOPPED.load(Ordering::Relaxed)
}

/// Whether the last event drops a candidate that made the worker fail, so that a new worker can continue.
fn dropped_a_candidate(events: &[JournalEvent]) -> bool {
    let failed = |why: &str| why.contains("timed out after") || why.contains("CUDA_ERROR");
    matches!(events.last(), Some(JournalEvent::Dropped { why, .. }) if failed(why))
}

fn drop_candidate(watch: &Watch, config: &str, why: String) -> Result<()> {
    let event = JournalEvent::Dropped { config: config.to_string(), why };
    Journal::append(watch.log, &event).map_err(|error| CliError::file("write", watch.log, error))
}

enum End {
    Done(ExitStatus),
    /// A candidate exceeded the timeout, and the worker was killed.
    Hung(String),
}

fn wait(worker: &mut Child, watch: &Watch) -> Result<End> {
    let mut seen = 0;
    let mut since = Instant::now();
    loop {
        let status =
            worker.try_wait().map_err(|error| CliError::Failure(format!("cannot wait for the worker: {error}")))?;
        if let Some(status) = status {
            return Ok(End::Done(status));
        }
        if STOPPED.load(Ordering::Relaxed) {
            stop(worker);
            let message = format!("stopped while tuning {}: the same command continues from the log", watch.title);
            return Err(CliError::Stopped(message));
        }
        std::thread::sleep(Duration::from_millis(20));
        // The log is short: reading all of it again is cheap.
        let events = Journal::read(watch.log);
        if events.len() != seen {
            (seen, since) = (events.len(), Instant::now());
        }
        // One second of slack: the worker's own timeout gives a better message.
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
    // The worker may have exited in the meantime.
    let _ = worker.kill();
    let _ = worker.wait();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Supervises a shell script as the worker; `$LOG` is its log.
    fn worker(script: &str) -> (Result<String>, Vec<JournalEvent>) {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log.jsonl");
        std::fs::write(&log, "{\"job\":\"test\"}\n").unwrap();
        let start = || {
            let mut command = Command::new("sh");
            command.args(["-c", script]).env("LOG", &log);
            command
        };
        let watch = Watch { log: &log, limit: Duration::from_millis(200), title: "a test".to_string() };
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
    fn a_candidate_that_ends_the_worker_is_dropped_and_the_next_worker_continues() {
        let script = r#"grep -q dropped $LOG && echo progress && echo done && exit 0
            echo '{"start":"a"}' >> $LOG; kill -SEGV $$"#;
        let (outcome, events) = worker(script);
        assert_eq!(outcome.unwrap(), "done");
        let dropped = dropped(&events);
        assert!(
            dropped.len() == 1 && dropped[0].0 == "a" && dropped[0].1.contains("crashed the worker"),
            "{dropped:?}"
        );
    }

    #[test]
    fn a_candidate_that_does_not_end_is_stopped() {
        let script = r#"grep -q dropped $LOG && echo done && exit 0
            echo '{"start":"slow"}' >> $LOG; exec sleep 60"#;
        let (outcome, events) = worker(script);
        assert_eq!(outcome.unwrap(), "done");
        assert!(matches!(dropped(&events)[..], [("slow", why)] if why.contains("timed out after")), "{events:?}");
    }

    #[test]
    fn a_failure_outside_of_candidates_is_reported() {
        let (outcome, _) = worker("echo 'error: no device' >&2; exit 1");
        assert_eq!(outcome.unwrap_err().to_string(), "error: a test: no device");
        let message = worker("kill -SEGV $$").0.unwrap_err().to_string();
        assert!(
            message.contains("a test: the worker exited without a message") && message.contains("signal: 11"),
            "{message}"
        );
    }
}
