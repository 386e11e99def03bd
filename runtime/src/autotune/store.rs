//! Stores the choices of this machine: one file each, in `tuned/KERNEL` of the cache directory.
//!
//! A file is a [`Table`] with one entry, written to a temporary file and renamed. Invalid files are ignored with a
//! warning; files of another device are skipped. Like the cache's entries, a file counts only if no other user can
//! write it.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::table::{Entry, Table};
use crate::cache::{Cache, owned};
use crate::device::Device;

/// A device model: all devices of a model share choices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceId {
    /// The vendor's name of a GPU; the model and number of threads of a CPU.
    pub device: String,
    /// `9.0`; only for a GPU.
    pub compute_capability: Option<String>,
}

impl DeviceId {
    pub fn of(device: &Device) -> DeviceId {
        let info = device.info();
        // For CPUs, the choice depends on the model that code is compiled for and on the number of threads.
        let cpu = device.host_cpu().map(|host| format!("{} with {} threads", host.cpu, info.compute_units));
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

/// The file name for a problem.
fn name(device: &DeviceId, entry: &Entry) -> String {
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    let parts = [device.to_string(), text(&entry.compiler), text(&entry.ir), entry.key.clone()];
    blake3::hash(parts.join("\n").as_bytes()).to_hex()[..32].to_string()
}

/// Stores a choice. A failure is not an error: the next process selects again.
pub(super) fn save_choice(cache: &Cache, device: &DeviceId, entry: &Entry) {
    let Some(folder) = cache.make(&[FOLDER, &entry.kernel]) else { return };
    let name = name(device, entry) + EXTENSION;
    let table = Table::new(device.clone(), vec![entry.clone()]).text();
    if let Err(error) = folder.write(&name, table.as_bytes()) {
        cache.warn_unwritable(&folder.path().display().to_string(), &error);
    }
}

/// Name of the directory in the cache directory that has one subdirectory per kernel.
const FOLDER: &str = "tuned";
const EXTENSION: &str = ".json";

/// Maximum size of a table; larger files are not read.
const MAX_BYTES: u64 = 16 << 20;

/// Path of the log of tuning a problem; `None` if nothing can be stored.
pub(super) fn log_path(cache: &Cache, device: &DeviceId, entry: &Entry) -> Option<PathBuf> {
    let folder = cache.make(&[FOLDER, &entry.kernel])?;
    Some(folder.path().join(name(device, entry)).with_extension("log.jsonl"))
}

/// All stored entries of a kernel on a device, from any compiler version.
pub(super) fn load_choices(cache: &Cache, kernel: &str, device: &DeviceId) -> Table {
    let mut found = Table::new(device.clone(), Vec::new());
    let Some(folder) = cache.open(&[FOLDER, kernel]) else { return found };
    let mut names = folder.names().unwrap_or_default();
    // Sorted, so that the order does not depend on the file system.
    names.sort();
    for name in names.iter().filter(|name| name.ends_with(EXTENSION)) {
        let read = || -> Result<Table, String> {
            let file = folder.open_file(name).map_err(|why| why.to_string())?;
            let bytes = owned::read(&file, MAX_BYTES).map_err(|error| error.to_string())?;
            Table::parse(std::str::from_utf8(&bytes).map_err(|_| "it is not UTF-8")?)
        };
        match read() {
            Ok(table) if table.device == *device => found.entries.extend(table.entries),
            Ok(_) => {}
            Err(why) => tracing::warn!("{} is ignored: {why}", folder.path().join(name).display()),
        }
    }
    found
}

/// The stored entries of a kernel, for `tilewright tune --export`.
pub fn saved_choices(kernel: &str, device: &Device) -> Table {
    let id = DeviceId::of(device);
    match Cache::from_env() {
        Ok(cache) => load_choices(cache, kernel, &id),
        Err(_) => Table::new(id, Vec::new()),
    }
}
