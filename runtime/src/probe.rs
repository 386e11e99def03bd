//! What is there to work with: the facts that `tilewright doctor` prints.

use std::fmt;
use std::path::PathBuf;
use std::process::Command;

use crate::cache::Cache;
use crate::device::{Device, DeviceInfo, driver_version, gpu_count};
use crate::env::Env;
use crate::error::{Error, Result};

/// CUDA version of the driver as major × 1000 + minor × 10.
///
/// # Errors
/// Why no driver answers.
pub fn cuda_driver() -> Result<i32> {
    driver_version()
}

/// Every visible GPU, by ordinal; one that cannot be used says why.
///
/// # Errors
/// Why no driver answers.
pub fn gpus() -> Result<Vec<Result<DeviceInfo>>> {
    let count = gpu_count()?;
    Ok((0..count).map(|ordinal| Device::cuda(ordinal).map(|device| device.info().clone())).collect())
}

/// A `ptxas` and what it says of its version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ptxas {
    pub path: PathBuf,
    /// For example `V13.0.88`.
    pub version: String,
}

/// The `ptxas` that `PTXAS` or `PATH` names; `None` where there is none. Kernels run without it: it serves tests.
///
/// # Errors
/// A bad variable, or a `ptxas` that does not run.
pub fn ptxas() -> Result<Option<Ptxas>> {
    let Some(path) = Env::get()?.ptxas.clone() else { return Ok(None) };
    let fail = |message: String| Error::Io { doing: "run ptxas at", path: path.display().to_string(), message };
    let output = Command::new(&path).arg("--version").output().map_err(|error| fail(error.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        return Err(fail(format!("it ended with {}", output.status)));
    }
    let version = text.split_whitespace().rev().find(|word| word.starts_with('V')).unwrap_or("unknown").to_string();
    Ok(Some(Ptxas { path, version }))
}

/// Everything above, and the state of the cache.
#[derive(Clone, Debug)]
pub struct Report {
    pub driver: Result<i32>,
    pub gpus: Vec<Result<DeviceInfo>>,
    pub cpu: DeviceInfo,
    /// LLVM's name of the CPU.
    pub cpu_model: String,
    pub llvm: (u32, u32, u32),
    pub ptxas: Result<Option<Ptxas>>,
    pub cache_dir: Option<PathBuf>,
    /// Why nothing can be written to the cache.
    pub cache: Result<()>,
    /// Entries in the cache, and their bytes.
    pub cache_usage: (usize, u64),
    /// What [`Device::best`] picks.
    pub best: Result<String>,
}

/// Asks everything. Only what is broken is an error, each in its own field.
pub fn report() -> Report {
    let cpu = Device::cpu();
    let cache = Cache::from_env();
    let dir = cache.as_ref().ok().and_then(|cache| cache.dir().map(PathBuf::from));
    Report {
        driver: cuda_driver(),
        gpus: gpus().unwrap_or_default(),
        cpu_model: cpu.host_cpu().map(|host| host.cpu.clone()).unwrap_or_default(),
        cpu: cpu.info().clone(),
        llvm: tilewright_codegen::llvm::version(),
        ptxas: ptxas(),
        cache_dir: dir,
        cache_usage: cache.as_ref().map(Cache::usage).unwrap_or_default(),
        cache: cache.and_then(|cache| cache.check_writable()),
        best: Device::best().map(|device| device.to_string()),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = |bytes: u64| bytes as f64 / (1_u64 << 30) as f64;
        match &self.driver {
            Ok(version) => writeln!(f, "CUDA driver  {}.{}", version / 1000, version % 1000 / 10)?,
            Err(error) => writeln!(f, "CUDA driver  {error}")?,
        }
        for (ordinal, gpu) in self.gpus.iter().enumerate() {
            match gpu {
                Ok(gpu) => {
                    let (major, minor) = gpu.compute_capability.unwrap_or_default();
                    writeln!(
                        f,
                        "GPU {ordinal}        {}, compute capability {major}.{minor}, {} SMs, {:.1} GiB, {} MiB L2",
                        gpu.name,
                        gpu.processors,
                        gib(gpu.memory_bytes),
                        gpu.l2_bytes >> 20
                    )?;
                }
                Err(error) => writeln!(f, "GPU {ordinal}        {error}")?,
            }
        }
        let (threads, memory) = (self.cpu.processors, gib(self.cpu.memory_bytes));
        writeln!(f, "CPU          {}, {threads} threads, {memory:.1} GiB", self.cpu_model)?;
        writeln!(f, "LLVM         {}.{}.{}", self.llvm.0, self.llvm.1, self.llvm.2)?;
        match &self.ptxas {
            Ok(Some(ptxas)) => writeln!(f, "ptxas        {} at {}", ptxas.version, ptxas.path.display())?,
            Ok(None) => writeln!(f, "ptxas        not found (only tests need it)")?,
            Err(error) => writeln!(f, "ptxas        {error}")?,
        }
        match (&self.cache_dir, &self.cache) {
            (_, Err(error)) => writeln!(f, "cache        {error}")?,
            (None, Ok(())) => writeln!(f, "cache        off")?,
            (Some(dir), Ok(())) => {
                let (entries, bytes) = self.cache_usage;
                writeln!(f, "cache        {} ({entries} kernels, {} KiB)", dir.display(), bytes >> 10)?;
            }
        }
        match &self.best {
            Ok(device) => writeln!(f, "kernels run on {device}"),
            Err(error) => writeln!(f, "kernels run nowhere: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_has_a_line_for_everything() {
        let text = report().to_string();
        for part in ["CUDA driver", "CPU ", "LLVM         22.", "ptxas", "cache", "kernels run"] {
            assert!(text.contains(part), "`{part}` is missing in:\n{text}");
        }
    }
}
