//! Checks that a launch keeps the promises of its kernel, and that its accesses are in bounds of its arguments' memory.

use tilewright_codegen::analysis::reach::{Beyond, Launch, Reach, Refused};
use tilewright_codegen::lang::kernel::{KernelDef, ParamKind};

use super::arg::label;
use crate::error::{Error, Result};
use crate::launch::LaunchArg;

struct Values<'a>(&'a [LaunchArg]);

impl Launch for Values<'_> {
    fn integer(&self, arg: usize) -> i128 {
        self.0[arg].integer().unwrap_or(0)
    }

    fn bytes(&self, arg: usize) -> u64 {
        match self.0[arg] {
            LaunchArg::Ptr { bytes, .. } => bytes,
            _ => 0,
        }
    }

    fn address(&self, arg: usize) -> u64 {
        match self.0[arg] {
            LaunchArg::Ptr { addr, .. } => addr,
            _ => 0,
        }
    }
}

pub(super) fn check(def: &KernelDef, reach: &Reach, args: &[LaunchArg], grid: [u32; 3]) -> Result<()> {
    reach.check(&Values(args), grid).map_err(|refused| explain(def, refused))
}

/// Name of an argument, from its index among the passed arguments.
fn name_of(def: &KernelDef, arg: usize) -> Option<&'static str> {
    let mut passed = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. }));
    passed.nth(arg).map(|p| p.name)
}

fn explain(def: &KernelDef, refused: Refused) -> Error {
    let kernel = label(def);
    match refused {
        Refused::Beyond(beyond) => explain_access(def, beyond),
        Refused::Extent { arg, dim, found, loc } => {
            let place = loc.to_string();
            match arg.and_then(|arg| name_of(def, arg)) {
                Some(name) => Error::NegativeExtent { kernel, name: name.into(), found, dim, place },
                None => {
                    let promise =
                        format!("extents of block pointers must not be negative: dimension {dim} has {found} elements");
                    Error::BrokenPromise { kernel, promise, place }
                }
            }
        }
        Refused::Step { found, loc } => {
            let promise = format!("the step of a loop must be positive: it is {found}");
            Error::BrokenPromise { kernel, promise, place: loc.to_string() }
        }
        Refused::LoopEnd { found, step, dtype, loc } => {
            let promise =
                format!("a loop to {found} in steps of {step} is too long for {dtype}: its index would overflow");
            Error::BrokenPromise { kernel, promise, place: loc.to_string() }
        }
        Refused::Assumption { loc } => {
            let promise = "the condition of `assume` must hold".to_string();
            Error::BrokenPromise { kernel, promise, place: loc.to_string() }
        }
        Refused::Multiple { by, loc } => {
            let promise = format!("the operand of `multiple_of` must be a multiple of {by}");
            Error::BrokenPromise { kernel, promise, place: loc.to_string() }
        }
    }
}

fn explain_access(def: &KernelDef, Beyond { arg, elements, reached, loc }: Beyond) -> Error {
    let name = arg.and_then(|arg| name_of(def, arg));
    let (kernel, place) = (label(def), loc.to_string());
    match (name, reached) {
        (Some(name), Some(reached)) => Error::OutOfReach { kernel, name: name.into(), elements, reached, place },
        (Some(name), None) => {
            Error::UnknownReach { kernel, memory: format!("`{name}`, which has {elements} elements"), place }
        }
        (None, _) => Error::UnknownReach { kernel, memory: "the kernel's buffers".into(), place },
    }
}
