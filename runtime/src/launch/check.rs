//! Checks of a launch before it starts.

use tilewright_codegen::analysis::bounds::AssumptionViolation;
use tilewright_codegen::target::{ArgDesc, ArgType, Manifest};

use super::arg::declared_type_name;
use super::{Kernel, LaunchArg, Slots, Values};
use crate::error::{Error, Result};

/// Maximum grid on a GPU (CUDA C Programming Guide, "Technical Specifications"); the CPU has the same limits, so that a
/// grid that runs here runs on a GPU.
const GRID_LIMITS: [u32; 3] = [i32::MAX as u32, 65535, 65535];

/// Indices of the arguments that the caller passes.
pub(super) fn passed_arguments(manifest: &Manifest) -> Vec<usize> {
    let is_passed = |(index, arg): (usize, &ArgDesc)| arg.ty.is_passed().then_some(index);
    manifest.args.iter().enumerate().filter_map(is_passed).collect()
}

/// Checks `args` against the manifest and writes their values to slots.
pub(super) fn bind_arguments(kernel: &Kernel, args: &[LaunchArg]) -> Result<Slots> {
    if args.len() != kernel.passed.len() {
        return Err(Error::ArgCount {
            kernel: kernel.label.to_string(),
            expected: kernel.passed.len(),
            found: args.len(),
        });
    }
    let mut slots = Slots::from_elem(0, kernel.manifest.args.len());
    for (position, (arg, &index)) in args.iter().zip(&kernel.passed).enumerate() {
        let declared = &kernel.manifest.args[index];
        if !arg.is(declared.ty) {
            return Err(Error::ArgType {
                kernel: kernel.label.to_string(),
                index: position,
                name: declared.name.clone(),
                expected: declared_type_name(declared.ty),
                found: arg.type_name(),
            });
        }
        check_assumptions(kernel, position, declared, arg)?;
        slots[index] = arg.bits();
    }
    Ok(slots)
}

/// Checks the compiler's assumptions: a value is a multiple of a number, or equal to one.
fn check_assumptions(kernel: &Kernel, position: usize, declared: &ArgDesc, arg: &LaunchArg) -> Result<()> {
    let Some(found) = arg.integer() else { return Ok(()) };
    let fail = |assumption: String| {
        Err(Error::Assumption {
            kernel: kernel.label.to_string(),
            index: position,
            name: declared.name.clone(),
            assumption,
            found,
        })
    };
    if declared.divisible_by > 1 && found % declared.divisible_by as i128 != 0 {
        let what = if declared.ty == ArgType::Ptr { "addresses" } else { "values" };
        return fail(format!("{what} divisible by {}", declared.divisible_by));
    }
    match declared.equal_to {
        Some(value) if value as i128 != found => fail(format!("the value {value}")),
        Some(_) | None => Ok(()),
    }
}

/// Checks the compiler's assumptions about the ranges of integers that are computed from arguments and grid.
pub(super) fn ranges(kernel: &Kernel, grid: [u32; 3], args: &[LaunchArg]) -> Result<()> {
    let violated = kernel.manifest.footprint.as_ref().and_then(|code| code.violated_assumption(&Values(args), grid));
    violated.map_or(Ok(()), |AssumptionViolation { found, at_least, loc }| {
        Err(Error::RangeAssumption { kernel: kernel.label.to_string(), place: loc.to_string(), at_least, found })
    })
}

/// Checks the grid's extents. Returns those of the grid of blocks, which may have several programs each, or share one.
pub(super) fn grid(kernel: &Kernel, grid: [u32; 3]) -> Result<[u32; 3]> {
    for ((found, limit), axis) in grid.into_iter().zip(GRID_LIMITS).zip(['x', 'y', 'z']) {
        if found > limit {
            return Err(Error::GridLimit { kernel: kernel.label.to_string(), axis, found, limit });
        }
    }
    let [x, y, z] = grid;
    let replicas = kernel.manifest.programs_per_block.max(1);
    let ctas = kernel.manifest.ctas_per_program.max(1);
    let limit = GRID_LIMITS[0] / ctas;
    if x / replicas > limit {
        return Err(Error::GridLimit { kernel: kernel.label.to_string(), axis: 'x', found: x, limit });
    }
    match x.is_multiple_of(replicas) {
        true => Ok([x / replicas * ctas, y, z]),
        false => Err(Error::GridReplicas { kernel: kernel.label.to_string(), found: x, replicas }),
    }
}
