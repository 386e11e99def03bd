//! The first half of a SwiGLU feed-forward layer as one kernel: gate = a·b_gate, value = a·b_value and y = silu(gate) ·
//! value, for a [m, k], b_gate and b_value [k, n], and results [m, n] of any strides.
//!
//! Both products share the loads of a. y is computed of the sums in f32, before they are rounded.

use crate::cut::{Cut, SMS, config_of_cut, cut_among, occupies};
use crate::matmul::{grid, is_col_major, order, sms};
use crate::tensor::{FloatElement, Tensor, TensorMut, expect_shape};
use tilewright_codegen::target::{GpuArch, Target};
use tilewright_runtime::autotune::{Config, Problem};
use tilewright_runtime::prelude::*;

/// gate, value and y = silu(gate) · value, summed in f32. gate and value are for the backward pass, and may be left out.
///
/// A grid of ⌈m/m_tile⌉ · ⌈n/n_tile⌉ programs, each of one tile of every result. `a_col_major` and `b_col_major` promise
/// that operands are column-major. With `persistent`, the grid has at most `programs` blocks, each of `replicas` programs
/// that take turns.
#[autotune(
    configs = [
        Config(m_tile = 128, n_tile = [64, 80, 96], k_tile = 64, num_warps = 4, num_stages = 4, warp_specialize = true, persistent = true, replicas = 2),
        Config(m_tile = 128, n_tile = [64, 96, 128], k_tile = 64, num_warps = 8, num_stages = 4, warp_specialize = true, persistent = [false, true]),
        Config(m_tile = 64, n_tile = [32, 64, 96], k_tile = 64, num_warps = 4, num_stages = 5, warp_specialize = true),
        Config(m_tile = 128, n_tile = [32, 64], k_tile = 32, num_warps = [4, 8], num_stages = 3),
        Config(m_tile = 64, n_tile = [32, 64], k_tile = 32, num_warps = 4, num_stages = 3),
        Config(m_tile = 32, n_tile = 32, k_tile = [16, 32], num_warps = 4, num_stages = 2),
    ],
    key = [a_col_major, b_col_major, m, n, k, cut = cut_of_pairs([m, n, k], programs, b_col_major)],
    default = default_config,
)]
#[kernel(grid = grid(cdiv(m, m_tile) * cdiv(n, n_tile), persistent, programs, replicas))]
pub fn matmul_swiglu<T: Float>(
    a: Tensor<T, (m, k)>,
    b_gate: Tensor<T, (k, n)>,
    b_value: Tensor<T, (k, n)>,
    gate: Option<TensorMut<T, (m, n)>>,
    value: Option<TensorMut<T, (m, n)>>,
    y: TensorMut<T, (m, n)>,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr = 8] group: usize,
    #[constexpr = false] a_col_major: bool,
    #[constexpr = false] b_col_major: bool,
    #[constexpr = false] persistent: bool,
    #[constexpr = 132] programs: usize,
    #[constexpr = 1] replicas: usize,
) {
    static_assert(programs >= 1 && replicas >= 1, "programs and replicas must be at least 1");
    let (m_tiles, n_tiles) = (cdiv(m, m_tile), cdiv(n, n_tile));
    let compute = |tile: Scalar<i32>| {
        let (i, j) = swizzle2d(tile / n_tiles, tile % n_tiles, m_tiles, n_tiles, group);
        let mut a_block = make_block_ptr(
            a.ptr(),
            shape = [m, k],
            strides = [a.stride(0), a.stride(1)],
            offsets = [i * m_tile, 0],
            block_shape = [m_tile, k_tile],
            order = order(a_col_major),
        );
        let columns = |b: TensorPtr<T>| {
            make_block_ptr(
                b.ptr(),
                shape = [k, n],
                strides = [b.stride(0), b.stride(1)],
                offsets = [0, j * n_tile],
                block_shape = [k_tile, n_tile],
                order = order(b_col_major),
            )
        };
        let (mut gate_block, mut value_block) = (columns(b_gate), columns(b_value));
        let mut gates = zeros::<f32>([m_tile, n_tile]);
        let mut values = zeros::<f32>([m_tile, n_tile]);
        for _ in range(0, cdiv(k, k_tile)) {
            let at = load(a_block, boundary_check = [0, 1], padding = zero);
            let gt = load(gate_block, boundary_check = [0, 1], padding = zero);
            let vt = load(value_block, boundary_check = [0, 1], padding = zero);
            gates = dot(at, gt, gates, input_precision = ieee);
            values = dot(at, vt, values, input_precision = ieee);
            a_block = a_block.advance([0, k_tile]);
            gate_block = gate_block.advance([k_tile, 0]);
            value_block = value_block.advance([k_tile, 0]);
        }
        let at = [i * m_tile, j * n_tile];
        if let Some(gate) = gate {
            store(gate.block(at, [m_tile, n_tile]), gates.to::<T>(), boundary_check = [0, 1]);
        }
        if let Some(value) = value {
            store(value.block(at, [m_tile, n_tile]), values.to::<T>(), boundary_check = [0, 1]);
        }
        let product = gates * sigmoid(gates) * values;
        store(y.block(at, [m_tile, n_tile]), product.to::<T>(), boundary_check = [0, 1]);
    };
    if persistent {
        for tile in range(program_id(0), m_tiles * n_tiles, num_programs(0), replicas = replicas) {
            compute(tile);
        }
    } else {
        compute(program_id(0));
    }
}

/// The cut of a pair of products: that of one with twice as many columns, half of each tile for either.
fn cut_of_pairs([m, n, k]: [usize; 3], sms: usize, b_col_major: bool) -> Cut {
    /// Bytes of three results for two sums.
    const BYTES: usize = 3;
    let least = if b_col_major { 16 } else { 64 };
    let fits = |Cut { tile: [_, columns], .. }: Cut| (columns / 2).is_multiple_of(least) && columns <= 192;
    let Cut { tile: [rows, columns], programs } = cut_among([m, 2 * n, k], sms, BYTES, |cut| fits(cut).then_some(1.0));
    // Each half has the columns of a `wgmma`, at least 8.
    Cut { tile: [rows, columns.max(16)], programs }
}

/// The configuration where no tuning entry applies.
fn default_config(problem: &Problem) -> Config {
    let size = |name: &str| problem.int(name).unwrap_or(1) as usize;
    let bytes = problem.dtypes.first().map_or(4, |dtype| dtype.bytes());
    if bytes == 2 && matches!(problem.target, Target::Nvptx(arch) if arch >= GpuArch::Sm90a) {
        let col_major = problem.get("b_col_major").unwrap_or(false);
        let cut = problem.get("cut").unwrap_or_else(|| cut_of_pairs(["m", "n", "k"].map(size), SMS, col_major));
        let config = config_of_cut(problem, bytes, cut);
        return config.set("n_tile", cut.tile[1] / 2);
    }
    // Of 16 bits, those of `mma.sync` that were the fastest, in code for sm_80 on an H200
    // (`harness/records/2026-11-30-h200-ldmatrix.jsonl`).
    let [rows, columns, depth] = match (problem.is_gpu(), bytes) {
        (true, 2) if occupies(["m", "n"].map(size), [128, 64]) => [128, 64, 32],
        (true, 2) | (false, _) => [64, 64, 32],
        (true, _) => [32, 32, 16],
    };
    let fit = |name: &str, most: usize| size(name).clamp(16, most);
    let config = Config::default().set("m_tile", fit("m", rows)).set("n_tile", fit("n", columns));
    let config = config.set("k_tile", fit("k", depth));
    config.num_warps(4).num_stages(3)
}

/// y [m, n] = silu(gate) · value for gate = a [m, k] · b_gate [k, n] and value = a · b_value [k, n], which are stored too
/// where `products` has memory [m, n] for them. The launch is planned for all SMs but `reserved_sms`.
///
/// # Errors
/// Shapes that do not match; tensors on another device; launch errors.
pub fn multiply<T: FloatElement>(
    device: &Device,
    a: Tensor<'_, T, 2>,
    [b_gate, b_value]: [Tensor<'_, T, 2>; 2],
    products: Option<[TensorMut<'_, T, 2>; 2]>,
    mut y: TensorMut<'_, T, 2>,
    reserved_sms: u32,
) -> Result<()> {
    expect_shape("matmul_swiglu", "b_value", b_value.shape(), b_gate.shape())?;
    let b_col_major = is_col_major(b_gate.strides()) && is_col_major(b_value.strides());
    let (mut gate, mut value) = match products {
        Some([gate, value]) => (Some(gate), Some(value)),
        None => (None, None),
    };
    MatmulSwiglu {
        a_col_major: is_col_major(a.strides()),
        b_col_major,
        a: &a,
        b_gate: &b_gate,
        b_value: &b_value,
        gate: gate.as_mut().map(|gate| gate as _),
        value: value.as_mut().map(|value| value as _),
        y: &mut y,
        m_tile: tuned(),
        n_tile: tuned(),
        k_tile: tuned(),
        group: 8,
        persistent: tuned(),
        programs: sms(device, reserved_sms),
        replicas: tuned(),
    }
    .launch_tuned(device)
}
