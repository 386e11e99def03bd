//! Type errors, which rustc finds: its messages name the language's types and the fix.
use tilewright::prelude::*;

#[kernel]
fn mixed_elements(x: In<f32>, h: In<f16>, out: Out<f32>) {
    let i = arange(0, 64);
    let a = load(x + i);
    let b = load(h + i);
    store(out + i, a * b);
}

#[kernel]
fn mixed_generic<T: Float>(x: In<T>, out: Out<T>) {
    let mut acc = zeros::<f32>([64]);
    acc += load(x + arange(0, 64));
    store(out + arange(0, 64), acc.to::<T>());
}

#[kernel]
fn wrong_store(h: In<f16>, out: Out<f32>) {
    store(out, load(h));
}

#[kernel]
fn float_offset(x: In<f32>, out: Out<f32>, s: f32) {
    store(out, load(x + s));
}

#[kernel]
fn run_time_shape(out: Out<f32>, n: i32) {
    store(out, sum(zeros::<f32>([n])));
}

#[kernel]
fn exp_of_ints(out: Out<f32>, n: i32) {
    store(out, exp(n).to::<f32>());
}

#[kernel]
fn float_literal_on_ints(out: Out<i32>, n: i32) {
    store(out, n * 2.5);
}

#[kernel]
fn mask_is_a_number(x: In<f32>, out: Out<f32>, n: i32) {
    store(out, load(x, mask = n));
}

#[kernel]
fn condition_is_a_number(out: Out<f32>, n: i32) {
    if n {
        store(out, 1.0);
    }
}

#[kernel]
fn static_while(out: Out<f32>, #[constexpr] n: usize) {
    while n < 4 {
        store(out, 1.0);
    }
}

fn main() {}
