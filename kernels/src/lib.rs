//! The kernels that ship with Tilewright: one idea per file, beside a plain-Rust reference in f64.
//!
//! Each file has the kernels, functions that check shapes, choose tiles and launch them, and the reference. Tensors are
//! borrowed memory with a shape and strides; empty ones are nothing special.
//!
//! ```no_run
//! use tilewright_kernels::{Tensor, TensorMut, weighted_sum};
//! use tilewright_runtime::prelude::*;
//!
//! let device = Device::best()?;
//! let (rows, d) = (100, 50);
//! let x = Buffer::from_slice(&device, &vec![bf16::ONE; rows * d])?;
//! let w = Buffer::from_slice(&device, &vec![bf16::ONE; d])?;
//! let mut y = Buffer::<f32>::uninit(&device, rows)?;
//! weighted_sum::forward(
//!     &device,
//!     Tensor::dense(x.view(), [rows, d])?,
//!     Tensor::dense(w.view(), [d])?,
//!     TensorMut::dense(y.view_mut(), [rows])?,
//! )?;
//! assert_eq!(y.to_vec()?[0], 50.0);
//! # Ok::<(), Error>(())
//! ```

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
