//! Choices that this machine remembers: a file each, in `tuned/KERNEL` of the cache's folder.
//!
//! A file is a [`Table`] with one entry, written to a temporary file and renamed. What is wrong with one, it is ignored with
//! a warning; another device's is passed over. As the cache's entries, they count only if nobody else can write them.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::table::{Entry, Table};
use crate::cache::{Cache, owned};
use crate::device::Device;

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

/// A name for the files about one problem.
fn name(device: &DeviceId, entry: &Entry) -> String {
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    let parts = [device.to_string(), text(&entry.compiler), text(&entry.ir), entry.key.clone()];
    blake3::hash(parts.join("\n").as_bytes()).to_hex()[..32].to_string()
}

/// Keeps a choice. A failure is no error: the next process chooses again.
pub(super) fn remember(cache: &Cache, device: &DeviceId, entry: &Entry) {
    let Some(folder) = cache.make(&[FOLDER, &entry.kernel]) else { return };
    let name = name(device, entry) + EXTENSION;
    let table = Table::new(device.clone(), vec![entry.clone()]).text();
    if let Err(error) = folder.write(&name, table.as_bytes()) {
        cache.warn_unwritable(&folder.path().display().to_string(), &error);
    }
}

/// The folder in the cache's with a folder for each kernel.
const FOLDER: &str = "tuned";
const EXTENSION: &str = ".json";

/// No table is as large as this.
const MAX_BYTES: u64 = 16 << 20;

/// Where the log of tuning a problem is; `None` where none can be kept.
pub(super) fn log(cache: &Cache, device: &DeviceId, entry: &Entry) -> Option<PathBuf> {
    let folder = cache.make(&[FOLDER, &entry.kernel])?;
    Some(folder.path().join(name(device, entry)).with_extension("log.jsonl"))
}

/// Everything that is remembered about a kernel on a device, from any compiler.
pub(super) fn recall(cache: &Cache, kernel: &str, device: &DeviceId) -> Table {
    let mut found = Table::new(device.clone(), Vec::new());
    let Some(folder) = cache.open(&[FOLDER, kernel]) else { return found };
    let mut names = folder.names().unwrap_or_default();
    // The same order in every process, whatever the file system says.
    names.sort();
    for name in names.iter().filter(|name| name.ends_with(EXTENSION)) {
        let read = || -> Result<Table, String> {
            let file = folder.open_file(name).map_err(|why| why.to_string())?;
            let bytes = owned::read(&file, MAX_BYTES).map_err(|error| error.to_string())?;
            Table::parse(std::str::from_utf8(&bytes).map_err(|_| "it is no text")?)
        };
        match read() {
            Ok(table) if table.device == *device => found.entries.extend(table.entries),
            Ok(_) => {}
            Err(why) => tracing::warn!("{} is ignored: {why}", folder.path().join(name).display()),
        }
    }
    found
}

/// What this machine remembers about a kernel: for `tilewright tune --export`.
pub fn remembered(kernel: &str, device: &Device) -> Table {
    let id = DeviceId::of(device);
    match Cache::from_env() {
        Ok(cache) => recall(cache, kernel, &id),
        Err(_) => Table::new(id, Vec::new()),
    }
}
