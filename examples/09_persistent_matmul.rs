//! Persistent GEMM: as many programs as the device runs concurrently, each of which computes tile after tile.
//!
//! With one program per tile, each fills its pipeline, computes, drains and stores; and in the last, partially filled
//! wave some SMs are idle. A persistent program loops over its tiles, so that loads of one tile can overlap the
//! epilogue of the previous one.

#[path = "common/mod.rs"]
pub mod common;

use common::{Outcome, Row, Work, check, to, wave};
use tilewright::prelude::*;

#[autotune(
    configs = [
        Config(m_tile = 64, n_tile = 64, k_tile = 32, num_warps = 4, num_stages = 3),
        Config(m_tile = 128, n_tile = 128, k_tile = 64, num_warps = 8, num_stages = [3, 4]),
        Config(m_tile = 128, n_tile = 256, k_tile = 64, num_warps = 8, num_stages = 3, warp_specialize = [false, true]),
        Config(m_tile = 256, n_tile = 128, k_tile = 64, num_warps = 8, num_stages = 3, warp_specialize = [false, true]),
    ],
    key = [m, n, k],
)]
// ANCHOR: kernel
/// c = a·bᵀ for row-major a [m, k], b [n, k] and c [m, n]: a linear layer, whose weights have one row per output.
///
/// The grid may have any number of programs.
#[kernel]
pub fn persistent_matmul<T: Float>(
    a: Tensor<T, (m, k)>,
    b: Tensor<T, (n, k)>,
    c: TensorMut<T, (m, n)>,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr = 8] group: usize,
) {
    // A tensor descriptor describes a whole tensor, from which blocks are loaded at any offset. Out-of-bounds elements
    // load as 0, and are not stored.
    let (a_tensor, b_tensor) = (a.descriptor([m_tile, k_tile]), b.descriptor([n_tile, k_tile]));
    let c_tensor = c.descriptor([m_tile, n_tile]);
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
// ANCHOR_END: kernel

fn case(device: &Device, [m, n, k]: [usize; 3], bench: bool) -> Outcome<Row> {
    let (a, b): (Vec<bf16>, Vec<bf16>) = (to(&wave(m * k, 0.7), bf16::from_f32), to(&wave(n * k, 0.3), bf16::from_f32));
    let (a_buffer, b_buffer) = (Buffer::from_slice(device, &a)?, Buffer::from_slice(device, &b)?);
    let mut c = Buffer::<bf16>::poisoned(device, m * n)?;
    let programs = device.info().compute_units as usize;
    let time = common::time(device, bench, || {
        PersistentMatmul {
            a: &a_buffer.tensor([m, k])?,
            b: &b_buffer.tensor([n, k])?,
            c: &mut c.tensor_mut([m, n])?,
            m_tile: tuned(),
            n_tile: tuned(),
            k_tile: tuned(),
            group: 8,
        }
        .launch_tuned(device, |args| (m.div_ceil(args.m_tile) * n.div_ceil(args.n_tile)).min(programs))
    })?;
    let want = |at: usize| (0..k).map(|l| a[at / n * k + l].to_f64() * b[at % n * k + l].to_f64()).sum::<f64>();
    let error = check("c", &c.to_vec()?, 4000, 1e-2, want)?;
    let work = Work::Flop((2 * m * n * k) as f64);
    Ok(Row { kernel: "persistent_matmul", case: format!("{m} × {n} × {k}"), work, error, time })
}

/// Checks small shapes, or checks and times realistic ones.
///
/// # Errors
/// A result that differs from its definition, and errors of launches.
pub fn cases(device: &Device, bench: bool) -> Outcome<Vec<Row>> {
    let shape = if bench { [4096, 4096, 4096] } else { [200, 136, 96] };
    Ok(vec![case(device, shape, bench)?])
}

fn main() -> Outcome {
    common::main(cases)
}
