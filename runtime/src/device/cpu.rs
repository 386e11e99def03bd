//! This machine's CPU as a device.

use std::sync::OnceLock;

use tilewright_codegen::target::HostCpu;

use super::DeviceInfo;
use crate::error::{Error, Result};

pub(crate) struct Cpu {
    pub(super) info: DeviceInfo,
}

impl Cpu {
    pub(super) fn new() -> Cpu {
        crate::pool::start();
        let info = DeviceInfo {
            name: format!("CPU ({})", std::env::consts::ARCH),
            compute_capability: None,
            driver_version: None,
            memory_bytes: memory_bytes().unwrap_or(0),
            processors: rayon::current_num_threads() as u32,
            l2_bytes: 0,
            max_shared_bytes: 0,
        };
        Cpu { info }
    }

    /// Asked of LLVM at the first use: a device that only holds buffers needs no compiler.
    pub(super) fn host_cpu(&self) -> &HostCpu {
        static HOST_CPU: OnceLock<HostCpu> = OnceLock::new();
        HOST_CPU.get_or_init(HostCpu::native)
    }
}

/// Memory of the machine.
fn memory_bytes() -> Option<u64> {
    kib_line(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}

/// The line `NAME N kB` of a file of Linux's `/proc`, in bytes.
fn kib_line(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Fails unless the system can give `bytes` bytes of host memory now: what is free, could be freed or can be swapped, and no more than
/// the process's limit on its address space leaves. Where the system does not say, everything fits.
///
/// Linux promises more memory than it has, and ends a process that uses it; other allocations end it at once. So whoever is about to
/// take as much as a command line says asks before.
///
/// # Errors
/// Both numbers.
pub fn expect_host_memory(bytes: f64) -> Result<()> {
    match available_bytes() {
        Some(available) if bytes > available => Err(Error::HostMemoryShort { needed: bytes, available }),
        _ => Ok(()),
    }
}

fn available_bytes() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let free = kib_line(&text, "MemAvailable:")?.saturating_add(kib_line(&text, "SwapFree:").unwrap_or(0));
    let left = address_space_left().unwrap_or(u64::MAX);
    Some(free.min(left) as f64)
}

/// What `RLIMIT_AS` leaves; `None` without a limit.
fn address_space_left() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
    let used = kib_line(&std::fs::read_to_string("/proc/self/status").ok()?, "VmSize:")?;
    Some(limit.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_there_is_is_refused_with_both_numbers() {
        expect_host_memory(1e6).unwrap();
        if available_bytes().is_some() {
            let message = expect_host_memory(1e18).unwrap_err().to_string();
            assert!(message.starts_with("out of memory on the CPU: about 9.3e8 GiB"), "{message}");
            assert!(expect_host_memory(f64::INFINITY).is_err());
        }
    }

    #[test]
    fn lines_of_proc_are_bytes() {
        let text = "MemTotal:       24 kB\nMemAvailable:   3 kB\nHugePages_Total:       0\n";
        assert_eq!(
            ["MemTotal:", "MemAvailable:", "SwapFree:"].map(|name| kib_line(text, name)),
            [Some(24576), Some(3072), None]
        );
    }
}
