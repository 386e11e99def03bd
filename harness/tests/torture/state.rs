//! Contents of a run's folder.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use safetensors::SafeTensors;

use crate::plan::STEPS;

/// Hash of each tensor of a checkpoint and its shards, by name.
pub type State = BTreeMap<String, blake3::Hash>;

const CHECKPOINT: &str = "checkpoint.safetensors";

/// State of a finished run.
pub fn last(run: &Path) -> Result<State, String> {
    let mut state = tensors(&run.join(CHECKPOINT))?;
    for name in names(run)? {
        if let Some(file) = name.strip_prefix(&format!("moments-{STEPS:08}-")) {
            // The rank follows the random number of the save.
            let rank = file.split_once('-').map(|(_, rank)| rank.to_string()).unwrap_or_default();
            for (name, hash) in tensors(&run.join(&name))? {
                if state.insert(format!("{rank}: {name}"), hash).is_some() {
                    return Err(format!("rank {rank} has shards of two saves of one step"));
                }
            }
        }
    }
    Ok(state)
}

fn tensors(path: &Path) -> Result<State, String> {
    Ok(contents(path)?.0.into_iter().map(|(name, bytes)| (name, blake3::hash(&bytes))).collect())
}

pub fn names(folder: &Path) -> Result<Vec<String>, String> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    Ok(names)
}

/// Fails unless the folder of a finished run has exactly its files: no lock, and no files of killed writers.
pub fn expect_files(run: &Path) -> Result<(), String> {
    let names = names(run)?;
    let known = |name: &str| {
        let kept =
            ["checkpoint-", "moments-"].iter().any(|begin| name.starts_with(begin)) && name.ends_with(".safetensors");
        kept || [CHECKPOINT, "log.jsonl", "loss.svg"].contains(&name)
    };
    match names.iter().find(|name| !known(name)) {
        Some(name) => Err(format!("`{name}` remains in the run's folder, which has {names:?}")),
        None => Ok(()),
    }
}

/// The loss of each step; fails unless the log has every step once.
pub fn losses(run: &Path) -> Result<Vec<f64>, String> {
    let text = fs::read_to_string(run.join("log.jsonl")).map_err(|error| format!("log.jsonl: {error}"))?;
    let mut losses = Vec::new();
    for line in text.lines() {
        let line: serde_json::Value =
            serde_json::from_str(line).map_err(|error| format!("log.jsonl: {error}: {line}"))?;
        if line["what"] != "step" {
            continue;
        }
        losses.push(line["loss"].as_f64().ok_or_else(|| format!("log.jsonl has no loss in {line}"))?);
        if line["step"] != losses.len() {
            return Err(format!("log.jsonl has step {} at index {}", line["step"], losses.len()));
        }
    }
    match losses.len() as u64 {
        STEPS => Ok(losses),
        others => Err(format!("log.jsonl has {others} steps of {STEPS}")),
    }
}

/// Whether a step was run.
pub fn has_begun(run: &Path) -> bool {
    fs::read_to_string(run.join("log.jsonl")).is_ok_and(|text| text.contains("\"step\""))
}

/// Number of steps in the log.
pub fn steps(run: &Path) -> u64 {
    let log = fs::read_to_string(run.join("log.jsonl")).unwrap_or_default();
    log.lines().filter(|line| line.contains("\"what\":\"step\"")).count() as u64
}

/// Flips a bit of the newest checkpoint; `None` if there is none.
pub fn flip(run: &Path, place: u64) -> Option<()> {
    let path = run.join(CHECKPOINT);
    let mut bytes = fs::read(&path).ok()?;
    let bit = place % (8 * bytes.len() as u64);
    bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
    fs::write(path, bytes).ok()
}

/// Replaces the newest checkpoint by the newest older one; without one, the run starts again.
pub fn take_older(run: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| error.to_string();
    match names(run)?.iter().rfind(|name| name.starts_with("checkpoint-")) {
        Some(older) => fs::copy(run.join(older), run.join(CHECKPOINT)).map(drop).map_err(failed),
        None => fs::remove_dir_all(run).map_err(failed),
    }
}

/// The contents of all tensors of the newest checkpoint, with merged shards; and its step.
pub fn merged(run: &Path) -> Result<(BTreeMap<String, Vec<u8>>, u64), String> {
    let (mut merged, header) = contents(&run.join(CHECKPOINT))?;
    let step = header["step"].as_u64().ok_or("the checkpoint has no step")?;
    let Some(parts) = header["parts"].as_object() else { return Ok((merged, step)) };
    let (id, world) = (parts["id"].as_u64().unwrap_or_default(), parts["world"].as_u64().unwrap_or_default());
    // By name and first element, so that ranges of a tensor are adjacent.
    let mut pieces = BTreeMap::new();
    for rank in 0..world {
        let name = format!("moments-{step:08}-{id:016x}-{rank}-of-{world}.safetensors");
        for (name, bytes) in contents(&run.join(name))?.0 {
            let (name, start) = match name.split_once('[') {
                Some((name, range)) => (name.to_string(), range.split_once("..").and_then(|(a, _)| a.parse().ok())),
                None => (name, Some(0_u64)),
            };
            pieces.insert((name, start.ok_or("a shard has no range")?), bytes);
        }
    }
    for ((name, _), bytes) in pieces {
        merged.entry(name).or_default().extend(bytes);
    }
    Ok((merged, step))
}

/// The tensors of a file, and its header.
pub fn contents(path: &Path) -> Result<(BTreeMap<String, Vec<u8>>, serde_json::Value), String> {
    let bytes = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let damaged = |error: safetensors::SafeTensorError| format!("{}: {error}", path.display());
    let (_, metadata) = SafeTensors::read_metadata(&bytes).map_err(damaged)?;
    let said = metadata.metadata().as_ref().and_then(|fields| fields.get("tilewright")).cloned().unwrap_or_default();
    let file = SafeTensors::deserialize(&bytes).map_err(damaged)?;
    let tensors = file.iter().map(|(name, tensor)| (name.to_string(), tensor.data().to_vec())).collect();
    Ok((tensors, serde_json::from_str(&said).unwrap_or_default()))
}
