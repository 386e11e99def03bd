//! Results of device functions that must be used, as with Triton's `must_use_result`.

#![deny(unused_must_use)]

use tilewright::prelude::*;

#[must_use]
#[device_fn]
fn squared(x: Tile<f32>) -> Tile<f32> {
    x * x
}

#[aggregate]
struct Square {
    x: Tile<f32>,
}

impl Square {
    #[must_use]
    #[device_fn]
    fn area(self) -> Tile<f32> {
        self.x * self.x
    }
}

#[kernel]
fn forgets(x: In<f32>, y: Out<f32>) {
    let v = load(x + arange(0, 8));
    squared(v);
    let square = Square { x: v };
    square.area();
    store(y + arange(0, 8), squared(v) + square.area());
}

fn main() {}
