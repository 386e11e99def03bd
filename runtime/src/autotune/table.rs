//! Tables of choices: shipped with kernels, written by `tilewright tune --export`, and stored on this machine.
//!
//! A table is JSON: the device, and one entry per kernel and key with the configuration.
//!
//! ```json
//! {"format": "tilewright tuning table", "version": 1, "device": "NVIDIA H200", "compute_capability": "9.0",
//!  "entries": [{"kernel": "scale", "key": "T=bf16,n<=4096", "config": "tile=1024,num_warps=4,num_stages=2"}]}
//! ```

use serde::{Deserialize, Serialize};
use tilewright_codegen::lang::kernel::KernelDef;
use tilewright_codegen::target::Target;

use super::config::distance;
use super::store::DeviceId;
use crate::device::Device;

const FORMAT: &str = "tilewright tuning table";
const VERSION: u32 = 1;

/// Choices for one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    format: String,
    version: u32,
    #[serde(flatten)]
    pub device: DeviceId,
    pub entries: Vec<Entry>,
}

/// One choice.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    pub kernel: String,
    /// In the format of [`Problem::key`](super::Problem::key).
    pub key: String,
    /// In the format of [`Config`](super::Config).
    pub config: String,
    /// The time measured when it was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub median_ms: Option<f64>,
    /// Version of the compiler that it was measured with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compiler: Option<String>,
    /// Hash of the kernel's IR that it was measured with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ir: Option<String>,
}

impl Table {
    pub fn new(device: DeviceId, entries: Vec<Entry>) -> Table {
        Table { format: FORMAT.into(), version: VERSION, device, entries }
    }

    /// Parses a table.
    ///
    /// # Errors
    /// The reason why the text is not a table of this format and version.
    pub fn parse(text: &str) -> Result<Table, String> {
        let table: Table = serde_json::from_str(text).map_err(|error| format!("it is not a tuning table: {error}"))?;
        if table.format != FORMAT {
            return Err(format!("its format is `{}`, not `{FORMAT}`", table.format));
        }
        if table.version != VERSION {
            return Err(format!("it has version {}: this program reads version {VERSION}", table.version));
        }
        Ok(table)
    }

    /// This table with the present name of a kernel, and of the parameters in its keys, in place of former ones
    /// (`#[alias(…)]`). [`Autotune::parse_config`](super::Autotune::parse_config) reads the former names of constants.
    pub fn renamed(mut self, def: &KernelDef) -> Table {
        for entry in self.entries.iter_mut().filter(|entry| def.has_name(&entry.kernel)) {
            entry.kernel = def.name.into();
            entry.key = renamed_key(def, &entry.key);
        }
        self
    }

    /// Whether the choices are for a target: for GPUs of its architecture, or for the CPU of this machine.
    pub fn is_for(&self, target: &Target) -> bool {
        match target {
            Target::Nvptx(arch) => self.device.compute_capability.as_deref() == Some(arch.compute_capability()),
            Target::Host(_) => self.device == DeviceId::of(&Device::cpu()),
        }
    }

    /// The table as text, one entry per line.
    pub fn text(&self) -> String {
        let json = |value: &dyn erased::Json| value.json();
        let mut text = format!(
            "{{\"format\": {}, \"version\": {}, \"device\": {}, \"compute_capability\": {}, \"entries\": [",
            json(&self.format),
            self.version,
            json(&self.device.device),
            json(&self.device.compute_capability),
        );
        for (i, entry) in self.entries.iter().enumerate() {
            text += if i == 0 { "\n  " } else { ",\n  " };
            text += &json(entry);
        }
        text + "\n]}\n"
    }

    /// The entry of this kernel and key.
    pub fn exact(&self, kernel: &str, key: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.kernel == kernel && entry.key == key)
    }

    /// The entry of this kernel with the nearest key, and its distance; `None` if all differ in more than sizes.
    pub fn nearest(&self, kernel: &str, key: &str) -> Option<(&Entry, u32)> {
        let of_kernel = self.entries.iter().filter(|entry| entry.kernel == kernel);
        let distances = of_kernel.filter_map(|entry| Some((entry, distance(&entry.key, key)?)));
        distances.min_by_key(|(_, distance)| *distance)
    }
}

fn renamed_key(def: &KernelDef, key: &str) -> String {
    let rename = |part: &str| {
        let (name, value) = part.split_at(part.find(['<', '=']).unwrap_or(part.len()));
        format!("{}{value}", def.param_name(name))
    };
    key.split(',').map(rename).collect::<Vec<_>>().join(",")
}

/// JSON of parts of a table: strings and numbers, whose serialization cannot fail.
mod erased {
    use serde::Serialize;

    pub trait Json {
        fn json(&self) -> String;
    }

    impl<T: Serialize> Json for T {
        fn json(&self) -> String {
            serde_json::to_string(self).unwrap_or_default()
        }
    }
}
