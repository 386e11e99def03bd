//! Cross-entropy of logits x [rows, d] and one target t per row: loss[r] = Lᵣ − x[r, tᵣ] with the log-sum-exp Lᵣ = log
//! Σⱼ exp x[r, j], and its gradient.
//!
//! The forward pass reads the logits once, with a sum that is rescaled whenever the maximum grows (Milakov and
//! Gimelshein, "Online normalizer calculation for softmax", 2018), and saves L (`lse`). With g[r] = ∂ℓ/∂loss[r] for
//! the objective ℓ
//!
//! - ∂ℓ/∂x[r, j] = g[r] · (exp(x[r, j] − Lᵣ) − [j = tᵣ]).
//!
//! A row whose target is `ignore_index` has loss 0 and gradient 0. A target that is neither `ignore_index` nor a column
//! gives NaN, so that the error is visible.

use crate::blocks::{ElementwiseTiles, fast_exp, tile_start};
use crate::tensor::{FloatElement, IndexElement, Tensor, TensorMut, extent};
use crate::unaligned_rows::{UnalignedRows, aligned_span, head_tail_columns, vector_tile};
use tilewright_runtime::autotune::{Config, Problem};
use tilewright_runtime::prelude::*;

/// loss and lse (L) of each row, in f32, natural logarithm.
///
/// One program per tile of rows, which loops over the columns. A row has `slots` accumulators (maximum and sum), which
/// are combined after the loop: with one slot per thread, which takes `size_per_thread` contiguous elements at a time,
/// the loop needs no synchronization. Rows that are not aligned to 16 bytes are read in aligned vectors of `vector`
/// elements; the peeled head and tail are one more accumulator.
#[autotune(
    configs = [
        Config(rows_tile = 1, d_tile = 2048, slots = 128, num_warps = 4),
        Config(rows_tile = 1, d_tile = 4096, slots = 128, num_warps = 4),
        Config(rows_tile = 1, d_tile = 4096, slots = 256, num_warps = 8),
        Config(rows_tile = 1, d_tile = 8192, slots = 256, num_warps = 8),
        Config(rows_tile = 1, d_tile = 8192, slots = 512, num_warps = 16),
        Config(rows_tile = 1, d_tile = 1024, slots = 64, num_warps = 2),
        Config(rows_tile = 1, d_tile = 1024, slots = 128, num_warps = 4),
        Config(rows_tile = 2, d_tile = 1024, slots = 128, num_warps = 4),
        Config(rows_tile = 2, d_tile = 2048, slots = 128, num_warps = 4),
        Config(rows_tile = 4, d_tile = 1024, slots = 128, num_warps = 4),
        Config(rows_tile = 4, d_tile = 1024, slots = 256, num_warps = 8),
    ],
    key = [size_per_thread, vector, d, rows],
    default = default_forward,
    tables = crate::tuned::TABLES,
)]
#[kernel(grid = cdiv(rows, rows_tile))]
#[alias(lead = misalignment, neighbours = size_per_thread)]
pub fn cross_entropy_fwd<T: Float, I: Int>(
    logits: Tensor<T, (rows, d)>,
    targets: Tensor<I, (rows,)>,
    loss: TensorMut<f32, (rows,)>,
    lse: TensorMut<f32, (rows,)>,
    #[no_specialize] ignore_index: i64,
    #[no_specialize] misalignment: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
    #[constexpr] slots: usize,
    #[constexpr = 1] size_per_thread: usize,
    #[constexpr = 0] vector: usize,
) {
    let size_per_thread = size_per_thread.min(d_tile);
    let slots = slots.min(d_tile / size_per_thread);
    let first_row = program_id(0) * rows_tile;
    let mut block = logits.block([first_row, 0], [rows_tile, d_tile]);
    let row = first_row + arange(0, rows_tile);
    let row_starts = (row * logits.stride(0), row < rows);
    let head_tail = if vector > 0 {
        let (column, inside) = head_tail_columns(row_starts, d, misalignment, vector);
        load(logits.ptr() + (row_starts.0.expand_dims(1) + column), mask = inside, other = f32::NEG_INFINITY)
            .to::<f32>()
    } else {
        full([rows_tile, 1], f32::NEG_INFINITY)
    };
    let mut largest = full([rows_tile, slots], f32::NEG_INFINITY);
    let mut total = zeros::<f32>([rows_tile, slots]);
    for start in range(0, d, d_tile) {
        let x = if vector > 0 {
            let (at, inside) = vector_tile(logits.ptr(), row_starts, d, misalignment, vector, (start, d_tile));
            load(at, mask = inside, other = f32::NEG_INFINITY).to::<f32>()
        } else {
            let inside = (arange(0, d_tile) + start < d).expand_dims(0);
            where_(inside, load(block, boundary_check = [0, 1], padding = zero).to::<f32>(), f32::NEG_INFINITY)
        };
        (largest, total) = add_columns(largest, total, x, size_per_thread);
        block = block.advance([0, d_tile]);
    }
    let mut row_largest = max(largest, axis = 1);
    if vector > 0 {
        row_largest = maximum(row_largest, max(head_tail, axis = 1));
    }
    let shift = softmax_shift(row_largest).expand_dims(1);
    let mut row_total = sum(total * fast_exp(largest - shift), axis = 1);
    if vector > 0 {
        row_total += sum(fast_exp(head_tail - shift), axis = 1);
    }
    let log_sum = row_largest + log(row_total);
    store(lse.block([first_row], [rows_tile]), log_sum, boundary_check = [0]);

    let target = load(targets.block([first_row], [rows_tile]), boundary_check = [0], padding = zero).to::<i64>();
    let exists = (row < rows) && (target >= 0) && (target < d.to::<i64>());
    let at = logits.ptr() + (row * logits.stride(0) + target * logits.stride(1));
    let score = load(at, mask = exists, other = 0.0).to::<f32>();
    let nll = where_(exists, log_sum - score, f32::NAN);
    let row_loss = where_(target == ignore_index, 0.0, nll);
    store(loss.block([first_row], [rows_tile]), row_loss, boundary_check = [0]);
}

/// The maxima and sums [rows, slots] of exp(x − maximum), after the columns x [rows, d_tile] in addition to those before.
#[device_fn]
fn add_columns(largest: Tile<f32>, total: Tile<f32>, x: Tile<f32>, size_per_thread: usize) -> (Tile<f32>, Tile<f32>) {
    let (sums, tile) = (largest.shape(), x.shape());
    let (rows, slots, d_tile) = (sums[0], sums[1], tile[1]);
    let x = x.reshape([rows, d_tile / (slots * size_per_thread), slots, size_per_thread]);
    let new_largest = maximum(largest, max(max(x, axis = 3), axis = 1));
    let shift = softmax_shift(new_largest);
    let e = fast_exp(x - shift.expand_dims(1).expand_dims(3));
    (new_largest, total * fast_exp(largest - shift) + sum(sum(e, axis = 3), axis = 1))
}

/// The shift before exp: the maximum; 0 where it is −∞, since −∞ − −∞ would be NaN.
#[device_fn]
fn softmax_shift(largest: Tile<f32>) -> Tile<f32> {
    where_(largest == f32::NEG_INFINITY, 0.0, largest)
}

/// grad_logits = scale · grad_loss · (exp(logits − lse) − one-hot(target)).
///
/// One program per tile. With `vector`, the first program of a row also processes the peeled head and tail.
#[kernel(grid = cdiv(rows, rows_tile) * cdiv(d, d_tile))]
#[alias(lead = misalignment)]
pub fn cross_entropy_bwd<T: Float, I: Int>(
    logits: Tensor<T, (rows, d)>,
    targets: Tensor<I, (rows,)>,
    lse: Tensor<f32, (rows,)>,
    grad_loss: Tensor<f32, (rows,)>,
    grad_logits: TensorMut<T, (rows, d)>,
    #[no_specialize] ignore_index: i64,
    #[no_specialize] misalignment: i32,
    scale: f32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
    #[constexpr = 0] vector: usize,
) {
    let (row, col) = tile_start(d, (rows_tile, d_tile));
    let target = load(targets.block([row], [rows_tile]), boundary_check = [0], padding = zero).to::<i64>();
    let log_sum = load(lse.block([row], [rows_tile]), boundary_check = [0], padding = zero);
    let g = load(grad_loss.block([row], [rows_tile]), boundary_check = [0], padding = zero) * scale;
    let exists = (target >= 0) && (target < d.to::<i64>());
    let factor = where_(exists, g, f32::NAN);
    let ignored = target == ignore_index;

    if vector > 0 {
        let row_index = row + arange(0, rows_tile);
        let x_rows = (row_index * logits.stride(0), row_index < rows);
        let grad_rows = (row_index * grad_logits.stride(0), row_index < rows);
        let (head, _) = aligned_span(x_rows.0, d, misalignment, vector);
        let (at, inside) = vector_tile(logits.ptr(), x_rows, d, misalignment, vector, (col, d_tile));
        let x = load(at, mask = inside, other = 0.0).to::<f32>();
        let column = arange(0, d_tile).expand_dims(0);
        let grad = gradient(x, column, target - head - col, log_sum, factor, ignored);
        let (at, inside) = vector_tile(grad_logits.ptr(), grad_rows, d, misalignment, vector, (col, d_tile));
        store(at, grad.to::<T>(), mask = inside);
        if col == 0 {
            let (column, inside) = head_tail_columns(x_rows, d, misalignment, vector);
            let x = load(logits.ptr() + (x_rows.0.expand_dims(1) + column), mask = inside, other = 0.0).to::<f32>();
            let at = grad_logits.ptr() + (grad_rows.0.expand_dims(1) + column);
            let grad = gradient(x, column.to::<i32>(), target, log_sum, factor, ignored);
            store(at, grad.to::<T>(), mask = inside);
        }
    } else {
        let block = logits.block([row, col], [rows_tile, d_tile]);
        let grad_block = grad_logits.block([row, col], [rows_tile, d_tile]);
        let x = load(block, boundary_check = [0, 1], padding = zero).to::<f32>();
        let column = arange(0, d_tile).expand_dims(0);
        let grad = gradient(x, column, target - col, log_sum, factor, ignored);
        store(grad_block, grad.to::<T>(), boundary_check = [0, 1]);
    }
}

/// The loss of each row, and grad_logits in place of the logits: as [`cross_entropy_fwd`] and then [`cross_entropy_bwd`].
///
/// One program per tile of rows, which reads its logits twice, the second time mostly from the L2 cache where few programs
/// run at a time. Only the first `classes` columns are logits: the others are written as 0, so that rows can be padded to
/// aligned ones.
#[autotune(
    configs = [
        Config(rows_tile = 1, d_tile = 8192, slots = 512, num_warps = 16),
        Config(rows_tile = 1, d_tile = 4096, slots = 256, num_warps = 8),
        Config(rows_tile = 1, d_tile = 2048, slots = 128, num_warps = 4),
        Config(rows_tile = 4, d_tile = 1024, slots = 128, num_warps = 4),
    ],
    key = [size_per_thread, columns, rows],
    default = default_in_place,
)]
#[kernel(grid = cdiv(rows, rows_tile))]
pub fn cross_entropy_fwd_bwd<T: Float, I: Int>(
    logits: TensorInOut<T, (rows, columns)>,
    targets: Tensor<I, (rows,)>,
    grad_loss: Tensor<f32, (rows,)>,
    loss: TensorMut<f32, (rows,)>,
    #[no_specialize] classes: i32,
    #[no_specialize] ignore_index: i64,
    scale: f32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
    #[constexpr] slots: usize,
    #[constexpr = 1] size_per_thread: usize,
) {
    let size_per_thread = size_per_thread.min(d_tile);
    let slots = slots.min(d_tile / size_per_thread);
    let first_row = program_id(0) * rows_tile;
    let row = first_row + arange(0, rows_tile);
    let target = load(targets.block([first_row], [rows_tile]), boundary_check = [0], padding = zero).to::<i64>();
    let exists = (row < rows) && (target >= 0) && (target < classes.to::<i64>());
    let ignored = target == ignore_index;
    let at = logits.ptr() + (row * logits.stride(0) + target * logits.stride(1));
    let score = load(at, mask = exists, other = 0.0).to::<f32>();

    let first = logits.block([first_row, 0], [rows_tile, d_tile]);
    let mut block = first;
    let mut largest = full([rows_tile, slots], f32::NEG_INFINITY);
    let mut total = zeros::<f32>([rows_tile, slots]);
    for start in range(0, classes, d_tile) {
        let inside = (arange(0, d_tile) + start < classes).expand_dims(0);
        let x = load(block, boundary_check = [0, 1], padding = zero).to::<f32>();
        (largest, total) = add_columns(largest, total, where_(inside, x, f32::NEG_INFINITY), size_per_thread);
        block = block.advance([0, d_tile]);
    }
    let row_largest = max(largest, axis = 1);
    let shift = softmax_shift(row_largest).expand_dims(1);
    let log_sum = row_largest + log(sum(total * fast_exp(largest - shift), axis = 1));
    let nll = where_(exists, log_sum - score, f32::NAN);
    store(loss.block([first_row], [rows_tile]), where_(ignored, 0.0, nll), boundary_check = [0]);

    let g = load(grad_loss.block([first_row], [rows_tile]), boundary_check = [0], padding = zero) * scale;
    let factor = where_(exists, g, f32::NAN);
    let mut block = first;
    let column = arange(0, d_tile).expand_dims(0);
    for start in range(0, columns, d_tile) {
        let x = load(block, boundary_check = [0, 1], padding = zero).to::<f32>();
        let grad = gradient(x, column, target - start, log_sum, factor, ignored);
        let grad = where_(column + start < classes, grad, 0.0);
        store(block, grad.to::<T>(), boundary_check = [0, 1]);
        block = block.advance([0, d_tile]);
    }
}

/// The gradient of the logits `x` of the given columns. `log_sum`, `factor` and `ignored` are, for each row, lse, the
/// factor of the gradient, and whether the target is ignored.
#[device_fn]
fn gradient(
    x: Tile<f32>,
    columns: Tile<i32>,
    target: Tile<i64>,
    log_sum: Tile<f32>,
    factor: Tile<f32>,
    ignored: Tile<bool>,
) -> Tile<f32> {
    // The comparison in 32 bits is safe: a 64-bit target that equals a column only after truncation has a NaN factor,
    // or is ignored.
    let hit = where_(columns == target.to::<i32>().expand_dims(1), 1.0, 0.0);
    let grad = factor.expand_dims(1) * (fast_exp(x - log_sum.expand_dims(1)) - hit);
    // Selected, not multiplied by zero: an ignored row may hold any values, NaN included.
    where_(ignored.expand_dims(1), 0.0, grad)
}

/// The configuration where no tuning entry applies: on a GPU many small programs with several loads in flight per
/// thread.
fn default_forward(problem: &Problem) -> Config {
    default_of(problem, "d")
}

fn default_of(problem: &Problem, columns: &str) -> Config {
    let size = |name: &str| problem.int(name).map_or(1, |n| n.max(1) as usize);
    let bytes = problem.dtypes.first().map_or(4, |dtype| dtype.bytes());
    let (elements, max_d) = if problem.is_gpu() { (8192 / bytes, 8192 / bytes) } else { (8192, 4096) };
    let d_tile = size(columns).next_power_of_two().clamp(16, max_d);
    let rows_tile = (elements / d_tile).clamp(1, size("rows").next_power_of_two());
    let slots = if problem.is_gpu() { 128usize } else { 1 };
    let config = Config::default().set("rows_tile", rows_tile).set("d_tile", d_tile).set("slots", slots);
    config.num_warps(4)
}

/// As [`default_forward`], with programs of whole SMs for long rows, so that the second read finds them in the L2 cache.
fn default_in_place(problem: &Problem) -> Config {
    if problem.is_gpu() && problem.int("columns").unwrap_or(1) > 1 << 14 {
        let config = Config::default().set("rows_tile", 1usize).set("d_tile", 8192usize).set("slots", 512usize);
        return config.num_warps(16);
    }
    default_of(problem, "columns")
}

/// The number of contiguous elements that a thread of a GPU loads at a time: one 16-byte vector, or 1 where `d` is
/// strided. On a CPU, a whole tile.
fn size_per_thread<T: FloatElement>(device: &Device, strides: [i64; 2]) -> usize {
    match device.is_cuda() {
        true if strides[1] == 1 => 16 / size_of::<T>(),
        true => 1,
        false => 1 << 20,
    }
}

/// loss [rows] and lse [rows] of logits [rows, d] and targets [rows].
///
/// # Errors
/// Shapes that do not match; tensors on another device; launch errors.
pub fn forward<T: FloatElement, I: IndexElement>(
    device: &Device,
    logits: Tensor<'_, T, 2>,
    targets: Tensor<'_, I, 1>,
    ignore_index: i64,
    mut loss: TensorMut<'_, f32, 1>,
    mut lse: TensorMut<'_, f32, 1>,
) -> Result<()> {
    let unaligned = UnalignedRows::of(device, &logits);
    CrossEntropyFwd {
        logits: &logits,
        targets: &targets,
        loss: &mut loss,
        lse: &mut lse,
        ignore_index,
        misalignment: unaligned.misalignment,
        rows_tile: tuned(),
        d_tile: tuned(),
        slots: tuned(),
        size_per_thread: size_per_thread::<T>(device, logits.strides()),
        vector: unaligned.vector,
    }
    .launch_tuned(device)
}

/// grad_logits [rows, d], given the gradient grad_loss [rows] of the losses, which is multiplied by `scale`, and the
/// lse [rows] of [`forward`].
///
/// A gradient that is the same for all rows is a tensor of one element with stride 0. For the mean over N rows, `scale`
/// is 1/N.
///
/// # Errors
/// As [`forward`].
pub fn backward<T: FloatElement, I: IndexElement>(
    device: &Device,
    logits: Tensor<'_, T, 2>,
    targets: Tensor<'_, I, 1>,
    ignore_index: i64,
    lse: Tensor<'_, f32, 1>,
    grad_loss: Tensor<'_, f32, 1>,
    scale: f32,
    mut grad_logits: TensorMut<'_, T, 2>,
) -> Result<()> {
    let [rows, d] = logits.shape();
    let tiles = ElementwiseTiles::new(rows, d);
    let unaligned = UnalignedRows::common(device, &logits, &grad_logits);
    CrossEntropyBwd {
        logits: &logits,
        targets: &targets,
        lse: &lse,
        grad_loss: &grad_loss,
        grad_logits: &mut grad_logits,
        ignore_index,
        misalignment: unaligned.misalignment,
        scale,
        rows_tile: tiles.rows_tile,
        d_tile: tiles.d_tile,
        vector: unaligned.vector,
    }
    .launch_with(device, &tiles.config())
}

/// loss [rows], and grad_logits in place of the logits [rows, columns], of which the first `classes` columns count: as
/// [`forward`] and then [`backward`], without the memory of a gradient. The other columns become 0.
///
/// # Errors
/// As [`forward`]; more classes than columns.
pub fn forward_backward<T: FloatElement, I: IndexElement>(
    device: &Device,
    mut logits: TensorMut<'_, T, 2>,
    classes: usize,
    targets: Tensor<'_, I, 1>,
    ignore_index: i64,
    grad_loss: Tensor<'_, f32, 1>,
    scale: f32,
    mut loss: TensorMut<'_, f32, 1>,
) -> Result<()> {
    let ([_, columns], strides) = (logits.shape(), logits.strides());
    if classes > columns {
        return Err(Error::Argument {
            kernel: "cross_entropy_fwd_bwd".into(),
            name: "classes",
            expected: format!("at most {columns}, the columns"),
            found: classes.to_string(),
        });
    }
    let classes = extent("cross_entropy_fwd_bwd", "classes", classes)?;
    CrossEntropyFwdBwd {
        logits: &mut logits,
        targets: &targets,
        grad_loss: &grad_loss,
        loss: &mut loss,
        classes,
        ignore_index,
        scale,
        rows_tile: tuned(),
        d_tile: tuned(),
        slots: tuned(),
        size_per_thread: size_per_thread::<T>(device, strides),
    }
    .launch_tuned(device)
}

/// The reference in f64, on dense row-major slices with rows of `d` logits.
pub mod reference {
    fn log_sum_exp(row: &[f64]) -> f64 {
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        largest + row.iter().map(|x| (x - largest).exp()).sum::<f64>().ln()
    }

    /// (loss [rows], lse [rows]) of logits [rows, d] and targets [rows].
    pub fn forward(logits: &[f64], targets: &[i64], d: usize, ignore_index: i64) -> (Vec<f64>, Vec<f64>) {
        let rows = logits.chunks_exact(d.max(1)).zip(targets);
        rows.map(|(row, &target)| {
            let lse = log_sum_exp(row);
            (if target == ignore_index { 0.0 } else { lse - row[target as usize] }, lse)
        })
        .unzip()
    }

    /// grad_logits [rows, d] of logits [rows, d], targets [rows] and grad_loss [rows].
    pub fn backward(
        logits: &[f64],
        targets: &[i64],
        d: usize,
        ignore_index: i64,
        grad_loss: &[f64],
        scale: f64,
    ) -> Vec<f64> {
        let mut grad = vec![0.0; logits.len()];
        for (r, row) in logits.chunks_exact(d.max(1)).enumerate() {
            if targets[r] == ignore_index {
                continue;
            }
            let lse = log_sum_exp(row);
            for (j, x) in row.iter().enumerate() {
                let hit = if j as i64 == targets[r] { 1.0 } else { 0.0 };
                grad[r * d + j] = scale * grad_loss[r] * ((x - lse).exp() - hit);
            }
        }
        grad
    }
}
