//! The host side of `#[kernel]`: typed arguments, specialization, and the launch.
//!
//! The struct that `#[kernel]` generates lists its fields as [`KernelArg`]s and calls [`launch`]. A launch
//!
//! 1. inspects the arguments: their device, which are aligned, which integers are 1;
//! 2. looks up the variant of the kernel that is compiled for these facts (`variant.rs`); the first time it records the
//!    kernel and compiles it (`compile.rs`), through the cache on disk;
//! 3. proves that every access of the kernel is in bounds of its arguments' memory (`launch/bounds.rs`), and starts the
//!    grid.

mod arg;
mod compile;
mod config;
mod tensor;
mod variant;

use smallvec::SmallVec;
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang;
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef};
use tilewright_codegen::target::Schedule;

pub use arg::{Input, KernelArg, Memory, MemoryMut, Output};
pub(crate) use compile::for_launches;
pub use compile::{compile, compile_error, compile_func, record, render_with_source, source_file};
pub use config::{BoundsCheck, Grid, LaunchConfig};
pub use tensor::{InputTensor, MAX_EXTENT, OutputTensor, Tensor, TensorMut, cdiv, tensor_dims};
pub use variant::specialization;

use crate::device::Device;
use crate::element::{Dtype, F8E4M3, F8E5M2};
use crate::error::{Error, Result};
use crate::launch::{CompiledKernel, LaunchArg};

impl lang::Dtype for F8E4M3 {
    type Acc = f32;
    fn dtype() -> DType {
        DType::F8E4M3
    }
}

impl lang::Dtype for F8E5M2 {
    type Acc = f32;
    fn dtype() -> DType {
        DType::F8E5M2
    }
}

/// The compiler's name of a buffer's element type.
pub fn ir_dtype(dtype: Dtype) -> DType {
    match dtype {
        Dtype::Bool => DType::Bool,
        Dtype::I8 => DType::I8,
        Dtype::I16 => DType::I16,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        Dtype::U8 => DType::U8,
        Dtype::U16 => DType::U16,
        Dtype::U32 => DType::U32,
        Dtype::U64 => DType::U64,
        Dtype::F8E4M3 => DType::F8E4M3,
        Dtype::F8E5M2 => DType::F8E5M2,
        Dtype::F16 => DType::F16,
        Dtype::Bf16 => DType::BF16,
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
    }
}

/// The constexpr parameters of one launch: a key for the lookup, and the values for compilation.
#[derive(Clone, Copy)]
pub struct Consts<'a> {
    /// Different for different values; one per parameter.
    pub keys: &'a [u64],
    /// The values, in order.
    pub values: &'a dyn Fn() -> Vec<ConstValue>,
}

/// The variant of a kernel for these arguments and this grid, compiled if necessary. `dtypes` has one entry per type
/// parameter, `args` one per parameter that is not constexpr.
///
/// # Errors
/// Arguments on other devices or of other types than the kernel declares, mistakes in the kernel, and all errors of
/// compiling and loading.
pub fn prepare(
    def: &'static KernelDef,
    device: &Device,
    config: &LaunchConfig,
    dtypes: &[DType],
    args: &[KernelArg],
    consts: Consts,
) -> Result<CompiledKernel> {
    let grid = config.grid.extents(def)?;
    let kernel = variant(def, device, config, dtypes, args, consts, true)?;
    match kernel.violates_assumption(grid, &values(args)) {
        true => variant(def, device, config, dtypes, args, consts, false),
        false => Ok(kernel),
    }
}

pub(crate) fn values(args: &[KernelArg]) -> SmallVec<[LaunchArg; 32]> {
    args.iter().map(KernelArg::launch_arg).collect()
}

fn variant(
    def: &'static KernelDef,
    device: &Device,
    config: &LaunchConfig,
    dtypes: &[DType],
    args: &[KernelArg],
    consts: Consts,
    assume_ranges: bool,
) -> Result<CompiledKernel> {
    arg::check(def, device, dtypes, args)?;
    variant::find_or_compile(def, device, config, dtypes, args, consts, assume_ranges)
}

/// Launches a kernel: [`prepare`], then [`CompiledKernel::launch`]. In between it proves that every access is in bounds
/// of the arguments' memory (`tilewright_codegen::analysis::bounds`), unless the configuration is one of
/// [`LaunchConfig::unchecked`]. If no tensor map can describe a tensor, it launches a variant without tensor maps; if
/// an assumption about ranges does not hold, one without such assumptions.
///
/// # Errors
/// Those of both, and an access that may be out of bounds.
pub fn launch(
    def: &'static KernelDef,
    device: &Device,
    config: &LaunchConfig,
    dtypes: &[DType],
    args: &mut [KernelArg],
    consts: Consts,
) -> Result<()> {
    let grid = config.grid.extents(def)?;
    let kernel = variant(def, device, config, dtypes, args, consts, true)?;
    let values = values(args);
    if config.bounds_check.is_enabled() {
        kernel.check_bounds(grid, &values)?;
    }
    let start = |kernel: &CompiledKernel| {
        // SAFETY: each pointer comes from a borrow of live memory of this device, exclusive if the kernel writes it;
        // later uses of that memory are queued on the same stream, or wait for it. The kernel's accesses are in bounds:
        // proved above, or promised.
        unsafe {
            match &config.stream {
                None => kernel.launch(grid, &values),
                Some(stream) => kernel.launch_on(stream, grid, &values),
            }
        }
    };
    let (mut schedule, mut assume_ranges) = (config.schedule, true);
    let mut outcome = start(&kernel);
    loop {
        match &outcome {
            Err(Error::TensorMap { .. }) if schedule.tma != Some(false) => {
                schedule = Schedule { tma: Some(false), ..schedule };
            }
            Err(Error::RangeAssumption { .. }) if assume_ranges => assume_ranges = false,
            Ok(()) | Err(_) => return outcome,
        }
        if let Err(error) = &outcome {
            tracing::debug!("{error}: using a variant that does not need this");
        }
        let config = LaunchConfig { schedule, ..config.clone() };
        outcome = start(&variant(def, device, &config, dtypes, args, consts, assume_ranges)?);
    }
}

/// Like [`launch`], for callers that know the kernel only at run time, such as a command line: constants by name, type
/// parameters by value.
///
/// # Errors
/// Those of [`launch`]; also missing or unknown constants.
pub fn launch_erased(
    def: &'static KernelDef,
    device: &Device,
    config: &LaunchConfig,
    dtypes: &[DType],
    args: &mut [KernelArg],
    consts: &[(&str, ConstValue)],
) -> Result<()> {
    let values = def.complete_consts(consts).map_err(|d| Error::Kernel(render_with_source(&d)))?;
    let keys: Vec<u64> = values.iter().map(erased_key).collect();
    launch(def, device, config, dtypes, args, Consts { keys: &keys, values: &|| values.clone() })
}

/// Like [`prepare`], for callers that know the kernel only at run time.
///
/// # Errors
/// Those of [`prepare`]; also missing or unknown constants.
pub fn prepare_erased(
    def: &'static KernelDef,
    device: &Device,
    config: &LaunchConfig,
    dtypes: &[DType],
    args: &[KernelArg],
    consts: &[(&str, ConstValue)],
) -> Result<CompiledKernel> {
    let values = def.complete_consts(consts).map_err(|d| Error::Kernel(render_with_source(&d)))?;
    let keys: Vec<u64> = values.iter().map(erased_key).collect();
    prepare(def, device, config, dtypes, args, Consts { keys: &keys, values: &|| values.clone() })
}

/// A key for a value without its type: a hash of the text. It cannot equal a key of typed launches.
pub(crate) fn erased_key(value: &ConstValue) -> u64 {
    let hash = blake3::hash(value.to_string().as_bytes());
    let mut word = [0; 8];
    word.copy_from_slice(&hash.as_bytes()[..8]);
    u64::from_le_bytes(word) | 1 << 63
}
