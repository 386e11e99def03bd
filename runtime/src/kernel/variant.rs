//! Compiled variants of kernels: which one a launch needs, and the table of all variants.
//!
//! Every launch does the lookup: it hashes about a dozen words and does not allocate.

use std::collections::HashMap;
use std::sync::{LazyLock, RwLock};

use smallvec::SmallVec;
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ArgSpec, KernelDef, ParamKind, Specialization};
use tilewright_codegen::llvm;

use super::{Consts, KernelArg, LaunchConfig, compile, compile_func};
use crate::device::{Device, Inner};
use crate::error::{Error, Result};
use crate::launch::{CompiledKernel, LaunchArg};
use crate::precompiled::embedded::{self, Wanted};
use crate::trace;

/// The key of a variant.
type Key = SmallVec<[u64; 24]>;

/// All variants of this process: kernels compiled for certain facts about their arguments. Each keeps its device alive,
/// so the address in its key is not reused.
static VARIANTS: LazyLock<RwLock<HashMap<Key, CompiledKernel>>> = LazyLock::new(RwLock::default);

/// The largest power of two on which pointers and integers are specialized, where they are multiples of it: the widest access of a
/// thread has 16 bytes.
const ALIGNMENT: u32 = 16;

/// What a variant may assume about one argument: the power of two, up to 16, that divides it, or that it is one. Rows of 5000
/// elements of two bytes, for example, start at multiples of 16 bytes, which TMA requires, though not at multiples of 16 elements.
fn facts(arg: &KernelArg) -> ArgSpec {
    let divisible = |zeros: u32| ArgSpec { divisible_by: 1 << zeros.min(ALIGNMENT.trailing_zeros()), equal_to: None };
    let integer = |v: i64| match v {
        1 => ArgSpec { divisible_by: 1, equal_to: Some(1) },
        v => divisible(v.trailing_zeros()),
    };
    match arg.launch_arg() {
        LaunchArg::Ptr { addr, .. } => divisible(addr.trailing_zeros()),
        LaunchArg::I8(v) => integer(v.into()),
        LaunchArg::I16(v) => integer(v.into()),
        LaunchArg::I32(v) => integer(v.into()),
        LaunchArg::I64(v) => integer(v),
        LaunchArg::F32(_) | LaunchArg::F64(_) => ArgSpec::default(),
    }
}

/// For each parameter that is passed at a launch: whether the kernel is specialized on it.
fn specialized_flags(def: &KernelDef) -> impl Iterator<Item = bool> {
    def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. })).map(|p| p.specialize)
}

/// The facts that a launch with these arguments specializes on.
pub fn specialization(def: &KernelDef, args: &[KernelArg]) -> Specialization {
    let specs = specialized_flags(def).zip(args);
    let specs = specs.map(|(specialize, arg)| if specialize { facts(arg) } else { ArgSpec::default() });
    Specialization { args: specs.collect() }
}

/// A word that differs for different texts.
fn text_word(text: &str) -> u64 {
    let bytes = *blake3::hash(text.as_bytes()).as_bytes();
    u64::from_le_bytes(std::array::from_fn(|i| bytes[i]))
}

fn key(
    def: &'static KernelDef,
    device: &Device,
    config: &LaunchConfig,
    dtypes: &[DType],
    args: &[KernelArg],
    consts: Consts,
    assume_ranges: bool,
) -> Key {
    let mut key = Key::new();
    key.push(std::ptr::from_ref(def) as u64);
    match device.inner() {
        Inner::Cpu(_) => key.extend([0, 0]),
        Inner::Simulated(simulated) => key.extend([1, std::ptr::from_ref(simulated) as u64]),
        // All streams of a GPU share its code.
        Inner::Cuda(cuda) => key.extend([2, cuda.context.cu_ctx() as u64]),
    }
    let LaunchConfig {
        grid: _,
        stream: _,
        bounds_check: _,
        num_warps,
        num_ctas,
        num_stages,
        debug_asserts,
        fp_fusion,
        max_registers,
        loops,
        clocks,
        schedule,
    } = config;
    key.push(u64::from(*num_warps) << 32 | u64::from(*num_ctas) << 16 | u64::from(*num_stages));
    key.push(
        u64::from(*debug_asserts) << 63 | u64::from(*fp_fusion) << 62 | max_registers.map_or(u64::MAX >> 2, u64::from),
    );
    key.push(loops.as_deref().map_or(0, text_word));
    key.push(clocks.map_or(u64::MAX, u64::from));
    let assume_ranges = u64::from(assume_ranges);
    key.push(schedule.named().iter().fold(assume_ranges, |word, (_, choice)| word << 2 | choice.map_or(2, u64::from)));
    for chunk in dtypes.chunks(8) {
        key.push(chunk.iter().fold(0, |word, &d| word << 8 | d as u64));
    }
    let mut word = 0;
    for (i, (specialize, arg)) in specialized_flags(def).zip(args).enumerate() {
        if specialize {
            let ArgSpec { divisible_by, equal_to } = facts(arg);
            let one = u64::from(equal_to.is_some());
            word |= (u64::from(divisible_by.trailing_zeros()) | one << 3) << (4 * (i % 16));
        }
        if i % 16 == 15 {
            key.push(std::mem::take(&mut word));
        }
    }
    key.push(word);
    key.extend_from_slice(consts.keys);
    key
}

/// The compiled variant for these arguments; with `assume_ranges`, its launches check assumptions about ranges.
pub(super) fn find_or_compile(
    def: &'static KernelDef,
    device: &Device,
    config: &LaunchConfig,
    dtypes: &[DType],
    args: &[KernelArg],
    consts: Consts,
    assume_ranges: bool,
) -> Result<CompiledKernel> {
    let key = key(def, device, config, dtypes, args, consts, assume_ranges);
    // The map is consistent even if a thread panicked while it held the lock: every change is one insertion.
    let found = VARIANTS.read().unwrap_or_else(|e| e.into_inner()).get(&key[..]).cloned();
    if let Some(kernel) = found {
        return Ok(kernel.on(device));
    }
    // Two threads may compile the same variant: both results are correct, and the second one is kept.
    let names = def.params.iter().filter(|p| matches!(p.kind, ParamKind::Constexpr { .. })).map(|p| p.name);
    let values: Vec<_> = names.zip((consts.values)()).collect();
    let options = device.limit_ptx_version(&config.options());
    let facts = specialization(def, args);
    let wanted = Wanted { def, device, dtypes, constants: &values, options: &options, facts: &facts };
    if let Some(kernel) = embedded::find(&wanted)? {
        VARIANTS.write().unwrap_or_else(|e| e.into_inner()).insert(key, kernel.clone());
        return Ok(kernel);
    }
    let (func, footprint) = {
        let _span = trace::span("kernel recorded");
        let func = compile::record(def, dtypes, &values, &facts)?;
        compile::for_launches(func, &device.target(), assume_ranges)
    };
    let kernel = match device.inner() {
        Inner::Simulated(simulated) => device.simulate(simulated, &func, &options)?,
        Inner::Cpu(_) | Inner::Cuda(_) => {
            let artifact = {
                let _span = trace::span("kernel from cache or compiler");
                compile_func(&func, &device.target(), &options).map_err(|error| with_embedded(error, &wanted))?
            };
            let _span = trace::span("kernel to device");
            device.load(&artifact)?
        }
    };
    let variant = kernel.with_footprint(footprint, assume_ranges);
    VARIANTS.write().unwrap_or_else(|e| e.into_inner()).insert(key, variant.clone());
    Ok(variant)
}

/// An error of compiling; in a program without LLVM also what it embeds of the kernel, since nothing of that fits.
fn with_embedded(error: Error, wanted: &Wanted) -> Error {
    match error {
        Error::Kernel(message) if llvm::version().is_none() => {
            Error::Kernel(format!("{message}\n  {}", embedded::explain(wanted)))
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_specialized_by_the_powers_of_two_that_divide_them() {
        let divisible = |n: i64| facts(&KernelArg::scalar(n));
        for (n, by) in [(0, 16), (16, 16), (5120, 16), (5000, 8), (-5000, 8), (12, 4), (6, 2), (777, 1), (-1, 1)] {
            assert_eq!(divisible(n), ArgSpec { divisible_by: by, equal_to: None }, "{n}");
        }
        assert_eq!(divisible(i64::MIN), ArgSpec { divisible_by: 16, equal_to: None });
        assert_eq!(divisible(1), ArgSpec { divisible_by: 1, equal_to: Some(1) });
        assert_eq!(facts(&KernelArg::scalar(1.0_f32)), ArgSpec::default());
    }
}
