//! One buffer cannot be read and written by one launch.
use tilewright::prelude::*;

#[kernel]
fn copy<T: Float>(x: In<T>, y: Out<T>, n: i32) {
    store(y + n, load(x + n));
}

fn main() {
    let device = Device::cpu();
    let mut a = Buffer::<f32>::zeros(&device, 4).unwrap();
    Copy { x: &a, y: &mut a, n: 3 }.launch(&device, 1).unwrap();
}
