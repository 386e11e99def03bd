//! Memory that a kernel reads, writes, and reads again.

use tilewright::prelude::*;
use tilewright_tests::on_device::devices;

/// Masked accesses through pointers and through a block; at the end, each element is read that a neighboring thread wrote.
#[kernel]
fn grows_in_place(x: InOut<f32>, y: InOut<f32>, n: i32, steps: i32, #[constexpr] tile: usize) {
    let i = arange(0, tile);
    let block = make_block_ptr(y, shape = [n], strides = [1], offsets = [0], block_shape = [tile], order = [0]);
    for _ in range(0, steps) {
        let t = load(x + i, mask = i < n, other = 0.0);
        store(x + i, t + t, mask = i < n);
        let t = load(block, boundary_check = [0]);
        store(block, t * 3.0, boundary_check = [0]);
    }
    let next = load(x + 1 + i, mask = i < n - 1, other = 0.0);
    store(x + i, next, mask = i < n - 1);
}

#[test]
fn stores_are_seen_by_later_masked_loads() {
    for (tile, n, steps) in [(64usize, 50usize, 3), (128, 128, 1), (256, 7, 5), (96, 90, 2)] {
        let x: Vec<f32> = (0..n).map(|i| i as f32 - 3.0).collect();
        let grown: Vec<f32> = x.iter().map(|x| x * 2f32.powi(steps)).collect();
        let moved: Vec<f32> = (0..n).map(|i| grown[(i + 1).min(n - 1)]).collect();
        let tripled: Vec<f32> = x.iter().map(|x| x * 3f32.powi(steps)).collect();
        for device in devices() {
            let [mut a, mut b] = [(); 2].map(|()| Buffer::from_slice(&device, &x).unwrap());
            GrowsInPlace { x: &mut a, y: &mut b, n: n as i32, steps, tile }.launch(&device, 1).unwrap();
            assert_eq!(a.to_vec().unwrap(), moved, "{device}, {n} of {tile}");
            assert_eq!(b.to_vec().unwrap(), tripled, "{device}, {n} of {tile}");
        }
    }
}
