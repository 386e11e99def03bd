//! Fused softmax of rows: one kernel reads each row once and writes it once.
//!
//! With one kernel per operation (maximum, difference, exponential, sum, quotient), the matrix would pass between
//! device memory and the SMs five times. Here a row stays in registers, so the kernel is as fast as a copy.

use tilewright::bench::do_bench;
use tilewright::prelude::*;

// ANCHOR: kernel
/// y[r, :] = softmax(x[r, :]), for rows that fit into one tile: `tile` ≥ cols.
///
/// `T` is any float type. The grid is persistent: there are fewer programs than rows, and each processes every
/// `num_programs`-th row.
#[kernel]
pub fn softmax_rows<T: Float>(
    x: In<T>,
    y: Out<T>,
    // i64, so that `row * x_stride` does not overflow: i32 · i64 is i64.
    x_stride: i64,
    y_stride: i64,
    rows: i32,
    cols: i32,
    #[constexpr] tile: usize,
) {
    // A launch with wider rows is refused.
    assume(cols <= tile);
    let col = arange(0, tile);
    let mask = col < cols;
    for row in range(program_id(0), rows, num_programs(0)) {
        // −∞ beyond the end of the row: it does not change the maximum, and its exponential is 0.
        let v = load(x + row * x_stride + col, mask = mask, other = f32::NEG_INFINITY).to::<f32>();
        // Without subtraction of the maximum, exp would overflow from 89 on.
        let e = exp(v - max(v));
        store(y + row * y_stride + col, (e / sum(e)).to::<T>(), mask = mask);
    }
}
// ANCHOR_END: kernel

/// Computes the softmax of a matrix in f32 and in bf16.
pub fn run(device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    run_as::<f32>(device, |x| x, f64::from, 1e-6)?;
    // bf16 has 8 significant bits: the relative rounding error is up to 2⁻⁹, and these values are below 0.1.
    run_as::<bf16>(device, bf16::from_f32, bf16::to_f64, 2e-4)
}

fn run_as<T: Float + Element>(
    device: &Device,
    narrow: fn(f32) -> T,
    widen: fn(T) -> f64,
    tolerance: f64,
) -> Result<(), Box<dyn std::error::Error>> {
    let (rows, cols) = (1823, 781);
    let x: Vec<T> = (0..rows * cols).map(|i| narrow((i as f32 * 0.7).sin() * 5.0)).collect();
    let want: Vec<f64> = x.chunks(cols).flat_map(|row| reference(row, widen)).collect();

    let x = Buffer::from_slice(device, &x)?;
    let mut y = Buffer::<T>::poisoned(device, rows * cols)?;
    let mut kernel = SoftmaxRows {
        x: &x,
        y: &mut y,
        x_stride: cols as i64,
        y_stride: cols as i64,
        rows: rows as i32,
        cols: cols as i32,
        tile: cols.next_power_of_two(),
    };
    // A few programs per SM (or CPU thread): enough to hide the latency of memory, few enough to start quickly.
    let programs = rows.min(8 * device.info().compute_units as usize);
    kernel.launch(device, programs)?;
    let time = do_bench(device, 10.0, 50.0, || kernel.launch(device, programs))?;

    let got: Vec<f64> = y.to_vec()?.into_iter().map(widen).collect();
    let error = check("y", &got, &want, tolerance)?;
    let (shape, rate) =
        (format!("{rows} × {cols} {}", T::dtype()), time.gbps((2 * rows * cols * size_of::<T>()) as f64));
    println!("fused_softmax     {shape:<28} error {error:<7.1e} {:9.3} ms {rate:8.1} GB/s  {device}", time.median);
    Ok(())
}

/// The reference for one row, in f64.
fn reference<T: Copy>(row: &[T], widen: fn(T) -> f64) -> Vec<f64> {
    let highest = row.iter().map(|x| widen(*x)).fold(f64::NEG_INFINITY, f64::max);
    let e: Vec<f64> = row.iter().map(|x| (widen(*x) - highest).exp()).collect();
    let total: f64 = e.iter().sum();
    e.iter().map(|e| e / total).collect()
}

/// Fails unless all elements are within `tolerance` of the expected ones; returns the largest error.
fn check(what: &str, got: &[f64], want: &[f64], tolerance: f64) -> Result<f64, String> {
    let mut worst = 0.0;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got - want).abs();
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
