//! Vector addition: the smallest kernel, and a host program for it.
//!
//! `cargo run --example 01_vector_add` runs on the GPU if there is one, else on the CPU; `TILEWRIGHT_DEVICE=cpu` forces
//! the CPU.

use tilewright::bench::do_bench;
use tilewright::prelude::*;

// ANCHOR: kernel
/// out[i] = x[i] + y[i] for i < n.
///
/// The function describes one *program instance*; a launch starts a grid of them. Each instance processes a tile of
/// `tile` elements. The language has no threads: the compiler distributes the tile over them.
#[kernel]
pub fn vector_add(x: In<f32>, y: In<f32>, out: Out<f32>, n: i32, #[constexpr] tile: usize) {
    // The indices of this program's elements.
    let i = program_id(0) * tile + arange(0, tile);
    // All tiles have the same extent, so the last one may extend beyond n: the mask guards the accesses.
    let mask = i < n;
    // A pointer plus a tile of offsets is a tile of pointers.
    let sum = load(x + i, mask = mask) + load(y + i, mask = mask);
    store(out + i, sum, mask = mask);
}
// ANCHOR_END: kernel

/// Adds two vectors on `device`, checks the sum and times it.
pub fn run(device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    let n = 98_432;
    let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.1).sin()).collect();
    let y: Vec<f32> = (0..n).map(|i| (i as f32 * 0.3).cos()).collect();
    let want: Vec<f64> = x.iter().zip(&y).map(|(x, y)| f64::from(*x) + f64::from(*y)).collect();

    // ANCHOR: launch
    // Device memory. `poisoned` fills it with NaN, which reveals elements that the kernel does not write.
    let x = Buffer::from_slice(device, &x)?;
    let y = Buffer::from_slice(device, &y)?;
    let mut out = Buffer::<f32>::poisoned(device, n)?;

    // `#[kernel]` generates this struct from the parameters. rustc ensures that the output is not also an input.
    let tile = 1024;
    let mut kernel = VectorAdd { x: &x, y: &y, out: &mut out, n: n as i32, tile };
    // The first launch compiles for this device, this `tile` and these alignments; later launches reuse the code.
    kernel.launch(device, n.div_ceil(tile))?;
    // ANCHOR_END: launch
    let time = do_bench(device, 10.0, 50.0, || kernel.launch(device, n.div_ceil(tile)))?;

    // The error of one rounding to f32.
    let error = check("out", &out.to_vec()?, &want, 1e-6)?;
    let rate = time.gbps((3 * n * size_of::<f32>()) as f64);
    println!("vector_add        n = {n:<24} error {error:<7.1e} {:9.3} ms {rate:8.1} GB/s  {device}", time.median);
    Ok(())
}

/// Fails unless all elements are within `tolerance` of the expected ones; returns the largest error.
fn check(what: &str, got: &[f32], want: &[f64], tolerance: f64) -> Result<f64, String> {
    let mut worst = 0.0;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        // Also true for NaN.
        if !(error <= tolerance) {
            return Err(format!("{what}[{i}] is {got}, expected {want} to within {tolerance}"));
        }
        worst = error.max(worst);
    }
    Ok(worst)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&Device::best()?)
}
