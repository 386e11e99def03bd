//! Variables that would change their type, and invalid defaults.
use tilewright::prelude::*;

#[kernel]
fn number_to_tile(x: In<f32>, out: Out<f32>, n: i32) {
    let mut total = 0.0;
    for i in range(0, n, 64) {
        total += load(x + i + arange(0, 64));
    }
    store(out, total);
}

#[kernel]
fn integer_to_float(x: In<f32>, out: Out<f32>, n: i32) {
    let mut best = 0;
    for i in range(0, n) {
        best = max(load(x + i + arange(0, 64)));
    }
    store(out, best.to::<f32>());
}

#[kernel]
fn mixed_list(x: In<f32>, out: Out<f32>, n: i32, #[constexpr] tile: usize) {
    let offsets = [program_id(0) * tile, tile];
    store(out, sum(load(make_block_ptr(x, shape = [n, n], strides = [n, 1], offsets = offsets, block_shape = [4, 4]))));
}

constexpr_enum! {
    pub enum Side { Left, Right }
}

#[kernel]
fn defaults(out: Out<f32>, #[constexpr = Middle] side: Side, #[constexpr = true] n: usize) {
    store(out, n);
}

fn main() {}
