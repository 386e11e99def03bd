//! A histogram with atomic additions, and one with fewer of them (privatization).
//!
//! Programs run concurrently and in any order. Where several of them update one address, each addition must be atomic.

use tilewright::bench::do_bench;
use tilewright::prelude::*;

/// counts[x[i]] += 1: one atomic addition per element. Values outside of 0..bins are not counted.
///
/// Additions to one address serialize, so this kernel is slow if a few values are frequent.
#[kernel]
pub fn histogram_direct(x: In<u8>, counts: InOut<i32>, n: i32, bins: i32, #[constexpr] tile: usize) {
    let i = program_id(0) * tile + arange(0, tile);
    let mask = i < n;
    let bin = load(x + i, mask = mask).to::<i32>();
    // Several elements of one tile may have the same bin: each of them is counted. Where an offset is loaded from
    // memory, the mask has to bound it: then a launch can prove that the access is in bounds.
    atomic_add(counts + bin, 1, mask = mask && bin < bins);
}

/// As `histogram_direct`, with one atomic addition per bin and program: a program first counts its own elements in
/// registers.
///
/// Comparing elements with bins gives a tile of booleans [tile, bins], whose columns are summed.
#[kernel]
pub fn histogram_private(x: In<u8>, counts: InOut<i32>, n: i32, #[constexpr] tile: usize, #[constexpr] bins: usize) {
    let bin = arange(0, bins);
    let mut mine = zeros::<i32>([bins]);
    for first in range(program_id(0) * tile, n, num_programs(0) * tile) {
        let i = first + arange(0, tile);
        // −1 is not a bin.
        let value = where_(i < n, load(x + i, mask = i < n).to::<i32>(), -1);
        let hit = value.expand_dims(1) == bin.expand_dims(0);
        mine += sum(hit.to::<i32>(), axis = 0);
    }
    atomic_add(counts + bin, mine);
}

/// Counts bytes with both kernels.
pub fn run(device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    let (n, bins) = (100_000usize, 64usize);
    // Low bins are much more frequent than high ones.
    let x: Vec<u8> = (0..n).map(|i| ((i as f32 * 0.7).sin().powi(4) * bins as f32) as u8 % bins as u8).collect();
    let mut want = vec![0i32; bins];
    x.iter().for_each(|x| want[usize::from(*x)] += 1);

    let x = Buffer::from_slice(device, &x)?;
    // InOut: the kernel adds to the content, so it starts at 0.
    let mut counts = Buffer::<i32>::zeros(device, bins)?;
    let (len, tile) = (n as i32, 1024);
    let mut kernel = HistogramDirect { x: &x, counts: &mut counts, n: len, bins: bins as i32, tile };
    kernel.launch(device, n.div_ceil(tile))?;
    check("the direct histogram", &counts.to_vec()?, &want)?;
    // Timing launches the kernel many times, and each launch adds: so it follows the check.
    let mut kernel = HistogramDirect { x: &x, counts: &mut counts, n: len, bins: bins as i32, tile };
    let time = do_bench(device, 10.0, 50.0, || kernel.launch(device, n.div_ceil(tile)))?;
    let shape = format!("{n} into {bins} bins");
    println!("histogram_direct  {shape:<28} exact         {:9.3} ms {:17} {device}", time.median, "");

    counts.fill_zero()?;
    let programs = n.div_ceil(tile).min(4 * device.info().compute_units as usize);
    let mut kernel = HistogramPrivate { x: &x, counts: &mut counts, n: len, tile: 128, bins };
    kernel.launch(device, programs)?;
    check("the private histogram", &counts.to_vec()?, &want)?;
    let mut kernel = HistogramPrivate { x: &x, counts: &mut counts, n: len, tile: 128, bins };
    let time = do_bench(device, 10.0, 50.0, || kernel.launch(device, programs))?;
    println!("histogram_private {shape:<28} exact         {:9.3} ms {:17} {device}", time.median, "");
    Ok(())
}

/// Fails unless all counts are correct.
fn check(what: &str, got: &[i32], want: &[i32]) -> Result<(), String> {
    match got.iter().zip(want).position(|(got, want)| got != want) {
        Some(bin) => Err(format!("{what}: bin {bin} has {}, expected {}", got[bin], want[bin])),
        None => Ok(()),
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&Device::best()?)
}
