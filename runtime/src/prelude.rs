//! Names that a kernel and its host code need: `use tilewright::prelude::*`.

pub use crate::autotune::tuned;
pub use crate::{
    Buffer, Device, Element, Error, F8E4M3, F8E5M2, Grid, LaunchConfig, Result, Tensor, TensorMut, View, ViewMut,
};
pub use half::{bf16, f16};
pub use tilewright_codegen::constexpr_enum;
pub use tilewright_codegen::diag::Diagnostic;
pub use tilewright_codegen::lang::kernel::ConstexprItem;
pub use tilewright_codegen::lang::*;
pub use tilewright_codegen::target::{GpuArch, HostCpu};
pub use tilewright_dsl_macros::{aggregate, autotune, device_fn, kernel};
