//! Persistent GEMM: as many programs as the device runs concurrently, each of which computes tile after tile.
//!
//! With one program per tile, each fills its pipeline, computes, drains and stores; and in the last, partially filled
//! wave some SMs are idle. A persistent program loops over its tiles, so that loads of one tile can overlap the
//! epilogue of the previous one.

use tilewright::bench::do_bench;
use tilewright::prelude::*;

/// c = a·bᵀ for row-major a [m, k], b [n, k] and c [m, n]: a linear layer, whose weights have one row per output.
///
/// The grid may have any number of programs.
#[kernel]
pub fn persistent_matmul<T: Float>(
    a: In<T>,
    b: In<T>,
    c: Out<T>,
    m: i32,
    n: i32,
    k: i32,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr = 8] group: usize,
) {
    // A tensor descriptor describes a whole tensor, from which blocks are loaded at any offset. Out-of-bounds elements
    // load as 0, and are not stored.
    let a_tensor = make_tensor_descriptor(a, shape = [m, k], strides = [k, 1], block_shape = [m_tile, k_tile]);
    let b_tensor = make_tensor_descriptor(b, shape = [n, k], strides = [k, 1], block_shape = [n_tile, k_tile]);
    let c_tensor = make_tensor_descriptor(c, shape = [m, n], strides = [n, 1], block_shape = [m_tile, n_tile]);
    let (m_tiles, n_tiles) = (cdiv(m, m_tile), cdiv(n, n_tile));
    for tile in range(program_id(0), m_tiles * n_tiles, num_programs(0)) {
        // The program order of the matmul example: adjacent programs share rows and columns in the L2 cache.
        let (i, j) = swizzle2d(tile / n_tiles, tile % n_tiles, m_tiles, n_tiles, group);
        let mut acc = zeros::<f32>([m_tile, n_tile]);
        for l in range(0, k, k_tile) {
            let (at, bt) = (a_tensor.load([i * m_tile, l]), b_tensor.load([j * n_tile, l]));
            acc = dot(at, bt.t(), acc);
        }
        c_tensor.store([i * m_tile, j * n_tile], acc.to::<T>());
    }
}

/// Multiplies in bf16, with fewer programs than tiles.
pub fn run(device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    let (m, n, k) = (384, 264, 160);
    let wave = |len: usize, f: f32| -> Vec<bf16> { (0..len).map(|i| bf16::from_f32((i as f32 * f).sin())).collect() };
    let (a, b) = (wave(m * k, 0.7), wave(n * k, 0.3));
    let mut want = Vec::new();
    for row in a.chunks(k) {
        for column in b.chunks(k) {
            want.push(row.iter().zip(column).map(|(x, y)| x.to_f64() * y.to_f64()).sum::<f64>());
        }
    }

    let (a, b) = (Buffer::from_slice(device, &a)?, Buffer::from_slice(device, &b)?);
    let mut c = Buffer::<bf16>::poisoned(device, m * n)?;
    let (m_tile, n_tile, k_tile) = (64, 64, 32);
    let (rows, columns, depth) = (m as i32, n as i32, k as i32);
    #[rustfmt::skip]
    let mut kernel = PersistentMatmul {
        a: &a, b: &b, c: &mut c, m: rows, n: columns, k: depth, m_tile, n_tile, k_tile, group: 8,
    };
    let tiles = m.div_ceil(m_tile) * n.div_ceil(n_tile);
    let config = LaunchConfig::new(tiles.min(device.info().compute_units as usize)).num_warps(4).num_stages(3);
    kernel.launch_with(device, &config)?;
    let time = do_bench(device, 10.0, 50.0, || kernel.launch_with(device, &config))?;

    let error = check("c", &c.to_vec()?, &want)?;
    let (shape, rate) = (format!("{m} × {n} × {k}, {tiles} tiles"), time.tflops((2 * m * n * k) as f64));
    println!("persistent_matmul {shape:<28} error {error:<7.1e} {:9.3} ms {rate:8.3} TFLOP/s  {device}", time.median);
    Ok(())
}

/// Fails unless all elements are correct to 1e-2, relative to values above 1; returns the largest error.
fn check(what: &str, got: &[bf16], want: &[f64]) -> Result<f64, String> {
    let mut worst = 0.0;
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got.to_f64() - want).abs() / want.abs().max(1.0);
        // Also true for NaN.
        if !(error <= 1e-2) {
            return Err(format!("{what}[{i}] is {got}, expected {want}"));
        }
        worst = error.max(worst);
    }
    Ok(worst)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&Device::best()?)
}
