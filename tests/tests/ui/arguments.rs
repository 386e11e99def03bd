//! Named arguments that are unknown, missing, or have invalid values.
use tilewright::prelude::*;

#[kernel]
fn arguments(x: In<f32>, out: Out<f32>, n: i32) {
    let block = make_block_ptr(x, shape = [n], strides = [1], block_shape = [64]);
    let a = load(x, masks = n > 3);
    let b = load(block, padding = "zero");
    let c = dot(a, a, allow_tf32 = true);
    let d = max(a, axis = 1, return_indices = true);
    let e = zeros([64], dtype = f32);
    let f = sum(a, axis = 0, axis = 1);
    let g = where_(n > 3, a, a, a);
}

#[kernel]
fn waits_for_another_program(flag: In<i32>, y: Out<i32>) {
    let mut n = 0;
    while load(flag, volatile = true) == 0 {
        n += 1;
    }
    store(y, n);
}

fn main() {}
