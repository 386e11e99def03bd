//! The host side of `#[kernel]`: typed arguments, specialisation, and the launch.

use tilewright_codegen::ir::DType;
use tilewright_codegen::lang;

use crate::element::{F8E4M3, F8E5M2};

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
