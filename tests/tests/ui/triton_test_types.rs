//! Mistakes of types of which Triton has tests.

use tilewright::prelude::*;

#[kernel]
fn float_seed(y: Out<f32>, seed: f32) {
    store(y + arange(0, 16), rand(seed, arange(0, 16)));
}

fn main() {}
