//! Products of 8-bit matrices with scales: c = scale_a · scale_b · (a · b), for floats (`F8E4M3`, `F8E5M2`) and integers
//! (i8, u8), a [m, k], b [k, n], c [m, n] of any strides.
//!
//! The matrix instructions of 8-bit types read K-contiguous operands: a row-major and b column-major (a weight [n, k]
//! transposed) need no transposition on their way.

use crate::cut::{Cut, Programs, SMS, config_of_cut, cut_among};
use crate::matmul::{few_rows, grid, is_col_major, order};
use crate::tensor::{Tensor, TensorMut, expect_shape};
use tilewright_codegen::ir::DType;
use tilewright_codegen::target::{GpuArch, Target};
use tilewright_runtime::autotune::{Config, Problem};
use tilewright_runtime::prelude::*;

constexpr_enum! {
    /// Where scales apply.
    pub enum Scaling {
        /// No scales.
        None,
        /// Each row of a and each column of b has a scale.
        Rowwise,
    }
}

/// c = scale_a · scale_b · (a · b); 8-bit floats are summed in f32, integers in i32.
///
/// A grid of ⌈m/m_tile⌉ · ⌈n/n_tile⌉ programs. `a_col_major` and `b_col_major` promise that the operand is
/// column-major. With `scaling` `Rowwise`, `a_scale` has a number for each row of a and `b_scale` for each column of b; a
/// stride of 0 repeats one number. Without `fast_accumulation`, tensor cores sum
/// `k_tile` products of 8-bit floats, and these sums are added in f32; with it, they sum all. With `persistent`, the grid has
/// at most `programs` blocks, each of `replicas` programs that take turns.
#[autotune(
    configs = [
        Config(m_tile = 64..=256, n_tile = 64..=256, k_tile = 128, num_warps = [4, 8], num_stages = 3..=4, warp_specialize = true),
        Config(m_tile = 128, n_tile = 128..=256, k_tile = 128, num_warps = 8, num_stages = 3..=4, warp_specialize = true, persistent = true),
        Config(m_tile = 128, n_tile = [128, 160, 176], k_tile = 128, num_warps = 4, num_stages = 4, warp_specialize = true, persistent = true, replicas = 2),
        Config(m_tile = 64, n_tile = [16, 32], k_tile = 128..=512, num_warps = 4, num_stages = [4, 8], warp_specialize = true),
        Config(m_tile = 128, n_tile = [16, 32], k_tile = 128..=256, num_warps = 8, num_stages = [4, 5], warp_specialize = true),
        Config(m_tile = 16..=128, n_tile = 64..=128, k_tile = 128, num_warps = [4, 8], num_stages = 3..=4),
        Config(m_tile = 64..=128, n_tile = 128, k_tile = 64, num_warps = 4, num_stages = [3, 4]),
        Config(m_tile = 64..=128, n_tile = 128, k_tile = 128, num_warps = 4, num_stages = 2),
    ],
    keep = keep,
    key = [a_col_major, b_col_major, fast_accumulation, m, n, k, cut = cut_of_bytes([m, n, k], programs, fast_accumulation)],
    default = default_config,
)]
#[kernel(grid = grid(cdiv(m, m_tile) * cdiv(n, n_tile), persistent, programs, replicas))]
pub fn scaled_matmul<T: Dtype, O: Num>(
    a: Tensor<T, (m, k)>,
    b: Tensor<T, (k, n)>,
    a_scale: In<f32>,
    b_scale: In<f32>,
    c: TensorMut<O, (m, n)>,
    a_scale_stride: i64,
    b_scale_stride: i64,
    m: i32,
    n: i32,
    k: i32,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr = 8] group: usize,
    #[constexpr = false] a_col_major: bool,
    #[constexpr = false] b_col_major: bool,
    #[constexpr = None] scaling: Scaling,
    #[constexpr = false] fast_accumulation: bool,
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
        let mut b_block = make_block_ptr(
            b.ptr(),
            shape = [k, n],
            strides = [b.stride(0), b.stride(1)],
            offsets = [0, j * n_tile],
            block_shape = [k_tile, n_tile],
            order = order(b_col_major),
        );
        let c_block = c.block([i * m_tile, j * n_tile], [m_tile, n_tile]);
        let mut acc = zeros::<T::Acc>([m_tile, n_tile]);
        for _ in range(0, cdiv(k, k_tile)) {
            let at = load(a_block, boundary_check = [0, 1], padding = zero);
            let bt = load(b_block, boundary_check = [0, 1], padding = zero);
            if fast_accumulation {
                acc = dot(at, bt, acc);
            } else {
                acc = dot(at, bt, acc, max_num_imprecise_acc = k_tile);
            }
            a_block = a_block.advance([0, k_tile]);
            b_block = b_block.advance([k_tile, 0]);
        }
        if scaling == Scaling::Rowwise {
            let (rows, columns) = (i * m_tile + arange(0, m_tile), j * n_tile + arange(0, n_tile));
            let a_scales = load(a_scale + rows.to::<i64>() * a_scale_stride, mask = rows < m, other = 0.0);
            let b_scales = load(b_scale + columns.to::<i64>() * b_scale_stride, mask = columns < n, other = 0.0);
            let scaled = acc.to::<f32>() * a_scales.expand_dims(1) * b_scales.expand_dims(0);
            store(c_block, scaled.to::<O>(), boundary_check = [0, 1]);
        } else {
            store(c_block, acc.to::<O>(), boundary_check = [0, 1]);
        }
    };
    if persistent {
        for tile in range(program_id(0), m_tiles * n_tiles, num_programs(0), replicas = replicas) {
            compute(tile);
        }
    } else {
        compute(program_id(0));
    }
}

/// Scales of a product.
#[derive(Clone, Copy)]
pub enum Scales<'a> {
    /// None: each is 1.
    None,
    /// One for each matrix, each of one element.
    PerTensor(Tensor<'a, f32, 1>, Tensor<'a, f32, 1>),
    /// One for each row of a [m], and one for each column of b [n].
    Rowwise(Tensor<'a, f32, 1>, Tensor<'a, f32, 1>),
}

/// c [m, n] = scales · (a [m, k] · b [k, n]). With `fast_accumulation`, sums of 8-bit floats have the precision of
/// tensor cores, about 14 bits on Hopper; otherwise sums of 128 products are added in f32.
///
/// # Errors
/// Shapes that do not match; results in integers of less than 32 bits; more columns of integers than sums in i32 can hold (131 071 of i8, 33 025 of u8); tensors on
/// another device; launch errors.
pub fn multiply<T: Dtype + Element, O: Num + Element>(
    device: &Device,
    a: Tensor<'_, T, 2>,
    b: Tensor<'_, T, 2>,
    scales: Scales<'_>,
    fast_accumulation: bool,
    c: TensorMut<'_, O, 2>,
) -> Result<()> {
    let ([m, k], [_, n]) = (a.shape(), b.shape());
    expect_sums_fit::<T>(k)?;
    expect_results_fit::<O>()?;
    // Without scales the kernel gets views that it does not read.
    let nothing = View::<f32>::empty(device);
    let (scaling, a_scale, b_scale, strides) = match scales {
        Scales::None => (Scaling::None, nothing, nothing, [0, 0]),
        Scales::PerTensor(of_a, of_b) => {
            expect_shape("scaled_matmul", "the scale of a", of_a.shape(), [1])?;
            expect_shape("scaled_matmul", "the scale of b", of_b.shape(), [1])?;
            (Scaling::Rowwise, of_a.view(), of_b.view(), [0, 0])
        }
        Scales::Rowwise(of_a, of_b) => {
            expect_shape("scaled_matmul", "the scales of a", of_a.shape(), [m])?;
            expect_shape("scaled_matmul", "the scales of b", of_b.shape(), [n])?;
            (Scaling::Rowwise, of_a.view(), of_b.view(), [of_a.strides()[0], of_b.strides()[0]])
        }
    };
    let few_rows = few_rows::<T>(device, [a.shape(), b.shape(), c.shape()]);
    let ([a, b], mut c, [a_scale, b_scale], strides) = match few_rows {
        // cᵀ = bᵀ·aᵀ.
        Some(true) => {
            let transposed = [b.transposed(0, 1), a.transposed(0, 1)];
            (transposed, c.transposed(0, 1), [b_scale, a_scale], [strides[1], strides[0]])
        }
        _ => ([a, b], c, [a_scale, b_scale], strides),
    };
    ScaledMatmul {
        a_col_major: is_col_major(a.strides()),
        b_col_major: is_col_major(b.strides()),
        a: &a,
        b: &b,
        a_scale: &a_scale,
        b_scale: &b_scale,
        c: &mut c,
        a_scale_stride: strides[0],
        b_scale_stride: strides[1],
        m_tile: tuned(),
        n_tile: tuned(),
        k_tile: tuned(),
        group: 8,
        scaling,
        // Sums of integers are exact.
        fast_accumulation: fast_accumulation || !T::dtype().is_float(),
        persistent: tuned(),
        programs: device.info().compute_units as usize,
        replicas: tuned(),
    }
    .launch_tuned(device)
}

/// Fails where sums of k products of integers may exceed i32.
fn expect_sums_fit<T: Dtype>(k: usize) -> Result<()> {
    let largest: usize = match T::dtype() {
        DType::I8 => 128 * 128,
        DType::U8 => 255 * 255,
        _ => return Ok(()),
    };
    let most = i32::MAX as usize / largest;
    if k <= most {
        return Ok(());
    }
    Err(Error::Argument {
        kernel: "scaled_matmul".into(),
        name: "a",
        expected: format!("at most {most} columns of {}, whose sums of products fit i32", T::dtype()),
        found: format!("{k}"),
    })
}

/// Fails for integers that do not hold sums.
fn expect_results_fit<O: Num>() -> Result<()> {
    let dtype = O::dtype();
    if dtype.is_float() || dtype.bits() >= 32 {
        return Ok(());
    }
    Err(Error::Argument {
        kernel: "scaled_matmul".into(),
        name: "c",
        expected: "a matrix of floats, or of integers of 32 bits or more, which hold sums of products".into(),
        found: format!("{dtype}"),
    })
}

/// Whether a configuration is worth measuring. The compiler's estimate of registers and shared memory rejects others.
fn keep(problem: &Problem, config: &Config) -> bool {
    let [Some(m_tile), Some(n_tile), Some(k_tile)] =
        ["m_tile", "n_tile", "k_tile"].map(|name| config.get::<usize>(name))
    else {
        return false;
    };
    let Target::Nvptx(arch) = problem.target else { return m_tile <= 128 && n_tile <= 128 };
    let is_integer = problem.dtypes.first().is_some_and(|dtype| dtype.is_int());
    let warps = config.num_warps as usize;
    let sums_per_thread = m_tile * n_tile / (32 * warps);
    match config.schedule.warp_specialize {
        // A consumer warpgroup has the 64 rows of a `wgmma`, or more.
        Some(true) => {
            let most = if config.get::<usize>("replicas") == Some(2) { 176 } else { 128 };
            // Narrow tiles are for few rows or columns.
            let least = if n_tile < 64 { 8 } else { 64 };
            arch >= GpuArch::Sm90a && m_tile >= 16 * warps && (least..=most).contains(&sums_per_thread)
        }
        // Hopper's tiles of this kind are all of the same depth. Before it, sums in i32 may take the space of a second set.
        _ if arch >= GpuArch::Sm90a && (k_tile < 128 || config.num_stages < 3) => false,
        _ => {
            let most = if is_integer && arch < GpuArch::Sm90a { 128 } else { 64 };
            (8..=most).contains(&sums_per_thread) && (warps == 4 || m_tile == 128)
        }
    }
}

/// The cut for operands of one byte: a step of 128 takes as long as one of 64 of 16-bit types. With two sets of accumulators,
/// of a step and of all, wide tiles and turns have no space in registers; with one, scales take those of the widest turns.
fn cut_of_bytes([m, n, k]: [usize; 3], sms: usize, fast_accumulation: bool) -> Cut {
    let Cut { tile: [rows, columns], programs } =
        cut_among([m, n, k / 2], sms, 2, |Cut { tile: [_, columns], programs }| {
            let fits = match programs {
                Programs::Turns => fast_accumulation && columns <= 176,
                _ => fast_accumulation || columns <= 160,
            };
            fits.then_some(1.0)
        });
    // TMA loads rows of at least 16 bytes.
    Cut { tile: [rows, columns.max(16)], programs }
}

/// The configuration where no tuning entry applies.
fn default_config(problem: &Problem) -> Config {
    if matches!(problem.target, Target::Nvptx(arch) if arch >= GpuArch::Sm90a) {
        let size = |name: &str| problem.int(name).unwrap_or(1) as usize;
        let fast = problem.get("fast_accumulation") != Some(false);
        let cut = problem.get("cut").unwrap_or_else(|| cut_of_bytes(["m", "n", "k"].map(size), SMS, fast));
        return config_of_cut(problem, 1, cut);
    }
    // Of 8-bit integers, those of `mma.sync` that were the fastest, in code for sm_80 on an H200
    // (`harness/records/2026-11-30-h200-ldmatrix.jsonl`); and of those that leave space for a second block on desktop GPUs.
    let is_integer = problem.dtypes.first().is_some_and(|dtype| dtype.is_int());
    let (tile, num_warps, num_stages) = match problem.target {
        Target::Nvptx(arch) if arch.is_desktop() => ([64, 128, 64], 4, 4),
        Target::Nvptx(_) if is_integer => ([128, 128, 128], 4, 2),
        Target::Nvptx(_) => ([128, 128, 64], 8, 3),
        _ => ([64; 3], 8, 3),
    };
    let [rows, columns, depth] = tile;
    // The sizes in the key are powers of two.
    let fit = |name: &str, least: usize, most: usize| (problem.int(name).unwrap_or(1) as usize).clamp(least, most);
    let (m, n, k) = (fit("m", 16, rows), fit("n", 16, columns), fit("k", 32, depth));
    let config = Config::default().set("m_tile", m).set("n_tile", n).set("k_tile", k);
    config.num_warps(if m * n < 64 * 128 { 4 } else { num_warps }).num_stages(num_stages)
}
