//! Errors of `#[autotune]`.
use tilewright::prelude::*;

#[autotune(configs = [Config(tile = 64)], key = [n])]
fn no_kernel(x: In<f32>, n: i32, #[constexpr] tile: usize) {}

#[kernel]
#[autotune(configs = [Config(tile = 64)], key = [n])]
fn wrong_order(x: In<f32>, n: i32, #[constexpr] tile: usize) {}

#[autotune(key = [n])]
#[kernel]
fn no_configurations(x: In<f32>, n: i32, #[constexpr] tile: usize) {}

#[autotune(configs = [], keys = [n])]
#[kernel]
fn empty(x: In<f32>, n: i32, #[constexpr] tile: usize) {}

#[autotune(Config(tile = 64))]
#[kernel]
fn not_pairs(x: In<f32>, n: i32, #[constexpr] tile: usize) {}

#[autotune(
    configs = [
        Config(tile = 64, num_warps = 3, n = 5, depth = 2),
        Config(tile = n, num_warps = 4, num_stages = 0, num_warps = 8),
        Config(num_warps = 4),
        Config(tile = 32, wide = true),
        Config(32),
        tile(32),
        { 32 },
    ],
    key = [n],
)]
#[kernel]
fn configurations(x: In<f32>, n: i32, #[constexpr] tile: usize, #[constexpr] wide: bool) {}

#[autotune(configs = [Config(tile = 64), Config(tile = 64, num_warps = 2), Config(tile = 64)], key = n)]
#[kernel]
fn repeated(x: In<f32>, n: i32, #[constexpr] tile: usize) {}

#[autotune(configs = [Config(tile = 64)], key = [x, tile, scale, m, n, n, 3])]
#[kernel]
fn keys(x: In<f32>, n: i32, scale: f32, #[constexpr] tile: usize) {}

#[autotune(
    configs = [
        Config(tile = [], num_warps = 4),
        Config(tile = [32, 64], num_warps = [4, 5]),
        Config(tile = [32, 64], num_warps = [4, 8]),
        Config(tile = 64, num_warps = [2, 4]),
        Config(tile = [1, 2, 4, 8, 16, 32, 64], num_warps = [1, 2, 4, 8, 16, 32], num_stages = [1, 2, 3, 4, 5, 6, 7]),
    ],
    key = [n],
)]
#[kernel]
fn lists(x: In<f32>, n: i32, #[constexpr] tile: usize) {}

#[autotune(configs = [
    Config(tile = 16..64),
    Config(tile = 16..=100),
    Config(tile = 64, num_stages = 2..),
    Config(tile = 8..=16, num_warps = 0..=8),
], keep = always)]
#[kernel]
fn ranges(x: In<f32>, y: Out<f32>, #[constexpr] tile: usize) {
    store(y + arange(0, tile), load(x + arange(0, tile)));
}

#[autotune(configs = [Config(tile = 64)], key = [bytes = size_of::<T>() * 2, wide = T::dtype() == DType::F32])]
#[kernel]
fn types_in_keys<T: Float>(x: In<T>, n: i32, #[constexpr] tile: usize) {}

fn main() {}
