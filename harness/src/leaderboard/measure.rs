//! One case: its step, and the times of its passes.

use std::time::Duration;

use half::{bf16, f16};
use tilewright::autotune::{self, Choice};
use tilewright::bench::{Timing, do_bench};
use tilewright::codegen::lang::Precision;
use tilewright::kernels::attention::config::few;
use tilewright::kernels::attention::reference::Problem;
use tilewright::kernels::attention::{Backward, Options, Tiles};
use tilewright::kernels::{Tensor, TensorMut, weighted_sum};
use tilewright::{Buffer, Device};

use super::check::{Checked, check, largest_error};
use crate::cli::bench::attention_check::Attention;
use crate::cli::bench::data::Number;
use crate::cli::bench::record::Trouble;
use crate::cli::bench::tiles;

/// What is measured.
#[derive(Clone, Debug)]
pub struct Plan {
    pub problem: Problem,
    /// `bf16`, `f16` or `f32`.
    pub dtype: String,
    /// How f32 multiplies, on a GPU.
    pub precision: Option<Precision>,
    /// Of the forward kernel, and of those that make dK with dV, and dQ; none where the autotuner chooses.
    pub tiles: [Option<Tiles>; 3],
    /// Whether dQ is summed up atomically by the kernel that makes dK and dV.
    pub one_pass: bool,
    /// Seconds of tuning for each kernel.
    pub tune: Option<f64>,
}

/// The passes that are timed, in the order of [`Measured::times`].
pub const PASSES: [&str; 3] = ["forward", "backward", "forward + sum + backward"];

/// A case that computes what it should.
#[derive(Clone, Debug)]
pub struct Measured {
    pub checked: Checked,
    pub times: [Timing; 3],
    /// As `Plan::tiles`, with what was used.
    pub tiles: [Tiles; 3],
    one_pass: bool,
}

impl Plan {
    /// Operations of each pass: two products forward, five backward; half of the scores where causal.
    pub fn flop(&self) -> [f64; 3] {
        let p = &self.problem;
        let square = [p.batch, p.heads_q, p.n_q, p.n_k, p.d].map(|n| n as f64).iter().product::<f64>();
        let forward = 4.0 * square * if p.causal { 0.5 } else { 1.0 };
        [forward, 2.5 * forward, 3.5 * forward]
    }

    /// `bf16`, or `f32 (tf32)`.
    pub fn dtype_text(&self) -> String {
        match self.precision {
            Some(precision) => format!("{} ({})", self.dtype, precision.name()),
            None => self.dtype.clone(),
        }
    }

    /// Checks and times the case.
    ///
    /// # Errors
    /// A wrong result, or what the device said; then nothing was timed.
    pub fn measure(&self, device: &Device, times: (f64, f64)) -> Result<Measured, Trouble> {
        match self.dtype.as_str() {
            "f32" => self.measure_as::<f32>(device, times, |_| Ok(())),
            "f16" => self.measure_as::<f16>(device, times, |_| Ok(())),
            _ => self.measure_as::<bf16>(device, times, |_| Ok(())),
        }
    }

    /// As [`Plan::measure`]; `after` runs after each step that is checked (tests spoil the outputs there).
    pub(super) fn measure_as<T: Number>(
        &self,
        device: &Device,
        (warmup_ms, rep_ms): (f64, f64),
        after: fn(&mut Attention<T>) -> tilewright::Result<()>,
    ) -> Result<Measured, Trouble> {
        let mut step = Step::<T>::new(device, self, after)?;
        let backward = if self.one_pass { Backward::OnePass } else { Backward::TwoPass };
        let options = Options { precision: self.precision, backward, ..Options::new(self.problem.causal) };
        let tiles = self.choose(&mut step, &options)?;
        let [forward, keys, queries] = tiles.map(Some);
        let options = Options { forward_tiles: forward, key_tiles: keys, query_tiles: queries, ..options };
        let checked = check(&mut step, &options)?;
        let times = [
            do_bench(device, warmup_ms, rep_ms, || step.attention.forward(&options))?,
            do_bench(device, warmup_ms, rep_ms, || step.attention.backward(&options))?,
            do_bench(device, warmup_ms, rep_ms, || step.run(&options))?,
        ];
        Ok(Measured { checked, times, tiles, one_pass: self.one_pass })
    }

    /// The tiles of all kernels: the given ones, and what a launch chooses.
    fn choose<T: Number>(&self, step: &mut Step<T>, options: &Options) -> Result<[Tiles; 3], Trouble> {
        let [forward, keys, queries] = self.tiles;
        let open = Options { forward_tiles: forward, key_tiles: keys, query_tiles: queries, ..options.clone() };
        match self.tune {
            None => step.run(&open)?,
            Some(seconds) => {
                let tuning = autotune::Options::new(Duration::from_secs_f64(seconds));
                autotune::tuning(&tuning, || step.run(&open)).0?;
            }
        }
        let chosen = autotune::chosen();
        let names = ["flash_attention_fwd", "flash_attention_bwd_dkdv", "flash_attention_bwd_dq"];
        let mut tiles = Vec::new();
        for (given, name) in self.tiles.iter().zip(names) {
            // In one pass there is no kernel for dQ, and its tiles do not matter.
            if self.one_pass && name == names[2] {
                tiles.push(tiles[1]);
                continue;
            }
            let known = || chosen.iter().find(|choice| self.is_mine::<T>(choice, name, step.device()));
            let tile = given.or_else(|| known().and_then(|choice| Tiles::of(&choice.config)));
            tiles.push(
                tile.ok_or_else(|| Trouble::Cannot(format!("internal error: no tiles of {name}; please report")))?,
            );
        }
        Ok([tiles[0], tiles[1], tiles[2]])
    }

    /// Whether a choice of this process is about this case.
    fn is_mine<T: Number>(&self, choice: &Choice, kernel: &str, device: &Device) -> bool {
        let precision = match (T::dtype().bytes(), device.is_cuda()) {
            (4, true) => self.precision.unwrap_or(Precision::Tf32x3),
            (4, false) => self.precision.unwrap_or(Precision::Ieee),
            _ => Precision::Ieee,
        };
        let p = &self.problem;
        let bucket = |n: usize| autotune::size_bucket(n as i64);
        let key = format!(
            "T={},R={},R=f32,d={},causal={},precision={},n_q<={},n_k<={},few={}",
            T::dtype(),
            T::dtype(),
            p.d,
            p.causal,
            precision.name(),
            bucket(p.n_q),
            bucket(p.n_k),
            few(p.batch * p.heads_q, p.n_q),
        );
        // One of the kernels also asks how dQ is made, and what parts of walks leave is f32.
        let mode = format!("one_pass={}", self.one_pass);
        let same = |word: &str| key.split(',').any(|mine| mine == word) || word == mode;
        choice.kernel == kernel && choice.key.split(',').all(same)
    }
}

impl Measured {
    /// `q_tile,k_tile,warps,stages` of the kernels of a pass.
    pub fn tiles_text(&self, pass: usize) -> String {
        let [forward, keys, mut queries] = self.tiles.map(tiles::text);
        if self.one_pass {
            queries = "one pass".to_string();
        }
        match pass {
            0 => forward,
            1 => format!("{keys} {queries}"),
            _ => format!("{forward} {keys} {queries}"),
        }
    }
}

/// Forward, sum and backward, with all that they read and write.
pub struct Step<T: Number> {
    pub attention: Attention<T>,
    device: Device,
    /// The gradient of the sum.
    ones: Buffer<T>,
    /// Ones, to sum the partial sums with.
    weights: Buffer<f32>,
    partial: Buffer<f32>,
    total: Buffer<f32>,
    after: fn(&mut Attention<T>) -> tilewright::Result<()>,
}

/// Longest row of O's elements that one program sums.
const MAX_ROW: usize = 8192;

impl<T: Number> Step<T> {
    pub(super) fn new(
        device: &Device,
        plan: &Plan,
        after: fn(&mut Attention<T>) -> tilewright::Result<()>,
    ) -> tilewright::Result<Step<T>> {
        let limit = largest_error::<T>(plan.precision);
        let attention = Attention::<T>::new(device, plan.problem)?.accept_up_to(limit);
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

    /// One step: O, its sum, a gradient of ones, dQ, dK and dV.
    pub fn run(&mut self, options: &Options) -> tilewright::Result<()> {
        self.attention.forward(options)?;
        self.sum()?;
        self.attention.gradient_mut().copy_from(self.ones.view())?;
        self.attention.backward(options)?;
        (self.after)(&mut self.attention)
    }

    /// Sums of rows, then the sum of the sums: the same bits in every run.
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

    /// The sum of O that the last step found.
    pub fn total(&self) -> tilewright::Result<f64> {
        Ok(f64::from(self.total.to_vec()?[0]))
    }
}

/// The largest divisor of `elements` that a program sums.
fn row_length(elements: usize) -> usize {
    (1..=MAX_ROW.min(elements)).rev().find(|&n| elements.is_multiple_of(n)).unwrap_or(1)
}

/// A buffer of one number.
fn ones<T: tilewright::Element + Copy>(device: &Device, len: usize, one: T) -> tilewright::Result<Buffer<T>> {
    Buffer::from_slice(device, &vec![one; len])
}
