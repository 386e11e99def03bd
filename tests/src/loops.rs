//! Kernels with software-pipelined loops, and kernels whose threads communicate through global memory: for the
//! simulated GPU, the CPU and GPUs.

use crate::numerics::Random;
use tilewright::kernels::{layer_norm::LayerNormBwd, rms_norm::RmsNormBwd, weighted_sum::WeightedSumBwd};
use tilewright::prelude::*;

/// `y[j] = Σ (i · x[i, j] + w[i])` over i = first, first + by, … below end; rows out of bounds are zeros.
#[kernel]
pub fn row_loop<T: Float>(
    x: In<T>,
    w: In<f32>,
    y: Out<f32>,
    stride: i64,
    rows: i32,
    d: i32,
    first: i32,
    end: i32,
    by: i32,
    #[constexpr] d_tile: usize,
    #[constexpr] stages: usize,
) {
    let mut total = zeros::<f32>([1, d_tile]);
    for i in range(first, end, by, num_stages = stages) {
        let block = make_block_ptr(
            x,
            shape = [rows, d],
            strides = [stride, 1],
            offsets = [i, 0],
            block_shape = [1, d_tile],
            order = [1, 0],
        );
        let w_block = make_block_ptr(w, shape = [rows], strides = [1], offsets = [i], block_shape = [1], order = [0]);
        let weights = load(w_block, boundary_check = [0], padding = zero);
        total += load(block, boundary_check = [0, 1], padding = zero).to::<f32>() * i.to::<f32>();
        total += weights.expand_dims(1);
    }
    let y_block = make_block_ptr(
        y,
        shape = [1, d],
        strides = [d, 1],
        offsets = [0, 0],
        block_shape = [1, d_tile],
        order = [1, 0],
    );
    store(y_block, total, boundary_check = [1]);
}

/// A loop in a loop, followed by another loop: Σᵢ Σₖ x[i, j] · w[k, j] for k < i, then Σᵢ x[i, j] for i below
/// `second_rows`.
#[kernel]
pub fn nested<T: Float>(
    x: In<T>,
    w: In<T>,
    y: Out<f32>,
    rows: i32,
    second_rows: i32,
    #[constexpr] d: usize,
    #[constexpr] stages: usize,
) {
    let mut total = zeros::<f32>([1, d]);
    let start =
        make_block_ptr(x, shape = [rows, d], strides = [d, 1], offsets = [0, 0], block_shape = [1, d], order = [1, 0]);
    let w_start =
        make_block_ptr(w, shape = [rows, d], strides = [d, 1], offsets = [0, 0], block_shape = [1, d], order = [1, 0]);
    let mut x_block = start;
    for i in range(0, rows, num_stages = stages) {
        let factor = load(x_block).to::<f32>();
        let mut w_block = w_start;
        let mut sum = zeros::<f32>([1, d]);
        for _ in range(0, i, num_stages = stages + 1) {
            sum += load(w_block).to::<f32>();
            w_block = w_block.advance([1, 0]);
        }
        total += factor * sum;
        // A cross-warp reduction, which needs a barrier.
        total += max(factor, axis = 1, keep_dims = true) * 0.0;
        x_block = x_block.advance([1, 0]);
    }
    if second_rows > 0 {
        x_block = start;
        for _ in range(0, second_rows, num_stages = stages) {
            total += load(x_block, boundary_check = [0], padding = zero).to::<f32>();
            x_block = x_block.advance([1, 0]);
        }
    }
    let y_block =
        make_block_ptr(y, shape = [1, d], strides = [d, 1], offsets = [0, 0], block_shape = [1, d], order = [1, 0]);
    store(y_block, total);
}

/// x[i, ·] += x[i − 1, ·] + add[i, ·], row by row: each iteration reads what the previous one wrote.
#[kernel]
pub fn running_sum(x: InOut<f32>, add: In<f32>, rows: i32, #[constexpr] d: usize, #[constexpr] stages: usize) {
    for i in range(1, rows, num_stages = stages) {
        let strides = [d, 1];
        let before = make_block_ptr(
            x,
            shape = [rows, d],
            strides = strides,
            offsets = [i - 1, 0],
            block_shape = [1, d],
            order = [1, 0],
        );
        let here = make_block_ptr(
            x,
            shape = [rows, d],
            strides = strides,
            offsets = [i, 0],
            block_shape = [1, d],
            order = [1, 0],
        );
        let more = make_block_ptr(
            add,
            shape = [rows, d],
            strides = strides,
            offsets = [i, 0],
            block_shape = [1, d],
            order = [1, 0],
        );
        store(here, load(here) + load(before) + load(more));
    }
}

/// As [`RUNNING_SUM`], through a block pointer that the loop advances, with an atomic addition instead of the store.
#[kernel]
pub fn running_atomic(x: InOut<f32>, add: In<f32>, rows: i32, #[constexpr] d: usize, #[constexpr] stages: usize) {
    let mut before =
        make_block_ptr(x, shape = [rows, d], strides = [d, 1], offsets = [0, 0], block_shape = [1, d], order = [1, 0]);
    for i in range(1, rows, num_stages = stages) {
        let more = make_block_ptr(
            add,
            shape = [rows, d],
            strides = [d, 1],
            offsets = [i, 0],
            block_shape = [1, d],
            order = [1, 0],
        );
        let next = before.advance([1, 0]);
        atomic_add(next, load(before) + load(more));
        before = next;
    }
}

/// Reverses x in place.
#[kernel]
pub fn reversed(x: InOut<f32>, y: InOut<f32>, #[constexpr] n: usize) {
    let i = arange(0, n);
    store(x + (n as i32 - 1 - i), load(x + i));
    store(y + i, 0.0);
}

/// Each thread loads an element of y that another thread has just stored, and an element of x that another thread
/// overwrites in the same statement.
#[kernel]
pub fn permuted(x: InOut<f32>, y: InOut<f32>, #[constexpr] n: usize) {
    let i = arange(0, n);
    let other = (i * 5 + 3) % (n as i32);
    store(y + i, load(x + i) * 2.0);
    store(x + i, load(y + other) + load(x + other));
}

/// A value that all threads load and one of them overwrites.
#[kernel]
pub fn broadcast_counter(x: InOut<f32>, y: InOut<f32>, #[constexpr] n: usize) {
    let i = arange(0, n);
    let count = load(x);
    store(x, count + 1.0);
    store(y + i, count + i.to::<f32>());
    let next = load(x);
    store(x + (i + 1), next, mask = i < n as i32 - 1);
}

/// Atomic additions to elements that were just zeroed, which are loaded right after.
#[kernel]
pub fn atomic_sums(x: InOut<f32>, y: InOut<f32>, #[constexpr] n: usize) {
    let i = arange(0, n);
    store(y + i, 0.0);
    atomic_add(y + i % 8, load(x + i));
    store(x + i, load(y + i % 8));
}

/// The sum of all elements in the first one, by a tree reduction through memory.
#[kernel]
pub fn tree_sum(x: InOut<f32>, y: InOut<f32>, #[constexpr] n: usize) {
    let i = arange(0, n);
    let mut half = scalar::<i32>(n as i32 / 2);
    while half > 0 {
        let other = i + half;
        let mask = i < half && other >= 0 && other < n as i32;
        store(x + i, load(x + i, mask = mask) + load(x + other, mask = mask), mask = mask);
        half = half / 2;
    }
    let total = load(x);
    for row in range(0, 3) {
        store(y + (i + row) % (n as i32), total + load(y + i));
    }
}

/// Transposes a matrix in place, and then sums its columns.
#[kernel]
pub fn transposed_in_place(x: InOut<f32>, y: InOut<f32>, #[constexpr] n: usize) {
    let rows: usize = 16;
    let columns = n / rows;
    let at = make_block_ptr(
        x,
        shape = [rows, columns],
        strides = [columns, 1],
        offsets = [0, 0],
        block_shape = [rows, columns],
        order = [1, 0],
    );
    let transposed = make_block_ptr(
        x,
        shape = [columns, rows],
        strides = [rows, 1],
        offsets = [0, 0],
        block_shape = [columns, rows],
        order = [1, 0],
    );
    store(transposed, load(at).trans());
    store(y + arange(0, columns), sum(load(at), axis = 0));
}

/// Number of elements of x and of y in a [`LaunchPair`].
pub const N: usize = 256;

/// Launches one of the kernels with x and y of [`N`] elements.
type LaunchPair = fn(&Device, &mut Buffer<f32>, &mut Buffer<f32>, &LaunchConfig) -> tilewright::Result<()>;

fn random(device: &Device, n: usize, random: &mut Random) -> Buffer<f32> {
    let values: Vec<f32> = (0..n).map(|_| random.number() as f32).collect();
    Buffer::from_slice(device, &values).expect("memory")
}

fn assert_close(what: &str, found: &[f32], want: &[f32]) {
    assert_eq!(found.len(), want.len(), "{what}");
    for (at, (found, want)) in found.iter().zip(want).enumerate() {
        let near = (found - want).abs() <= 1e-5 * want.abs().max(1.0);
        assert!(near, "{what}: element {at} is {found}, expected {want}");
    }
}

/// Runs the kernels whose threads communicate through memory on `device`, with 1 to 32 warps, and compares the results
/// with those of the CPU.
pub fn check_thread_communication(device: &Device) {
    macro_rules! pair {
        ($name:ident) => {
            (stringify!($name), (|device, x, y, config| $name { x, y, n: N }.launch_with(device, config)) as LaunchPair)
        };
    }
    let run = |device: &Device, launch: LaunchPair, num_warps: u32| {
        let mut numbers = Random::new(9);
        let (mut x, mut y) = (random(device, N, &mut numbers), random(device, N, &mut numbers));
        let config = LaunchConfig::new(1).num_warps(num_warps);
        launch(device, &mut x, &mut y, &config).unwrap_or_else(|e| panic!("{e}"));
        [x.to_vec().expect("x"), y.to_vec().expect("y")].concat()
    };
    for (name, launch) in [
        pair!(Reversed),
        pair!(Permuted),
        pair!(BroadcastCounter),
        pair!(AtomicSums),
        pair!(TreeSum),
        pair!(TransposedInPlace),
    ] {
        let want = run(&Device::cpu(), launch, 4);
        for num_warps in [1, 4, 8, 16, 32] {
            assert_close(&format!("{name}, {num_warps} warps"), &run(device, launch, num_warps), &want);
        }
    }
}

/// Checks that loops give the same results with several stages as with one.
pub fn check_pipelined_loops(device: &Device) {
    let mut numbers = Random::new(4);
    for (rows, d, d_tile) in [(7usize, 37usize, 64usize), (9, 64, 64), (33, 2000, 2048)] {
        let (x, w) = (random(device, rows * d, &mut numbers), random(device, rows, &mut numbers));
        for (first, end, by) in [(0, 0, 1), (0, 1, 1), (0, 2, 1), (1, 4, 1), (0, 7, 3), (2, 11, 2), (0, 40, 1)] {
            let run = |stages, num_warps| {
                let mut y = Buffer::<f32>::zeros(device, d).expect("memory");
                let stride = d as i64;
                let (rows, d) = (rows as i32, d as i32);
                let mut kernel = RowLoop { x: &x, w: &w, y: &mut y, stride, rows, d, first, end, by, d_tile, stages };
                kernel
                    .launch_with(device, &LaunchConfig::new(1).num_warps(num_warps))
                    .unwrap_or_else(|e| panic!("{e}"));
                y.to_vec().expect("y")
            };
            let want = run(1, 4);
            for (stages, num_warps) in [(2, 1), (2, 4), (3, 8), (4, 16), (5, 2)] {
                let what = format!("{rows} × {d}: {first}..{end} by {by}, {stages} stages, {num_warps} warps");
                assert_close(&what, &run(stages, num_warps), &want);
            }
        }
    }
    const D: usize = 64;
    for (rows, second_rows) in [(1usize, 0i32), (5, 9), (6, 2)] {
        let (x, w) = (random(device, rows * D, &mut numbers), random(device, rows * D, &mut numbers));
        let run = |stages, num_warps| {
            let mut y = Buffer::<f32>::zeros(device, D).expect("memory");
            let mut nested = Nested { x: &x, w: &w, y: &mut y, rows: rows as i32, second_rows, d: D, stages };
            nested.launch_with(device, &LaunchConfig::new(1).num_warps(num_warps)).unwrap_or_else(|e| panic!("{e}"));
            y.to_vec().expect("y")
        };
        let want = run(1, 4);
        for (stages, num_warps) in [(2, 1), (3, 4), (4, 8)] {
            assert_close(&format!("{rows} rows, {stages} stages"), &run(stages, num_warps), &want);
        }
        for stages in [1, 3] {
            let (mut sums, mut atomics) =
                (random(device, rows * D, &mut Random::new(5)), random(device, rows * D, &mut Random::new(5)));
            let mut want = sums.to_vec().expect("x");
            let add = w.to_vec().expect("add");
            for at in D..rows * D {
                want[at] += want[at - D] + add[at];
            }
            let config = LaunchConfig::new(1).num_warps(2);
            let launched =
                RunningSum { x: &mut sums, add: &w, rows: rows as i32, d: D, stages }.launch_with(device, &config);
            launched.unwrap_or_else(|e| panic!("{e}"));
            let launched = RunningAtomic { x: &mut atomics, add: &w, rows: rows as i32, d: D, stages }
                .launch_with(device, &config);
            launched.unwrap_or_else(|e| panic!("{e}"));
            assert_close("a running sum", &sums.to_vec().expect("sums"), &want);
            assert_close("a running sum by atomics", &atomics.to_vec().expect("sums"), &want);
        }
    }
}

/// The inputs of the shipped kernels with a row loop.
struct RowLoopInputs<'d> {
    device: &'d Device,
    rows: usize,
    d: usize,
    x: Buffer<bf16>,
    w: Buffer<bf16>,
    grad_y: Buffer<bf16>,
    mean: Buffer<f32>,
    rstd: Buffer<f32>,
}

/// Tile, warps and stages of a row loop.
#[derive(Clone, Copy)]
struct LaunchShape {
    rows_tile: usize,
    num_warps: u32,
    stages: usize,
}

/// Gradients of x, and partial sums.
type Results = (Vec<bf16>, Vec<f32>);

impl RowLoopInputs<'_> {
    fn new(device: &Device, rows: usize, d: usize) -> RowLoopInputs<'_> {
        let mut numbers = Random::new(6);
        let mut halves = |n: usize| {
            let values: Vec<bf16> = (0..n).map(|_| bf16::from_f64(numbers.number())).collect();
            Buffer::from_slice(device, &values).expect("memory")
        };
        let (x, grad_y, w) = (halves(rows * d), halves(rows * d), halves(d));
        let (mean, rstd) = (random(device, rows, &mut numbers), random(device, rows, &mut numbers));
        RowLoopInputs { device, rows, d, x, w, grad_y, mean, rstd }
    }

    /// Splits the rows among up to three programs: rows per program, and the number of programs.
    fn rows_and_programs(&self, shape: LaunchShape) -> (usize, usize) {
        let each = self.rows.div_ceil(3).next_multiple_of(shape.rows_tile);
        (each, self.rows.div_ceil(each))
    }

    /// Allocates the results and calls `launch` with them.
    fn run(
        &self,
        shape: LaunchShape,
        launch: impl FnOnce(&mut Buffer<bf16>, &mut Buffer<f32>, &LaunchConfig) -> tilewright::Result<()>,
    ) -> Results {
        let (_, programs) = self.rows_and_programs(shape);
        let mut grad_x = Buffer::<bf16>::zeros(self.device, self.rows * self.d).expect("memory");
        let mut partial = Buffer::<f32>::zeros(self.device, programs * self.d).expect("memory");
        let config = LaunchConfig::new(programs).num_warps(shape.num_warps);
        launch(&mut grad_x, &mut partial, &config).unwrap_or_else(|e| panic!("{e}"));
        (grad_x.to_vec().expect("grad_x"), partial.to_vec().expect("partial sums"))
    }

    fn rms_norm(&self, shape: LaunchShape) -> Results {
        let ((rows_per_program, programs), matrix) = (self.rows_and_programs(shape), [self.rows, self.d]);
        self.run(shape, |grad_x, partial_grad_w, config| {
            RmsNormBwd {
                x: &self.x.tensor(matrix)?,
                w: &self.w,
                rstd: &self.rstd,
                grad_y: &self.grad_y.tensor(matrix)?,
                grad_x: &mut grad_x.tensor_mut(matrix)?,
                partial_grad_w: &mut partial_grad_w.tensor_mut([programs, self.d])?,
                rows_per_program: rows_per_program as i32,
                rows_tile: shape.rows_tile,
                d_tile: self.d.next_power_of_two(),
                stages: shape.stages,
            }
            .launch_with(self.device, config)
        })
    }

    fn layer_norm(&self, shape: LaunchShape) -> Results {
        let ((rows_per_program, programs), matrix) = (self.rows_and_programs(shape), [self.rows, self.d]);
        self.run(shape, |grad_x, partial_grad_w, config| {
            let mut partial_grad_b = Buffer::<f32>::zeros(self.device, partial_grad_w.len())?;
            LayerNormBwd {
                x: &self.x.tensor(matrix)?,
                w: &self.w,
                mean: &self.mean,
                rstd: &self.rstd,
                grad_y: &self.grad_y.tensor(matrix)?,
                grad_x: &mut grad_x.tensor_mut(matrix)?,
                partial_grad_w: &mut partial_grad_w.tensor_mut([programs, self.d])?,
                partial_grad_b: &mut partial_grad_b.tensor_mut([programs, self.d])?,
                rows_per_program: rows_per_program as i32,
                rows_tile: shape.rows_tile,
                d_tile: self.d.next_power_of_two(),
                stages: shape.stages,
            }
            .launch_with(self.device, config)
        })
    }

    fn weighted_sum(&self, shape: LaunchShape) -> Results {
        let (rows_per_program, programs) = self.rows_and_programs(shape);
        self.run(shape, |grad_x, partial_grad_w, config| {
            let matrix = [self.rows, self.d];
            WeightedSumBwd {
                x: &self.x.tensor(matrix)?,
                w: &self.w,
                grad_y: &self.rstd,
                grad_x: &mut grad_x.tensor_mut(matrix)?,
                partial_grad_w: &mut partial_grad_w.tensor_mut([programs, self.d])?,
                rows_per_program: rows_per_program as i32,
                rows_tile: shape.rows_tile,
                d_tile: self.d.next_power_of_two(),
                stages: shape.stages,
            }
            .launch_with(self.device, config)
        })
    }
}

/// Checks that the shipped row loops give the same bits with several stages as with one.
pub fn check_shipped_row_loops(device: &Device) {
    for (rows, d) in [(1, 64), (65, 1024), (37, 1000), (19, 8192)] {
        let shipped = RowLoopInputs::new(device, rows, d);
        for (rows_tile, num_warps) in [(1, 4), (2, 8), (4, 16)] {
            let run = |stages| {
                let shape = LaunchShape { rows_tile, num_warps, stages };
                [shipped.rms_norm(shape), shipped.layer_norm(shape), shipped.weighted_sum(shape)]
            };
            let want = run(1);
            for stages in 2..=4 {
                assert!(
                    run(stages) == want,
                    "{rows} × {d}, {rows_tile} rows at a time, {stages} stages: the bits differ"
                );
            }
        }
    }
}
