//! Measures one case: checks its step, and times its passes.

use std::time::Duration;

use half::{bf16, f16};
use tilewright::autotune;
use tilewright::bench::{Timing, do_bench};
use tilewright::codegen::lang::Precision;
use tilewright::kernels::attention::reference::Problem;
use tilewright::kernels::attention::{Backward, Options, Tiles};
use tilewright::kernels::{Tensor, TensorMut, weighted_sum};
use tilewright::{Buffer, Device};

use super::check::{Checked, check, tolerance_of};
use crate::cli::bench::attention_check::Attention;
use crate::cli::bench::data::Number;
use crate::cli::bench::record::BenchError;
use crate::cli::bench::tiles;

/// One case to measure.
#[derive(Clone, Debug)]
pub struct Plan {
    pub problem: Problem,
    /// `bf16`, `f16` or `f32`.
    pub dtype: String,
    /// Precision of f32 on a GPU.
    pub precision: Option<Precision>,
    /// Tiles of the forward, the dK/dV and the dQ kernel; `None` leaves the choice to the autotuner.
    pub tiles: [Option<Tiles>; 3],
    /// How the backward pass computes dQ.
    pub backward: Backward,
    /// Autotuning budget of each kernel in seconds.
    pub tune: Option<f64>,
}

/// The passes that are timed, in the order of [`Measured::times`].
pub const PASSES: [&str; 3] = ["forward", "backward", "forward + sum + backward"];

/// The result of a case that passed its check.
#[derive(Clone, Debug)]
pub struct Measured {
    pub checked: Checked,
    pub times: [Timing; 3],
    /// The tiles that were used, in the order of `Plan::tiles`.
    pub tiles: [Tiles; 3],
    form: Backward,
}

impl Plan {
    /// Returns the FLOPs of each pass: two matmuls forward, five backward, and half of the scores if causal.
    pub fn flop(&self) -> [f64; 3] {
        let p = &self.problem;
        let square = [p.batch, p.heads_q, p.n_q, p.n_k, p.d].map(|n| n as f64).iter().product::<f64>();
        let forward = 4.0 * square * if p.causal { 0.5 } else { 1.0 };
        [forward, 2.5 * forward, 3.5 * forward]
    }

    /// Formats the element type: `bf16`, or `f32 (tf32)`.
    pub fn dtype_text(&self) -> String {
        match self.precision {
            Some(precision) => format!("{} ({})", self.dtype, precision.name()),
            None => self.dtype.clone(),
        }
    }

    /// Checks and times the case.
    ///
    /// # Errors
    /// A wrong result, which is not timed, or an error of the device.
    pub fn measure(&self, device: &Device, times: (f64, f64)) -> Result<Measured, BenchError> {
        match self.dtype.as_str() {
            "f32" => self.measure_as::<f32>(device, times, |_| Ok(())),
            "f16" => self.measure_as::<f16>(device, times, |_| Ok(())),
            _ => self.measure_as::<bf16>(device, times, |_| Ok(())),
        }
    }

    /// As [`Plan::measure`]; `after` runs after each step (tests inject faults into the outputs there).
    pub(super) fn measure_as<T: Number>(
        &self,
        device: &Device,
        (warmup_ms, rep_ms): (f64, f64),
        after: fn(&mut Attention<T>) -> tilewright::Result<()>,
    ) -> Result<Measured, BenchError> {
        let mut step = Step::<T>::new(device, self, after)?;
        let options =
            Options { precision: self.precision, backward: self.backward, ..Options::new(self.problem.causal) };
        let Problem { batch, heads_kv, n_k, d, .. } = self.problem;
        let keys = [batch, heads_kv, n_k, d];
        let form = options.form::<T>(device, keys, keys);
        let tiles = self.choose(&mut step, &options, form != Backward::TwoPass)?;
        let [forward_tiles, dkdv_tiles, dq_tiles] = tiles.map(Some);
        let options = Options { forward_tiles, dkdv_tiles, dq_tiles, ..options };
        let checked = check(&mut step, &options)?;
        let times = [
            do_bench(device, warmup_ms, rep_ms, || step.attention.forward(&options))?,
            do_bench(device, warmup_ms, rep_ms, || step.attention.backward(&options))?,
            do_bench(device, warmup_ms, rep_ms, || step.run(&options))?,
        ];
        Ok(Measured { checked, times, tiles, form })
    }

    /// Returns the tiles of all kernels: the given ones, else those that the autotuner chooses in a step.
    fn choose<T: Number>(
        &self,
        step: &mut Step<T>,
        options: &Options,
        one_pass: bool,
    ) -> Result<[Tiles; 3], BenchError> {
        let [forward_tiles, dkdv_tiles, dq_tiles] = self.tiles;
        let options = Options { forward_tiles, dkdv_tiles, dq_tiles, ..options.clone() };
        match self.tune {
            None => step.run(&options)?,
            Some(seconds) => {
                let tuning = autotune::Options::new(Duration::from_secs_f64(seconds));
                autotune::tuning(&tuning, || step.run(&options)).0?;
            }
        }
        let taken = tiles::taken::<T>(&self.problem, ["dense", "plain"], self.precision, step.device(), one_pass);
        let names = ["flash_attention_fwd", "flash_attention_bwd_dkdv", "flash_attention_bwd_dq"];
        let mut tiles = Vec::new();
        for ((given, taken), name) in self.tiles.iter().zip(taken).zip(names) {
            // One-pass backward has no dQ kernel: its tiles are unused.
            if one_pass && name == names[2] {
                tiles.push(tiles[1]);
                continue;
            }
            tiles.push(given.or(taken).ok_or_else(|| {
                BenchError::Unsupported(format!("internal error: no tiles of {name}; please report this"))
            })?);
        }
        Ok([tiles[0], tiles[1], tiles[2]])
    }
}

impl Measured {
    /// Formats the tiles of the kernels of a pass as `q_tile,k_tile,warps,stages`.
    pub fn tiles_text(&self, pass: usize) -> String {
        let [fwd, dkdv, _] = self.tiles.map(tiles::text);
        let dq = tiles::dq_text(self.form, self.tiles[2]);
        match pass {
            0 => fwd,
            1 => format!("{dkdv} {dq}"),
            _ => format!("{fwd} {dkdv} {dq}"),
        }
    }
}

/// The buffers of forward, sum and backward.
pub struct Step<T: Number> {
    pub attention: Attention<T>,
    device: Device,
    /// The gradient of the sum: ones.
    ones: Buffer<T>,
    /// Ones, the weights of the partial sums.
    weights: Buffer<f32>,
    partial: Buffer<f32>,
    total: Buffer<f32>,
    after: fn(&mut Attention<T>) -> tilewright::Result<()>,
}

/// Maximum number of elements of O in one partial sum.
const MAX_SUM_LENGTH: usize = 8192;

impl<T: Number> Step<T> {
    pub(super) fn new(
        device: &Device,
        plan: &Plan,
        after: fn(&mut Attention<T>) -> tilewright::Result<()>,
    ) -> tilewright::Result<Step<T>> {
        let limit = tolerance_of::<T>(plan.precision);
        let attention = Attention::<T>::new(device, plan.problem)?.with_tolerance(limit);
        let elements = attention.output().len();
        let rows = elements / row_length(elements);
        Ok(Step {
            attention,
            device: device.clone(),
            ones: ones(device, elements, T::from_f32(1.0))?,
            weights: ones(device, rows, 1.0)?,
            partial: Buffer::poisoned(device, rows)?,
            total: Buffer::poisoned(device, 1)?,
            after,
        })
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Runs one step: computes O and its sum, writes a gradient of ones, and computes dQ, dK and dV.
    pub fn run(&mut self, options: &Options) -> tilewright::Result<()> {
        self.attention.forward(options)?;
        self.sum()?;
        self.attention.gradient_mut().copy_from(self.ones.view())?;
        self.attention.backward(options)?;
        (self.after)(&mut self.attention)
    }

    /// Sums rows of O, then the partial sums. The result is bitwise deterministic.
    fn sum(&mut self) -> tilewright::Result<()> {
        let o = self.attention.output();
        let length = row_length(o.len());
        let rows = o.len() / length;
        weighted_sum::forward(
            &self.device,
            Tensor::dense(o.view(), [rows, length])?,
            Tensor::dense(self.ones.slice(..length)?, [length])?,
            TensorMut::dense(self.partial.view_mut(), [rows])?,
        )?;
        weighted_sum::forward(
            &self.device,
            Tensor::dense(self.partial.view(), [1, rows])?,
            Tensor::dense(self.weights.view(), [rows])?,
            TensorMut::dense(self.total.view_mut(), [1])?,
        )
    }

    /// Returns the sum of O of the last step.
    pub fn total(&self) -> tilewright::Result<f64> {
        Ok(f64::from(self.total.to_vec()?[0]))
    }
}

/// Returns the largest divisor of `elements` up to [`MAX_SUM_LENGTH`].
fn row_length(elements: usize) -> usize {
    (1..=MAX_SUM_LENGTH.min(elements)).rev().find(|&n| elements.is_multiple_of(n)).unwrap_or(1)
}

/// Allocates a buffer filled with `one`.
fn ones<T: tilewright::Element + Copy>(device: &Device, len: usize, one: T) -> tilewright::Result<Buffer<T>> {
    Buffer::from_slice(device, &vec![one; len])
}
