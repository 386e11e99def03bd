//! Attention in three forms: by our FlashAttention-2 kernels, materialised, and tiled in candle's own ops.
//!
//! - [`flash_attention`] and [`flash_attention_packed`] keep the log-sum-exp of each row and recompute the scores backward.
//! - [`naive_attention`] makes the whole matrix of scores, as candle differentiates it.
//! - [`tiled_attention`] is FlashAttention-2 in pure tensor ops, forward and backward: what the algorithm costs without a
//!   kernel.

mod flash;
mod naive;
mod tiled;

pub use flash::{Heads, flash_attention, flash_attention_packed};
pub(crate) use flash::{Kept, packed_backward, packed_forward};
pub use naive::naive_attention;
pub use tiled::{Tiling, tiled_attention};
