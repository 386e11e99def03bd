//! A kernel with configurations.

use tilewright::prelude::*;

/// y = a · x
#[autotune(configs = [Config(tile = 64), Config(tile = 512), Config(tile = 4096)], key = [n])]
#[kernel]
pub fn scale<T: Float>(x: In<T>, y: Out<T>, a: f32, n: i32, #[constexpr] tile: usize) {
    let i = program_id(0) * tile + arange(0, tile);
    store(y + i, (load(x + i, mask = i < n).to::<f32>() * a).to::<T>(), mask = i < n);
}
