//! RMSNorm fused with the residual addition and dtype conversion of its backward pass.
//!
//! The residual stream x is f32, because every block adds to it and small additions must not be rounded away; blocks
//! compute in a shorter dtype. [`forward`] reads x and writes its norm y[r, j] = x[r, j] · sᵣ · w[j], with sᵣ =
//! 1/√(meanⱼ x[r, j]² + ε), in that dtype. [`backward`] takes the gradient g of y, and the gradient h of the residual
//! stream after the branch of the norm, and writes
//!
//! - ∂L/∂x = h + s · (g·w − x̂ · meanⱼ(g·w·x̂)) with x̂ = x·s, in f32 and rounded to the compute dtype;
//! - on request, the recomputed y, so that it need not be saved for the weight gradient of the next linear layer;
//! - one row per program of the partial sums of ∂L/∂w[j] = Σᵣ g[r, j] · x̂[r, j].
//!
//! Norm, residual addition and conversions are one launch. [`add_weight_gradients`] reduces the partial sums of all
//! norms of a model in one launch, in a fixed order.

use candle_core::{Result, Tensor};
use tilewright::kernels::FloatElement;
use tilewright::prelude::*;

use tilewright_candle::memory::{Elem, OutputAlloc, Read, for_float_type, kernel_error, write};

/// The block of `tile` = (rows, columns) of a dense matrix with rows of `d` elements, starting at row `first`.
#[device_fn]
fn block<T: Dtype>(
    base: Ptr<T>,
    rows: Scalar<i32>,
    d: Scalar<i32>,
    first: Scalar<i32>,
    tile: (usize, usize),
) -> BlockPtr<T> {
    make_block_ptr(
        base,
        shape = [rows, d],
        strides = [d.to::<i64>(), 1],
        offsets = [first, 0],
        block_shape = [tile.0, tile.1],
        order = [1, 0],
    )
}

/// The block of `tile` elements of a vector of `n`, starting at `first`.
#[device_fn]
fn part<T: Dtype>(base: Ptr<T>, n: Scalar<i32>, first: Scalar<i32>, tile: usize) -> BlockPtr<T> {
    make_block_ptr(base, shape = [n], strides = [1], offsets = [first], block_shape = [tile], order = [0])
}

/// y = x · rstd · w and rstd = 1/√(mean(x²) + eps), for dense x and y [rows, d].
///
/// Grid: one program per tile of rows; `d_tile` ≥ d.
#[kernel]
pub fn residual_rms_norm_fwd<S: Float, T: Float>(
    x: In<S>,
    w: In<f32>,
    y: Out<T>,
    rstd: Out<f32>,
    #[no_specialize] rows: i32,
    d: i32,
    eps: f32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let tile = (rows_tile, d_tile);
    let first = program_id(0) * rows_tile;
    let xt = load(block(x, rows, d, first, tile), boundary_check = [0, 1], padding = zero).to::<f32>();
    let wt = load(part(w, d, scalar::<i32>(0), d_tile), boundary_check = [0], padding = zero);
    let s = rsqrt(sum(xt * xt, axis = 1) / d.to::<f32>() + eps);
    store(part(rstd, rows, first, rows_tile), s, boundary_check = [0]);
    let yt = xt * s.expand_dims(1) * wt.expand_dims(0);
    store(block(y, rows, d, first, tile), yt.to::<T>(), boundary_check = [0, 1]);
}

/// grad_x = ∂L/∂x of the norm, plus grad_sum with `accumulate`; the same rounded in `rounded_out` with `write_rounded`;
/// and partial\[p, j\] = Σ grad_y\[r, j\] · x\[r, j\] · rstd\[r\] over the rows r of program p. With `recompute`, also
/// the y of the forward pass.
///
/// Each program processes `steps` tiles of rows; `d_tile` ≥ d.
#[kernel]
pub fn residual_rms_norm_bwd<S: Float, T: Float>(
    x: In<S>,
    w: In<f32>,
    rstd: In<f32>,
    grad_y: In<T>,
    grad_sum: In<S>,
    grad_x: Out<S>,
    rounded_out: Out<T>,
    y: Out<T>,
    partial: Out<f32>,
    #[no_specialize] rows: i32,
    d: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
    #[constexpr] steps: usize,
    #[constexpr] accumulate: bool,
    #[constexpr] write_rounded: bool,
    #[constexpr] recompute: bool,
) {
    let tile = (rows_tile, d_tile);
    let program = program_id(0);
    let wt = load(part(w, d, scalar::<i32>(0), d_tile), boundary_check = [0], padding = zero).expand_dims(0);
    let mut total = zeros::<f32>([1, d_tile]);
    for step in range(0, steps) {
        let first = (program * steps + step) * rows_tile;
        let s = load(part(rstd, rows, first, rows_tile), boundary_check = [0], padding = zero).expand_dims(1);
        let xt = load(block(x, rows, d, first, tile), boundary_check = [0, 1], padding = zero).to::<f32>();
        let g = load(block(grad_y, rows, d, first, tile), boundary_check = [0, 1], padding = zero).to::<f32>();
        let normed = xt * s;
        let gw = g * wt;
        let mean = sum(gw * normed, axis = 1, keep_dims = true) / d.to::<f32>();
        let mut grad = (gw - normed * mean) * s;
        if accumulate {
            grad += load(block(grad_sum, rows, d, first, tile), boundary_check = [0, 1], padding = zero).to::<f32>();
        }
        store(block(grad_x, rows, d, first, tile), grad.to::<S>(), boundary_check = [0, 1]);
        if write_rounded {
            store(block(rounded_out, rows, d, first, tile), grad.to::<T>(), boundary_check = [0, 1]);
        }
        if recompute {
            store(block(y, rows, d, first, tile), (normed * wt).to::<T>(), boundary_check = [0, 1]);
        }
        total += sum(g * normed, axis = 0, keep_dims = true);
    }
    store(block(partial, num_programs(0), d, program, (1, d_tile)), total, boundary_check = [1]);
}

/// grad_w\[n · norm_stride + j\] = Σᵢ partial\[n, i, j\], or with `accumulate` += that sum, for the norms n.
///
/// Grid: (tiles of columns, norms).
#[kernel]
pub fn residual_rms_norm_weight_grads<G: Float>(
    partial: In<f32>,
    grad_w: InOut<G>,
    norm_stride: i64,
    rows: i32,
    d: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
    #[constexpr] accumulate: bool,
) {
    let (first, norm) = (program_id(0) * d_tile, program_id(1).to::<i64>());
    let from = partial + norm * rows.to::<i64>() * d.to::<i64>();
    let mut at = block(from, rows, d, scalar::<i32>(0), (rows_tile, d_tile)).advance([0, first]);
    let mut total = zeros::<f32>([rows_tile, d_tile]);
    for _ in range(0, cdiv(rows, rows_tile)) {
        total += load(at, boundary_check = [0, 1], padding = zero);
        at = at.advance([rows_tile, 0]);
    }
    let target = part(grad_w + norm * norm_stride, d, first, d_tile);
    let mut gradient = sum(total, axis = 0);
    if accumulate {
        gradient += load(target, boundary_check = [0], padding = zero).to::<f32>();
    }
    store(target, gradient.to::<G>(), boundary_check = [0]);
}

/// Largest d: the kernels keep a row in registers.
pub const MAX_D: usize = 16_384;

/// How rows are distributed over programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    rows_tile: usize,
    d_tile: usize,
    /// Tiles per program.
    steps: usize,
    programs: usize,
    num_warps: u32,
}

impl Plan {
    /// Chooses tiles of up to 2048 elements, or of one row if `d` is larger, with 16 elements per thread up to 16
    /// warps, and at most `max_programs` programs.
    fn new([rows, d]: [usize; 2], max_programs: usize) -> Result<Plan> {
        if d == 0 || d > MAX_D || rows > i32::MAX as usize / 2 {
            let message =
                format!("expected rows of 1 to {MAX_D} elements and less than 2^30 rows, found {rows} rows of {d}");
            return Err(candle_core::Error::Msg(message));
        }
        let d_tile = d.next_power_of_two().max(16);
        let rows_tile = (2048 / d_tile).min((rows / 256).max(1).next_power_of_two()).max(1);
        let tiles = rows.div_ceil(rows_tile);
        let steps = tiles.div_ceil(max_programs).max(1);
        let num_warps = ((rows_tile * d_tile / 512) as u32).clamp(4, 16);
        Ok(Plan { rows_tile, d_tile, steps, programs: tiles.div_ceil(steps), num_warps })
    }

    fn config(&self) -> LaunchConfig {
        LaunchConfig::new(self.programs).num_warps(self.num_warps)
    }
}

/// Largest number of programs of a backward pass, and of partial sums per weight. About three per SM of a large GPU,
/// which are all resident.
const MAX_PROGRAMS: usize = 384;

/// Number of partial sums per weight that [`backward`] writes for a residual stream [rows, d].
///
/// # Errors
/// A d above [`MAX_D`].
pub fn num_partials(shape: [usize; 2]) -> Result<usize> {
    Plan::new(shape, MAX_PROGRAMS).map(|plan| plan.programs)
}

fn shape_of(x: &Tensor) -> Result<[usize; 2]> {
    let d = x.dims().last().copied().unwrap_or(0);
    Ok([x.elem_count() / d.max(1), d])
}

/// Returns (y, rstd [rows]) for a residual stream x [.., d] and weights w [d], both f32.
///
/// # Errors
/// A d above [`MAX_D`], and those of the launch.
pub fn forward<T: Elem + FloatElement>(x: &Tensor, w: &Tensor, eps: f64) -> Result<(Tensor, Tensor)> {
    let [rows, d] = shape_of(x)?;
    let plan = Plan::new([rows, d], usize::MAX)?;
    let mut y = OutputAlloc::<T>::new(x.device(), rows * d)?;
    let mut rstd = OutputAlloc::<f32>::new(x.device(), rows)?;
    {
        let (x, w) = (Read::<f32>::new(x)?, Read::<f32>::new(w)?);
        ResidualRmsNormFwd {
            x: &x.view()?,
            w: &w.view()?,
            y: &mut y.view()?,
            rstd: &mut rstd.view()?,
            rows: rows as i32,
            d: d as i32,
            eps: eps as f32,
            rows_tile: plan.rows_tile,
            d_tile: plan.d_tile,
        }
        .launch_with(x.device(), &plan.config())
        .map_err(kernel_error)?;
    }
    Ok((y.into_tensor(x.shape()), rstd.into_tensor(rows)))
}

/// The gradient of the residual stream: f32, and rounded to the compute dtype.
#[derive(Clone)]
pub struct ResidualGrad {
    pub f32: Tensor,
    pub rounded: Tensor,
}

/// Arguments of [`backward`].
#[derive(Clone, Copy)]
pub struct Backward<'a> {
    /// The residual stream before the norm, f32 [.., d].
    pub x: &'a Tensor,
    /// f32 [d].
    pub w: &'a Tensor,
    /// f32 [rows].
    pub rstd: &'a Tensor,
    /// Gradient of y, in the compute dtype.
    pub grad_y: &'a Tensor,
    /// Gradient of the residual stream after the branch of the norm, f32; `None` if there is no residual connection.
    pub residual_grad: Option<&'a Tensor>,
    /// Partial sums of ∂L/∂w of all norms, f32 [norms, sums, d].
    pub partials: &'a Tensor,
    /// The norm, a row of `partials`.
    pub index: usize,
    /// Whether to recompute y.
    pub recompute: bool,
}

/// Returns ∂L/∂x [.., d] plus `residual_grad`, and with `recompute` the recomputed y. Writes the partial sums of ∂L/∂w.
///
/// # Errors
/// As [`forward`].
pub fn backward<T: Elem + FloatElement>(arguments: Backward<'_>) -> Result<(ResidualGrad, Option<Tensor>)> {
    let Backward { x, w, rstd, grad_y, residual_grad, partials, index, recompute } = arguments;
    let [rows, d] = shape_of(x)?;
    let plan = Plan::new([rows, d], MAX_PROGRAMS)?;
    let is_f32 = <T as candle_core::WithDType>::DTYPE == candle_core::DType::F32;
    let mut grad_x = OutputAlloc::<f32>::new(x.device(), rows * d)?;
    let mut rounded_out = OutputAlloc::<T>::new(x.device(), if is_f32 { 1 } else { rows * d })?;
    let mut y = OutputAlloc::<T>::new(x.device(), if recompute { rows * d } else { 1 })?;
    let shape = x.shape();
    {
        // Without a gradient to accumulate, the kernel does not read this argument.
        let (accumulate, residual_grad) = (residual_grad.is_some(), Read::<f32>::new(residual_grad.unwrap_or(x))?);
        let (x, w, rstd) = (Read::<f32>::new(x)?, Read::<f32>::new(w)?, Read::<f32>::new(rstd)?);
        let grad_y = Read::<T>::new(grad_y)?;
        write::<f32, ()>(&partials.narrow(0, index, 1)?, |device, mut sums| {
            ResidualRmsNormBwd {
                x: &x.view()?,
                w: &w.view()?,
                rstd: &rstd.view()?,
                grad_y: &grad_y.view()?,
                grad_sum: &residual_grad.view()?,
                grad_x: &mut grad_x.view()?,
                rounded_out: &mut rounded_out.view()?,
                y: &mut y.view()?,
                partial: &mut sums,
                rows: rows as i32,
                d: d as i32,
                rows_tile: plan.rows_tile,
                d_tile: plan.d_tile,
                steps: plan.steps,
                accumulate,
                write_rounded: !is_f32,
                recompute,
            }
            .launch_with(device, &plan.config())
            .map_err(kernel_error)
        })?;
    }
    let f32 = grad_x.into_tensor(x.shape());
    let rounded = if is_f32 { f32.clone() } else { rounded_out.into_tensor(x.shape()) };
    Ok((ResidualGrad { f32, rounded }, recompute.then(|| y.into_tensor(shape))))
}

/// Reduces the partial sums that [`backward`] wrote to `partial` [norms, sums, d], and accumulates the weight gradients
/// into `grads`, a flat tensor: those of norm n into the d elements from `first` + n · `norm_stride` on. Without
/// `accumulate` it overwrites them.
///
/// # Errors
/// Ranges outside of the flat tensor, and those of the launch.
pub fn add_weight_gradients(
    partial: &Tensor,
    grads: &Tensor,
    [first, norm_stride]: [usize; 2],
    accumulate: bool,
) -> Result<()> {
    let (norms, rows, d) = partial.dims3()?;
    if norms == 0 {
        return Ok(());
    }
    let partial = Read::<f32>::new(partial)?;
    let len = (norms - 1) * norm_stride + d;
    for_float_type!(grads.dtype(), "a gradient", G => write::<G, ()>(&grads.narrow(0, first, len)?, |device, mut grad_w| {
        let (rows_tile, d_tile) = if device.is_cuda() { (64, 32) } else { (8, 256) };
        ResidualRmsNormWeightGrads {
            partial: &partial.view()?,
            grad_w: &mut grad_w,
            norm_stride: norm_stride as i64,
            rows: rows as i32,
            d: d as i32,
            rows_tile,
            d_tile,
            accumulate,
        }
        .launch(device, [d.div_ceil(d_tile), norms, 1])
        .map_err(kernel_error)
    }))
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use half::bf16;
    use tilewright::kernels::rms_norm::reference;

    use super::*;

    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| (((i + 1) * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0).collect()
    }

    fn tensor(values: &[f32], shape: &[usize]) -> Tensor {
        Tensor::from_slice(values, shape, &Device::Cpu).unwrap()
    }

    fn wide(values: &[f32]) -> Vec<f64> {
        values.iter().map(|&x| x.into()).collect()
    }

    #[track_caller]
    fn close(found: &Tensor, expected: &[f64], tolerance: f64) {
        let found = found.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let difference: f64 = found.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum();
        let size: f64 = expected.iter().map(|b| b * b).sum();
        assert!(
            found.len() == expected.len() && (difference / size).sqrt() <= tolerance,
            "{:.1e}",
            (difference / size).sqrt()
        );
    }

    fn check<T: Elem + FloatElement>(dtype: DType, [rows, d]: [usize; 2], tolerance: f64) {
        let eps = 1e-5;
        let (x, w, residual_grad) = (numbers(rows * d, 1), numbers(d, 2), numbers(rows * d, 4));
        let grad_y = tensor(&numbers(rows * d, 3), &[rows, d]).to_dtype(dtype).unwrap();
        let grad_values = grad_y.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
        let (want_y, want_rstd) = reference::forward(&wide(&x), &wide(&w), eps);
        let (want_x, want_w) = reference::backward(&wide(&x), &wide(&w), &grad_values, eps);
        let with: Vec<f64> = want_x.iter().zip(&residual_grad).map(|(a, b)| a + f64::from(*b)).collect();

        let (x, w, residual_grad) = (tensor(&x, &[1, rows, d]), tensor(&w, &[d]), tensor(&residual_grad, &[rows, d]));
        let (y, rstd) = forward::<T>(&x, &w, eps).unwrap();
        assert_eq!((y.dtype(), y.dims()), (dtype, [1, rows, d].as_slice()));
        close(&y, &want_y, tolerance);
        close(&rstd, &want_rstd, 1e-6);

        let norm_stride = d.next_multiple_of(64);
        let grads = Tensor::full(0.5_f32, 100 + 3 * norm_stride, &Device::Cpu).unwrap();
        let partials = Tensor::full(f32::NAN, (2, num_partials([rows, d]).unwrap(), d), &Device::Cpu).unwrap();
        let (x, w, rstd, grad_y, partials) = (&x, &w, &rstd, &grad_y, &partials);
        let alone = Backward { x, w, rstd, grad_y, residual_grad: None, partials, index: 0, recompute: false };
        let with_residual = Backward { residual_grad: Some(&residual_grad), index: 1, recompute: true, ..alone };
        let [alone, with_residual] = [alone, with_residual].map(|arguments| backward::<T>(arguments).unwrap());
        assert!(alone.1.is_none());
        let recomputed = with_residual
            .1
            .as_ref()
            .map(|y| y.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap());
        close(&y, &recomputed.unwrap(), if dtype == DType::F32 { 1e-6 } else { 1e-3 });
        for ((gradient, _), want) in [(alone, &want_x), (with_residual, &with)] {
            close(&gradient.f32, want, 1e-5);
            close(&gradient.rounded, want, tolerance);
            assert_eq!((gradient.rounded.dtype(), gradient.f32.dtype()), (dtype, DType::F32));
        }
        for (accumulate, before) in [(true, 0.5), (false, 0.0)] {
            add_weight_gradients(partials, &grads, [100, norm_stride], accumulate).unwrap();
            let expected: Vec<f64> = want_w.iter().map(|w| w + before).collect();
            for norm in 0..2 {
                close(&grads.narrow(0, 100 + norm * norm_stride, d).unwrap(), &expected, 1e-5);
            }
            let untouched = grads.narrow(0, 100 + 2 * norm_stride, norm_stride).unwrap().to_vec1::<f32>().unwrap();
            assert!(untouched.iter().all(|x| *x == 0.5));
            assert_eq!(grads.narrow(0, 0, 100).unwrap().to_vec1::<f32>().unwrap(), [0.5; 100]);
        }
    }

    #[test]
    fn norms_and_gradients_match_f64() {
        for shape in [[1, 2], [5, 33], [70, 64], [600, 48], [3, 5000]] {
            check::<f32>(DType::F32, shape, 1e-5);
            check::<bf16>(DType::BF16, shape, 1e-2);
        }
        let x = tensor(&[0.0; 20_000], &[1, 20_000]);
        let message = forward::<f32>(&x, &tensor(&[0.0; 20_000], &[20_000]), 1e-5).unwrap_err().to_string();
        assert!(message.contains("16384"), "{message}");
    }

    #[test]
    fn plans_cover_all_rows() {
        for (rows, d) in [(1, 1), (512, 768), (4096, 768), (4096, 2560), (100_000, 1600), (513, 1024)] {
            for max_programs in [usize::MAX, MAX_PROGRAMS] {
                let plan = Plan::new([rows, d], max_programs).unwrap();
                let covered = plan.programs * plan.steps * plan.rows_tile;
                assert!(plan.programs <= max_programs && covered >= rows, "{plan:?}");
                assert!(covered < rows + (plan.programs + plan.steps) * plan.rows_tile, "{plan:?}");
            }
        }
    }

    /// The kernels compile for GPUs with the constants of a model's launches.
    #[test]
    fn kernels_compile_for_gpus() {
        use tilewright::codegen::ir::DType;
        use tilewright::codegen::lang::kernel::{ConstValue, Specialization};
        use tilewright::codegen::pipeline;
        use tilewright::codegen::target::{CompileOptions, GpuArch};

        for (rows, d) in [(512, 768), (4096, 1600), (4096, 2560)] {
            let plan = Plan::new([rows, d], MAX_PROGRAMS).unwrap();
            let sizes = [("rows_tile", plan.rows_tile), ("d_tile", plan.d_tile), ("steps", plan.steps)];
            let sizes = sizes.map(|(name, size)| (name, ConstValue::Int(size as i64)));
            let flags = ["accumulate", "write_rounded", "recompute"].map(|name| (name, ConstValue::Bool(true)));
            let consts: Vec<_> = sizes.into_iter().chain(flags).collect();
            let types = [DType::F32, DType::BF16];
            let forward = RESIDUAL_RMS_NORM_FWD.record(&types, &consts[..2], &Specialization::default()).unwrap();
            let backward = RESIDUAL_RMS_NORM_BWD.record(&types, &consts, &Specialization::default()).unwrap();
            let tiles = [
                ("rows_tile", ConstValue::Int(64)),
                ("d_tile", ConstValue::Int(32)),
                ("accumulate", ConstValue::Bool(true)),
            ];
            let weights =
                RESIDUAL_RMS_NORM_WEIGHT_GRADS.record(&[DType::BF16], &tiles, &Specialization::default()).unwrap();
            for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
                let options = CompileOptions { num_warps: plan.num_warps, ..CompileOptions::default() };
                for func in [&forward, &backward, &weights] {
                    assert!(pipeline::compile_gpu(func, arch, &options, &mut ()).is_ok(), "{arch:?} {d}");
                }
            }
        }
    }
}
