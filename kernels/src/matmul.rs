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
use crate::cut::{FEW, Memory, SMS, config_of_cut, cut, occupies};
use crate::tensor::{Tensor, TensorMut, expect_shape};
use tilewright_codegen::ir::DType;
use tilewright_codegen::target::{GpuArch, Schedule, Target};
use tilewright_runtime::autotune::{Config, Problem};
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
    key = [a_col_major, b_col_major, precision, m, n, k, cut = cut([m, n, k], programs, Memory::of([T::dtype(), C::dtype()], addend, b_col_major).of_rows(T::dtype(), [if a_col_major { m } else { k }, if b_col_major { k } else { n }]))],
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
