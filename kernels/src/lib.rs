//! The kernels that ship with Tilewright, each with a plain-Rust reference in f64.
//!
//! Each module has one kernel family: the `#[kernel]` functions, host functions that check shapes, choose tiles and
//! launch, and the reference. Arguments are [`Tensor`] and [`TensorMut`]: borrowed device memory with a shape and
//! strides. Empty tensors are allowed everywhere.
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

#![allow(rustdoc::broken_intra_doc_links, reason = "formulas and shapes are full of brackets: y[r], x [rows, d]")]

pub mod activation;
pub mod adamw;
pub mod attention;
mod blocks;
pub mod cast;
pub mod column_sum;
pub mod cross_entropy;
mod cut;
pub mod embedding;
pub mod layer_norm;
pub mod matmul;
pub mod matmul_swiglu;
pub mod rank_sum;
pub mod rms_norm;
pub mod rope;
mod row_loop;
pub mod scaled_matmul;
pub mod softmax;
pub mod swiglu;
pub mod tensor;
pub mod tuned;
mod unaligned_rows;
pub mod weighted_sum;

pub use tensor::{FloatElement, IndexElement, OperandElement, Tensor, TensorMut};

use tilewright_codegen::lang::kernel::KernelDef;
use tilewright_runtime::autotune::Autotune;

/// All kernels that are autotuned, sorted by name.
pub static AUTOTUNED: &[&Autotune] = &[
    &attention::backward::FLASH_ATTENTION_BWD_DKDV_AUTOTUNE,
    &attention::backward::FLASH_ATTENTION_BWD_DQ_AUTOTUNE,
    &attention::forward::FLASH_ATTENTION_FWD_AUTOTUNE,
    &cross_entropy::CROSS_ENTROPY_FWD_AUTOTUNE,
    &cross_entropy::CROSS_ENTROPY_FWD_BWD_AUTOTUNE,
    &layer_norm::LAYER_NORM_BWD_AUTOTUNE,
    &layer_norm::LAYER_NORM_FWD_AUTOTUNE,
    &matmul::MATMUL_AUTOTUNE,
    &matmul_swiglu::MATMUL_SWIGLU_AUTOTUNE,
    &rms_norm::RMS_NORM_BWD_AUTOTUNE,
    &rms_norm::RMS_NORM_FWD_AUTOTUNE,
    &scaled_matmul::SCALED_MATMUL_AUTOTUNE,
    &softmax::SOFTMAX_ROWS_AUTOTUNE,
    &weighted_sum::WEIGHTED_SUM_BWD_AUTOTUNE,
    &weighted_sum::WEIGHTED_SUM_FWD_AUTOTUNE,
];

/// All kernels, sorted by name.
pub static KERNELS: &[&KernelDef] = &[
    &activation::ACTIVATION_BWD,
    &activation::ACTIVATION_FWD,
    &adamw::ADAMW,
    &adamw::ADAMW_CONTROLLED,
    &adamw::ADAMW_TWO_PEERS,
    &adamw::ADAMW_WITH_COMPUTE_WEIGHTS,
    &cast::CAST,
    &column_sum::COLUMN_SUM,
    &cross_entropy::CROSS_ENTROPY_BWD,
    &cross_entropy::CROSS_ENTROPY_FWD,
    &cross_entropy::CROSS_ENTROPY_FWD_BWD,
    &attention::documents::DOCUMENT_RANGES_OF_SIDE,
    &embedding::EMBEDDING_BWD,
    &attention::backward::FLASH_ATTENTION_BWD_DKDV,
    &attention::backward::FLASH_ATTENTION_BWD_DQ,
    &attention::backward_rows::FLASH_ATTENTION_BWD_POSTPROCESS,
    &attention::backward_rows::FLASH_ATTENTION_BWD_PREPROCESS,
    &attention::relative::FLASH_ATTENTION_BWD_RELATIVE,
    &attention::relative::FLASH_ATTENTION_BWD_RELATIVE_SUM,
    &attention::sinks::FLASH_ATTENTION_BWD_SINKS,
    &attention::forward::FLASH_ATTENTION_FWD,
    &attention::split_kv::FLASH_ATTENTION_FWD_COMBINE,
    &layer_norm::LAYER_NORM_BWD,
    &layer_norm::LAYER_NORM_FWD,
    &matmul::MATMUL,
    &matmul_swiglu::MATMUL_SWIGLU,
    &attention::eight_bit::QUANTIZE_ROWS,
    &rank_sum::RANK_SUM,
    &rms_norm::RMS_NORM_BWD,
    &rms_norm::RMS_NORM_FWD,
    &rope::ROPE_AT,
    &rope::ROPE_FROM,
    &cast::SCALE,
    &scaled_matmul::SCALED_MATMUL,
    &softmax::SOFTMAX_BWD,
    &softmax::SOFTMAX_ROWS,
    &softmax::SOFTMAX_WIDE_ROWS,
    &swiglu::SWIGLU_BWD,
    &swiglu::SWIGLU_FWD,
    &attention::eight_bit::TRANSPOSE_VALUES,
    &weighted_sum::WEIGHTED_SUM_BWD,
    &weighted_sum::WEIGHTED_SUM_FWD,
];
