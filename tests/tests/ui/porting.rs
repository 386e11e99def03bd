//! Mistakes of a kernel that is ported from Triton.

use tilewright::prelude::*;

/// A helper with the parameter types of a kernel.
#[device_fn]
fn reads(x: In<f32>, n: i32) -> Tile<f32> {
    load(x + arange(0, 64))
}

/// A helper of the user, called with a named argument.
#[device_fn]
fn scaled(x: Tile<f32>, factor: f32) -> Tile<f32> {
    x * factor
}

#[kernel]
fn calls_by_name(x: In<f32>, out: Out<f32>) {
    let i = arange(0, 64);
    store(out + i, scaled(load(x + i), factor = 2.0));
}

#[kernel]
fn misspells(x: In<f32>, out: Out<f32>) {
    store(out, sun(load(x + arange(0, 64)), axis = 0));
}

fn main() {}
