//! Triton's syntax that Rust does not parse: rustc's error, and then what to write.
use tilewright::prelude::*;

#[kernel]
fn keyword(x: In<f32>, out: Out<f32>, n: i32, #[constexpr] block: usize) {
    let i = arange(0, block);
    store(out + i, where(i < n, load(x + i), 0.0));
}

#[kernel]
fn new_dimensions(x: In<f32>, out: Out<f32>, n: i32, #[constexpr] block: usize) {
    let i = arange(0, block);
    let p = i[:, None] * n + i[None, :];
    let part = i[0:4];
    store(out + p, load(x + p, mask = (i < n)[:, None]));
}

#[kernel]
fn conditional(out: Out<f32>, n: i32) {
    store(out, 1.0 if n > 3 else 0.0);
}

#[kernel]
fn parameters(x, out: Out<f32>, block: tl.constexpr) {
    store(out, load(x));
}

#[autotune(configs = [Config(block = 64)], key = [n])]
#[kernel]
fn tuned_kernel(out: Out<f32>, n: i32, #[constexpr] block: usize) {
    store(out, 1.0 if n is None else 0.0);
}

#[device_fn]
fn column(x: Tile<f32>) -> Tile<f32> {
    x[:, None]
}

fn host(device: &Device, x: &Buffer<f32>, out: &mut Buffer<f32>) -> Result<()> {
    Keyword { x, out, n: 3, block: 64 }.launch(device, 1)?;
    TunedKernel { out, n: 3, block: tuned() }.launch_tuned(device, |_| 1)
}

fn main() {}
