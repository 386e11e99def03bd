//! Dropout without a mask in memory: the random numbers are a pure function of a seed and the index of the element.
//!
//! A stored mask would take a byte or more per element until the backward pass. Philox (Salmon et al., 2011) is
//! counter-based: it maps (seed, offset) to random bits without state, so the backward pass regenerates the mask from
//! the seed. The bits are the same on every device.

use tilewright::bench::do_bench;
use tilewright::prelude::*;

/// y[i] = x[i] / (1 − p) with probability 1 − p, else 0.
///
/// The gradient is the same function of the gradient of y with the same seed: dropout is linear in x.
#[kernel]
pub fn dropout(
    x: In<f32>,
    y: Out<f32>,
    n: i32,
    p: f32,
    // Without `no_specialize`, integers that are 1 or multiples of 16 compile separate variants; a seed changes at
    // every launch.
    #[no_specialize] seed: u64,
    #[constexpr] tile: usize,
) {
    let i = program_id(0) * tile + arange(0, tile);
    let mask = i < n;
    let v = load(x + i, mask = mask);
    let keep = rand(seed, i) >= p;
    store(y + i, where_(keep, v / (1.0 - p), 0.0), mask = mask);
}

/// Applies dropout, checks the mask against Philox in plain Rust, and regenerates it for a gradient.
pub fn run(device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    let (n, p, seed, tile) = (100_000, 0.25f32, 0x1234_5678_9abc_def0, 1024);
    let x: Vec<f32> = (0..n).map(|i| 1.0 + (i as f32 * 0.1).sin().abs()).collect();
    let mask: Vec<bool> = (0..n).map(|i| uniform(seed, i as u32) >= p).collect();
    let want = |x: &[f32]| -> Vec<f32> {
        x.iter().zip(&mask).map(|(x, keep)| if *keep { x / (1.0 - p) } else { 0.0 }).collect()
    };
    let drop = |x: &[f32], seed: u64| -> Result<Vec<f32>> {
        let x = Buffer::from_slice(device, x)?;
        let mut y = Buffer::<f32>::poisoned(device, n)?;
        Dropout { x: &x, y: &mut y, n: n as i32, p, seed, tile }.launch(device, n.div_ceil(tile))?;
        y.to_vec()
    };

    let y = drop(&x, seed)?;
    let error = check("y", &y, &want(&x))?;
    // The fraction that is kept is 1 − p, up to five standard deviations of a binomial distribution.
    let kept = y.iter().filter(|y| **y != 0.0).count() as f64 / n as f64;
    let deviation = (f64::from(p) * f64::from(1.0 - p) / n as f64).sqrt();
    if (kept - f64::from(1.0 - p)).abs() > 5.0 * deviation {
        return Err(format!("{kept} of the elements were kept, expected {} ± {deviation}", 1.0 - p).into());
    }
    // The backward pass has the seed, and no mask.
    let grad: Vec<f32> = (0..n).map(|i| 2.0 + (i as f32 * 0.3).cos()).collect();
    check("grad_x", &drop(&grad, seed)?, &want(&grad))?;
    if drop(&x, seed + 1)? == y {
        return Err("another seed dropped the same elements".into());
    }

    let x = Buffer::from_slice(device, &x)?;
    let mut y = Buffer::<f32>::poisoned(device, n)?;
    let mut kernel = Dropout { x: &x, y: &mut y, n: n as i32, p, seed, tile };
    let time = do_bench(device, 10.0, 50.0, || kernel.launch(device, n.div_ceil(tile)))?;
    let shape = format!("n = {n}, kept {:.2} %", 100.0 * kept);
    let rate = time.gbps((2 * n * size_of::<f32>()) as f64);
    println!("dropout           {shape:<28} error {error:<7.1e} {:9.3} ms {rate:8.1} GB/s  {device}", time.median);
    Ok(())
}

/// `rand(seed, offset)` in plain Rust: Philox 4×32-10. As in Triton, its first word, or the complement if the sign bit
/// is set, is scaled to a number in [0, 1).
fn uniform(seed: u64, offset: u32) -> f32 {
    // The counter is the offset. The key is the seed, low half first.
    let mut counter = [offset, 0, 0, 0];
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        let high = |x: u64| (x >> 32) as u32;
        counter = [high(b) ^ counter[1] ^ key[0], b as u32, high(a) ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    let word = counter[0] as i32;
    (if word < 0 { !word } else { word }) as f32 * 4.656_612_7e-10
}

/// Fails unless all elements are the expected ones up to rounding; returns the largest relative error.
fn check(what: &str, got: &[f32], want: &[f32]) -> Result<f32, String> {
    let mut worst = 0.0;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got - want).abs() / want.abs().max(1.0);
        // Also true for NaN.
        if !(error <= 1e-6) {
            return Err(format!("{what}[{i}] is {got}, expected {want}"));
        }
        worst = error.max(worst);
    }
    Ok(worst)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&Device::best()?)
}
