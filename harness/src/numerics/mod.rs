//! Experiments with precision: what accumulation, mixed precision and layer normalisation do in 16 bits.
//!
//! Everything is computed when it is asked for, with real values of the types; the sentences are about what the numbers
//! of the assignment show.
//!
//! - [`accumulate`]: a thousand times 0.01;
//! - [`autocast`]: which types a toy model's tensors have under mixed precision;
//! - [`norm`]: what of layer normalisation needs 32 bits;
//! - [`scaling`]: gradients too small for f16, and the scale that saves them.

pub mod accumulate;
pub mod autocast;
pub mod norm;
pub mod scaling;
