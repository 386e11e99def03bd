//! This machine's CPU as a device.

use std::sync::OnceLock;

use tilewright_codegen::target::HostCpu;

use super::DeviceInfo;
use super::host_memory::kib_line;

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
            compute_units: rayon::current_num_threads() as u32,
            l2_bytes: 0,
            max_shared_bytes: 0,
        };
        Cpu { info }
    }

    /// Queried from LLVM at the first use: a device that only holds buffers needs no compiler.
    pub(super) fn host_cpu(&self) -> &HostCpu {
        static HOST_CPU: OnceLock<HostCpu> = OnceLock::new();
        HOST_CPU.get_or_init(HostCpu::native)
    }
}

/// The machine's memory in bytes.
fn memory_bytes() -> Option<u64> {
    kib_line(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemTotal:")
}
