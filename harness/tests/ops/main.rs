//! Compares every op with the same formula in f64, differentiated by candle: results, and gradients of inputs and
//! parameters.

mod attention;
mod check;
mod layers;
