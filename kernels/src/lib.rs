//! The kernels that ship with Tilewright: one idea per file, beside a plain-Rust reference in f64.

pub mod attention;
pub mod column_sum;
pub mod matmul;
pub mod rms_norm;
pub mod softmax;
pub mod tensor;
pub mod weighted_sum;

pub use tensor::{FloatElement, Tensor, TensorMut};

use tilewright_codegen::lang::kernel::KernelDef;

/// All kernels, by name.
pub static KERNELS: &[&KernelDef] = &[
    &column_sum::COLUMN_SUM,
    &attention::backward::FLASH_ATTENTION_BWD_DKDV,
    &attention::backward::FLASH_ATTENTION_BWD_DQ,
    &attention::backward::FLASH_ATTENTION_BWD_PREPROCESS,
    &attention::forward::FLASH_ATTENTION_FWD,
    &matmul::MATMUL,
    &rms_norm::RMS_NORM_BWD,
    &rms_norm::RMS_NORM_FWD,
    &softmax::SOFTMAX_ROWS,
    &softmax::SOFTMAX_WIDE_ROWS,
    &weighted_sum::WEIGHTED_SUM_BWD,
    &weighted_sum::WEIGHTED_SUM_FWD,
];
