//! Bounds check of a launch: proves that every access stays inside its argument's memory, and that the arguments
//! satisfy the kernel's preconditions.

use tilewright_codegen::analysis::bounds::{FailedCondition, LaunchViolation, OutOfBounds};

use tilewright_codegen::diag::Diagnostic;

use super::{Kernel, LaunchArg, Values};
use crate::error::{Error, Result};
use crate::kernel::render_with_source;

/// Checks a launch of a kernel with these arguments, whose number and types are checked.
///
/// # Errors
/// The first access that may be out of bounds, the first violated precondition, or that the kernel has no footprint.
pub(super) fn check(kernel: &Kernel, args: &[LaunchArg], grid: [u32; 3]) -> Result<()> {
    match &kernel.manifest.footprint {
        Some(footprint) => footprint.check(&Values(args), grid).map_err(|violation| explain(kernel, violation)),
        None => Err(Error::NoFootprint { kernel: kernel.label.to_string() }),
    }
}

/// Name of an argument, from its index among the passed arguments.
fn name_of(kernel: &Kernel, arg: usize) -> Option<&str> {
    kernel.passed.get(arg).map(|&index| kernel.manifest.args[index].name.as_str())
}

fn explain(of: &Kernel, violation: LaunchViolation) -> Error {
    let kernel = of.label.to_string();
    match violation {
        LaunchViolation::OutOfBounds(out_of_bounds) => explain_access(of, out_of_bounds),
        LaunchViolation::Extent { arg, dim, found, loc } => {
            let place = loc.to_string();
            match arg.and_then(|arg| name_of(of, arg)) {
                Some(name) => Error::NegativeExtent { kernel, name: name.into(), found, dim, place },
                None => {
                    let precondition =
                        format!("extents of block pointers must not be negative: dimension {dim} has {found} elements");
                    Error::PreconditionFailed { kernel, precondition, place }
                }
            }
        }
        LaunchViolation::Step { found, loc } => {
            let precondition = format!("the step of a loop must be positive: it is {found}");
            Error::PreconditionFailed { kernel, precondition, place: loc.to_string() }
        }
        LaunchViolation::LoopEnd { found, step, dtype, loc } => {
            let precondition =
                format!("a loop to {found} in steps of {step} is too long for {dtype}: its index would overflow");
            Error::PreconditionFailed { kernel, precondition, place: loc.to_string() }
        }
        LaunchViolation::Assumption { failed, loc } => {
            let precondition = explain_condition(of, &failed);
            Error::PreconditionFailed { kernel, precondition, place: loc.to_string() }
        }
        LaunchViolation::Multiple { by, loc } => {
            let precondition = format!("the operand of `multiple_of` must be a multiple of {by}");
            Error::PreconditionFailed { kernel, precondition, place: loc.to_string() }
        }
    }
}

/// The condition of an `assume` with the values that it has, and the arguments that it depends on.
fn explain_condition(of: &Kernel, failed: &FailedCondition) -> String {
    let comparison = failed.comparison.as_ref().map(|text| format!(", {text},")).unwrap_or_default();
    let names: Vec<String> = failed.args.iter().filter_map(|&arg| Some(format!("`{}`", name_of(of, arg)?))).collect();
    let depends = if names.is_empty() { String::new() } else { format!("; it depends on {}", names.join(", ")) };
    format!("the condition of `assume`{comparison} is false{depends}")
}

fn explain_access(of: &Kernel, found: OutOfBounds) -> Error {
    let OutOfBounds { arg, elements, farthest_element, unbounded, loc } = found;
    let name = arg.and_then(|arg| name_of(of, arg));
    let label = of.label.to_string();
    let show = |message: String, label: &str, help: &str| {
        let text = render_with_source(&Diagnostic::new(message, loc).label(label).help(help));
        text.strip_prefix("error: ").map(str::to_string).unwrap_or(text)
    };
    if let (Some(name), Some(farthest_element)) = (name, farthest_element) {
        let message = format!(
            "kernel {label}: out of bounds: `{name}` has {elements} elements, but this access may reach element {farthest_element}"
        );
        let message = show(message, &format!("reaches element {farthest_element}"), OUT_OF_BOUNDS);
        return Error::OutOfBounds { name: name.into(), elements, farthest_element, message };
    }
    let memory = match name {
        Some(name) => format!("`{name}`, which has {elements} elements"),
        None => "the kernel's buffers".into(),
    };
    let (missing, help) = match unbounded {
        [true, false] => (
            "nothing bounds its index from below",
            "add a lower bound to the mask: `mask = index >= 0 && …`, for the whole index of the address",
        ),
        [false, true] => (
            "nothing bounds its index from above",
            "add an upper bound to the mask: `mask = index < n && …`, for the whole index of the address",
        ),
        _ => (
            "nothing bounds its index",
            "mask the access by comparing its index with an extent (`mask = index >= 0 && index < n`), or use a block pointer with \
             `boundary_check`",
        ),
    };
    let message = format!("kernel {label}: cannot prove before the launch that this access is in bounds of {memory}");
    let help =
        format!("{help}; if the arguments do not determine the bounds, guarantee them with `LaunchConfig::unchecked`");
    Error::UnprovenBounds(show(message, missing, &help))
}

/// What to do where an access may reach an element that is not there.
const OUT_OF_BOUNDS: &str = "check that the extents and strides match the buffer, and that the grid matches the extents. A mask must \
     bound the whole index of the address: for `p + (first + i) * stride`, `first + i < n` or `i < n - first`. A loop that advances \
     pointers must advance them by as much in each iteration as its mask shrinks. If the arguments do not determine the bounds, \
     guarantee them with `LaunchConfig::unchecked`";
