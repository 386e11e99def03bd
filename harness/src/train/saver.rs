//! Writes checkpoints asynchronously.
//!
//! A save copies the state to host memory, which blocks training, and a thread writes it: to a temporary file,
//! synchronized to the disk, renamed, then the folder is synchronized. With a sharded optimizer each rank writes its
//! shard; when all are done, rank 0 renames the checkpoint. An error is returned with the next step.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::checkpoint::{Header, Staged, shard_file_name};
use super::keep::{self, Retention};
use super::run::CHECKPOINT;
use super::{DataParallel, Error, Result};
use crate::dist::lifeline;
use crate::files::{self, Prepared};

/// Default number of steps between checkpoints.
pub const DEFAULT_INTERVAL: u64 = 100;
/// Default saves take at most one part in this many of the time.
const MAX_OVERHEAD: u32 = 20;

/// Interval at which ranks that wait for a save exchange their status: a save may take longer than a collective's
/// timeout.
const RANK_POLL_INTERVAL: Duration = Duration::from_secs(1);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The files that a rank writes for a checkpoint.
pub struct CheckpointFiles {
    pub header: Header,
    /// The checkpoint itself, on rank 0.
    pub checkpoint: Option<Staged>,
    /// This rank's shard of the moments, if they are sharded, and the rank.
    pub shard: Option<(Staged, usize)>,
}

/// Writes a run's checkpoints, one at a time.
pub struct Saver {
    folder: PathBuf,
    pub(super) keep: Retention,
    /// Step of the newest checkpoint on the disk.
    last: Option<u64>,
    running: Option<Running>,
    /// Start of the last save.
    began: Option<Instant>,
    /// Duration of the last save, including the copy to host memory.
    duration: Duration,
    /// Held by tests to delay writing.
    #[cfg(test)]
    pub gate: Arc<std::sync::Mutex<()>>,
}

struct Running {
    header: Header,
    began: Instant,
    thread: Option<JoinHandle<SaveOutcome>>,
    outcome: Option<SaveOutcome>,
}

/// How the thread of a save ended.
struct SaveOutcome {
    /// The prepared checkpoint that rank 0 commits when all ranks are done; `None` if it is already committed.
    result: io::Result<Option<Prepared>>,
    /// Time at which the files were on the disk.
    ended: Instant,
}

impl Saver {
    /// Creates the saver of a run in `folder`, which resumes from the checkpoint of step `last` if there is one.
    pub fn new(folder: PathBuf, keep: Retention, last: Option<u64>) -> Saver {
        Saver {
            folder,
            keep,
            last,
            running: None,
            began: None,
            duration: Duration::ZERO,
            #[cfg(test)]
            gate: Default::default(),
        }
    }

    /// Step of the newest checkpoint on the disk.
    pub fn last(&self) -> Option<u64> {
        self.last
    }

    /// Whether files are being written.
    pub fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Whether another save now would leave enough time for training.
    pub fn is_affordable(&self, now: Instant) -> bool {
        !self.is_running()
            && self.began.is_none_or(|began| now.saturating_duration_since(began) >= self.duration * MAX_OVERHEAD)
    }

    /// Fails unless the file system has space for checkpoints of `each` bytes: for the maximum number that exists at a
    /// time, in a run with at most `saves` saves.
    ///
    /// # Errors
    /// Required and available space.
    pub fn check_space_for(&self, each: u64, saves: u64) -> Result<()> {
        let most = if self.keep.last == 0 { saves } else { self.keep.last.saturating_add(self.keep.best) as u64 };
        // One more: the new one is written before the older ones are removed.
        let count = most.saturating_add(1).min(saves.max(1)).saturating_sub(keep::count(&self.folder) as u64).max(1);
        let what = if count == 1 { "a checkpoint takes".to_string() } else { format!("{count} checkpoints take") };
        self.check_space(&what, count.saturating_mul(each), files::free_bytes(&self.folder))
    }

    /// Fails unless there is space for the files that all ranks are about to write into the folder, of which `own`
    /// bytes are this rank's. All writing ranks call it before any of them starts.
    ///
    /// # Errors
    /// Required and available space; errors of communication.
    pub fn check_space_for_all(&self, own: u64, data_parallel: Option<&DataParallel>) -> Result<()> {
        // Queried before the reduction, after which other ranks may start to write.
        let free = files::free_bytes(&self.folder);
        let needed = data_parallel
            .map_or(Ok(own), |data_parallel| data_parallel.all_reduce_sum(own as f64).map(|bytes| bytes as u64))?;
        self.check_space("a checkpoint takes", needed, free)
    }

    fn check_space(&self, what: &str, needed: u64, free: io::Result<u64>) -> Result<()> {
        match free {
            Ok(free) if free < needed => Err(self.error(io::Error::new(
                io::ErrorKind::StorageFull,
                format!("{what} {}, and its file system has {} left", format_bytes(needed), format_bytes(free)),
            ))),
            // If the file system does not report its free space, a full disk is found when writing.
            _ => Ok(()),
        }
    }

    fn error(&self, source: io::Error) -> Error {
        self.error_of(&self.folder.join(CHECKPOINT), source)
    }

    /// The error of a file of the run that cannot be written, with the newest checkpoint on the disk.
    pub fn error_of(&self, path: &Path, source: io::Error) -> Error {
        Error::Save { path: path.to_path_buf(), source, last: self.last }
    }

    /// Starts to write files. The previous save has to be finished. With a sharded optimizer all ranks call it
    /// together.
    ///
    /// # Errors
    /// Too little space on the disk; errors of communication. [`Saver::finish`] returns the errors of writing.
    pub fn start(
        &mut self,
        files: CheckpointFiles,
        data_parallel: Option<&DataParallel>,
        began: Instant,
    ) -> Result<()> {
        let CheckpointFiles { header, checkpoint, shard } = files;
        let bytes = checkpoint.iter().chain(shard.iter().map(|(shard, _)| shard)).map(Staged::bytes).sum::<u64>();
        self.check_space_for_all(bytes, data_parallel.filter(|_| shard.is_some()))?;
        let (folder, keep, newest) = (self.folder.clone(), self.keep, header.clone());
        #[cfg(test)]
        let gate = self.gate.clone();
        let write = move || -> io::Result<Option<Prepared>> {
            // Asks the launcher to wait for the save before it terminates this process.
            let _saving = lifeline::saving();
            #[cfg(test)]
            let _open = gate.lock();
            checkpoint.iter().chain(shard.iter().map(|(shard, _)| shard)).try_for_each(Staged::check_finite)?;
            if let (Some((shard, rank)), Some(shards)) = (&shard, &newest.shards) {
                files::replace(&folder.join(shard_file_name(newest.step, shards, *rank)), |file| shard.write(file))?;
            }
            let Some(checkpoint) = &checkpoint else { return Ok(None) };
            let prepared = files::prepare(&folder.join(CHECKPOINT), |file| checkpoint.write(file))?;
            match newest.shards {
                // Other ranks may still be writing.
                Some(_) => Ok(Some(prepared)),
                None => keep::commit(&folder, prepared, &newest, keep).map(|()| None),
            }
        };
        let write = Arc::new(move || SaveOutcome { result: write(), ended: Instant::now() });
        let written = write.clone();
        self.began = Some(began);
        let (thread, outcome) = match std::thread::Builder::new().name("save".to_string()).spawn(move || written()) {
            Ok(thread) => (Some(thread), None),
            // No threads are available: write synchronously.
            Err(_) => (None, Some(write())),
        };
        self.running = Some(Running { header, began, thread, outcome });
        Ok(())
    }

    /// Finishes the current save if this rank and all others are done with it; with `wait`, blocks until they are. With
    /// `wait` all ranks call it together; without, those with a sharded optimizer.
    ///
    /// # Errors
    /// Errors of the file system on this rank: the previous checkpoint stays the newest. Errors of communication.
    pub fn finish(&mut self, data_parallel: Option<&DataParallel>, wait: bool) -> Result<()> {
        let shared = self.running.as_ref().is_some_and(|running| running.header.shards.is_some());
        // Ranks that write nothing wait here with the others, and not in the next collective, which has a timeout.
        let data_parallel = data_parallel.filter(|_| wait || shared);
        loop {
            let (done, failed) = self.poll();
            // The caller reports a failure to the other ranks.
            let all_are = match data_parallel.filter(|_| !failed) {
                Some(data_parallel) => {
                    data_parallel.all_reduce_sum(f64::from(u8::from(done)))?
                        >= data_parallel.communicator().world() as f64
                }
                None => done,
            };
            if all_are {
                break;
            }
            if !wait {
                return Ok(());
            }
            let until = Instant::now() + RANK_POLL_INTERVAL;
            while !self.poll().0 && Instant::now() < until {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        let Some(Running { header, began, outcome: Some(SaveOutcome { result, ended }), .. }) = self.running.take()
        else {
            return Ok(());
        };
        self.duration = ended.saturating_duration_since(began);
        let committed = result.and_then(|prepared| match prepared {
            Some(prepared) => keep::commit(&self.folder, prepared, &header, self.keep),
            None => Ok(()),
        });
        committed.map_err(|error| self.error(error))?;
        // No rank reports the state as saved before rank 0 has committed it.
        if let Some(data_parallel) = data_parallel.filter(|_| shared) {
            data_parallel.all_reduce_sum(0.0)?;
        }
        self.last = Some(header.step);
        Ok(())
    }

    /// Whether this rank is done with writing, and whether its save has failed.
    fn poll(&mut self) -> (bool, bool) {
        let Some(running) = &mut self.running else { return (true, false) };
        if let Some(thread) = running.thread.take_if(|thread| thread.is_finished()) {
            let ended = |_| SaveOutcome {
                result: Err(io::Error::other("the thread that writes it has ended")),
                ended: Instant::now(),
            };
            running.outcome = Some(thread.join().unwrap_or_else(ended));
        }
        (running.outcome.is_some(), matches!(&running.outcome, Some(SaveOutcome { result: Err(_), .. })))
    }
}

impl Drop for Saver {
    /// Blocks until the files are written.
    fn drop(&mut self) {
        if let Some(thread) = self.running.take().and_then(|running| running.thread) {
            let _ = thread.join();
        }
    }
}

/// Formats a size: `1.25 GiB`.
fn format_bytes(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes < 1024.0 * 1024.0 => format!("{:.1} KiB", bytes / 1024.0),
        bytes if bytes < 1024.0 * 1024.0 * 1024.0 => format!("{:.1} MiB", bytes / 1024.0 / 1024.0),
        bytes => format!("{:.2} GiB", bytes / 1024.0 / 1024.0 / 1024.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saves_take_at_most_a_twentieth_of_the_time() {
        let dir = tempfile::tempdir().unwrap();
        let mut saver = Saver::new(dir.path().to_path_buf(), Retention::default(), None);
        let began = Instant::now();
        assert!(saver.is_affordable(began), "the first one is due");
        (saver.began, saver.duration) = (Some(began), Duration::from_secs(3));
        assert!(!saver.is_affordable(began + Duration::from_secs(59)));
        assert!(saver.is_affordable(began + Duration::from_secs(60)));
    }

    #[test]
    fn a_full_file_system_is_an_error_before_training() {
        let dir = tempfile::tempdir().unwrap();
        let saver = Saver::new(dir.path().to_path_buf(), Retention::default(), Some(7));
        saver.check_space_for(1000, 50).unwrap();
        let message = saver.check_space_for(1 << 60, 50).unwrap_err().to_string();
        for expected in ["4 checkpoints take 4294967296.00 GiB", "GiB left", "the disk is full", "of step 7, is intact"]
        {
            assert!(message.contains(expected), "`{expected}` is missing in: {message}");
        }
        // A single save needs space for one.
        let message = saver.check_space_for(1 << 60, 1).unwrap_err().to_string();
        assert!(message.contains("a checkpoint takes 1073741824.00 GiB"), "{message}");
    }
}
