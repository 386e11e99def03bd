//! Rust's syntax for numbers, on values that are known only at run time.
use tilewright::prelude::*;

constexpr_enum! { enum Which { First, Second } }

#[kernel]
fn casts(x: In<f32>, out: Out<f32>, n: i32, #[constexpr] block: usize, #[constexpr] which: Which) {
    let known = block as f32 + (block * 2) as f32 + 3_000_000_000 as f32 + which as i32 as f32;
    let scalar = n as f32;
    let tile = load(x + arange(0, block) as i64);
    store(out, scalar);
}

#[kernel]
fn smaller(out: Out<i32>, n: i32, #[constexpr] block: usize) {
    let i = arange(0, block);
    store(out, min(n, 4));
    store(out + i, max(i, i));
}

#[kernel]
fn indices(x: In<f32>, out: Out<f32>, #[constexpr] block: usize) {
    let v = load(x + arange(0, block));
    store(out, v[0]);
}

fn main() {}
