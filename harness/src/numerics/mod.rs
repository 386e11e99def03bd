//! Experiments with floating-point precision: accumulation, mixed precision and layer normalization in 16 bits.
//!
//! All results are computed on demand with real values of the types. The explanatory texts describe the results for the
//! values of the assignment.
//!
//! - [`accumulate`]: adding 0.01 a thousand times;
//! - [`autocast`]: the dtypes of a toy model's tensors under mixed precision;
//! - [`norm`]: which parts of layer normalization need 32 bits;
//! - [`scaling`]: gradients too small for f16, and loss scaling.

pub mod accumulate;
pub mod autocast;
pub mod norm;
pub mod scaling;
