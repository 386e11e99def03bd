//! Attention without the matrix of scores: FlashAttention-2 (Dao, 2023), forward and backward.
//!
//! O = softmax(scale · Q Kᵀ) V per batch entry and head, with the rows' log-sum-exp L, which the backward pass needs.
//! [`forward()`] and [`backward()`] run it; the kernels are in [`mod@forward`], [`mod@backward`] and [`backward_rows`], their tiles are chosen in
//! [`config`], [`parts`] has what few programs with long walks need, and [`mod@reference`] is the definition that they are tested against.
//!
//! Queries may be more heads than keys (each group of `heads / heads_kv` shares one), rows of q and k may differ in
//! number, strides are free, head dimensions go from 1 to 256. The causal mask lets row i see the keys
//! j ≤ i + (n_k − n_q): its diagonal ends in the bottom right corner, so that the last query sees every key.

pub mod backward;
pub mod backward_rows;
pub mod config;
pub mod forward;
mod launch;
pub mod parts;
mod passes;
pub mod reference;

pub use config::Tiles;
pub use launch::{
    Backward, Options, Saved, Tensor, TensorMut, backward, backward_into, backward_workspace, forward, forward_into,
    forward_workspace,
};
