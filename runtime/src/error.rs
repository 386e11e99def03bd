//! Errors of this crate. Messages say what failed, where, what was expected, what was found, and what to do.

use std::fmt;

use cudarc::driver::DriverError;
use tilewright_codegen::llvm::JitError;

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Help for running without a GPU, for an explicit device and for one selected by the environment.
const ON_THE_CPU: &str = "kernels also run on the CPU: use `Device::cpu()`, or `Device::best()` with TILEWRIGHT_DEVICE unset or \
                          set to `cpu`";

/// Help for a grid that is too large along an axis.
fn grid_help(axis: char) -> &'static str {
    match axis {
        'x' => "use larger tiles, or programs that loop over several of them",
        _ => {
            "launch the kernel for parts of this axis, or let the x axis count these programs, which has the limit \
             2147483647"
        }
    }
}

/// The error type. Fields named `kernel` hold the kernel's name and source location, as in "`matmul` (src/lib.rs:12)".
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("the environment variable {name} is `{value}`: expected {expected}")]
    BadVariable { name: &'static str, value: String, expected: &'static str },

    #[error("no CUDA device: {reason}\n  help: {ON_THE_CPU}")]
    NoDriver { reason: String },

    #[error(
        "there is no GPU {ordinal}: the driver reports {count}, numbered from 0\n  help: CUDA_VISIBLE_DEVICES may hide some"
    )]
    NoSuchGpu { ordinal: usize, count: usize },

    #[error(
        "{device} has compute capability {major}.{minor}: kernels need 8.0 (Ampere) or newer\n  help: {ON_THE_CPU}"
    )]
    UnsupportedGpu { device: String, major: i32, minor: i32 },

    #[error("{tool} is not available: {reason}\n  help: {help}")]
    Profiler { tool: &'static str, reason: String, help: &'static str },

    #[error("{operation}: {failure}")]
    Cuda { operation: String, failure: CudaFailure },

    #[error("out of memory on {device}: {requested} bytes requested, {free} of {total} bytes free")]
    OutOfMemory { device: String, requested: u64, free: u64, total: u64 },

    #[error("kernel {kernel} on the simulated GPU: {error}")]
    Simulated { kernel: String, error: String },

    #[error("out of memory on the CPU: {requested} bytes requested")]
    HostMemory { requested: u64 },

    /// Bytes; `needed` is estimated by a formula, before any allocation.
    #[error("out of memory on the CPU: about {} are needed, {} are available", in_gib(*needed), in_gib(*available))]
    HostMemoryShort { needed: f64, available: f64 },

    #[error("out of memory: a tensor of shape {shape:?} has more elements than the address space")]
    TooLarge { shape: Vec<usize> },

    #[error(
        "kernel {kernel}: the driver on {device} rejected its PTX ({})\n{log}\n  \
         help: TILEWRIGHT_DUMP=ptx prints the PTX; a newer driver may accept it",
        failure.code_name()
    )]
    JitRejected { kernel: String, device: String, failure: CudaFailure, log: String },

    #[error("kernel {kernel} is compiled for {found}, but {device} runs {expected}")]
    WrongTarget { kernel: String, device: String, expected: String, found: String },

    #[error(
        "kernel {kernel} is compiled code for {found}: {device} cannot run compiled code, be it PTX or native; it simulates \
         kernels from their source\n  \
         help: launch the kernel's struct on the simulated GPU, or load the code on a device that runs it: PTX on a GPU \
         (`Device::cuda`), native code on the CPU (`Device::cpu`)"
    )]
    CompiledForSimulation { kernel: String, device: String, found: String },

    #[error(transparent)]
    Link(#[from] JitError),

    #[error(
        "kernel {kernel} needs {needed} bytes of shared memory per block: {device} has {available}\n  \
         help: use smaller tiles or fewer pipeline stages"
    )]
    SharedMemory { kernel: String, device: String, needed: u32, available: u32 },

    #[error(
        "kernel {kernel} needs {needed} threads per block, but with {registers} registers per thread \
         {device} supports {available}\n  help: use fewer warps or smaller tiles"
    )]
    TooManyThreads { kernel: String, device: String, needed: u32, available: u32, registers: u32 },

    #[error("kernel {kernel} takes {expected} arguments: found {found}")]
    ArgCount { kernel: String, expected: usize, found: usize },

    #[error("kernel {kernel}, argument {index} (`{name}`): expected {expected}, found {found}")]
    ArgType { kernel: String, index: usize, name: String, expected: &'static str, found: &'static str },

    #[error(
        "kernel {kernel}, argument {index} (`{name}`): this variant was compiled for {assumption}, found \
         {found}\n  help: compile a variant for this value"
    )]
    Assumption { kernel: String, index: usize, name: String, assumption: String, found: i128 },

    #[error(
        "kernel {kernel}: this variant was compiled for an operand of the division at {place} that is at least \
         {at_least}; with these arguments and this grid it may be {found}\n  \
         help: compile a variant for these arguments"
    )]
    RangeAssumption { kernel: String, place: String, at_least: i64, found: i128 },

    #[error("kernel {kernel}: the grid's {axis} extent is {found}, the limit is {limit}\n  help: {}", grid_help(*axis))]
    GridLimit { kernel: String, axis: char, found: u32, limit: u32 },

    #[error(
        "kernel {kernel}: the grid's x extent is {found}, and {replicas} programs share a block (`replicas` \
         of its loops)\n  \
         help: round the grid up to a multiple of {replicas}, as `cdiv(n, tile * {replicas}) * {replicas}`, and mask what \
         the programs beyond the end access"
    )]
    GridReplicas { kernel: String, found: u32, replicas: u32 },

    #[error("kernel {kernel}: no tensor map can describe `{tensor}`: {reason}")]
    TensorMap { kernel: String, tensor: String, reason: String },

    #[error("kernel {kernel}, program ({}, {}, {}): device_assert failed: {message}", pid[0], pid[1], pid[2])]
    DeviceAssert { kernel: String, pid: [i32; 3], message: String },

    #[error("{what}: expected {expected} elements, found {found}")]
    Length { what: &'static str, expected: usize, found: usize },

    #[error("there is no axis {axis} in a shape of {rank} dimensions")]
    NoSuchAxis { axis: usize, rank: usize },

    #[error("a view of elements {start}..{end} does not fit a buffer of {len} elements")]
    OutOfRange { start: usize, end: usize, len: usize },

    #[error(
        "a tensor of shape {shape:?} and strides {strides:?} accesses elements {lowest}..={highest}, outside 0..{len}"
    )]
    StridesOutOfRange { shape: Vec<i64>, strides: Vec<i64>, lowest: i128, highest: i128, len: usize },

    #[error(
        "a tensor of shape {shape:?} is too large: the product of the extents is above {limit} (an extent of 0 counts as 1)\n  \
         help: check the extents; one that was computed may have wrapped around"
    )]
    ExtentsTooLarge { shape: Vec<usize>, limit: u64 },

    #[error("{what}: one operand is on {left}, the other on {right}")]
    DifferentDevices { what: &'static str, left: String, right: String },

    #[error("kernel {kernel}: `{name}` expects {expected}, found {found}")]
    Argument { kernel: String, name: &'static str, expected: String, found: String },

    #[error("kernel {kernel}: the grid's {axis} extent is {found}: expected 0 to 2147483647")]
    GridExtent { kernel: String, axis: char, found: i64 },

    /// `message` is the whole message, with the source line.
    #[error("{message}")]
    OutOfBounds { name: String, elements: u64, farthest_element: i128, message: String },

    /// The whole message, with the source line.
    #[error("{0}")]
    UnprovenBounds(String),

    #[error(
        "kernel {kernel}: `{name}` is {found}, but is the extent of dimension {dim} at {place}: expected 0 or more\n  \
         help: pass the number of elements of that dimension, 0 if the tensor is empty"
    )]
    NegativeExtent { kernel: String, name: String, found: i128, dim: usize, place: String },

    #[error(
        "kernel {kernel}: an assumption at {place} does not hold for these arguments, or cannot be proved: {precondition}\n  \
         help: pass other arguments, or change the kernel if they are valid"
    )]
    PreconditionFailed { kernel: String, precondition: String, place: String },

    #[error("kernel {kernel}: `{name}` expects {expected}, found {found}")]
    PrecompiledArgument { kernel: String, name: String, expected: String, found: String },

    #[error(
        "kernel {kernel}: a launch cannot be checked, because the manifest has no access footprint\n  \
         help: compile the kernel again with this version of `tilewright compile`, or guarantee the bounds with \
         `PrecompiledKernel::launch_unchecked`"
    )]
    NoFootprint { kernel: String },

    #[error(
        "the manifest of a kernel that was compiled ahead of time is not valid: {reason}\n  \
         help: compile the kernel again with this version of `tilewright compile`"
    )]
    InvalidManifest { reason: String },

    #[error("kernel `{kernel}` cannot be compiled ahead of time: {message}\n  help: {help}")]
    AheadOfTime { kernel: &'static str, message: String, help: String },

    #[error(
        "kernel `{kernel}` cannot be compiled ahead of time: the configuration depends on the constant `{name}`, which \
         has no value\n  help: give the constant `{name}`"
    )]
    NoConstant { kernel: &'static str, name: &'static str },

    #[error("cannot write {}: {reason}", path.display())]
    WriteFile { path: std::path::PathBuf, reason: String },

    #[error("kernels cannot be embedded: {0}\n  help: call `embed` in the build script of the crate that embeds them")]
    NoBuildScript(String),

    #[error(
        "this program embeds no kernel `{kernel}` for {device}\n  \
         help: pass it to `embed` in the build script, and put `include_kernels!();` into the crate{found}"
    )]
    NotEmbedded { kernel: String, device: String, found: String },

    #[error(
        "the code of `{kernel}` needs a CPU with {missing}, which this one does not have\n  help: compile it for `x86-64-v3` or less"
    )]
    CpuFeatures { kernel: String, missing: String },

    /// A mistake in a kernel, already formatted like an error of rustc.
    #[error("{0}")]
    Kernel(String),

    #[error("kernel {kernel}: tuning stopped: {message}")]
    Tuning { kernel: String, message: String },

    #[error("cannot {operation} {path}: {message}")]
    Io { operation: &'static str, path: String, message: String },
}

/// Formats a number of bytes: `1.5 GiB`, or `1.2e9 GiB` for very large ones.
fn in_gib(bytes: f64) -> String {
    let gib = bytes / f64::from(1 << 30);
    if gib < 1e6 { format!("{gib:.1} GiB") } else { format!("{gib:.1e} GiB") }
}

/// The same text as [`Display`](fmt::Display): `unwrap` and a `main` that returns an error print it, and the message of
/// a kernel's mistake contains several lines of source.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    pub(crate) fn cuda(operation: impl Into<String>, error: DriverError) -> Error {
        Error::Cuda { operation: operation.into(), failure: CudaFailure::from(error) }
    }
}

/// Adds a description of the operation to a driver error.
pub(crate) trait ErrorContext<T> {
    fn context(self, what: &str) -> Result<T>;
}

impl<T> ErrorContext<T> for Result<T, DriverError> {
    fn context(self, what: &str) -> Result<T> {
        self.map_err(|error| Error::cuda(what, error))
    }
}

/// An error code of the CUDA driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaFailure {
    /// The code's number, for example 700.
    pub code: u32,
    /// Its name in the driver API, for example `CUDA_ERROR_ILLEGAL_ADDRESS`.
    pub name: String,
}

impl From<DriverError> for CudaFailure {
    fn from(error: DriverError) -> Self {
        CudaFailure { code: error.0 as u32, name: format!("{:?}", error.0) }
    }
}

impl CudaFailure {
    /// Name and number: `CUDA_ERROR_ILLEGAL_ADDRESS (700)`.
    pub fn code_name(&self) -> String {
        format!("{} ({})", self.name, self.code)
    }

    /// What the code means for an author of kernels, and what to do; empty if the name is sufficient.
    ///
    /// Meanings: CUDA Driver API, "Data types used by CUDA driver", `CUresult`.
    pub fn hint(&self) -> &'static str {
        match self.code {
            1 => "an argument of the call is out of range",
            2 => "the GPU is out of memory: free buffers, or use smaller ones",
            3 | 4 => "the driver is not initialized, or the process is ending",
            100 => "no GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES",
            101 => "this ordinal is not a GPU: check CUDA_VISIBLE_DEVICES",
            200 | 218 => "the PTX is not valid: please report it with the log above",
            209 => "the code is for another GPU architecture",
            222 => "the driver is older than the PTX: update it, or compile for an older PTX version",
            700 => {
                "a kernel accessed memory outside of its buffers: run the program under compute-sanitizer, which reports the access; \
                 no further call in this process can use the GPU"
            }
            701 => {
                "the launch needs more registers or shared memory than a block can have: use fewer warps or smaller tiles"
            }
            702 => "a kernel exceeded the time limit of the display driver, or does not terminate",
            710 => {
                "a device_assert failed; the driver printed its message to standard error; no further call in this process can use \
                 the GPU"
            }
            715 => {
                "a kernel executed an illegal instruction, or trapped after a failed device_assert; no further call in this process \
                 can use the GPU"
            }
            716 => {
                "a kernel accessed a misaligned address: a pointer or stride is not the multiple that the kernel was compiled for; \
                 run the program under compute-sanitizer; no further call in this process can use the GPU"
            }
            717 | 718 => "a kernel used an invalid address space or program counter: run it under compute-sanitizer",
            719 => {
                "a kernel failed, for example by a trap after a failed device_assert: run the program under compute-sanitizer; no \
                 further call in this process can use the GPU"
            }
            802 => "the GPUs are still being set up: is the fabric manager running?",
            803 | 804 => "the driver's library and its kernel module do not match: reboot, or reinstall the driver",
            999 => "an unknown error of the driver: check dmesg for Xid lines",
            _ => "",
        }
    }

    /// Whether the context is lost: every later call fails with the same code.
    pub fn is_sticky(&self) -> bool {
        matches!(self.code, 700 | 702 | 710 | 713..=719)
    }
}

impl fmt::Display for CudaFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.code_name())?;
        match self.hint() {
            "" => Ok(()),
            hint => write!(f, "\n  help: {hint}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cudarc::driver::sys::CUresult;

    #[test]
    fn driver_errors_are_named_and_explained() {
        let error = Error::cuda("synchronizing GPU 0", DriverError(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
        let text = error.to_string();
        for part in ["synchronizing GPU 0", "CUDA_ERROR_ILLEGAL_ADDRESS (700)", "compute-sanitizer"] {
            assert!(text.contains(part), "`{part}` is missing in: {text}");
        }
    }

    #[test]
    fn sticky_errors_are_classified() {
        let sticky = |result| CudaFailure::from(DriverError(result)).is_sticky();
        assert!(sticky(CUresult::CUDA_ERROR_ASSERT) && sticky(CUresult::CUDA_ERROR_LAUNCH_FAILED));
        assert!(!sticky(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    }
}
