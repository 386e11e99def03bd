//! Facts about the machine: the output of `tilewright doctor`.

use std::path::PathBuf;
use std::process::Command;

use cudarc::driver::sys;
use tilewright_codegen::llvm::LlvmVersion;
use tilewright_codegen::target::HostCpu;

use crate::cache::Cache;
use crate::device::{Device, DeviceInfo, driver_version, gpu_count};
use crate::env::Env;
use crate::error::{Error, ErrorContext, Result};

/// CUDA version of the driver as major × 1000 + minor × 10.
///
/// # Errors
/// Why the driver is not usable.
pub fn cuda_driver() -> Result<i32> {
    driver_version()
}

/// Every visible GPU, by ordinal; an unusable one has an error.
///
/// # Errors
/// Why the driver is not usable.
pub fn gpus() -> Result<Vec<Result<DeviceInfo>>> {
    let count = gpu_count()?;
    Ok((0..count).map(|ordinal| Device::cuda(ordinal).map(|device| device.info().clone())).collect())
}

/// The GPU, by ordinal, whose memory is at this address.
///
/// # Errors
/// Why the driver is not usable, or an address that is not GPU memory.
pub fn gpu_of_address(address: u64) -> Result<usize> {
    driver_version()?;
    let mut ordinal = 0_i32;
    let which = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    // SAFETY: this attribute is an i32 (CUDA Driver API, cuPointerGetAttribute), and any address may be asked for.
    let outcome = unsafe { sys::cuPointerGetAttribute((&raw mut ordinal).cast(), which, address) }.result();
    outcome.context("finding the GPU of an array's memory, which must be allocated GPU memory")?;
    Ok(ordinal.max(0) as usize)
}

/// A `ptxas` and its version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ptxas {
    pub path: PathBuf,
    /// For example `V13.0.88`.
    pub version: String,
}

/// The `ptxas` of `TILEWRIGHT_PTXAS` or `PATH`; `None` if there is none. Kernels run without it: tests use it.
///
/// # Errors
/// An invalid variable, or a `ptxas` that does not run.
pub fn ptxas() -> Result<Option<Ptxas>> {
    let Some(path) = Env::get()?.ptxas.clone() else { return Ok(None) };
    let fail = |message: String| Error::Io { operation: "run ptxas at", path: path.display().to_string(), message };
    let output = Command::new(&path).arg("--version").output().map_err(|error| fail(error.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        return Err(fail(format!("it exited with {}", output.status)));
    }
    let version = text.split_whitespace().rev().find(|word| word.starts_with('V')).unwrap_or("unknown").to_string();
    Ok(Some(Ptxas { path, version }))
}

/// Another CUDA tool, for example `nvdisasm`: in the directory of `ptxas`, on `PATH`, or where `make cuda-tools` puts
/// it in the working directory or an ancestor.
pub fn cuda_tool(name: &str) -> Option<PathBuf> {
    let next_to_ptxas = || Some(Env::get().ok()?.ptxas.as_ref()?.parent()?.join(name));
    let on_path = || {
        let dirs = std::env::var_os("PATH")?;
        std::env::split_paths(&dirs).map(|dir| dir.join(name)).find(|file| file.is_file())
    };
    let in_build_dir = || {
        let here = std::env::current_dir().ok()?;
        let file = |dir: &std::path::Path| dir.join("build/cuda-tools/nvidia/cu13/bin").join(name);
        here.ancestors().take(4).map(file).find(|file| file.is_file())
    };
    next_to_ptxas().filter(|file| file.is_file()).or_else(on_path).or_else(in_build_dir)
}

/// A CUDA library that a machine learning program may use; kernels need none of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Library {
    /// NVIDIA's name for it.
    pub name: &'static str,
    /// Its purpose.
    pub purpose: &'static str,
    /// The file that the system's loader found; `None` if there is none.
    pub file: Option<&'static str>,
}

/// The CUDA libraries, each loaded as a program would load it.
pub fn cuda_libraries() -> Vec<Library> {
    const KNOWN: [(&str, &str, &[&str]); 5] = [
        ("cuBLAS", "GEMM of other libraries", &["libcublas.so.13", "libcublas.so.12", "libcublas.so"]),
        ("cuRAND", "random numbers of other libraries", &["libcurand.so.10", "libcurand.so"]),
        ("NVRTC", "CUDA C++ compiled at run time", &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]),
        ("NCCL", "collectives between GPUs", &["libnccl.so.2", "libnccl.so"]),
        ("CUPTI", "profiling", &["libcupti.so.13", "libcupti.so.12", "libcupti.so"]),
    ];
    // SAFETY: these are NVIDIA's libraries by name, whose initializers any program may run; no symbol is used.
    let loads = |file: &str| unsafe { libloading::Library::new(file) }.is_ok();
    let find = |files: &[&'static str]| files.iter().copied().find(|file| loads(file));
    KNOWN.iter().map(|&(name, purpose, files)| Library { name, purpose, file: find(files) }).collect()
}

/// The output of [`report`].
#[derive(Clone, Debug)]
pub struct Report {
    pub driver: Result<i32>,
    pub gpus: Vec<Result<DeviceInfo>>,
    pub cpu: DeviceInfo,
    /// LLVM's name of the CPU and its features.
    pub host_cpu: HostCpu,
    /// The vendor's name of the CPU, if the system reports it.
    pub cpu_model: Option<String>,
    /// The version of the linked LLVM; `None` without the feature `llvm`.
    pub llvm: Option<LlvmVersion>,
    pub ptxas: Result<Option<Ptxas>>,
    pub libraries: Vec<Library>,
    pub cache_dir: Option<PathBuf>,
    /// Why the cache is not writable.
    pub cache: Result<()>,
    /// Number of entries in the cache, and their bytes.
    pub cache_usage: (usize, u64),
    /// The result of [`Device::best`].
    pub best: Result<String>,
}

/// The line `model name` of Linux's `/proc/cpuinfo`.
fn cpu_model() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, name)| name.trim().to_string()).filter(|name| !name.is_empty())
}

/// The facts needed to reproduce a measurement on this machine.
#[derive(Clone, Debug)]
pub struct Machine {
    pub cpu: DeviceInfo,
    /// The vendor's name of the CPU, if the system reports it.
    pub cpu_model: Option<String>,
    /// The usable GPUs.
    pub gpus: Vec<DeviceInfo>,
    /// CUDA version of the driver as major × 1000 + minor × 10.
    pub cuda: Option<i32>,
    /// The version of the driver itself, if Linux reports it.
    pub driver: Option<String>,
    /// Name and version of the system.
    pub os: String,
    /// The commit of the repository that contains the program, with `-changed` if files differ from it.
    pub commit: Option<String>,
    /// Time of the call: seconds since 1970-01-01 00:00 UTC.
    pub seconds_since_1970: u64,
}

/// Collects the facts, without LLVM or the cache.
pub fn machine() -> Machine {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    Machine {
        cpu: Device::cpu().info().clone(),
        cpu_model: cpu_model(),
        gpus: gpus().unwrap_or_default().into_iter().flatten().collect(),
        cuda: cuda_driver().ok(),
        driver: driver_release(),
        os: operating_system(),
        commit: commit(),
        seconds_since_1970: now.map_or(0, |since| since.as_secs()),
    }
}

/// The version in `/proc/driver/nvidia/version`: the first word that consists of digits and dots.
fn driver_release() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.split_whitespace().find(is_version).map(str::to_string)
}

/// Name of the distribution and version of the kernel, if Linux reports them.
fn operating_system() -> String {
    let release = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    let name = name.map_or(std::env::consts::OS, |name| name.trim_matches('"'));
    match std::fs::read_to_string("/proc/sys/kernel/osrelease") {
        Ok(kernel) => format!("{name}, Linux {}", kernel.trim()),
        Err(_) => name.to_string(),
    }
}

/// The commit of the nearest ancestor directory of the program that is a git repository; `None` if there is none.
fn commit() -> Option<String> {
    let program = std::env::current_exe().ok()?;
    let repository = program.ancestors().find(|folder| folder.join(".git").exists())?;
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(repository).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_string())
    };
    let id = git(&["rev-parse", "--short=12", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_some_and(|changes| !changes.is_empty());
    Some(if changed { format!("{id}-changed") } else { id })
}

/// Collects all facts. Each field has a separate error.
pub fn report() -> Report {
    let cpu = Device::cpu();
    let cache = Cache::from_env();
    let dir = cache.as_ref().ok().and_then(|cache| cache.dir().map(PathBuf::from));
    Report {
        driver: cuda_driver(),
        gpus: gpus().unwrap_or_default(),
        host_cpu: HostCpu::native(),
        cpu_model: cpu_model(),
        cpu: cpu.info().clone(),
        llvm: tilewright_codegen::llvm::version(),
        ptxas: ptxas(),
        libraries: cuda_libraries(),
        cache_dir: dir,
        cache_usage: cache.as_ref().ok().and_then(|cache| cache.usage().ok()).unwrap_or_default(),
        cache: cache.and_then(|cache| cache.check_writable()),
        best: Device::best().map(|device| device.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_is_complete() {
        let report = report();
        assert_eq!(report.llvm.map(|llvm| llvm.major), cfg!(feature = "llvm").then_some(22));
        assert!(report.cpu.compute_units > 0 && !report.host_cpu.cpu.is_empty());
        assert_eq!(report.gpus.is_empty(), report.driver.is_err(), "{report:?}");
        assert_eq!(report.libraries.len(), 5);
    }

    #[test]
    fn the_machine_is_described() {
        let machine = machine();
        assert!(machine.cpu.compute_units > 0 && !machine.os.is_empty() && machine.seconds_since_1970 > 1_700_000_000);
        assert_eq!(machine.gpus.is_empty(), machine.cuda.is_none(), "{machine:?}");
    }
}
