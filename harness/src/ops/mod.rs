//! Our kernels as differentiable operations on candle tensors.

pub mod memory;
