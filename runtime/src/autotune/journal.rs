//! The log of a tuning run: one JSON object per line, each on disk before the next step begins.
//!
//! A later run of the same job reads it: dropped candidates stay dropped, times are kept, and a candidate at which the
//! log ends (and so the process ended) gets one more try. Lines that do not parse, for example a last one that was cut
//! short, are skipped. A log that another user can write is neither read nor written.

use std::fs::File;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cache::owned::{self, Unusable};

/// One event, stored as one line of JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The job: device, kernel, key, compiler version, and hash of the kernel's IR. A log of another job is
    /// overwritten.
    Job(String),
    /// A candidate is about to run for the first time.
    Start(String),
    /// A candidate ran, and its outputs agree with the first candidate's up to this maximum relative error.
    Agrees { config: String, error: f64 },
    /// A candidate is not tried again.
    Dropped { config: String, why: String },
    /// Times of one candidate in one round, in milliseconds.
    Times { config: String, ms: Vec<f64> },
    /// The run is complete.
    Chosen { config: String, median_ms: f64 },
}

/// Maximum size of a log; larger files are not read.
const MAX_BYTES: u64 = 64 << 20;

/// Number of times that a process may end while it runs a candidate before the candidate is dropped.
const TRIES: usize = 2;

/// A log on disk, or only in memory if it cannot be stored.
#[derive(Debug)]
pub struct Journal {
    file: Option<File>,
    events: Vec<Event>,
}

impl Journal {
    /// Continues the log at `path` if it is of this job and incomplete; otherwise starts a new one.
    pub fn open(path: Option<&Path>, job: &str) -> Journal {
        let Some(path) = path else { return Journal { file: None, events: Vec::new() } };
        let mut events = Journal::read(path);
        let same = events.first() == Some(&Event::Job(job.to_string()));
        let ended = events.iter().any(|event| matches!(event, Event::Chosen { .. }));
        if !same || ended {
            events.clear();
        }
        let mut journal = Journal { file: None, events: Vec::new() };
        match open_log(path, events.is_empty()) {
            Ok(file) => journal.file = Some(file),
            Err(error) => tracing::warn!("the tuning run is not logged: cannot open {}: {error}", path.display()),
        }
        match events.is_empty() {
            true => journal.add(Event::Job(job.to_string())),
            false => journal.events = events,
        }
        for config in journal.unfinished(TRIES) {
            let why = format!("the process ended {TRIES} times while it ran");
            journal.add(Event::Dropped { config, why });
        }
        journal
    }

    /// The events of a log; empty if there is none.
    pub fn read(path: &Path) -> Vec<Event> {
        let read = || -> Result<Vec<u8>, Unusable> { Ok(owned::read(&owned::open(path, owned::user())?, MAX_BYTES)?) };
        let bytes = read().unwrap_or_else(|why| {
            if !matches!(why, Unusable::Missing) {
                tracing::debug!("the log {} is not read: {why}", path.display());
            }
            Vec::new()
        });
        String::from_utf8_lossy(&bytes).lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// Appends one event to a log that no process is writing.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn append(path: &Path, event: &Event) -> std::io::Result<()> {
        let file = owned::open_to_append(path, false, owned::user()).map_err(into_io)?;
        // The previous process may have stopped in the middle of a line.
        owned::append(&file, &format!("\n{}\n", line(event)))
    }

    /// The candidate that was started last, if its outcome is unknown.
    pub fn running(events: &[Event]) -> Option<&str> {
        match events.iter().rev().find(|event| !matches!(event, Event::Times { .. }))? {
            Event::Start(config) => Some(config),
            Event::Job(_)
            | Event::Agrees { .. }
            | Event::Dropped { .. }
            | Event::Times { .. }
            | Event::Chosen { .. } => None,
        }
    }

    /// Appends an event and syncs it to disk.
    pub fn add(&mut self, event: Event) {
        if let Some(file) = &mut self.file
            && let Err(error) = owned::append(file, &format!("{}\n", line(&event)))
        {
            tracing::warn!("the log of the tuning run cannot be continued: {error}");
            self.file = None;
        }
        self.events.push(event);
    }

    /// Why a candidate was dropped.
    pub fn dropped(&self, config: &str) -> Option<&str> {
        self.events.iter().find_map(|event| match event {
            Event::Dropped { config: c, why } if c == config => Some(why.as_str()),
            _ => None,
        })
    }

    /// All times of a candidate, in milliseconds.
    pub fn times(&self, config: &str) -> Vec<f64> {
        let of = |event: &Event| match event {
            Event::Times { config: c, ms } if c == config => ms.clone(),
            _ => Vec::new(),
        };
        self.events.iter().flat_map(of).collect()
    }

    /// The number of rounds in which a candidate was timed.
    pub fn rounds(&self, config: &str) -> usize {
        self.events.iter().filter(|event| matches!(event, Event::Times { config: c, .. } if c == config)).count()
    }

    /// Candidates that were started at least `tries` times without an outcome.
    fn unfinished(&self, tries: usize) -> Vec<String> {
        let mut found: Vec<(String, usize)> = Vec::new();
        for event in &self.events {
            match event {
                Event::Start(config) => match found.iter_mut().find(|(c, _)| c == config) {
                    Some((_, count)) => *count += 1,
                    None => found.push((config.clone(), 1)),
                },
                Event::Agrees { config, .. } | Event::Dropped { config, .. } => found.retain(|(c, _)| c != config),
                Event::Job(_) | Event::Times { .. } | Event::Chosen { .. } => {}
            }
        }
        found.into_iter().filter(|(_, count)| *count >= tries).map(|(config, _)| config).collect()
    }
}

fn line(event: &Event) -> String {
    // JSON has no NaN or infinity; times and errors are finite.
    serde_json::to_string(event).unwrap_or_default()
}

fn open_log(path: &Path, truncate: bool) -> Result<File, Unusable> {
    let file = owned::open_to_append(path, true, owned::user())?;
    match truncate {
        true => file.set_len(0)?,
        false => owned::append(&file, "\n")?,
    }
    Ok(file)
}

fn into_io(why: Unusable) -> std::io::Error {
    match why {
        Unusable::Missing => std::io::ErrorKind::NotFound.into(),
        Unusable::Refused { .. } => std::io::Error::other(why.to_string()),
        Unusable::Failed(error) => error,
    }
}
