//! Choices that this machine remembers: a file each, in `tuned/KERNEL` of the cache's directory.
//!
//! A file is a [`Table`] with one entry, written to a temporary file and renamed. What is wrong with one, it is ignored with
//! a warning; another device's is passed over.

use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::table::{Entry, Table};
use crate::device::Device;
use crate::env::Env;

/// A kind of device: choices are the same for all of a kind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceId {
    /// The vendor's name of a GPU; a CPU by its model and threads.
    pub device: String,
    /// `9.0`, on a GPU.
    pub compute_capability: Option<String>,
}

impl DeviceId {
    pub fn of(device: &Device) -> DeviceId {
        let info = device.info();
        // Of CPUs, what decides is the model that code is compiled for and the number of its threads.
        let cpu = device.host_cpu().map(|host| format!("{} with {} threads", host.cpu, info.processors));
        DeviceId {
            device: cpu.unwrap_or_else(|| info.name.clone()),
            compute_capability: info.compute_capability.map(|(major, minor)| format!("{major}.{minor}")),
        }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.compute_capability {
            Some(capability) => write!(f, "{} ({capability})", self.device),
            None => f.write_str(&self.device),
        }
    }
}

/// Where choices of a kernel are kept; `None` without a cache.
pub(super) fn dir(kernel: &str) -> Option<PathBuf> {
    let root = Env::get().ok()?.cache_dir.as_ref()?;
    Some(root.join("tuned").join(kernel))
}

/// A name for the files about one problem.
pub(super) fn name(device: &DeviceId, entry: &Entry) -> String {
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    let parts = [device.to_string(), text(&entry.compiler), text(&entry.ir), entry.key.clone()];
    blake3::hash(parts.join("\n").as_bytes()).to_hex()[..32].to_string()
}

/// Keeps a choice. A failure is no error: the next process chooses again.
pub(super) fn remember(dir: &Path, device: &DeviceId, entry: &Entry) {
    let path = dir.join(name(device, entry)).with_extension(EXTENSION);
    let table = Table::new(device.clone(), vec![entry.clone()]).text();
    let write = || -> std::io::Result<()> {
        std::fs::create_dir_all(dir)?;
        let mut file = tempfile::NamedTempFile::new_in(dir)?;
        file.write_all(table.as_bytes())?;
        file.persist(&path)?;
        Ok(())
    };
    if let Err(error) = write() {
        tracing::warn!("the tuned configuration cannot be kept in {}: {error}", path.display());
    }
}

const EXTENSION: &str = "json";

/// Everything that is remembered about a kernel on a device, from any compiler.
pub(super) fn recall(dir: &Path, device: &DeviceId) -> Table {
    let mut found = Table::new(device.clone(), Vec::new());
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    // The same order in every process, whatever the file system says.
    paths.sort();
    for path in paths.iter().filter(|path| path.extension().is_some_and(|extension| extension == EXTENSION)) {
        let read = std::fs::read_to_string(path).map_err(|error| error.to_string());
        match read.and_then(|text| Table::parse(&text)) {
            Ok(table) if table.device == *device => found.entries.extend(table.entries),
            Ok(_) => {}
            Err(why) => tracing::warn!("{} is ignored: {why}", path.display()),
        }
    }
    found
}

/// What this machine remembers about a kernel: for `tilewright tune --export`.
pub fn remembered(kernel: &str, device: &Device) -> Table {
    let id = DeviceId::of(device);
    match dir(kernel) {
        Some(dir) => recall(&dir, &id),
        None => Table::new(id, Vec::new()),
    }
}
