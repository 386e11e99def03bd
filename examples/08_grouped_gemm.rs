//! Grouped GEMM: several matrix multiplications of different sizes in one launch.
//!
//! A launch per multiplication leaves most of a GPU idle if the matrices are small. Here a fixed number of programs
//! loop over the tiles of all problems. Sizes and offsets of the matrices are data in device memory.

use tilewright::bench::do_bench;
use tilewright::prelude::*;

/// For each problem g: c = a·b with row-major a [m, k], b [k, n], c [m, n].
///
/// The matrices of all problems are contiguous in `a`, `b` and `c`. Problem g has `sizes[3g..]` = m, n, k and
/// `starts[3g..]` = the offsets of the first elements of its a, b and c. (Triton's example passes an array of addresses
/// instead.) Since offsets are loaded from memory, a launch cannot check bounds beforehand.
#[kernel]
pub fn grouped_gemm(
    a: In<f16>,
    b: In<f16>,
    c: Out<f16>,
    sizes: In<i32>,
    starts: In<i64>,
    problems: i32,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] k_tile: usize,
) {
    // Index of the tile that this program computes next, over all problems, and of the first tile of problem g.
    let mut tile = program_id(0);
    let mut first = 0;
    for g in range(0, problems) {
        // A pointer to one element loads a scalar.
        let (m, n, k) = (load(sizes + 3 * g), load(sizes + 3 * g + 1), load(sizes + 3 * g + 2));
        let n_tiles = cdiv(n, n_tile);
        let end = first + cdiv(m, m_tile) * n_tiles;
        let (a_matrix, b_matrix) = (a + load(starts + 3 * g), b + load(starts + 3 * g + 1));
        let a_tensor =
            make_tensor_descriptor(a_matrix, shape = [m, k], strides = [k, 1], block_shape = [m_tile, k_tile]);
        let b_tensor =
            make_tensor_descriptor(b_matrix, shape = [k, n], strides = [n, 1], block_shape = [k_tile, n_tile]);
        let c_matrix = c + load(starts + 3 * g + 2);
        let c_tensor =
            make_tensor_descriptor(c_matrix, shape = [m, n], strides = [n, 1], block_shape = [m_tile, n_tile]);
        while tile < end {
            let (i, j) = ((tile - first) / n_tiles * m_tile, (tile - first) % n_tiles * n_tile);
            let mut acc = zeros::<f32>([m_tile, n_tile]);
            for l in range(0, k, k_tile) {
                acc = dot(a_tensor.load([i, l]), b_tensor.load([l, j]), acc);
            }
            c_tensor.store([i, j], acc.to::<f16>());
            tile += num_programs(0);
        }
        first = end;
    }
}

/// Solves four problems of very different sizes in one launch.
pub fn run(device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    let problems = [(128, 64, 96), (17, 200, 40), (1, 33, 128), (90, 90, 90)];
    let wave = |len: usize, f: f32| -> Vec<f16> { (0..len).map(|i| f16::from_f32((i as f32 * f).sin())).collect() };
    let total = |len: fn(&(usize, usize, usize)) -> usize| problems.iter().map(len).sum::<usize>();
    let a = wave(total(|(m, _, k)| m * k), 0.7);
    let b = wave(total(|(_, n, k)| k * n), 0.3);

    let (mut sizes, mut starts, mut want) = (Vec::new(), Vec::new(), Vec::new());
    let (mut at_a, mut at_b) = (0, 0);
    for (m, n, k) in problems {
        sizes.extend([m as i32, n as i32, k as i32]);
        starts.extend([at_a as i64, at_b as i64, want.len() as i64]);
        for i in 0..m {
            for j in 0..n {
                want.push((0..k).map(|l| a[at_a + i * k + l].to_f64() * b[at_b + l * n + j].to_f64()).sum::<f64>());
            }
        }
        (at_a, at_b) = (at_a + m * k, at_b + k * n);
    }

    let (a, b) = (Buffer::from_slice(device, &a)?, Buffer::from_slice(device, &b)?);
    let (sizes, starts) = (Buffer::from_slice(device, &sizes)?, Buffer::from_slice(device, &starts)?);
    let mut c = Buffer::<f16>::poisoned(device, want.len())?;
    let (count, m_tile, n_tile, k_tile) = (problems.len() as i32, 64, 64, 32);
    #[rustfmt::skip]
    let mut kernel = GroupedGemm {
        a: &a, b: &b, c: &mut c, sizes: &sizes, starts: &starts, problems: count, m_tile, n_tile, k_tile,
    };
    // A launch rejects kernels whose bounds it cannot prove. Here the caller promises them.
    // SAFETY: `starts` and `sizes` were computed together above: the matrices cover exactly `a`, `b` and `c`.
    let config = unsafe { LaunchConfig::new(device.info().compute_units).unchecked() };
    kernel.launch_with(device, &config)?;
    let time = do_bench(device, 10.0, 50.0, || kernel.launch_with(device, &config))?;

    let error = check("c", &c.to_vec()?, &want)?;
    let rate = time.tflops(2.0 * total(|(m, n, k)| m * n * k) as f64);
    let shape = format!("{} problems", problems.len());
    println!("grouped_gemm      {shape:<28} error {error:<7.1e} {:9.3} ms {rate:8.3} TFLOP/s  {device}", time.median);
    Ok(())
}

/// Fails unless all elements are correct to 2e-3, relative to values above 1; returns the largest error.
fn check(what: &str, got: &[f16], want: &[f64]) -> Result<f64, String> {
    let mut worst = 0.0;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got.to_f64() - want).abs() / want.abs().max(1.0);
        // Also true for NaN.
        if !(error <= 2e-3) {
            return Err(format!("{what}[{i}] is {got}, expected {want}"));
        }
        worst = error.max(worst);
    }
    Ok(worst)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&Device::best()?)
}
