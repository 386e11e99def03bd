//! The kernel of both programs.

use tilewright::prelude::*;

/// y = 2 · x
#[kernel]
pub fn double(x: In<f32>, y: Out<f32>, n: i32, #[constexpr] tile: usize) {
    let i = program_id(0) * tile + arange(0, tile);
    store(y + i, load(x + i, mask = i < n) * 2.0, mask = i < n);
}
