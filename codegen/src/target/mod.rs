//! Targets, options and artifacts of a compilation.
//!
//! These types are the contract between the compiler and the runtime: the compiler produces an [`Artifact`]; the
//! runtime caches, loads and launches it, and depends on nothing else.

pub mod clocks;
mod schedule_names;

use crate::analysis::bounds::Footprint;
use crate::analysis::tensor_map::{ALIGN, MAX_BOX, MAX_RANK};
use crate::ir::{AtomicOp, DType};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The machine to generate code for.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Target {
    /// An NVIDIA GPU, by compute capability.
    Nvptx(GpuArch),
    /// A CPU, as LLVM describes it.
    Host(HostCpu),
}

impl From<GpuArch> for Target {
    fn from(arch: GpuArch) -> Target {
        Target::Nvptx(arch)
    }
}

impl From<HostCpu> for Target {
    fn from(cpu: HostCpu) -> Target {
        Target::Host(cpu)
    }
}

/// GPU architectures that the compiler distinguishes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum GpuArch {
    /// Ampere: `mma.sync`, `cp.async`.
    Sm80,
    /// Ampere of workstations and desktops: like `Sm80`, with less shared memory.
    Sm86,
    /// Ada: like `Sm86`, with conversions of 8-bit floats.
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
    /// The compute capability, as `9.0`.
    pub fn compute_capability(self) -> &'static str {
        match self {
            GpuArch::Sm80 => "8.0",
            GpuArch::Sm86 => "8.6",
            GpuArch::Sm89 => "8.9",
            GpuArch::Sm90a => "9.0",
        }
    }

    /// The largest number of consecutive elements that one instruction without a result adds to memory: four of f32 on
    /// Hopper (`red.v4`, from PTX 8.1 on).
    pub fn reduction_vector(self, op: AtomicOp, elem: DType, ptx_version: u32) -> usize {
        let has_vectors = self >= GpuArch::Sm90a && ptx_version >= 81;
        if has_vectors && op == AtomicOp::Add && elem == DType::F32 { 4 } else { 1 }
    }

    /// The name of the architecture in LLVM and ptxas.
    pub fn name(self) -> &'static str {
        match self {
            GpuArch::Sm80 => "sm_80",
            GpuArch::Sm86 => "sm_86",
            GpuArch::Sm89 => "sm_89",
            GpuArch::Sm90a => "sm_90a",
        }
    }

    /// Maximum dynamic shared memory of one block, in bytes (CUDA C Programming Guide, "Technical Specifications").
    pub fn max_shared_bytes(self) -> u32 {
        match self {
            GpuArch::Sm80 => 163 * 1024,
            GpuArch::Sm86 | GpuArch::Sm89 => 99 * 1024,
            GpuArch::Sm90a => 227 * 1024,
        }
    }

    /// Whether this is an architecture of desktop GPUs, whose blocks have 99 KB of shared memory: others have 163 KB and more.
    pub fn is_desktop(self) -> bool {
        matches!(self, GpuArch::Sm86 | GpuArch::Sm89)
    }

    /// The best architecture for a device of this compute capability; `None` before 8.0. Later devices run code for
    /// earlier architectures; later desktop devices have the shared memory of `Sm89`.
    pub fn for_compute_capability(major: i32, minor: i32) -> Option<GpuArch> {
        match (major, minor) {
            (8, 6) => Some(GpuArch::Sm86),
            (8, 9) | (12.., _) => Some(GpuArch::Sm89),
            (9, _) => Some(GpuArch::Sm90a),
            (8.., _) => Some(GpuArch::Sm80),
            _ => None,
        }
    }

    /// Whether a device of this compute capability runs code for the architecture: architecture-specific code runs only
    /// there, other code on all later devices too (PTX ISA, `.target`).
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

/// Options of one compilation that are not part of the kernel's text. All of them are part of the cache key.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CompileOptions {
    /// Warps per block, of 32 threads each (GPU only): a power of two from 1 to 32.
    pub num_warps: u32,
    /// CTAs of the cluster that shares each program (Hopper only): 1, 2, 4 or 8. Each has `num_warps` warps and computes a part of
    /// the tiles; what all of them load reaches them by TMA multicast.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub num_ctas: u32,
    /// Number of software pipeline stages in loops that do not set their own (GPU only).
    pub num_stages: u32,
    /// PTX version as major × 10 + minor, for example 84; the runtime lowers it to what the driver supports.
    pub ptx_version: u32,
    /// Compile `device_assert`s to checks; otherwise they are removed.
    pub debug_asserts: bool,
    /// Whether a product and a sum of floats may become one `fma`, which rounds once (GPU only).
    #[serde(default = "fp_fusion_by_default")]
    pub fp_fusion: bool,
    /// Maximum registers per thread for ptxas; `None` derives it from the block size.
    pub max_registers: Option<u32>,
    /// Schedules of loops: those that a solver found, as text
    /// ([`LoopSchedules`](crate::schedule::problem::LoopSchedules)), where the compiler chooses those of other loops; or the
    /// text of the function at stage *schedule* ([`given`](crate::schedule::given)).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loops: Option<String>,
    /// Record clocks of this block, by its linear index in the grid ([`clocks`]; GPU only).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clocks: Option<u32>,
    /// Scheduling options of loops with dots.
    #[serde(flatten)]
    pub schedule: Schedule,
}

/// The option in files that do not have it.
fn fp_fusion_by_default() -> bool {
    true
}

impl Default for CompileOptions {
    fn default() -> Self {
        CompileOptions {
            num_warps: 4,
            num_ctas: 1,
            num_stages: 3,
            ptx_version: 84,
            debug_asserts: true,
            fp_fusion: fp_fusion_by_default(),
            max_registers: None,
            loops: None,
            clocks: None,
            schedule: Schedule::default(),
        }
    }
}

/// Scheduling options of loops with dots on a GPU. `None` leaves the choice to the compiler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Schedule {
    /// Whether TMA performs the prefetching loads of software pipelines where a tensor map describes them (Hopper
    /// only). With `None`, `cp.async` performs them, except in warp-specialized loops, which use TMA. With
    /// `Some(false)` the code takes no tensor map: a launch recompiles the kernel with this choice for tensors that TMA
    /// does not support (an extent of 0, a negative stride).
    #[serde(alias = "bulk_copies")]
    pub tma: Option<bool>,
    /// Whether producer warps perform the prefetching loads (warp specialization, Hopper only), in kernels whose loops
    /// do not set it themselves. `None` currently means no.
    pub warp_specialize: Option<bool>,
    /// Whether `wgmma` of one iteration of a loop overlap with the arithmetic of the next (Hopper only), in loops that
    /// do not set it themselves. With `None` the compiler decides by the number of registers. With `Some(false)`, f32
    /// `wgmma` do not overlap with the FP32 adds of other f32 `wgmma` either, which takes the fewest registers.
    pub overlap: Option<bool>,
    /// Whether consumer warpgroups of a warp-specialized kernel alternate on the tensor cores (ping-pong scheduling).
    /// `None` currently means no.
    #[serde(alias = "take_turns")]
    pub pingpong: Option<bool>,
    /// Whether `wgmma` computes f32 dots in tf32 and tf32x3, where tiles are large enough (Hopper only). With `None`
    /// the compiler uses `mma.sync`.
    pub wgmma_f32: Option<bool>,
    /// Whether TMA stores tiles that would otherwise be exchanged between threads for coalesced stores, where a tensor
    /// map describes them (Hopper only). With `None` it does so in loops, where the next iteration does not wait for
    /// them; at the end of a program, threads' own stores end earlier. `tma = Some(false)` turns it off.
    pub tma_stores: Option<bool>,
}

impl Schedule {
    /// All options, by name.
    pub fn named(self) -> [(&'static str, Option<bool>); 6] {
        let Schedule { tma, warp_specialize, overlap, pingpong, wgmma_f32, tma_stores } = self;
        [
            ("tma", tma),
            ("warp_specialize", warp_specialize),
            ("pingpong", pingpong),
            ("overlap", overlap),
            ("wgmma_f32", wgmma_f32),
            ("tma_stores", tma_stores),
        ]
    }

    /// The option of a name, or of a former name; `None` if there is none.
    pub fn choice(&mut self, name: &str) -> Option<&mut Option<bool>> {
        Some(match schedule_names::current_name(name) {
            "tma" => &mut self.tma,
            "warp_specialize" => &mut self.warp_specialize,
            "pingpong" => &mut self.pingpong,
            "overlap" => &mut self.overlap,
            "wgmma_f32" => &mut self.wgmma_f32,
            "tma_stores" => &mut self.tma_stores,
            _ => return None,
        })
    }

    /// Returns these options, with those that are `None` replaced by the ones of `others`.
    pub fn or(mut self, others: Schedule) -> Schedule {
        for (name, value) in others.named() {
            if let Some(choice) = self.choice(name) {
                *choice = choice.or(value);
            }
        }
        self
    }
}

/// The type of a kernel argument as the launch passes it.
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
    /// The address of a record of clocks ([`clocks`]), which the launch passes.
    Clocks,
    /// A 128-byte `CUtensorMap`, passed by value; the launch encodes it from [`TensorMapDesc`].
    TensorMap,
}

impl ArgType {
    /// The size in the parameter buffer, in bytes.
    pub fn size(self) -> usize {
        match self {
            ArgType::I8 => 1,
            ArgType::I16 => 2,
            ArgType::I32 | ArgType::F32 => 4,
            ArgType::Ptr | ArgType::Clocks | ArgType::I64 | ArgType::F64 => 8,
            ArgType::TensorMap => 128,
        }
    }

    /// Whether the caller of a launch passes such an argument: the launch itself passes the others.
    pub fn is_passed(self) -> bool {
        !matches!(self, ArgType::Clocks | ArgType::TensorMap)
    }
}

/// An argument of the compiled entry. Arguments are listed in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArgDesc {
    pub name: String,
    pub ty: ArgType,
    /// The compiler assumes that the value (a byte address for pointers) is a multiple of this; 1 assumes nothing.
    pub divisible_by: u64,
    /// The compiler assumes exactly this value (specialization on 1).
    pub equal_to: Option<i64>,
}

/// A number that the launch evaluates: a constant, or a kernel argument by index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HostExpr {
    Const(i64),
    Arg(usize),
}

/// Describes how to encode a tensor map (`cuTensorMapEncodeTiled`). Dimensions are listed innermost first, as in CUDA.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorMapDesc {
    /// Index into [`Manifest::args`] of the `TensorMap` argument to fill.
    pub arg: usize,
    /// Index of the pointer argument that is the base address.
    pub base: usize,
    /// Element type, in Tile IR's spelling (`bf16`, `f32`, …).
    pub elem: String,
    /// Extent of each dimension, in elements.
    pub shape: Vec<HostExpr>,
    /// Stride of each dimension but the innermost (which is 1), in elements.
    pub strides: Vec<HostExpr>,
    /// The box that one instruction copies, in elements.
    pub block: Vec<u32>,
    /// Shared-memory swizzle span in bytes: 0 (none), 32, 64 or 128.
    pub swizzle_bytes: u32,
}

impl TensorMapDesc {
    /// Checks what is fixed when a kernel is compiled against the rules of `cuTensorMapEncodeTiled`. A mistake here is the
    /// compiler's.
    ///
    /// # Errors
    /// The broken rule.
    pub fn check(&self) -> Result<(), String> {
        let rank = self.shape.len();
        if !(1..=MAX_RANK).contains(&rank) || self.strides.len() != rank - 1 || self.block.len() != rank {
            return Err(format!(
                "a tensor map of {rank} extents, {} strides and a block of {} extents: expected 1 to {MAX_RANK} dimensions, and a stride \
                 of each but the innermost",
                self.strides.len(),
                self.block.len()
            ));
        }
        if let Some(extent) = self.block.iter().find(|extent| !(1..=MAX_BOX).contains(*extent)) {
            return Err(format!("a block extent of {extent} is outside 1..={MAX_BOX}"));
        }
        let size = DType::from_name(&self.elem).ok_or_else(|| format!("elements of type {}", self.elem))?.bytes();
        let row = self.block[0] * size as u32;
        if !u64::from(row).is_multiple_of(ALIGN) {
            return Err(format!("a block row of {row} bytes is not a multiple of {ALIGN}"));
        }
        match self.swizzle_bytes {
            0 => Ok(()),
            32 | 64 | 128 if row <= self.swizzle_bytes => Ok(()),
            32 | 64 | 128 => {
                Err(format!("a block row of {row} bytes is wider than the {}-byte swizzle", self.swizzle_bytes))
            }
            other => Err(format!("a swizzle of {other} bytes does not exist")),
        }
    }
}

/// Everything that a launch needs to know about compiled code.
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
    /// Program instances of one block, of the first axis of the grid (GPU), whose extent is a multiple: the
    /// grid of blocks has this extent divided by it.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub programs_per_block: u32,
    /// Blocks (CTAs) of the cluster that runs a program (GPU): the grid of blocks has the first extent times it.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub ctas_per_program: u32,
    /// Scratch memory of one running program instance, in bytes, 64-byte aligned (host).
    pub arena_bytes: u64,
    pub tensor_maps: Vec<TensorMapDesc>,
    /// Source location of the kernel, `file:line`, for messages.
    pub source: String,
    /// What the clocks that the code records are of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clocks_of: Option<clocks::Subject>,
    /// The accesses and assumptions of the code, for the checks of a launch. `None` in a compilation for launches by
    /// this process, which has the footprint of the recorded kernel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub footprint: Option<Footprint>,
}

fn one() -> u32 {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(n: &u32) -> bool {
    *n == 1
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

/// Entry point of host code. Runs one program instance.
///
/// - `args[i]` points to the value of argument `i` (as in `cuLaunchKernel`);
/// - `pid` and `num_programs` are the instance's three coordinates and the grid's three extents;
/// - `arena` is [`Manifest::arena_bytes`] of scratch memory, 64-byte aligned, exclusive to this call;
/// - `hooks` receives the output of `device_print` and `device_assert`.
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
    /// A failed `device_assert`: a zero-terminated message that includes the source location.
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
    fn former_names_of_options_are_read() {
        for (former, present) in schedule_names::FORMER_NAMES {
            let with = |name: &str| {
                let mut schedule = Schedule::default();
                *schedule.choice(name).unwrap() = Some(true);
                schedule
            };
            let wanted = with(present);
            let text =
                serde_json::to_string(&CompileOptions { schedule: wanted, ..CompileOptions::default() }).unwrap();
            let with_former = text.replace(&format!("\"{present}\""), &format!("\"{former}\""));
            assert_ne!(with_former, text);
            let read: CompileOptions = serde_json::from_str(&with_former).unwrap();
            assert_eq!((with(former), read.schedule), (wanted, wanted), "{former}");
            assert!(wanted.named().contains(&(present, Some(true))), "{present}");
        }
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
