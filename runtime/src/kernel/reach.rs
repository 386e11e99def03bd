//! Whether a launch stays inside its arguments' memory.

use tilewright_codegen::analysis::reach::{Beyond, Launch, Reach};
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
}

pub(super) fn check(def: &KernelDef, reach: &Reach, args: &[LaunchArg], grid: [u32; 3]) -> Result<()> {
    reach.check(&Values(args), grid).map_err(|beyond| explain(def, beyond))
}

fn explain(def: &KernelDef, Beyond { arg, elements, reached, loc }: Beyond) -> Error {
    let mut passed = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. }));
    let name = arg.and_then(|arg| passed.nth(arg)).map(|p| p.name);
    let (kernel, place) = (label(def), loc.to_string());
    match (name, reached) {
        (Some(name), Some(reached)) => Error::OutOfReach { kernel, name: name.into(), elements, reached, place },
        (Some(name), None) => {
            Error::UnknownReach { kernel, memory: format!("`{name}`, which has {elements} elements"), place }
        }
        (None, _) => Error::UnknownReach { kernel, memory: "the kernel's buffers".into(), place },
    }
}
