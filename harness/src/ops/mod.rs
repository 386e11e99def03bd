//! Our kernels as differentiable operations on candle tensors.
//!
//! Each op runs forward at once, on candle's own memory and stream, and is recorded with a backward of ours: what our kernels
//! compute, not what candle would derive. Gradients of parameters go straight into the flat gradient of [`crate::params`].
//! Nothing here drops a gradient: where an op has none to give, it says so.
//!
//! Files in reading order: `memory.rs` (tensors as kernels' memory), `tape.rs` (recording), then an op each;
//! `replay.rs` repeats work of any ops. Functions named
//! `…_unfused` are the same formulas in candle's own ops: what fusion is measured against, and what tests compare with.

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
