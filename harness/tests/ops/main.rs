//! Every op against the same formula in f64, differentiated by candle: results, gradients of inputs and of parameters.

mod attention;
mod check;
mod layers;
