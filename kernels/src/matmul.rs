//! GEMM with a fused epilogue: c = f(a·b + bias) + addend for a [m, k], b [k, n] and c [m, n] of any strides. f is
//! elementwise; bias has one element per column or per row; addend is a matrix, which may be c itself.
//!
//! Each program computes one tile of c. Programs are numbered so that concurrent programs share rows of a and columns
//! of b in the L2 cache: `group` rows of tiles at a time, column by column (the order of Triton's matrix multiplication
//! tutorial, here [`swizzle2d`]). A persistent program computes tile after tile: its producer warps load the next tile
//! while it stores the previous one. If two persistent programs share an SM and take turns, one multiplies while the
//! other stores.
//!
//! On Hopper a product of few rows is computed as cᵀ = bᵀ·aᵀ: tiles of `wgmma` have at least 64 rows, but may have 8 columns.

use crate::activation::{Activation, activate};
use crate::tensor::{Tensor, TensorMut, expect_shape};
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ConstValue, Constexpr};
use tilewright_codegen::target::{GpuArch, Schedule, Target};
use tilewright_runtime::autotune::{Config, KeyValue, Problem};
use tilewright_runtime::prelude::*;

constexpr_enum! {
    /// The vector that is added to a·b.
    pub enum Bias {
        /// No bias.
        None,
        /// One element for each column of c, as the bias of a linear layer.
        Columns,
        /// One element for each row of c.
        Rows,
    }
}

constexpr_enum! {
    /// The matrix that is added after the activation.
    pub enum Addend {
        /// No matrix.
        None,
        /// The previous content of c.
        Itself,
        /// The previous content of c, to which the L2 cache adds, in the type of c: the same, up to subnormal numbers, if
        /// that is f32.
        Atomic,
        /// Another matrix.
        Other,
    }
}

/// c = activation(a·b + bias) + addend. Products of f64 are summed in f64, others in f32; the activation is in f32.
///
/// A grid of ⌈m/m_tile⌉ · ⌈n/n_tile⌉ programs. `a_col_major` and `b_col_major` promise that the operand is
/// column-major: its first dimension is the contiguous one. `precision` applies to f32 operands. `bias_along` is the
/// dimension of c along which bias varies; with `None` bias is not read. `other` is read if `addend` is `Other`, and c
/// if it is `Itself` or `Atomic`. With `persistent`, the grid has at most `programs` blocks, each of `replicas` programs
/// that take turns.
///
/// On Hopper, [`multiply`] and the other functions of this module launch it for few rows with bᵀ, aᵀ and cᵀ.
#[autotune(
    configs = [
        Config(m_tile = 128, n_tile = 128, k_tile = 64, num_warps = 8, num_stages = 4),
        Config(m_tile = 128, n_tile = 256, k_tile = 64, num_warps = 8, num_stages = 3, warp_specialize = true, persistent = [false, true]),
        Config(m_tile = 256, n_tile = 128, k_tile = 64, num_warps = 8, num_stages = 3, warp_specialize = true, persistent = [false, true]),
        Config(m_tile = 128, n_tile = 128, k_tile = 64, num_warps = 8, num_stages = 6, warp_specialize = true, persistent = true),
        Config(m_tile = 128, n_tile = [144, 160], k_tile = 64, num_warps = 8, num_stages = 5, warp_specialize = true, persistent = [false, true]),
        Config(m_tile = 128, n_tile = [176, 192, 208, 224], k_tile = 64, num_warps = 8, num_stages = 4, warp_specialize = true, persistent = [false, true]),
        Config(m_tile = 128, n_tile = [128, 160, 176, 192, 208], k_tile = 64, num_warps = 4, num_stages = 4, warp_specialize = true, persistent = true, replicas = 2),
        Config(m_tile = 64, n_tile = [64, 80, 96], k_tile = 128, num_warps = 4, num_stages = 5, warp_specialize = true),
        Config(m_tile = 64, n_tile = [8, 16, 32], k_tile = [128, 256], num_warps = 4, num_stages = 8, warp_specialize = true),
        Config(m_tile = 128, n_tile = [8, 16, 32], k_tile = 128, num_warps = 8, num_stages = 5, warp_specialize = true),
        Config(m_tile = 64, n_tile = [128, 160, 192], k_tile = 64, num_warps = 4, num_stages = 6, warp_specialize = true),
        Config(m_tile = 128, n_tile = [64, 96], k_tile = 64, num_warps = 8, num_stages = 7, warp_specialize = true),
        Config(m_tile = 128, n_tile = 128, k_tile = 128, num_warps = 8, num_stages = 3, warp_specialize = true),
        Config(m_tile = 128, n_tile = 128, k_tile = 64, num_warps = 4, num_stages = 3, warp_specialize = true),
        Config(m_tile = 128, n_tile = 128, k_tile = 64, num_warps = 8, num_stages = 4, tma = true),
        Config(m_tile = 128, n_tile = 128, k_tile = 64, num_warps = 8, num_stages = 4, warp_specialize = true),
        Config(m_tile = 128, n_tile = 128, k_tile = 64, num_warps = 8, num_stages = 3),
        Config(m_tile = 128, n_tile = 256, k_tile = 64, num_warps = 8, num_stages = 3),
        Config(m_tile = 256, n_tile = 128, k_tile = 64, num_warps = 8, num_stages = 3),
        Config(m_tile = 128, n_tile = 128, k_tile = 32, num_warps = 8, num_stages = 4),
        Config(m_tile = 128, n_tile = 128, k_tile = 32, num_warps = 8, num_stages = [3, 4], wgmma_f32 = true),
        Config(m_tile = 128, n_tile = 64, k_tile = 32, num_warps = 8, num_stages = [3, 4], wgmma_f32 = true),
        Config(m_tile = 64, n_tile = 128, k_tile = 32, num_warps = 4, num_stages = [2, 3], wgmma_f32 = true),
        Config(m_tile = 128, n_tile = 64, k_tile = 32, num_warps = 4, num_stages = [2, 3], wgmma_f32 = true),
        Config(m_tile = 64, n_tile = 64, k_tile = 32, num_warps = 4, num_stages = [3, 4], wgmma_f32 = true),
        Config(m_tile = 128, n_tile = 128, k_tile = 16, num_warps = 8, num_stages = 4, wgmma_f32 = true),
        Config(m_tile = 256, n_tile = 64, k_tile = 32, num_warps = 8, num_stages = 3, wgmma_f32 = true),
        Config(m_tile = 128, n_tile = 128, k_tile = 32, num_warps = 8, num_stages = 3, wgmma_f32 = true, tma = true),
        Config(m_tile = 64, n_tile = 128, k_tile = 32, num_warps = 4, num_stages = 2, wgmma_f32 = true, tma = true),
        Config(m_tile = 128, n_tile = 256, k_tile = 32, num_warps = 8, num_stages = 3, wgmma_f32 = true, tma = true),
        Config(m_tile = 64, n_tile = 256, k_tile = 64, num_warps = 4, num_stages = 3),
        Config(m_tile = 128, n_tile = 64, k_tile = 64, num_warps = 4, num_stages = 4),
        Config(m_tile = 64, n_tile = 128, k_tile = 64, num_warps = 4, num_stages = 4),
        Config(m_tile = 64, n_tile = 64, k_tile = 64, num_warps = 4, num_stages = 4),
        Config(m_tile = 64, n_tile = 64, k_tile = 32, num_warps = 4, num_stages = 4),
        Config(m_tile = 64, n_tile = 64, k_tile = 32, num_warps = 4, num_stages = 3),
        Config(m_tile = 64, n_tile = 64, k_tile = 16, num_warps = 4, num_stages = 3),
        Config(m_tile = 128, n_tile = 64, k_tile = 32, num_warps = 8, num_stages = 3),
        Config(m_tile = 128, n_tile = 64, k_tile = 16, num_warps = 8, num_stages = 3),
        Config(m_tile = 32, n_tile = 64, k_tile = 32, num_warps = 4, num_stages = 3),
        Config(m_tile = 32, n_tile = 32, k_tile = 32, num_warps = 4, num_stages = 2),
        Config(m_tile = 128, n_tile = 128, k_tile = [32, 64], num_warps = 4, num_stages = 3),
        Config(m_tile = 128, n_tile = 256, k_tile = 32, num_warps = 8, num_stages = 2),
        Config(m_tile = 64, n_tile = 128, k_tile = 32, num_warps = 4, num_stages = [3, 4]),
        Config(m_tile = 128, n_tile = 128, k_tile = 32, num_warps = 8, num_stages = 3, warp_specialize = true),
        Config(m_tile = 64, n_tile = [64, 128], k_tile = 16, num_warps = 4, num_stages = 4, warp_specialize = true),
        Config(m_tile = 64, n_tile = 32, k_tile = 32, num_warps = 4, num_stages = 4, warp_specialize = true),
        Config(m_tile = 32, n_tile = 32, k_tile = 32, num_warps = 4, num_stages = 4, warp_specialize = true),
    ],
    keep = keep,
    key = [a_col_major, b_col_major, precision, m, n, k, cut = cut([m, n, k], programs, Memory::of([T::dtype(), C::dtype()], addend, b_col_major))],
    default = default_config,
)]
#[kernel(grid = grid(cdiv(m, m_tile) * cdiv(n, n_tile), persistent, programs, replicas))]
#[alias(a_columns = a_col_major, b_columns = b_col_major)]
pub fn matmul<T: Float, C: Float>(
    a: Tensor<T, (m, k)>,
    b: Tensor<T, (k, n)>,
    bias: In<T>,
    other: In<C>,
    c: TensorInOut<C, (m, n)>,
    bias_stride: i64,
    other_stride_m: i64,
    other_stride_n: i64,
    m: i32,
    n: i32,
    k: i32,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr = 8] group: usize,
    #[constexpr = false] a_col_major: bool,
    #[constexpr = false] b_col_major: bool,
    #[constexpr = None] bias_along: Bias,
    #[constexpr = None] activation: Activation,
    #[constexpr = None] addend: Addend,
    #[constexpr = ieee] precision: Precision,
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
        let mut acc = zeros::<T::Compute>([m_tile, n_tile]);
        for _ in range(0, cdiv(k, k_tile)) {
            let at = load(a_block, boundary_check = [0, 1], padding = zero);
            let bt = load(b_block, boundary_check = [0, 1], padding = zero);
            acc = dot(at, bt, acc, input_precision = precision);
            a_block = a_block.advance([0, k_tile]);
            b_block = b_block.advance([k_tile, 0]);
        }
        if bias_along == Bias::Columns {
            let columns = j * n_tile + arange(0, n_tile);
            let bias_tile = load(bias + columns.to::<i64>() * bias_stride, mask = columns < n, other = 0.0);
            acc = acc + bias_tile.to::<T::Compute>().expand_dims(0);
        }
        if bias_along == Bias::Rows {
            let rows = i * m_tile + arange(0, m_tile);
            let bias_tile = load(bias + rows.to::<i64>() * bias_stride, mask = rows < m, other = 0.0);
            acc = acc + bias_tile.to::<T::Compute>().expand_dims(1);
        }
        if activation != Activation::None {
            acc = activate(acc.to::<f32>(), activation).to::<T::Compute>();
        }
        // The sum with another matrix, in the wider type.
        let plus = |added: Tile<C>| {
            if is_f64::<T>() {
                (acc + added.to::<T::Compute>()).to::<C>()
            } else {
                (acc.to::<C::Compute>() + added.to::<C::Compute>()).to::<C>()
            }
        };
        if addend == Addend::Itself {
            store(c_block, plus(load(c_block, boundary_check = [0, 1], padding = zero)), boundary_check = [0, 1]);
        } else if addend == Addend::Other {
            let other_block = make_block_ptr(
                other,
                shape = [m, n],
                strides = [other_stride_m, other_stride_n],
                offsets = [i * m_tile, j * n_tile],
                block_shape = [m_tile, n_tile],
                order = [1, 0],
            );
            store(c_block, plus(load(other_block, boundary_check = [0, 1], padding = zero)), boundary_check = [0, 1]);
        } else if addend == Addend::Atomic {
            atomic_add(c_block, acc.to::<C>(), boundary_check = [0, 1]);
        } else {
            store(c_block, acc.to::<C>(), boundary_check = [0, 1]);
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

/// Whether a type is f64.
fn is_f64<T: Dtype>() -> bool {
    T::dtype() == DType::F64
}

/// Whether the first dimension of a matrix is the contiguous one.
pub(crate) fn is_col_major(strides: [i64; 2]) -> bool {
    strides[0] == 1 && strides[1] != 1
}

/// Dimensions of a matrix from the fastest-varying in memory to the slowest.
pub(crate) fn order(col_major: bool) -> [usize; 2] {
    if col_major { [0, 1] } else { [1, 0] }
}

/// Options of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Computed in f32.
    pub activation: Activation,
    /// Precision of the multiplication of f32 operands: IEEE by default.
    pub precision: Precision,
    /// SMs of a GPU that the launch leaves to other kernels, such as collectives: none by default. It is planned for the others,
    /// and for one at least.
    pub reserved_sms: u32,
}

impl Default for Options {
    fn default() -> Options {
        Options { activation: Activation::None, precision: Precision::Ieee, reserved_sms: 0 }
    }
}

/// c [m, n] = activation(a [m, k] · b [k, n]).
///
/// # Errors
/// Shapes that do not match; tensors on another device; launch errors.
pub fn multiply<T: Float + Element, C: Float + Element>(
    device: &Device,
    a: Tensor<'_, T, 2>,
    b: Tensor<'_, T, 2>,
    c: TensorMut<'_, C, 2>,
    options: Options,
) -> Result<()> {
    launch_matmul(device, a, b, None, AddendTensor::Nothing, c, options)
}

/// c [m, n] += activation(a [m, k] · b [k, n]), as for an accumulated gradient. Each element is rounded once.
///
/// # Errors
/// As [`multiply`].
pub fn accumulate<T: Float + Element, C: Float + Element>(
    device: &Device,
    a: Tensor<'_, T, 2>,
    b: Tensor<'_, T, 2>,
    c: TensorMut<'_, C, 2>,
    options: Options,
) -> Result<()> {
    launch_matmul(device, a, b, None, AddendTensor::Itself, c, options)
}

/// c [m, n] = other [m, n] + activation(a [m, k] · b [k, n]), as for a layer that adds to a residual stream.
///
/// # Errors
/// As [`multiply`].
pub fn multiply_add<T: Float + Element, C: Float + Element>(
    device: &Device,
    a: Tensor<'_, T, 2>,
    b: Tensor<'_, T, 2>,
    other: Tensor<'_, C, 2>,
    c: TensorMut<'_, C, 2>,
    options: Options,
) -> Result<()> {
    expect_shape("matmul", "other", other.shape(), c.shape())?;
    launch_matmul(device, a, b, None, AddendTensor::Other(other), c, options)
}

/// c [m, n] = activation(a [m, k] · b [k, n] + bias [n]): a linear layer, whose weight [n, k] is b transposed.
///
/// # Errors
/// As [`multiply`].
pub fn multiply_add_bias<T: Float + Element, C: Float + Element>(
    device: &Device,
    a: Tensor<'_, T, 2>,
    b: Tensor<'_, T, 2>,
    bias: Tensor<'_, T, 1>,
    c: TensorMut<'_, C, 2>,
    options: Options,
) -> Result<()> {
    expect_shape("matmul", "bias", bias.shape(), [b.shape()[1]])?;
    launch_matmul(device, a, b, Some((bias, Bias::Columns)), AddendTensor::Nothing, c, options)
}

/// The matrix that is added after the activation, with its tensor.
enum AddendTensor<'a, C: Float + Element> {
    Nothing,
    Itself,
    Other(Tensor<'a, C, 2>),
}

fn launch_matmul<'a, T: Float + Element, C: Float + Element>(
    device: &Device,
    a: Tensor<'a, T, 2>,
    b: Tensor<'a, T, 2>,
    bias: Option<(Tensor<'a, T, 1>, Bias)>,
    addend_tensor: AddendTensor<'a, C>,
    mut c: TensorMut<'_, C, 2>,
    options: Options,
) -> Result<()> {
    let few_rows = few_rows::<T>(device, [a.shape(), b.shape(), c.shape()]);
    if few_rows.unwrap_or_else(|| is_col_major(c.strides())) {
        // cᵀ = bᵀ·aᵀ, which is row-major or has few columns.
        let bias = bias.map(|(bias, _)| (bias, Bias::Rows));
        let addend_tensor = match addend_tensor {
            AddendTensor::Other(other) => AddendTensor::Other(other.transposed(0, 1)),
            same => same,
        };
        return launch_matmul(
            device,
            b.transposed(0, 1),
            a.transposed(0, 1),
            bias,
            addend_tensor,
            c.transposed(0, 1),
            options,
        );
    }
    // Without a bias or an addend the kernel does not read the pointer.
    let (bias, bias_stride, bias_along) = match bias {
        Some((bias, along)) => (bias.view(), bias.strides()[0], along),
        None => (View::empty(device), 1, Bias::None),
    };
    let (addend, other, [other_stride_m, other_stride_n]) = match addend_tensor {
        AddendTensor::Nothing => (Addend::None, View::empty(device), [0, 1]),
        AddendTensor::Itself => (addend_of_itself::<C>(device), View::empty(device), [0, 1]),
        AddendTensor::Other(other) => (Addend::Other, other.view(), other.strides()),
    };
    Matmul {
        a_col_major: is_col_major(a.strides()),
        b_col_major: is_col_major(b.strides()),
        a: &a,
        b: &b,
        bias: &bias,
        other: &other,
        c: &mut c,
        bias_stride,
        other_stride_m,
        other_stride_n,
        m_tile: tuned(),
        n_tile: tuned(),
        k_tile: tuned(),
        group: 8,
        bias_along,
        addend,
        activation: options.activation,
        precision: options.precision,
        persistent: tuned(),
        programs: sms(device, options.reserved_sms),
        replicas: tuned(),
    }
    .launch_tuned(device)
}

/// Whether a product of matrices a, b and c of these shapes is to be transposed, so that it has few columns instead of few
/// rows; `None` if it has neither, where that was not measured, and in programs without a compiler: code that is embedded
/// there is for products as they are. Shapes that a launch refuses stay, so that it names the matrix.
pub(crate) fn few_rows<T: Dtype>(device: &Device, [a, b, [m, n]]: [[usize; 2]; 3]) -> Option<bool> {
    const LARGE: usize = 1 << 30;
    if [a[0], a[1], b[1]] != [m, b[0], n] {
        return Some(false);
    }
    let hopper = matches!(device.target(), Target::Nvptx(arch) if arch >= GpuArch::Sm90a);
    let may = cfg!(feature = "llvm") && hopper && T::dtype().bytes() <= 2 && m.max(n) < LARGE;
    (may && m.min(n) <= FEW).then_some(m < n)
}

/// The SMs of a device without those that are reserved, at least one.
pub(crate) fn sms(device: &Device, reserved: u32) -> usize {
    device.info().compute_units.saturating_sub(reserved).max(1) as usize
}

/// How c is added to: by the L2 cache where that gives the same sum (up to subnormal numbers), which takes no registers
/// for its previous content.
fn addend_of_itself<C: Float>(device: &Device) -> Addend {
    let is_gpu = matches!(device.target(), Target::Nvptx(_));
    if is_gpu && C::dtype() == DType::F32 { Addend::Atomic } else { Addend::Itself }
}

/// Whether a configuration is worth measuring: producer warps load rows of 128 bytes or more, a thread has the registers for sums
/// in f64, and f64 needs short steps, and no `wgmma`.
fn keep(problem: &Problem, config: &Config) -> bool {
    let int = |name: &str| config.get::<usize>(name).unwrap_or(1);
    let bytes = problem.dtypes.first().map_or(4, |dtype| dtype.bytes());
    let sums = int("m_tile") * int("n_tile") / (32 * config.num_warps as usize);
    let Schedule { warp_specialize, wgmma_f32, .. } = config.schedule;
    (warp_specialize != Some(true) || bytes * int("k_tile") >= 128)
        && (bytes < 8 || sums <= 64 && int("k_tile") <= 32 && wgmma_f32.is_none())
}

/// The configuration where no tuning entry applies: the largest tiles, which read the operands less often, that leave work for all
/// SMs; small matrices get tiles of their size.
///
/// Those of `mma.sync` are the fastest of a few on an H200, in code for sm_80
/// (`harness/records/2026-11-29-h200-mma-sync.jsonl`, for 16 bits `…/2026-11-30-h200-ldmatrix.jsonl`), and fit the shared memory of
/// desktop GPUs.
fn default_config(problem: &Problem) -> Config {
    let bytes = problem.dtypes.first().map_or(4, |dtype| dtype.bytes());
    let hopper = matches!(problem.target, Target::Nvptx(arch) if arch >= GpuArch::Sm90a);
    let precision = problem.get("precision").unwrap_or(Precision::Ieee);
    let size = |name: &str| problem.int(name).unwrap_or(1) as usize;
    let of = TileChoice::new;
    let choices = match (problem.is_gpu(), bytes, precision) {
        (false, ..) => vec![of([64, 64, 64], 4, 1)],
        (true, 2, _) if hopper => {
            // Code that is compiled ahead of time is for usual sizes.
            let usual = || {
                let dtype = |i: usize| problem.dtypes.get(i).copied().unwrap_or(DType::F32);
                let memory =
                    Memory::of([dtype(0), dtype(1)], Addend::None, problem.get("b_col_major").unwrap_or(false));
                cut(["m", "n", "k"].map(size), SMS, memory)
            };
            return config_of_cut(problem, bytes, problem.get("cut").unwrap_or_else(usual));
        }
        (true, 2, _) => vec![of([128, 128, 32], 4, 3), of([64, 128, 32], 4, 4), of([64, 64, 64], 4, 4)],
        (true, 8, _) if hopper => vec![of([128, 128, 32], 8, 3), of([64, 64, 16], 4, 4), of([32, 32, 32], 4, 4)],
        (true, 8, _) => vec![of([64, 64, 16], 4, 3), of([32, 32, 32], 4, 2)],
        // Scalar FMAs: each of them reads both operands from shared memory.
        (true, _, Precision::Ieee) => vec![of([64, 64, 16], 4, 3)],
        // Splitting the operands (3xTF32) costs less the more each split operand is reused.
        (true, ..) if hopper => vec![of([128, 128, 32], 8, 3), of([64, 128, 32], 4, 3), of([64, 64, 32], 4, 4)],
        (true, _, Precision::Tf32) => vec![of([128, 256, 32], 8, 2), of([64, 128, 32], 4, 3), of([64, 64, 32], 4, 3)],
        (true, _, Precision::Tf32x3) => vec![of([64, 128, 32], 4, 3), of([64, 64, 32], 4, 3)],
    };
    let (smallest, extents) = (choices[choices.len() - 1], ["m", "n"].map(size));
    let largest = choices.into_iter().find(|tile| occupies(extents, [tile.m, tile.n])).unwrap_or(smallest);
    // The sizes in the key are powers of two.
    let fit = |name: &str, largest: usize| size(name).clamp(16, largest);
    let (m, n, k) = (fit("m", largest.m), fit("n", largest.n), fit("k", largest.k));
    // In tiles that are too small for eight warps, several warps would compute the same elements.
    let num_warps = if m * n < 64 * 128 { 4 } else { largest.num_warps };
    let config = Config::default().set("m_tile", m).set("n_tile", n).set("k_tile", k);
    let config = config.num_warps(num_warps).num_stages(largest.num_stages);
    let schedule = Schedule {
        wgmma_f32: (hopper && bytes == 4 && precision != Precision::Ieee).then_some(true),
        warp_specialize: (hopper && bytes == 8).then_some(true),
        ..Schedule::default()
    };
    Config { schedule, ..config }
}

/// Programs of a launch: with `persistent`, `replicas` for each of at most `programs` blocks.
pub(crate) fn grid(tiles: usize, persistent: bool, programs: usize, replicas: usize) -> usize {
    if persistent { tiles.min(programs) * replicas } else { tiles }
}

/// How programs share out the tiles of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Programs {
    /// A program for each tile.
    OfOneTile,
    /// Programs compute tile after tile.
    Persistent,
    /// Two persistent programs share an SM and take turns: one stores its tile while the other multiplies.
    Turns,
}

/// How a product of operands of one or two bytes is cut into tiles on Hopper.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cut {
    /// Rows and columns of a tile.
    pub tile: [usize; 2],
    pub programs: Programs,
}

/// In keys, as in `128x192`, `128x192p` or `128x192t`.
impl Constexpr for Cut {
    const TYPE: &'static str =
        "a tile, as in 128x192, 128x192p for persistent programs, or 128x192t for those that take turns";
    const PLACEHOLDER: Cut = Cut { tile: [64, 64], programs: Programs::OfOneTile };

    fn to_const(self) -> ConstValue {
        let [rows, columns] = self.tile;
        let suffix = match self.programs {
            Programs::OfOneTile => "",
            Programs::Persistent => "p",
            Programs::Turns => "t",
        };
        ConstValue::Variant(format!("{rows}x{columns}{suffix}"))
    }

    fn from_const(value: &ConstValue) -> Option<Cut> {
        let ConstValue::Variant(text) = value else { return None };
        let (size, programs) = match (text.strip_suffix('p'), text.strip_suffix('t')) {
            (Some(size), _) => (size, Programs::Persistent),
            (_, Some(size)) => (size, Programs::Turns),
            _ => (text.as_str(), Programs::OfOneTile),
        };
        let (rows, columns) = size.split_once('x')?;
        Some(Cut { tile: [rows.parse().ok()?, columns.parse().ok()?], programs })
    }

    fn key(self) -> u64 {
        let [rows, columns] = self.tile.map(|n| n as u64);
        rows << 32 | columns << 2 | self.programs as u64
    }
}

impl From<Cut> for KeyValue {
    fn from(cut: Cut) -> KeyValue {
        KeyValue::Exact(cut.to_const())
    }
}

/// A tile and its times in microseconds, of a step of 64 along k, and of a tile in addition to its steps: of programs of one
/// tile, of persistent programs, and of programs that take turns.
type TileTimes = ([usize; 2], [f64; 2], Option<[f64; 2]>, Option<[f64; 2]>);

/// Tiles for products with many rows. Robust least squares of relative errors over 152 products on an H100 and an H200,
/// median times of `harness/records/2026-11-27-h100-matmul-forms.jsonl` and `…-h200-…`; tiles that few of these products
/// have stay near the fit of `…-matmul-turns.jsonl`.
const TILES: [TileTimes; 19] = [
    ([64, 64], [0.133, 2.34], None, None),
    ([64, 80], [0.156, 3.36], None, None),
    ([64, 96], [0.173, 3.30], None, None),
    ([64, 128], [0.193, 2.92], None, None),
    ([64, 160], [0.228, 3.17], None, None),
    ([64, 192], [0.290, 2.57], None, None),
    ([128, 64], [0.212, 2.81], None, None),
    ([128, 80], [0.233, 3.16], None, None),
    ([128, 96], [0.255, 3.48], None, None),
    ([128, 112], [0.291, 4.03], Some([0.319, 1.27]), None),
    ([128, 128], [0.326, 3.35], Some([0.339, 0.81]), Some([0.338, 0.29])),
    ([128, 144], [0.384, 4.25], Some([0.388, 1.73]), Some([0.391, 0.28])),
    ([128, 160], [0.410, 4.41], Some([0.424, 1.27]), Some([0.423, 0.39])),
    ([128, 176], [0.443, 4.41], Some([0.464, 1.39]), Some([0.457, 0.45])),
    ([128, 192], [0.471, 3.82], Some([0.487, 1.29]), Some([0.488, 0.50])),
    ([128, 208], [0.519, 4.92], Some([0.529, 1.73]), Some([0.545, 0.55])),
    ([128, 224], [0.567, 4.84], Some([0.574, 1.64]), None),
    ([128, 240], [0.594, 5.00], Some([0.612, 1.69]), None),
    ([128, 256], [0.622, 4.75], Some([0.645, 1.63]), None),
];

/// What the cut of a product depends on in addition to its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Bytes per element of c that are written, and read where a matrix is added.
    pub bytes: usize,
    /// The most columns of tiles whose programs take turns: their threads have twice as many sums, and hold a matrix to add
    /// beside them (the previous content of c, or another matrix that is not in f32), or a few elements of it at a time
    /// (another matrix in f32).
    pub turns: usize,
    /// Whether rows of b are contiguous. Its columns are then loaded in panels of 64, of which the last one may have fewer, a
    /// power of two: the `wgmma` of a tile reads them all.
    pub b_rows: bool,
    /// Whether `wgmma` reads such a b as it is loaded: if its elements have two bytes.
    pub panels: bool,
}

impl Memory {
    fn of([operand, result]: [DType; 2], addend: Addend, b_col_major: bool) -> Memory {
        let accesses = if addend == Addend::None { 1 } else { 2 };
        let turns = match addend {
            Addend::None | Addend::Atomic => 208,
            Addend::Other if result == DType::F32 => 192,
            Addend::Other | Addend::Itself => 128,
        };
        let panels = operand.bytes() > 1;
        Memory { bytes: accesses * result.bytes(), turns, b_rows: !b_col_major, panels }
    }

    /// What a step of this cut takes in units of the table's, where the cut is possible.
    fn step(self, Cut { tile: [rows, columns], programs }: Cut) -> Option<f64> {
        /// With a last panel that is not full (fit to 80 products, medians of `2026-11-27-h200-matmul-gradients.jsonl`).
        const NARROW_PANEL: f64 = 1.02;
        if programs == Programs::Turns && columns > self.turns {
            return None;
        }
        match columns % 64 {
            0 => Some(1.0),
            _ if !self.b_rows => Some(1.0),
            16 | 32 if self.panels && rows == 128 && columns > 128 => Some(NARROW_PANEL),
            _ => None,
        }
    }
}

/// SMs of an H100 or H200.
pub(crate) const SMS: usize = 132;

/// The cut of a product of [m, k] and [k, n] on a GPU with this number of SMs: that of the shortest time by a model. An SM computes its tiles one after the
/// other, at a cost for each that does not depend on k (filling the pipeline, storing), most of which persistent programs
/// and programs that take turns hide.
pub(crate) fn cut(sizes: [usize; 3], sms: usize, memory: Memory) -> Cut {
    cut_among(sizes, sms, memory.bytes, |cut| memory.step(cut))
}

/// As [`cut`], of those for which `step` says what a step takes in units of the table's, as for sums that take more
/// registers, and for results of which an element takes this number of bytes.
pub(crate) fn cut_among([m, n, k]: [usize; 3], sms: usize, bytes: usize, step: impl Fn(Cut) -> Option<f64>) -> Cut {
    /// Persistent programs get their tiles in advance; without them, an SM takes the next tile when it is free.
    const LEAST_GAIN: f64 = 1.01;
    /// Microseconds before the first of several tiles of an SM and after the last.
    const ENDS: f64 = 3.0;
    /// Bytes per microsecond of results that are wider than those of two bytes, as fitted: an SM's share of the 3.35 TB/s of
    /// an H100's memory is 25 000.
    const STORED: f64 = 28_000.0;
    if n <= FEW && n <= m {
        let tile = [widest_in_fewest_rounds(m, [64, 128], sms), n.next_power_of_two().max(8)];
        return Cut { tile, programs: Programs::OfOneTile };
    }
    if m <= 64 {
        let tile = [64, widest_in_fewest_rounds(n, [32, 64, 128, 256], sms)];
        return Cut { tile, programs: Programs::OfOneTile };
    }
    let steps = k as f64 / 64.0;
    let times = TILES.iter().flat_map(|&(tile, alone, persistent, turns)| {
        let rounds = m.div_ceil(tile[0]).saturating_mul(n.div_ceil(tile[1])).div_ceil(sms.max(1)) as f64;
        let stored = |bytes: usize| (bytes * tile[0] * tile[1]) as f64 / STORED;
        let of = |times: Option<[f64; 2]>, programs| {
            let ([per_step, each], factor) = (times?, step(Cut { tile, programs })?);
            let of_sums = steps * per_step * factor + each + stored(bytes.saturating_sub(2));
            let all = rounds * of_sums.max(stored(bytes));
            match programs {
                Programs::OfOneTile => Some(all),
                Programs::Persistent | Programs::Turns => (rounds > 1.0).then_some(all + ENDS),
            }
        };
        let of_alone = of(Some(alone), Programs::OfOneTile);
        let of_persistent = of(persistent, Programs::Persistent);
        let of_persistent = of_persistent.filter(|time| of_alone.is_some_and(|alone| alone > LEAST_GAIN * time));
        let all = [
            (of_alone, Programs::OfOneTile),
            (of_persistent, Programs::Persistent),
            (of(turns, Programs::Turns), Programs::Turns),
        ];
        all.into_iter().filter_map(move |(time, programs)| Some((time?, Cut { tile, programs })))
    });
    times.min_by(|a, b| a.0.total_cmp(&b.0)).map_or(Cut::PLACEHOLDER, |(_, cut)| cut)
}

/// Whether tiles of this size give programs for most SMs of a Hopper GPU.
pub(crate) fn occupies([m, n]: [usize; 2], [rows, columns]: [usize; 2]) -> bool {
    m.div_ceil(rows).saturating_mul(n.div_ceil(columns)) >= 120
}

/// The most rows or columns of a product that is bound by reading one operand, and is cut by the rows or columns of the result
/// that this operand gives.
const FEW: usize = 32;

/// How many of n rows or columns a tile has, where reading them takes the time: an SM reads those of its rounds of tiles one
/// after the other. Of `sizes`, in ascending order, the widest of those with which an SM reads the fewest.
fn widest_in_fewest_rounds<const N: usize>(n: usize, sizes: [usize; N], sms: usize) -> usize {
    let read = |size: &usize| n.div_ceil(*size).div_ceil(sms.max(1)).max(1).saturating_mul(*size);
    sizes.into_iter().rev().min_by_key(read).unwrap_or(64)
}

/// The configuration for Hopper of a product of operands of one or two bytes. Producer warps load rows of 128 bytes, and of
/// 256 or 512 for narrow tiles of two-byte types, whose steps would be shorter than the waits between them. The compiler
/// reduces the stages to those that fit.
pub(crate) fn config_of_cut(problem: &Problem, bytes: usize, Cut { tile, programs }: Cut) -> Config {
    let [m_tile, n_tile] = tile;
    // Bytes in flight bound products of few rows: as many of one-byte types as of two-byte types (`…-matmul-few-rows.jsonl`).
    let most_stages = if m_tile == 64 && n_tile <= 64 { 16 / bytes } else { 8 };
    let size = |name: &str| problem.int(name).unwrap_or(1) as usize;
    let row_bytes = match n_tile {
        ..=16 if m_tile == 64 && bytes == 2 => 512,
        ..=127 if m_tile == 64 && bytes == 2 => 256,
        _ => 128,
    };
    let k_tile = size("k").clamp(32, row_bytes / bytes);
    let steps = size("k").div_ceil(k_tile);
    let turns = programs == Programs::Turns;
    let config = Config::default().set("m_tile", m_tile).set("n_tile", n_tile).set("k_tile", k_tile);
    let config = config.set("persistent", programs != Programs::OfOneTile).set("replicas", if turns { 2 } else { 1 });
    let config = config.num_warps(if m_tile > 64 && !turns { 8 } else { 4 });
    let config = config.num_stages(most_stages.min(steps.max(2)) as u32);
    Config { schedule: Schedule { warp_specialize: Some(true), ..Schedule::default() }, ..config }
}

/// Tile sizes in elements, with the warps and pipeline stages that suit them.
#[derive(Clone, Copy)]
struct TileChoice {
    m: usize,
    n: usize,
    k: usize,
    num_warps: u32,
    num_stages: u32,
}

impl TileChoice {
    fn new([m, n, k]: [usize; 3], num_warps: u32, num_stages: u32) -> TileChoice {
        TileChoice { m, n, k, num_warps, num_stages }
    }
}

/// The reference in f64, on dense row-major slices: c [m, n] of a [m, k] and b [k, n].
pub fn reference(a: &[f64], b: &[f64], [m, n, k]: [usize; 3]) -> Vec<f64> {
    let mut c = vec![0.0; m * n];
    for i in 0..m {
        for l in 0..k {
            for j in 0..n {
                c[i * n + j] += a[i * k + l] * b[l * n + j];
            }
        }
    }
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text([m, n, k]: [usize; 3]) -> String {
        cut([m, n, k], SMS, Memory::of([DType::BF16; 2], Addend::None, true)).to_const().to_string()
    }

    #[test]
    fn products_of_few_rows_are_cut_by_columns() {
        assert_eq!([[0, 4096, 4096], [48, 4096, 4096], [64, 64, 64]].map(text), ["64x32"; 3]);
        // Not two rounds of tiles of half the width.
        assert_eq!([[33, 6144, 4096], [64, 8192, 8192]].map(text), ["64x64"; 2]);
        assert_eq!([[64, 14336, 4096], [64, 16384, 4096]].map(text), ["64x128"; 2]);
        assert_eq!([text([64, 131_072, 4096]), text([64, usize::MAX, 1])], ["64x256", "64x128"]);
    }

    #[test]
    fn products_of_few_columns_are_cut_by_rows() {
        assert_eq!([[4096, 1, 4096], [8192, 8, 8192]].map(text), ["64x8"; 2]);
        assert_eq!([[8192, 9, 8192], [4096, 16, 0], [8192, 32, 64]].map(text), ["64x16", "64x16", "64x32"]);
        assert_eq!([[16384, 1, 16384], [16384, 32, 16384], [usize::MAX, 0, 1]].map(text), ["128x8", "128x32", "128x8"]);
        assert_eq!(text([8192, 33, 8192]), "64x64");
    }

    #[test]
    fn large_products_are_cut_by_rounds_of_the_sms() {
        assert_eq!([[128, 64, 64], [512, 768, 3072], [512, 1024, 4096]].map(text), ["64x64"; 3]);
        // 128 tiles of each, and 124 of 128 × 208.
        assert_eq!([[512, 1280, 5120], [1024, 1024, 1024], [4096, 768, 768]].map(text), ["64x80", "64x128", "128x192"]);
        assert_eq!(
            [[512, 2560, 10240], [512, 5120, 1280], [512, 6400, 1600]].map(text),
            ["64x160", "128x160", "128x208"]
        );
        // One round: persistent programs have nothing to hide.
        assert_eq!(text([2048, 2048, 2048]), "128x256");
        // Two rounds of 128 tiles with few steps, and of 128 with more.
        assert_eq!([[4096, 1280, 1280], [4096, 1600, 1600]].map(text), ["128x160t", "128x208t"]);
        assert_eq!(text([usize::MAX, usize::MAX, 1]), "128x128p");
    }

    #[test]
    fn rows_of_b_and_wide_results_change_the_cut() {
        let text = |sizes, memory| cut(sizes, SMS, memory).to_const().to_string();
        let rows = Memory::of([DType::BF16; 2], Addend::None, false);
        assert_eq!([[512, 1280, 5120], [4096, 2560, 2560]].map(|size| text(size, rows)), ["64x128", "128x128t"]);
        // Gradients of weights in f32. Threads hold other matrices that they add beside the sums.
        let of = |addend| Memory::of([DType::BF16, DType::F32], addend, true);
        let [stored, added, read, held] = [Addend::None, Addend::Atomic, Addend::Other, Addend::Itself].map(of);
        assert_eq!([stored.bytes, added.bytes, read.bytes], [4, 8, 8]);
        let turns = |tile| Cut { tile, programs: Programs::Turns };
        let narrow = Memory::of([DType::BF16; 2], Addend::Other, true);
        assert_eq!(
            [added, read, held, narrow].map(|of| of.step(turns([128, 192])).is_some()),
            [true, true, false, false]
        );
        assert_eq!([held, rows].map(|of| of.step(turns([128, 128]))), [Some(1.0); 2]);
        assert_eq!(
            [128, 144, 160, 176, 192, 208].map(|columns| rows.step(turns([128, columns])).is_some()),
            [true, true, true, false, true, true]
        );
    }

    #[test]
    fn cuts_survive_their_text() {
        for cut in [
            Cut { tile: [128, 192], programs: Programs::Persistent },
            Cut { tile: [128, 176], programs: Programs::Turns },
            Cut { tile: [64, 80], programs: Programs::OfOneTile },
        ] {
            assert_eq!(Cut::from_const(&cut.to_const()), Some(cut));
        }
        for wrong in ["", "p", "64", "64x", "axb", "64x64q"] {
            assert_eq!(Cut::from_const(&ConstValue::Variant(wrong.into())), None, "{wrong}");
        }
    }
}
