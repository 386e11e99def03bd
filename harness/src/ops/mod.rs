//! The ops of [`tilewright_candle`], and those that only the models of this crate use.
//!
//! Ops take a [`Param`](crate::params::Param) as a weight: its gradient goes directly to the flat gradient of
//! [`crate::params`]. Functions named `…_unfused` compute the same formulas in candle ops: the baseline for benchmarks
//! and tests.

pub mod attention;
pub(crate) mod residual_rms_norm;
pub(crate) mod swiglu_recompute;

pub use attention::{flash_attention, flash_attention_packed};
pub use tilewright_candle::convert::convert;
#[cfg(feature = "cuda")]
pub use tilewright_candle::set_tf32x3;
pub use tilewright_candle::{
    Rope, cast, cross_entropy, cross_entropy_rows, cross_entropy_unfused, embedding, layer_norm, linear, matmul,
    matmul_accumulate, reserve_sms, reserved_sms, rms_norm, silu, silu_unfused, swiglu, swiglu_pair, swiglu_unfused,
};
pub use tilewright_candle::{cuda_graph, graph, memory};
