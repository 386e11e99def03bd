//! Tilewright kernels as differentiable operations on candle tensors.
//!
//! Each op runs forward eagerly, on the memory and stream of candle, and is recorded with a backward pass by Tilewright
//! kernels instead of the one that candle would derive. Gradients of parameters go directly to the flat gradient of
//! [`crate::params`]. Every op returns or accumulates the gradients of all inputs that require one; where it has none,
//! its documentation says so.
//!
//! Files in reading order: `memory.rs` (tensors as kernel memory), `tape.rs` (recording in the autograd graph), one
//! file per op, `replay.rs` (CUDA graphs of any ops). Functions named `…_unfused` compute the same formulas in candle
//! ops: the baseline for benchmarks and tests.

pub mod attention;
mod convert;
#[cfg(feature = "cuda")]
mod cublas;
pub(crate) mod elementwise;
pub(crate) mod embedding;
pub(crate) mod gate;
pub(crate) mod linear;
pub(crate) mod loss;
pub mod memory;
pub(crate) mod norm;
#[cfg(feature = "cuda")]
mod parts;
pub(crate) mod product;
pub mod replay;
pub(crate) mod rope;
pub(crate) mod stream_norm;
pub mod tape;

pub use attention::{flash_attention, flash_attention_packed};
pub use convert::convert;
pub use elementwise::{cast, silu, silu_unfused, swiglu, swiglu_of, swiglu_unfused};
pub use embedding::embedding;
pub use linear::linear;
pub use loss::{cross_entropy, cross_entropy_rows, cross_entropy_unfused};
pub use norm::{layer_norm, rms_norm};
#[cfg(feature = "cuda")]
pub use parts::multiply_by_parts;
pub use product::{add_product, leave_multiprocessors, left_multiprocessors, product};
pub use rope::Rope;
