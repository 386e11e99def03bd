//! A GPU simulated in plain Rust as a device: `tilewright_codegen::sim` on this process's memory.

use tilewright_codegen::target::GpuArch;

use super::DeviceInfo;

pub(crate) struct Simulated {
    pub(super) info: DeviceInfo,
    pub(crate) arch: GpuArch,
    /// Seed of the order in which programs and threads run.
    pub(crate) seed: u64,
}

impl Simulated {
    pub(super) fn new(arch: GpuArch, seed: u64) -> Simulated {
        let info = DeviceInfo {
            name: format!("simulated {}", arch.name()),
            compute_capability: None,
            driver_version: None,
            memory_bytes: 0,
            compute_units: 1,
            l2_bytes: 0,
            max_shared_bytes: arch.max_shared_bytes(),
        };
        Simulated { info, arch, seed }
    }
}
