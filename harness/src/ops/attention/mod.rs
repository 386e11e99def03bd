//! Attention in three implementations: by the FlashAttention-2 kernels of Tilewright, materialized, and tiled in candle
//! ops.
//!
//! - [`flash_attention`] and [`flash_attention_packed`] save the log-sum-exp of each row and recompute the scores in
//!   the backward pass.
//! - [`naive_attention`] materializes the matrix of scores; candle differentiates it.
//! - [`tiled_attention`] is FlashAttention-2 in tensor ops, forward and backward: the cost of the algorithm without a
//!   fused kernel.

mod naive;
mod tiled;

pub use naive::naive_attention;
pub use tiled::{Tiling, tiled_attention};
pub use tilewright_candle::AttentionOptions;
pub use tilewright_candle::attention::{QkvLayout, flash_attention, flash_attention_packed};
