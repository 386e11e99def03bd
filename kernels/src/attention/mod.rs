//! FlashAttention-2 (Dao, 2023), forward and backward: attention without a materialized score matrix.
//!
//! O = softmax(scale · Q Kᵀ) V for each batch entry and head, with the row-wise log-sum-exp L, which the backward pass
//! reads. [`forward()`] and [`backward()`] launch the kernels of [`mod@forward`], [`mod@backward`] and
//! [`backward_rows`]. [`config`] chooses tile sizes. [`split_kv`] splits the loop over keys or queries (split-KV,
//! FlashDecoding) where the grid is sub-wave. [`sinks`] has the gradients of attention sinks, [`relative`]
//! those of relative biases. [`mod@reference`] is the definition in f64, against which the kernels are
//! tested.
//!
//! Grouped-query attention: the number of query heads is a multiple of the number of key/value heads (groups of
//! `heads / heads_kv`). q and k may have different numbers of rows and any strides; head dimensions are 1 to 256, and that of v
//! and O may be another than that of q and k. The
//! causal mask is aligned to the bottom right corner: row i sees the keys j ≤ i + (n_k − n_q), so that the last query
//! sees every key.

pub mod backward;
pub mod backward_rows;
pub mod config;
pub mod documents;
pub mod eight_bit;
pub mod forward;
mod launch;
mod loops;
pub mod modifiers;
mod ordered;
mod passes;
pub mod reference;
pub mod relative;
pub mod sinks;
pub mod split_kv;

pub use config::Tiles;
pub use eight_bit::{Quantized, quantize, quantize_into};
pub use launch::{
    Backward, Cache, Descale, Gradients, Options, Saved, Tensor, TensorMut, backward, backward_into,
    backward_workspace, forward, forward_into, forward_workspace, relative_bias_len,
};
pub use modifiers::{Mask, Score};
pub use relative::{relative_bias_gradient, relative_bias_gradient_into, relative_bias_workspace};
pub use sinks::{sink_gradients, sink_gradients_into};
