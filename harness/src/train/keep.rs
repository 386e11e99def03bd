//! Retention of a run's checkpoints.
//!
//! The newest one is `checkpoint.safetensors`. When a newer one is complete and gets this name, the older one becomes
//! `checkpoint-STEP.safetensors`. It is removed when it is neither among the last nor among the best ones.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::checkpoint::{Checkpoint, Header, OptimizerShards, shard_file_name, step_of_shard_file};
use super::run::CHECKPOINT;
use super::{Error, Result};
use crate::files::{self, Prepared};

/// Number of checkpoints to retain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retention {
    /// Number of newest checkpoints, including the newest one; 0 retains all.
    pub last: usize,
    /// Number of checkpoints with the lowest validation loss; they may be among the newest.
    pub best: usize,
}

impl Default for Retention {
    /// The last two and the best one, so that a run survives a damaged checkpoint.
    fn default() -> Retention {
        Retention { last: 2, best: 1 }
    }
}

/// An older checkpoint.
struct Older {
    path: PathBuf,
    step: u64,
    validation: Option<f64>,
    shards: Option<OptimizerShards>,
}

fn older_name(step: u64) -> String {
    format!("checkpoint-{step:08}.safetensors")
}

/// Files with names of older checkpoints, and the steps in their names.
fn older_files(folder: &Path) -> io::Result<Vec<(PathBuf, u64)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let step = name.strip_prefix("checkpoint-").and_then(|name| name.strip_suffix(".safetensors"));
        // Similar names belong to other programs.
        let Some(step) = step.and_then(|step| step.parse().ok()).filter(|step| older_name(*step) == name) else {
            continue;
        };
        found.push((path, step));
    }
    Ok(found)
}

/// All older checkpoints in a folder.
#[derive(Default)]
struct OlderCheckpoints {
    older: Vec<Older>,
    /// Steps of files that have the name of a checkpoint and cannot be read: these files and their shards are not
    /// removed.
    unreadable: HashSet<u64>,
}

fn list_older(folder: &Path) -> io::Result<OlderCheckpoints> {
    let mut found = OlderCheckpoints::default();
    for (path, step) in older_files(folder)? {
        match Checkpoint::open(&path) {
            Ok(Checkpoint { header: Header { validation, shards, .. }, .. }) => {
                found.older.push(Older { path, step, validation, shards });
            }
            Err(_) => drop(found.unreadable.insert(step)),
        }
    }
    Ok(found)
}

/// Name and step of the newest older checkpoint in the folder whose header is valid.
pub fn newest_older(folder: &Path) -> Option<(String, u64)> {
    let older = list_older(folder).ok()?.older.into_iter().max_by_key(|older| older.step)?;
    Some((older_name(older.step), older.step))
}

/// Help text for a damaged newest checkpoint: how to use the newest older one.
pub fn fallback_help(folder: &Path) -> Option<String> {
    let (name, step) = newest_older(folder)?;
    Some(format!("to resume after step {step}, copy {name} to {CHECKPOINT}"))
}

/// The checkpoint with the lowest validation loss.
pub struct BestCheckpoint {
    /// File name.
    pub name: String,
    pub step: u64,
    /// Validation loss.
    pub loss: f64,
}

/// The checkpoint in the folder with the lowest validation loss.
pub fn best(folder: &Path) -> Option<BestCheckpoint> {
    let newest = Checkpoint::open(&folder.join(CHECKPOINT)).ok().map(|newest| newest.header);
    let newest = newest.map(|header| (CHECKPOINT.to_string(), header.step, header.validation));
    let older = list_older(folder).unwrap_or_default().older.into_iter();
    let older = older.map(|older| (older_name(older.step), older.step, older.validation));
    let evaluated = newest
        .into_iter()
        .chain(older)
        .filter_map(|(name, step, loss)| Some(BestCheckpoint { name, step, loss: loss? }));
    evaluated.min_by(|a, b| a.loss.total_cmp(&b.loss))
}

/// Number of checkpoints in the folder.
pub fn count(folder: &Path) -> usize {
    list_older(folder).map_or(0, |found| found.older.len()) + usize::from(folder.join(CHECKPOINT).exists())
}

/// Name of the newest file with the name of a checkpoint, whether or not it can be read.
pub fn any_name(folder: &Path) -> Option<String> {
    if fs::symlink_metadata(folder.join(CHECKPOINT)).is_ok() {
        return Some(CHECKPOINT.to_string());
    }
    older_files(folder).ok()?.into_iter().map(|(_, step)| step).max().map(older_name)
}

/// Makes a prepared file the newest checkpoint, with header `header`, and removes checkpoints that are not retained.
/// Checkpoints of the same and later steps are removed too, since the run repeats these steps.
///
/// # Errors
/// Errors of the file system for the new name, or for reading the previous newest checkpoint, which then stays the
/// newest. Files that cannot be removed stay, with a warning.
pub fn commit(folder: &Path, prepared: Prepared, header: &Header, keep: Retention) -> io::Result<()> {
    let newest = folder.join(CHECKPOINT);
    match Checkpoint::open(&newest) {
        Ok(Checkpoint { header, .. }) => {
            link_or_copy(&newest, &folder.join(older_name(header.step)), |file, name| fs::hard_link(file, name))?;
        }
        Err(Error::File { source, .. }) if source.kind() != io::ErrorKind::NotFound => return Err(source),
        // The newest checkpoint does not exist, or is damaged.
        Err(_) => {}
    }
    prepared.commit()?;
    if let Err(error) = prune(folder, header, keep) {
        tracing::warn!("old checkpoints in {} stay: {error}", folder.display());
    }
    Ok(())
}

/// Adds a second name to the newest checkpoint, so that a newest one exists at any time. On file systems without hard
/// links, and for a link to another file system, it is copied.
fn link_or_copy(newest: &Path, older: &Path, link: impl Fn(&Path, &Path) -> io::Result<()>) -> io::Result<()> {
    match fs::remove_file(older) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = fs::canonicalize(newest)?;
    link(&file, older).or_else(|_| {
        let mut from = files::open_regular(&file)?;
        files::replace(older, |mut to| io::copy(&mut from, &mut to).map(drop))
    })
}

fn prune(folder: &Path, newest: &Header, keep: Retention) -> io::Result<()> {
    let OlderCheckpoints { mut older, unreadable } = list_older(folder)?;
    older.sort_by_key(|older| std::cmp::Reverse(older.step));
    let (mut retained, repeated): (Vec<Older>, Vec<Older>) =
        older.into_iter().partition(|older| older.step < newest.step);
    let last = if keep.last == 0 { usize::MAX } else { keep.last };
    // The newest one counts among the last ones.
    let mut removed = retained.split_off(retained.len().min(last - 1));
    let mut losses: Vec<f64> =
        retained.iter().chain(&removed).filter_map(|older| older.validation).chain(newest.validation).collect();
    losses.sort_by(f64::total_cmp);
    let worst = keep.best.checked_sub(1).and_then(|last| losses.get(last.min(losses.len().saturating_sub(1)))).copied();
    let is_best = |older: &mut Older| older.validation.is_some_and(|loss| worst.is_some_and(|worst| loss <= worst));
    retained.extend(removed.extract_if(.., is_best));
    for older in removed.iter().chain(&repeated) {
        fs::remove_file(&older.path)?;
    }
    let named = retained.iter().map(|older| (older.step, &older.shards)).chain([(newest.step, &newest.shards)]);
    remove_shards(folder, named, &unreadable)
}

/// Removes shards that no checkpoint in the folder references: of a run that was killed before its commit. No other
/// process may write shards.
///
/// # Errors
/// Errors of the file system; a newest checkpoint that cannot be read: all shards then stay, as some may belong to it.
pub fn remove_stale_shards(folder: &Path) -> Result<()> {
    let file = Error::file("read", folder);
    let newest = match Checkpoint::open(&folder.join(CHECKPOINT)) {
        Ok(Checkpoint { header, .. }) => Some(header),
        Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let removed = list_older(folder).and_then(|OlderCheckpoints { older, unreadable }| {
        let named = older.iter().map(|older| (older.step, &older.shards));
        remove_shards(folder, named.chain(newest.iter().map(|newest| (newest.step, &newest.shards))), &unreadable)
    });
    removed.map_err(file)
}

/// Removes all shards except those of these checkpoints and of `steps`.
fn remove_shards<'a>(
    folder: &Path,
    checkpoints: impl Iterator<Item = (u64, &'a Option<OptimizerShards>)>,
    steps: &HashSet<u64>,
) -> io::Result<()> {
    let needed: HashSet<String> = checkpoints
        .flat_map(|(step, shards)| {
            shards.iter().flat_map(move |shards| (0..shards.world).map(move |rank| shard_file_name(step, shards, rank)))
        })
        .collect();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if step_of_shard_file(&name).is_some_and(|step| !steps.contains(&step)) && !needed.contains(&name) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_made_without_hard_links() {
        let dir = tempfile::tempdir().unwrap();
        let (newest, older) = (dir.path().join(CHECKPOINT), dir.path().join(older_name(3)));
        fs::write(&newest, "step 3").unwrap();
        fs::write(&older, "of a run before").unwrap();
        link_or_copy(&newest, &older, |_, _| Err(io::ErrorKind::Unsupported.into())).unwrap();
        assert_eq!([&newest, &older].map(|path| fs::read_to_string(path).unwrap()), ["step 3", "step 3"]);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
