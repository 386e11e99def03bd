//! Fused differentiable ops for candle, forward and backward by Tilewright kernels: on the CPU, and with the feature
//! `cuda` on candle's CUDA stream and memory.
//!
//! | | |
//! |---|---|
//! | ops | [`flash_attention`], [`rms_norm`], [`layer_norm`], [`rope()`], [`swiglu`], [`swiglu_pair`], [`linear_swiglu`], [`silu`], [`gelu`], [`gelu_erf`], [`softmax`], [`cross_entropy`], [`linear_cross_entropy`], [`embedding()`], [`linear()`], [`matmul()`], these with an [`Epilogue`], [`cast`] |
//! | modules and optimizer | [`nn`], [`FusedAdamW`] |
//! | kernels of your own | [`custom_op`], [`memory`], [`graph`] |
//! | parameters, and where their gradients go | [`weight`] |
//! | evaluation | [`no_grad`] |
//! | CUDA graphs | [`cuda_graph`] |
//! | data-parallel training, with the feature `dist` | `dist` |
//!
//! The modules [`attention`], [`elementwise`], [`mod@embedding`], [`loss`], [`mod@matmul`] and [`norm`] also have the
//! forward and backward passes of their ops outside of the autograd graph, for an op that consists of several. Functions
//! named `…_unfused` compute the same in candle's ops, for comparison.
//!
//! Tensors have any strides and the dtypes f32, bf16 and f16, in a cache of keys also f8e4m3; the arithmetic is f32.

#![cfg_attr(not(test), warn(clippy::print_stderr, clippy::print_stdout))]
#![allow(rustdoc::broken_intra_doc_links, reason = "shapes are full of brackets: x [rows, d]")]

pub mod activation;
pub mod attention;
mod attention_options;
mod check;
pub mod convert;
#[cfg(feature = "cuda")]
mod cublas;
pub mod cuda_graph;
pub mod custom;
#[cfg(feature = "dist")]
pub mod dist;
pub mod elementwise;
pub mod embedding;
#[cfg(feature = "cuda")]
mod gpu_matmul;
pub mod graph;
pub mod linear;
mod linear_cross_entropy;
pub mod loss;
pub mod matmul;
pub mod memory;
pub mod nn;
pub mod norm;
mod optim;
pub mod rope;
mod softmax;
pub mod weight;

// For `for_float_type`, in crates that do not depend on them.
#[doc(hidden)]
pub use {candle_core, half};

pub use activation::{Epilogue, gelu, gelu_erf, silu};
pub use attention::{flash_attention, flash_attention_packed};
pub use attention_options::{AttentionOptions, KeyCache, PackedSequences};
pub use custom::custom_op;
pub use elementwise::{cast, silu_unfused, swiglu, swiglu_pair, swiglu_unfused};
pub use embedding::embedding;
#[cfg(feature = "cuda")]
pub use gpu_matmul::set_tf32x3;
pub use graph::{grad_enabled, no_grad};
pub use linear::{linear, linear_swiglu, linear_with, matmul, matmul_with};
pub use linear_cross_entropy::linear_cross_entropy;
pub use loss::{cross_entropy, cross_entropy_rows, cross_entropy_unfused};
pub use matmul::{matmul_accumulate, reserve_sms, reserved_sms};
pub use norm::{layer_norm, rms_norm};
pub use optim::FusedAdamW;
pub use rope::{Rope, rope};
pub use softmax::softmax;
pub use weight::{GradSink, Weight};

/// Compiles and runs the example of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
