//! Weight-only quantized matmul: weights of 8 or 4 bits with a scale per group, activations in f16 or bf16.
//!
//! With few rows of activations, as in decoding, a linear layer takes the time of reading its weights; 4 bits are a
//! quarter of f16. The product is computed transposed: c's tile is (w aᵀ)ᵀ. Tensor cores take their left operand from
//! registers, where the weights are converted, and a few rows of a need no tile of 64.

#[path = "common/mod.rs"]
pub mod common;

use common::{Outcome, Row, Work, check, to, wave};
use tilewright::prelude::*;

#[autotune(
    configs = [
        Config(m_tile = 16, n_tile = 64, k_tile = 128, num_warps = 4, num_stages = [4, 6, 8]),
        Config(m_tile = 16, n_tile = 128, k_tile = 128, num_warps = [4, 8], num_stages = [4, 6]),
        Config(m_tile = 64, n_tile = 128, k_tile = 64, num_warps = [4, 8], num_stages = [3, 4]),
        Config(m_tile = 128, n_tile = 128, k_tile = 64, num_warps = [4, 8], num_stages = [3, 4]),
        Config(m_tile = 256, n_tile = 128, k_tile = 64, num_warps = 8, num_stages = [3, 4]),
        Config(m_tile = 256, n_tile = 128, k_tile = 128, num_warps = 8, num_stages = 2, warp_specialize = [false, true]),
    ],
    key = [bits, group, m, n, k],
)]
// ANCHOR: kernel
/// c = a · wᵀ, where w[j, l] = (q[j, l] − 2^(bits − 1)) · scale[l / group, j].
///
/// `q` has `bits` = 8 or 4 bits per element, two in a byte if it is 4, the first one low. A group is a multiple of
/// `k_tile`.
#[kernel(grid = (cdiv(n, n_tile), cdiv(m, m_tile)))]
pub fn weight_only_matmul<T: Float>(
    a: Tensor<T, (m, k)>,
    q: Tensor<u8, (n, bytes)>,
    scale: Tensor<T, (groups, n)>,
    c: TensorMut<T, (m, n)>,
    #[constexpr] bits: usize,
    #[constexpr] group: usize,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] k_tile: usize,
) {
    static_assert(group % k_tile == 0, "a tile has one scale per row of w: group is a multiple of k_tile");
    let (column, row) = (program_id(0) * n_tile, program_id(1) * m_tile);
    let mut acc = zeros::<f32>([n_tile, m_tile]);
    for l in range(0, k, k_tile) {
        let bytes = load(q.block([column, l * bits / 8], [n_tile, k_tile * bits / 8]), boundary_check = [0, 1]);
        let numbers = if bits == 4 { interleave(bytes & 15, bytes >> 4) } else { bytes };
        let scales = load(scale.block([l / group, column], [1, n_tile]), boundary_check = [0, 1]);
        let weights = (numbers.to::<T>() - (1 << (bits - 1)) as f32) * scales.t();
        let rows = load(a.block([row, l], [m_tile, k_tile]), boundary_check = [0, 1]);
        acc = dot(weights, rows.t(), acc);
    }
    store(c.block([row, column], [m_tile, n_tile]), acc.t().to::<T>(), boundary_check = [0, 1]);
}
// ANCHOR_END: kernel

/// A problem: bits, m, n, k, elements in a group.
type Shape = (usize, [usize; 3], usize);

/// Multiplies, and checks elements of c against f64.
fn case(device: &Device, (bits, [m, n, k], group): Shape, bench: bool) -> Outcome<Row> {
    let a: Vec<f16> = to(&wave(m * k, 0.7), f16::from_f32);
    let bytes = k * bits / 8;
    let q: Vec<u8> = (0..n * bytes).map(|i| ((i * 2_654_435_761) >> 13) as u8).collect();
    let scale: Vec<f16> =
        wave(k / group * n, 0.3).iter().map(|x| f16::from_f32((1.5 + x) / (16 << bits) as f32)).collect();
    let weight = |j: usize, l: usize| {
        let byte = q[j * bytes + l * bits / 8];
        let number = if bits == 8 { byte } else { byte >> (l % 2 * 4) & 15 };
        (f64::from(number) - f64::from(1 << (bits - 1))) * scale[l / group * n + j].to_f64()
    };
    let product = |i: usize, j: usize| (0..k).map(|l| a[i * k + l].to_f64() * weight(j, l)).sum::<f64>();

    let (a, q) = (Buffer::from_slice(device, &a)?, Buffer::from_slice(device, &q)?);
    let (scale, mut c) = (Buffer::from_slice(device, &scale)?, Buffer::<f16>::poisoned(device, m * n)?);
    let launch = || {
        WeightOnlyMatmul {
            a: &a.tensor([m, k])?,
            q: &q.tensor([n, bytes])?,
            scale: &scale.tensor([k / group, n])?,
            c: &mut c.tensor_mut([m, n])?,
            bits,
            group,
            m_tile: tuned(),
            n_tile: tuned(),
            k_tile: tuned(),
        }
        .launch_tuned(device)
    };
    let case = format!("int{bits} {m} × {n} × {k}, group {group}");
    let moved = (m * k + m * n + k / group * n) * 2 + n * bytes;
    // With many rows the dots take longer than the memory accesses.
    let work = if m < 64 { Work::Bytes(moved as f64) } else { Work::Flop((2 * m * n * k) as f64) };
    let time = common::time(device, bench, launch)?;
    // Weights are rounded to f16 before the dot.
    let error = check("c", &c.to_vec()?, 4096, 5e-3, |x| product(x / n, x % n))?;
    Ok(Row { kernel: "weight_only_matmul", case, work, error, time })
}

/// Checks small shapes, or checks and times realistic ones.
///
/// # Errors
/// A result that differs from its definition, and errors of launches.
pub fn cases(device: &Device, bench: bool) -> Outcome<Vec<Row>> {
    let small = [(8, [17, 70, 256], 128), (4, [17, 72, 256], 128)];
    let realistic = [
        (8, [16, 8192, 8192], 128),
        (4, [16, 8192, 8192], 128),
        (8, [2048, 8192, 8192], 128),
        (4, [2048, 8192, 8192], 128),
    ];
    let shapes = if bench { &realistic[..] } else { &small[..] };
    shapes.iter().map(|shape| case(device, *shape, bench)).collect()
}

fn main() -> Outcome {
    common::main(cases)
}
