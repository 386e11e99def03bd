//! Configurations that are shared with another kernel.
use tilewright::prelude::*;

#[autotune(configs = [Config(tile = 64, wide = true)], key = [n])]
#[kernel]
fn first(x: In<f32>, n: i32, #[constexpr] tile: usize, #[constexpr] wide: bool) {}

#[autotune(configs = FIRST_AUTOTUNE, key = [n])]
#[kernel]
fn without_a_constant(x: In<f32>, n: i32, #[constexpr] tile: usize) {}

#[autotune(configs = FIRST_AUTOTUNE, key = [wide])]
#[kernel]
fn with_one_in_the_key(x: In<f32>, #[constexpr] tile: usize, #[constexpr] wide: bool) {}

fn main() {}
