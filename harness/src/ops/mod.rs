//! Tilewright kernels as differentiable operations on candle tensors.
//!
//! Each op runs forward eagerly, on the memory and stream of candle, and is recorded with a backward pass by Tilewright
//! kernels instead of the one that candle would derive. Gradients of parameters go directly to the flat gradient of
//! [`crate::params`]. Every op returns or accumulates the gradients of all inputs that require one; the documentation
//! of an op without a gradient says so.
//!
//! Files in reading order: `memory.rs` (tensors as kernel memory), `graph.rs` (recording in the autograd graph), one
//! file per op, `cuda_graph.rs` (CUDA graphs of any ops). Functions named `…_unfused` compute the same formulas in
//! candle ops: the baseline for benchmarks and tests.

pub mod attention;
mod convert;
#[cfg(feature = "cuda")]
mod cublas;
pub mod cuda_graph;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub mod graph;
pub(crate) mod linear;
pub(crate) mod loss;
pub(crate) mod matmul;
pub mod memory;
pub(crate) mod norm;
pub(crate) mod residual_rms_norm;
pub(crate) mod rope;
pub(crate) mod swiglu_recompute;
#[cfg(feature = "cuda")]
mod tf32x3;

pub use attention::{flash_attention, flash_attention_packed};
pub use convert::convert;
pub use elementwise::{cast, silu, silu_unfused, swiglu, swiglu_pair, swiglu_unfused};
pub use embedding::embedding;
pub use linear::linear;
pub use loss::{cross_entropy, cross_entropy_rows, cross_entropy_unfused};
pub use matmul::{matmul, matmul_accumulate, reserve_sms, reserved_sms};
pub use norm::{layer_norm, rms_norm};
pub use rope::Rope;
#[cfg(feature = "cuda")]
pub use tf32x3::set_tf32x3;
