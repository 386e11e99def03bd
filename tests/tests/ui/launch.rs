//! The argument struct: rustc checks order, types and aliasing.
use tilewright::prelude::*;

#[kernel]
fn copy<T: Float>(x: In<T>, y: Out<T>, n: i32) {
    store(y + n, load(x + n));
}

#[kernel]
fn fill(y: Out<f32>, n: i32, #[constexpr = 64] tile: usize) {
    store(y + arange(0, tile), 1.0, mask = arange(0, tile) < n);
}

fn main() {
    let device = Device::cpu();
    let mut a = Buffer::<f32>::zeros(&device, 4).unwrap();
    let b = Buffer::<f16>::zeros(&device, 4).unwrap();
    // Two element types.
    Copy { x: &b, y: &mut a, n: 3 }.launch(&device, 1).unwrap();
    // A shared borrow to write.
    Copy { x: &b, y: &b, n: 3 }.launch(&device, 1).unwrap();
    // A missing argument.
    Copy { x: &a, y: &mut a }.launch(&device, 1).unwrap();
    // A missing argument that has no default.
    FillRequired { y: &mut a }.with_defaults().launch(&device, 1).unwrap();
    // A constant that has one.
    Fill { y: &mut a, n: 4 }.launch(&device, 1).unwrap();
}
