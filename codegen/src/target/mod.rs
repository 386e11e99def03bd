//! What a compilation aims at, which options it takes, and what comes out of it.
//!
//! These types are the contract between the compiler and the runtime: the compiler fills an [`Artifact`], the runtime
//! caches it, loads it and launches it, and knows nothing else about how it was made.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The machine that code is generated for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Target {
    /// An NVIDIA GPU, by compute capability.
    Nvptx(GpuArch),
    /// The CPU that LLVM is asked to generate native code for.
    Host(HostCpu),
}

/// GPU architectures with a pipeline of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum GpuArch {
    /// Ampere: `mma.sync`, `cp.async`.
    Sm80,
    /// Ampere of workstations and desktops: as `Sm80`, with less shared memory.
    Sm86,
    /// Ada: as `Sm86`, with conversions of 8-bit floats.
    Sm89,
    /// Hopper with its architecture-specific instructions: `wgmma`, TMA, `setmaxnreg`.
    Sm90a,
}

/// The CPU model and features that native code may use, in LLVM's spelling.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HostCpu {
    /// Target triple, for example `x86_64-unknown-linux-gnu`.
    pub triple: String,
    /// CPU name, for example `sapphirerapids` or `x86-64-v3`.
    pub cpu: String,
    /// Feature string, for example `+avx2,+fma`.
    pub features: String,
}

impl GpuArch {
    /// LLVM's and ptxas's name of the architecture.
    pub fn name(self) -> &'static str {
        match self {
            GpuArch::Sm80 => "sm_80",
            GpuArch::Sm86 => "sm_86",
            GpuArch::Sm89 => "sm_89",
            GpuArch::Sm90a => "sm_90a",
        }
    }

    /// Largest dynamic shared memory of one block, in bytes (CUDA C Programming Guide, "Technical Specifications").
    pub fn max_shared_bytes(self) -> u32 {
        match self {
            GpuArch::Sm80 => 163 * 1024,
            GpuArch::Sm86 | GpuArch::Sm89 => 99 * 1024,
            GpuArch::Sm90a => 227 * 1024,
        }
    }

    /// The best pipeline for a device of this compute capability, or `None` where there is none. Later devices run code for
    /// earlier ones; those for desktops have the shared memory of `Sm89`.
    pub fn for_compute_capability(major: i32, minor: i32) -> Option<GpuArch> {
        match (major, minor) {
            (8, 6) => Some(GpuArch::Sm86),
            (8, 9) | (12.., _) => Some(GpuArch::Sm89),
            (9, _) => Some(GpuArch::Sm90a),
            (8.., _) => Some(GpuArch::Sm80),
            _ => None,
        }
    }

    /// Whether a device of this compute capability can run code for the architecture: architecture-specific code on its
    /// own alone, other code on everything later (PTX ISA, `.target`).
    pub fn runs_on(self, (major, minor): (i32, i32)) -> bool {
        match self {
            GpuArch::Sm80 => (major, minor) >= (8, 0),
            GpuArch::Sm86 => (major, minor) >= (8, 6),
            GpuArch::Sm89 => (major, minor) >= (8, 9),
            GpuArch::Sm90a => (major, minor) == (9, 0),
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Nvptx(arch) => f.write_str(arch.name()),
            Target::Host(_) => f.write_str("host"),
        }
    }
}

impl FromStr for GpuArch {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "sm_80" => Ok(GpuArch::Sm80),
            "sm_86" => Ok(GpuArch::Sm86),
            "sm_89" => Ok(GpuArch::Sm89),
            "sm_90a" | "sm_90" => Ok(GpuArch::Sm90a),
            other => Err(format!("unknown GPU target `{other}`: expected sm_80, sm_86, sm_89 or sm_90a")),
        }
    }
}

/// Choices of one compilation that are not part of the kernel's text. All of them are part of the cache key.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CompileOptions {
    /// Warps of 32 threads in a block (GPU only): a power of two.
    pub num_warps: u32,
    /// Depth of software pipelines in loops that do not name their own (GPU only).
    pub num_stages: u32,
    /// PTX version as major × 10 + minor, for example 83; the runtime lowers it to what the driver knows.
    pub ptx_version: u32,
    /// Check `device_assert`s; without it they vanish.
    pub debug_asserts: bool,
    /// Upper bound of registers per thread that ptxas may use; `None` leaves it to the block size.
    pub max_registers: Option<u32>,
    /// Choices of how loops with products run.
    #[serde(flatten)]
    pub schedule: Schedule,
}

impl Default for CompileOptions {
    fn default() -> Self {
        CompileOptions {
            num_warps: 4,
            num_stages: 3,
            ptx_version: 83,
            debug_asserts: true,
            max_registers: None,
            schedule: Schedule::default(),
        }
    }
}

/// How loops with products run on a GPU. What is `None` is the compiler's choice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Schedule {
    /// Whether loads that run ahead in software pipelines are the work of the bulk copy engine (TMA, Hopper only) where a
    /// tensor map describes them; `None` leaves it to the compiler, which has the threads copy, but for loads that are the work
    /// of warps of their own. With `Some(false)` the code takes no tensor map; a launch on
    /// tensors that the engine cannot fetch (an extent of 0, a negative stride) is such a one.
    pub bulk_copies: Option<bool>,
    /// Whether loads that run ahead are the work of warps of their own (Hopper only), in kernels whose loops do not say so
    /// themselves; `None` leaves it to the compiler, which does not do it yet.
    pub warp_specialize: Option<bool>,
    /// Whether products of one iteration of a loop run under the arithmetic of the next (Hopper only), in loops that do not
    /// say so themselves; `None` leaves it to the compiler, which looks at how many registers it takes. With `Some(false)`
    /// products of f32 do not run under each other's arithmetic either: the least registers.
    pub overlap: Option<bool>,
    /// Whether the warpgroups that compute take turns at the tensor cores, where loads are the work of others; `None` leaves
    /// it to the compiler, which does not do it yet.
    pub take_turns: Option<bool>,
    /// Whether warpgroups make products of f32 in tf32 and tf32x3 (`wgmma`, Hopper only), where tiles are large enough; `None`
    /// leaves it to the compiler, which has single warps make them.
    pub wgmma_f32: Option<bool>,
}

impl Schedule {
    /// All of them, by name.
    pub fn named(self) -> [(&'static str, Option<bool>); 5] {
        let Schedule { bulk_copies, warp_specialize, overlap, take_turns, wgmma_f32 } = self;
        [
            ("bulk_copies", bulk_copies),
            ("warp_specialize", warp_specialize),
            ("take_turns", take_turns),
            ("overlap", overlap),
            ("wgmma_f32", wgmma_f32),
        ]
    }

    /// The choice of that name.
    pub fn choice(&mut self, name: &str) -> Option<&mut Option<bool>> {
        Some(match name {
            "bulk_copies" => &mut self.bulk_copies,
            "warp_specialize" => &mut self.warp_specialize,
            "take_turns" => &mut self.take_turns,
            "overlap" => &mut self.overlap,
            "wgmma_f32" => &mut self.wgmma_f32,
            _ => return None,
        })
    }

    /// These choices, and where one is left open that of `others`.
    pub fn or(mut self, others: Schedule) -> Schedule {
        for (name, value) in others.named() {
            if let Some(choice) = self.choice(name) {
                *choice = choice.or(value);
            }
        }
        self
    }
}

/// Type of one kernel argument as the launch passes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ArgType {
    /// A device (or host) address, 8 bytes.
    Ptr,
    I8,
    I16,
    I32,
    I64,
    F32,
    F64,
    /// A 128-byte `CUtensorMap`, passed by value; the launch encodes it from [`TensorMapDesc`].
    TensorMap,
}

impl ArgType {
    /// Size in the parameter buffer, in bytes.
    pub fn size(self) -> usize {
        match self {
            ArgType::I8 => 1,
            ArgType::I16 => 2,
            ArgType::I32 | ArgType::F32 => 4,
            ArgType::Ptr | ArgType::I64 | ArgType::F64 => 8,
            ArgType::TensorMap => 128,
        }
    }
}

/// One argument of the compiled entry, in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArgDesc {
    pub name: String,
    pub ty: ArgType,
    /// The compiler assumed that the value (a byte address for pointers) is a multiple of this; 1 assumes nothing.
    pub divisible_by: u64,
    /// The compiler assumed exactly this value (specialisation on one).
    pub equal_to: Option<i64>,
}

/// A number that the launch computes from the kernel's arguments: a constant or an argument, by index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HostExpr {
    Const(i64),
    Arg(usize),
}

/// How to encode one tensor map (`cuTensorMapEncodeTiled`). Dimensions are listed innermost first, as CUDA wants them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorMapDesc {
    /// Index into [`Manifest::args`] of the `TensorMap` argument that this fills.
    pub arg: usize,
    /// Index of the pointer argument that is the base address.
    pub base: usize,
    /// Element type, in Tile IR's spelling (`bf16`, `f32`, …).
    pub elem: String,
    /// Extent of each dimension, in elements.
    pub shape: Vec<HostExpr>,
    /// Stride of each dimension but the innermost (which is 1), in elements.
    pub strides: Vec<HostExpr>,
    /// Box copied by one instruction, in elements.
    pub block: Vec<u32>,
    /// Shared-memory swizzle span in bytes: 0 (none), 32, 64 or 128.
    pub swizzle_bytes: u32,
}

/// Everything a launch needs to know about compiled code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The kernel's name in its source.
    pub kernel: String,
    /// Symbol of the entry point.
    pub entry: String,
    /// `sm_80`, `sm_86`, `sm_89`, `sm_90a` or `host`.
    pub target: String,
    pub args: Vec<ArgDesc>,
    /// Threads of one block (GPU); 1 on the host.
    pub threads: u32,
    /// Dynamic shared memory of one block in bytes (GPU).
    pub shared_bytes: u32,
    /// Scratch memory that one running program instance needs, in bytes, 64-byte aligned (host).
    pub arena_bytes: u64,
    pub tensor_maps: Vec<TensorMapDesc>,
    /// Source place of the kernel, `file:line`, for messages.
    pub source: String,
}

/// Compiled code and what is needed to launch it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    pub manifest: Manifest,
    pub code: Code,
}

/// The code itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Code {
    /// PTX text for the driver.
    Ptx(String),
    /// A relocatable native object file.
    Object(Vec<u8>),
}

/// Entry point of host code: runs one program instance.
///
/// - `args[i]` points at the value of argument `i` (as `cuLaunchKernel` takes them);
/// - `pid` and `num_programs` are the instance's three coordinates and the grid's three extents;
/// - `arena` is [`Manifest::arena_bytes`] of scratch memory, 64-byte aligned, owned by this call;
/// - `hooks` carries output of `device_print` and `device_assert` back.
///
/// Returns 0, or 1 after a failed `device_assert` (already reported through the hooks).
pub type HostEntry = unsafe extern "C" fn(
    args: *const *const std::ffi::c_void,
    pid: *const [i32; 3],
    num_programs: *const [i32; 3],
    arena: *mut u8,
    hooks: *const HostHooks,
) -> i32;

/// Callbacks from host code into the runtime.
#[repr(C)]
pub struct HostHooks {
    /// `device_print`: a zero-terminated prefix, then `len` values as f64.
    pub print:
        unsafe extern "C" fn(prefix: *const std::ffi::c_char, values: *const f64, len: u64, pid: *const [i32; 3]),
    /// A failed `device_assert`: a zero-terminated message that already names the source place.
    pub assert_failed: unsafe extern "C" fn(message: *const std::ffi::c_char, pid: *const [i32; 3]),
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [GpuArch; 4] = [GpuArch::Sm80, GpuArch::Sm86, GpuArch::Sm89, GpuArch::Sm90a];

    #[test]
    fn names_read_back() {
        for arch in ALL {
            assert_eq!(arch.name().parse(), Ok(arch));
        }
        assert!("sm_70".parse::<GpuArch>().is_err());
    }

    #[test]
    fn code_runs_on_the_device_that_it_was_chosen_for() {
        for capability in [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)] {
            let (major, minor) = capability;
            let arch = GpuArch::for_compute_capability(major, minor).expect("these devices are supported");
            assert!(arch.runs_on(capability), "{arch:?} on {capability:?}");
        }
        assert_eq!(GpuArch::for_compute_capability(7, 5), None);
        assert!(!GpuArch::Sm90a.runs_on((10, 0)) && !GpuArch::Sm89.runs_on((8, 6)));
    }
}
