//! FlashAttention-2: forward and backward.

pub mod backward;
pub mod config;
pub mod forward;
pub mod reference;
