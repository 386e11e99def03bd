//! Describes the machine of a measurement.

use serde::{Deserialize, Serialize};
use tilewright_runtime::probe;

/// Everything needed to reproduce a measurement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    /// CPU model name.
    pub cpu: String,
    /// Number of threads of CPU kernels.
    pub threads: u32,
    /// Host memory in bytes; 0 if unknown.
    pub memory_bytes: u64,
    pub gpus: Vec<Gpu>,
    /// GPU driver version, for example 580.159.
    pub driver: Option<String>,
    /// Newest CUDA version that the driver supports, for example 13.0.
    pub cuda: Option<String>,
    pub os: String,
    /// Version of Tilewright.
    pub version: String,
    /// Commit that the program was built from; the suffix `-changed` marks uncommitted changes.
    pub commit: Option<String>,
    /// Time of the measurement in UTC, for example 2026-01-31T12:34:56Z.
    pub date: String,
}

/// A GPU that Tilewright supports.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    pub name: String,
    pub memory_bytes: u64,
    pub compute_capability: String,
}

impl Machine {
    /// Queries this machine. `commit` is the one that the user passed; the default is the commit of the repository that
    /// contains the program.
    pub fn probe(commit: Option<&str>) -> Machine {
        let facts = probe::machine();
        let gpus = facts.gpus.iter().map(|gpu| {
            let (major, minor) = gpu.compute_capability.unwrap_or_default();
            let compute_capability = format!("{major}.{minor}");
            Gpu { name: gpu.name.clone(), memory_bytes: gpu.memory_bytes, compute_capability }
        });
        Machine {
            threads: facts.cpu.compute_units,
            memory_bytes: facts.cpu.memory_bytes,
            gpus: gpus.collect(),
            cuda: facts.cuda.map(|v| format!("{}.{}", v / 1000, v % 1000 / 10)),
            cpu: facts.cpu_model.unwrap_or(facts.cpu.name),
            driver: facts.driver,
            os: facts.os,
            version: tilewright_codegen::VERSION.to_string(),
            commit: commit.map(str::to_string).or(facts.commit),
            date: date(facts.seconds_since_1970),
        }
    }

    /// Names and values for display.
    pub fn facts(&self) -> Vec<(&'static str, String)> {
        let gib = |bytes: u64| format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64);
        let mut facts = vec![
            ("CPU", format!("{}, {} threads", self.cpu, self.threads)),
            ("Memory", if self.memory_bytes == 0 { "unknown".to_string() } else { gib(self.memory_bytes) }),
        ];
        let gpu = |gpu: &Gpu| format!("{}, {}", gpu.name, gib(gpu.memory_bytes));
        facts.push(match self.gpus.is_empty() {
            true => ("GPU", "none".to_string()),
            false => ("GPU", self.gpus.iter().map(gpu).collect::<Vec<_>>().join("; ")),
        });
        facts.extend(self.driver.iter().map(|driver| ("Driver", driver.clone())));
        facts.extend(self.cuda.iter().map(|cuda| ("CUDA of the driver", cuda.clone())));
        facts.push(("System", self.os.clone()));
        let commit = self.commit.as_deref().map(|commit| format!(", commit {commit}")).unwrap_or_default();
        facts.push(("Tilewright", format!("{}{commit}", self.version)));
        facts.push(("Date", self.date.clone()));
        facts
    }

    /// Formats [`Machine::facts`] on one line.
    pub fn line(&self) -> String {
        let shown = |(name, value): (&str, String)| match name {
            "CPU" | "Memory" | "System" | "Date" => value,
            _ => format!("{name} {value}"),
        };
        self.facts().into_iter().map(shown).collect::<Vec<_>>().join(" · ")
    }
}

/// Formats seconds since 1970 as an ISO 8601 date and time in UTC, in the Gregorian calendar: 400 years have 146 097
/// days.
pub fn date(seconds_since_1970: u64) -> String {
    let (days, seconds) = (seconds_since_1970 / 86_400, seconds_since_1970 % 86_400);
    // Years that start in March end with their leap day. 719 468 days lie between 0000-03-01 and 1970-01-01.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    // Months from March have 31, 30, 31, 30, 31 days, repeatedly: 153 days in five.
    let month = (5 * day + 2) / 153;
    let day_of_month = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day_of_month:02}T{hour:02}:{minute:02}:{second:02}Z")
}
