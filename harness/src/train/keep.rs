//! Which checkpoints of a run stay on the disk.
//!
//! The newest is `checkpoint.safetensors`. When a newer one is whole and has that name, the older one is `checkpoint-STEP.safetensors`,
//! until it is neither among the last ones nor among the best.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::checkpoint::{Checkpoint, Header, Parts, is_part_name, part_name};
use super::run::CHECKPOINT;
use crate::files::Prepared;

/// How many checkpoints stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Keep {
    /// The newest ones, the newest of all included; 0 for all.
    pub last: usize,
    /// Those with the lowest validation loss: they may be among the newest.
    pub best: usize,
}

impl Default for Keep {
    /// The last two and the best: one that is damaged is not the end of a run.
    fn default() -> Keep {
        Keep { last: 2, best: 1 }
    }
}

/// An older checkpoint.
struct Older {
    path: PathBuf,
    step: u64,
    validation: Option<f64>,
    parts: Option<Parts>,
}

fn older_name(step: u64) -> String {
    format!("checkpoint-{step:08}.safetensors")
}

/// Checkpoints in the folder beside the newest one. Files of such a name that are no checkpoints are not among them, and stay.
fn older(folder: &Path) -> io::Result<Vec<Older>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let step = name.strip_prefix("checkpoint-").and_then(|name| name.strip_suffix(".safetensors"));
        // Names that are nearly ours are somebody else's.
        let Some(step) = step.and_then(|step| step.parse().ok()).filter(|step| older_name(*step) == name) else {
            continue;
        };
        if let Ok(Checkpoint { header, .. }) = Checkpoint::open(&path) {
            let Header { validation, parts, .. } = header;
            found.push(Older { path, step, validation, parts });
        }
    }
    Ok(found)
}

/// The older checkpoints in the folder, the newest of them first, in words for whoever cannot use the newest.
pub fn help(folder: &Path) -> Option<String> {
    let mut older = older(folder).ok()?;
    older.sort_by_key(|older| std::cmp::Reverse(older.step));
    let newest = older.first()?.path.file_name()?.to_str()?.to_string();
    Some(format!("a copy of {newest} as {CHECKPOINT} is where the run goes on after step {}", older[0].step))
}

/// How many checkpoints are in the folder.
pub fn count(folder: &Path) -> usize {
    older(folder).map_or(0, |older| older.len()) + usize::from(folder.join(CHECKPOINT).exists())
}

/// Makes a file that is on the disk the newest checkpoint, whose header is `header`, and removes those that do not stay. Checkpoints of
/// the same and later steps are removed too: the run makes these steps again.
///
/// # Errors
/// What the file system says against the new name; the checkpoint that was the newest then still is. What cannot be removed stays, with a
/// warning.
pub fn commit(folder: &Path, prepared: Prepared, header: &Header, keep: Keep) -> io::Result<()> {
    let newest = folder.join(CHECKPOINT);
    if let Ok(Checkpoint { header, .. }) = Checkpoint::open(&newest) {
        let older = folder.join(older_name(header.step));
        match fs::remove_file(&older) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // A second name, so that there is a newest checkpoint at any time. Some file systems have no second names; a link to another one
        // moves as a link.
        let file = fs::canonicalize(&newest)?;
        fs::hard_link(file, &older).or_else(|_| fs::rename(&newest, &older))?;
    }
    prepared.commit()?;
    if let Err(error) = prune(folder, header, keep) {
        tracing::warn!("old checkpoints in {} stay: {error}", folder.display());
    }
    Ok(())
}

fn prune(folder: &Path, newest: &Header, keep: Keep) -> io::Result<()> {
    let mut older = older(folder)?;
    older.sort_by_key(|older| std::cmp::Reverse(older.step));
    let (mut stay, again): (Vec<Older>, Vec<Older>) = older.into_iter().partition(|older| older.step < newest.step);
    let last = if keep.last == 0 { usize::MAX } else { keep.last };
    // The newest is the first of the last ones.
    let mut go = stay.split_off(stay.len().min(last - 1));
    let mut losses: Vec<f64> =
        stay.iter().chain(&go).filter_map(|older| older.validation).chain(newest.validation).collect();
    losses.sort_by(f64::total_cmp);
    let worst = keep.best.checked_sub(1).and_then(|last| losses.get(last.min(losses.len().saturating_sub(1)))).copied();
    let is_best = |older: &mut Older| older.validation.is_some_and(|loss| worst.is_some_and(|worst| loss <= worst));
    stay.extend(go.extract_if(.., is_best));
    for older in go.iter().chain(&again) {
        fs::remove_file(&older.path)?;
    }
    // Files of moments that no checkpoint has any more, or never had: of a run that was killed before its commit.
    let named = stay.iter().map(|older| (older.step, &older.parts)).chain([(newest.step, &newest.parts)]);
    let needed: std::collections::HashSet<String> = named
        .flat_map(|(step, parts)| {
            parts.iter().flat_map(move |parts| (0..parts.world).map(move |rank| part_name(step, parts, rank)))
        })
        .collect();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if is_part_name(&name) && !needed.contains(&name) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
