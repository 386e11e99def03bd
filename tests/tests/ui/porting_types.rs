//! Mistakes of types in a kernel that is ported from Triton.

use tilewright::prelude::*;

#[device_fn]
fn larger(a: Tile<i32>, b: Tile<i32>) -> Tile<i32> {
    maximum(a, b)
}

#[kernel]
fn reduces_by_a_helper_of_another_type(x: In<f32>, out: Out<f32>) {
    store(out, reduce(load(x + arange(0, 64)), combine = larger));
}

#[device_fn]
fn of_one(a: Scalar<f32>) -> Scalar<f32> {
    a
}

#[kernel]
fn reduces_by_a_helper_of_one_element(x: In<f32>, out: Out<f32>) {
    store(out, reduce(load(x + arange(0, 64)), combine = of_one));
}

#[device_fn]
fn mean(total: Scalar<f32>) -> Scalar<f32> {
    total / 64.0
}

#[kernel]
fn a_row_sum_is_a_tile(x: In<f32>, out: Out<f32>) {
    store(out, mean(sum(load(x + arange(0, 64)), axis = 0)));
}

#[kernel]
fn one_arm_is_a_literal(x: In<i32>, out: Out<i32>, #[constexpr] scaled: bool) {
    let v = load(x + arange(0, 64));
    let w = if scaled { v * 2 } else { 1.5 };
    store(out + arange(0, 64), w);
}

#[kernel]
fn an_arm_of_a_match_is_a_literal(x: In<i32>, out: Out<i32>, #[constexpr] mode: usize) {
    let v = load(x + arange(0, 64));
    let w = match mode {
        0 => v * 2,
        _ => 1.5,
    };
    store(out + arange(0, 64), w);
}

const EPS: f32 = 1e-6;

#[kernel]
fn arms_differ(x: In<f32>, out: Out<f32>, n: i32) {
    let v = load(x + arange(0, 64));
    let w = if n > 3 { sum(v, axis = 0) } else { EPS };
    store(out, w);
}

#[kernel]
fn larger_of_two_types(x: In<f32>, out: Out<f32>) {
    let v = load(x + arange(0, 64));
    let w = maximum(v, arange(0, 64));
    let u = where_(v, v, v);
    store(out + arange(0, 64), w + u);
}

fn main() {}
