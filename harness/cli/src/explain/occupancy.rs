//! Computes occupancy: how many blocks of a kernel are resident on one streaming multiprocessor (SM).
//!
//! Sources: limits from the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; allocation
//! granularities from the occupancy calculator of Nsight Compute.

use tilewright_codegen::target::GpuArch;

/// Limits of an SM: 32-bit registers, resident threads and blocks, and bytes of shared memory.
#[derive(Clone, Copy, Debug)]
struct SmLimits {
    registers: u32,
    threads: u32,
    blocks: u32,
    shared_bytes: u32,
    /// Shared memory that the system reserves per block.
    reserved_bytes: u32,
}

fn sm_limits(arch: GpuArch) -> SmLimits {
    let (registers, reserved_bytes) = (65_536, 1024);
    let (threads, blocks, shared_bytes) = match arch {
        GpuArch::Sm80 => (2048, 32, 164 * 1024),
        GpuArch::Sm86 => (1536, 16, 100 * 1024),
        GpuArch::Sm89 => (1536, 24, 100 * 1024),
        GpuArch::Sm90a => (2048, 32, 228 * 1024),
    };
    SmLimits { registers, threads, blocks, shared_bytes, reserved_bytes }
}

/// Granularity of register allocation per warp, in registers.
const REGISTER_UNIT: u32 = 256;
/// Granularity of shared-memory allocation, in bytes.
const SHARED_UNIT: u32 = 128;

/// Resident blocks and warps, and the limiting resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupancy {
    pub blocks: u32,
    pub warps: u32,
    /// Maximum number of resident warps.
    pub max_warps: u32,
    pub limit: &'static str,
}

/// Computes the occupancy of blocks with `threads` threads, `registers` per thread, and `shared_bytes` per block.
pub fn occupancy(arch: GpuArch, threads: u32, registers: u32, shared_bytes: u32) -> Occupancy {
    let p = sm_limits(arch);
    let warps = threads.div_ceil(32).max(1);
    let per_warp = (registers.max(1) * 32).next_multiple_of(REGISTER_UNIT);
    let shared = (shared_bytes + p.reserved_bytes).next_multiple_of(SHARED_UNIT);
    let limits = [
        (p.registers / per_warp / warps, "registers"),
        (p.shared_bytes / shared, "shared memory"),
        (p.threads / 32 / warps, "threads"),
        (p.blocks, "blocks"),
    ];
    // Ties go to the first limit: the ones that a kernel's author can change come first.
    let (blocks, limit) = limits.into_iter().min_by_key(|(blocks, _)| *blocks).unwrap_or((0, "registers"));
    Occupancy { blocks, warps: blocks * warps, max_warps: p.threads / 32, limit }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn occupancy_names_its_limit() {
        let of = |threads, registers, shared| {
            let found = occupancy(GpuArch::Sm90a, threads, registers, shared);
            (found.blocks, found.warps, found.limit)
        };
        assert_eq!(of(128, 168, 40 << 10), (3, 12, "registers"));
        assert_eq!(of(128, 32, 100 << 10), (2, 8, "shared memory"));
        assert_eq!(of(1024, 32, 0), (2, 64, "registers"));
        assert_eq!(of(1024, 16, 0), (2, 64, "threads"));
        assert_eq!(of(32, 16, 0), (32, 32, "blocks"));
        assert_eq!(of(256, 240, 227 << 10), (1, 8, "registers"));
        assert_eq!(occupancy(GpuArch::Sm80, 128, 32, 100 << 10).blocks, 1);
    }
}
