//! Results and gradients of every op against its formula in f64, differentiated by candle, and against candle's own ops
//! in f32; for inputs of any strides, shared inputs and second uses.

mod attention;
mod check;
mod custom;
mod layers;
mod losses;
mod optimizer;
