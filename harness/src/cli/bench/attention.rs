//! `tilewright bench attention`: times FlashAttention-2, forward and backward, and checks the results against f64
//! references.

use std::io::Write;

use clap::Args;
use half::{bf16, f16};
use tilewright::bench::Timing;
use tilewright::kernels::attention::config::{Pass, default_tiles};
use tilewright::kernels::attention::reference::{Modifiers, Problem};
use tilewright::kernels::attention::{Backward, Options, Tiles};
use tilewright::{Device, F8E4M3, F8E5M2};

use super::attention_8_bit::measure as eight_bit;
use super::attention_check::{Attention, Expected, small};
use super::attention_peer as peer;
use super::data::Number;
use super::record::{BenchError, Measured, Recorder, Row, Work};
use super::tiles::Passes;
use super::{Common, attention_kinds, attention_modifiers, tiles};
use crate::cli::{CliError, Result};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    pub(super) common: Common,
    /// Batch size. Default: 1, or 8 with --kinds
    #[arg(long)]
    pub(super) batch: Option<usize>,
    /// Number of heads. Default: 16, or 4 on the CPU
    #[arg(long)]
    heads: Option<usize>,
    /// Sequence length of queries and keys. Default: 16384, or 1024 on the CPU
    #[arg(long, alias = "length")]
    pub(super) seq_len: Option<usize>,
    /// Head dimensions, separated by commas. Default: 64,128, or 64 on the CPU
    #[arg(long, alias = "dim", value_delimiter = ',')]
    pub(super) head_dim: Vec<usize>,
    /// Head dimension of values and outputs. Default: that of queries and keys
    #[arg(long, value_name = "DIM", conflicts_with = "kinds", value_parser = clap::value_parser!(u16).range(1..=256))]
    head_dim_v: Option<u16>,
    /// Causal mask; `true,false` measures with and without. Default: true,false, or true with --kinds
    #[arg(long, value_delimiter = ',', action = clap::ArgAction::Set)]
    pub(super) causal: Vec<bool>,
    /// Element types, separated by commas: bf16, f16 or f32; f8e4m3 or f8e5m2 for the forward pass of tensors that are
    /// rounded to them, with a scale for each block of 128 rows. Default: bf16, or f32 on the CPU
    #[arg(long, value_delimiter = ',', value_parser = ["bf16", "f16", "f32", "f8e4m3", "f8e5m2"])]
    pub(super) dtype: Vec<String>,
    /// Tiles of the forward kernel: q_tile,k_tile,warps,stages, and hints as in the table (`64,64,8,2,ws`). May be
    /// repeated: each is measured, and the fastest is used afterwards
    #[arg(long, alias = "forward", value_name = "TILES", value_parser = tiles::parse)]
    fwd_tiles: Vec<Tiles>,
    /// Tiles of the dK/dV kernel, in the same form
    #[arg(long, alias = "keys", value_name = "TILES", value_parser = tiles::parse)]
    dkdv_tiles: Vec<Tiles>,
    /// Tiles of the dQ kernel, in the same form
    #[arg(long, alias = "queries", value_name = "TILES", value_parser = tiles::parse)]
    dq_tiles: Vec<Tiles>,
    /// Sweep over many tiles for each kernel without tiles on the command line
    #[arg(long)]
    sweep: bool,
    /// Skip the backward pass
    #[arg(long, conflicts_with_all = ["dkdv_tiles", "dq_tiles", "one_pass", "deterministic"])]
    forward_only: bool,
    #[command(flatten)]
    passes: Passes,
    #[command(flatten)]
    modifiers: attention_modifiers::ModifierArguments,
    /// Maximum number of splits of each loop over KV blocks (split-KV) or query blocks (split-Q). Default: enough to
    /// fill the GPU when the grid has fewer programs than SMs
    #[arg(long, alias = "parts", value_name = "COUNT", conflicts_with_all = ["kinds", "modifiers"], value_parser = clap::value_parser!(u32).range(1..))]
    splits: Option<u32>,
    #[command(flatten)]
    pub(super) kinds: attention_kinds::Kinds,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    if !arguments.kinds.kinds.is_empty() {
        return attention_kinds::run(arguments, out);
    }
    arguments.kinds.expect_given()?;
    let batch = arguments.batch.unwrap_or(1);
    let (device, mut recorder) = arguments.common.open("attention")?;
    let or = |given: &[usize], gpu: &[usize], cpu: &[usize]| match (given, device.is_cuda()) {
        ([], true) => gpu.to_vec(),
        ([], false) => cpu.to_vec(),
        (given, _) => given.to_vec(),
    };
    let heads = or(arguments.heads.as_slice(), &[16], &[4])[0];
    let seq_len = or(arguments.seq_len.as_slice(), &[16384], &[1024])[0];
    let default_dtype = [if device.is_cuda() { "bf16" } else { "f32" }.to_string()];
    let dtypes = if arguments.dtype.is_empty() { &default_dtype[..] } else { &arguments.dtype };
    let causal_masks: &[bool] = match arguments.causal.as_slice() {
        [] => &[true, false],
        given => given,
    };
    // What is refused, is refused before the first measurement.
    let mut problems = Vec::new();
    for d in or(&arguments.head_dim, &[64, 128], &[64]) {
        if [batch, heads, seq_len].contains(&0) || !(1..=256).contains(&d) {
            return Err(CliError::usage(
                "invalid shape of attention",
                "--batch, --heads and --seq-len must be at least 1, head dimensions from 1 to 256",
            ));
        }
        for &causal in causal_masks {
            let scale = f64::from(1.0 / (d as f32).sqrt());
            let modifiers = arguments.modifiers.of(seq_len, causal)?;
            let (n_q, n_k) = (seq_len, seq_len);
            let d_v = arguments.head_dim_v.map_or(d, usize::from);
            let problem =
                Problem { batch, heads_q: heads, heads_kv: heads, n_q, n_k, d, d_v, causal, scale, modifiers };
            if dtypes.iter().any(|dtype| dtype.starts_with("f8")) {
                arguments.expect_8_bit(&problem)?;
            }
            problems.extend(dtypes.iter().map(|dtype| (problem, dtype.as_str())));
        }
    }
    for (problem, dtype) in problems {
        let tiles = &arguments.fwd_tiles;
        match dtype {
            "f8e4m3" => eight_bit::<F8E4M3>(&arguments.common, &device, problem, tiles, &mut recorder)?,
            "f8e5m2" => eight_bit::<F8E5M2>(&arguments.common, &device, problem, tiles, &mut recorder)?,
            "f32" => Bench::<f32>::new(arguments, &device, problem)?.run(&mut recorder)?,
            "f16" => Bench::<f16>::new(arguments, &device, problem)?.run(&mut recorder)?,
            _ => Bench::<bf16>::new(arguments, &device, problem)?.run(&mut recorder)?,
        }
    }
    recorder.finish(out)
}

impl Arguments {
    /// # Errors
    /// Options that the forward pass of 8-bit floats does not have here.
    fn expect_8_bit(&self, problem: &Problem) -> Result<()> {
        let has_modifiers = problem.modifiers != Modifiers::default();
        let options = [
            ("--modifier", has_modifiers),
            ("--splits", self.splits.is_some()),
            ("--head-dim-v", self.head_dim_v.is_some()),
            ("--sweep", self.sweep),
            ("--dkdv-tiles", !self.dkdv_tiles.is_empty()),
            ("--dq-tiles", !self.dq_tiles.is_empty()),
            ("--one-pass or --deterministic", self.passes.is_given()),
        ];
        match options.into_iter().find(|(_, is_given)| *is_given) {
            None => Ok(()),
            Some((option, _)) => Err(CliError::usage(
                format!("--dtype f8… with {option}"),
                "8-bit floats are measured in the forward pass alone, of values as wide as keys, without modifiers, \
                 with --fwd-tiles",
            )),
        }
    }
}

/// One problem in one element type: buffers at full size, and a small problem whose outputs are all checked.
struct Bench<'a, T: Number> {
    arguments: &'a Arguments,
    device: &'a Device,
    problem: Problem,
    /// How the backward pass computes dQ; the small problem does what the full one does.
    form: Backward,
    full: Attention<T>,
    small: Attention<T>,
    expected: Expected,
}

/// The tiles of each pass.
#[derive(Clone, Copy)]
struct TileChoice {
    fwd: Tiles,
    dkdv: Tiles,
    dq: Tiles,
}

impl<'a, T: Number> Bench<'a, T> {
    fn new(arguments: &'a Arguments, device: &'a Device, problem: Problem) -> Result<Bench<'a, T>> {
        let (small, full) = (Attention::new(device, small(&problem))?, Attention::new(device, problem)?);
        let (small, full) = match arguments.splits {
            None => (small.split_like(&problem), full),
            Some(splits) => (small.with_splits(splits as usize)?, full.with_splits(splits as usize)?),
        };
        let expected = small.expected()?;
        let backward = arguments.passes.backward(!arguments.dq_tiles.is_empty());
        let keys = |d| [problem.batch, problem.heads_kv, problem.n_k, d];
        let options = Options { backward, ..Options::new(problem.causal) };
        let form = options.form::<T>(device, keys(problem.d), keys(problem.d_v));
        Ok(Bench { arguments, device, problem, form, full, small, expected })
    }

    fn run(mut self, recorder: &mut Recorder) -> Result<()> {
        let [fwd, dkdv, dq] = self.tiles_of_launches();
        let [fwd_tiles, dkdv_tiles, dq_tiles] = [
            self.candidates(Pass::Forward, &self.arguments.fwd_tiles, fwd),
            self.candidates(Pass::Dkdv, &self.arguments.dkdv_tiles, dkdv),
            self.candidates(Pass::Dq, &self.arguments.dq_tiles, dq),
        ];
        let mut best = TileChoice { fwd: fwd_tiles[0], dkdv: dkdv_tiles[0], dq: dq_tiles[0] };
        let mut forward_ms = f64::INFINITY;
        for fwd in fwd_tiles {
            let choice = TileChoice { fwd, ..best };
            let measured = self.forward(choice);
            self.record(recorder, "attention_fwd", tiles::text(fwd), [1, 1], &measured)?;
            keep_better(&mut best, &mut forward_ms, choice, &measured);
        }
        self.peer(recorder)?;
        if self.arguments.forward_only || forward_ms.is_infinite() {
            return Ok(());
        }
        // The backward pass reads the outputs of the forward pass: compute them with tiles that are known to work.
        self.small.forward(&self.options(best))?;
        self.full.forward(&self.options(best))?;
        // The tiles of the two backward kernels are independent: tune one kernel after the other.
        let mut backward_ms = f64::INFINITY;
        let dkdv_choices = dkdv_tiles.into_iter().map(|dkdv| (Some(dkdv), None));
        // One-pass backward has no dQ kernel.
        let dq_tiles = if self.form == Backward::TwoPass { dq_tiles } else { Vec::new() };
        let dq_choices = dq_tiles.into_iter().skip(1).map(|dq| (None, Some(dq)));
        for (dkdv, dq) in dkdv_choices.chain(dq_choices) {
            let choice = TileChoice { dkdv: dkdv.unwrap_or(best.dkdv), dq: dq.unwrap_or(best.dq), ..best };
            let measured = self.backward(choice);
            let tiles = self.backward_text(choice);
            self.record(recorder, "attention_bwd", tiles, [3, 2], &measured)?;
            keep_better(&mut best, &mut backward_ms, choice, &measured);
        }
        if backward_ms.is_infinite() {
            return Ok(());
        }
        let measured = self.forward_backward(best);
        let tiles = format!("{} {}", tiles::text(best.fwd), self.backward_text(best));
        self.record(recorder, "attention_fwd_bwd", tiles, [4, 3], &measured)
    }

    /// Times candle's matmul and softmax on the same inputs, on the CPU in f32 without modifiers only.
    fn peer(&mut self, recorder: &mut Recorder) -> Result<()> {
        let is_modified = self.problem.modifiers != Modifiers::default();
        if self.device.is_cuda() || T::dtype().name() != "f32" || is_modified {
            return Ok(());
        }
        let measured = peer::Peer::new(&self.full).and_then(|peer| {
            let timing = self.arguments.common.time(self.device, || peer.run().map(drop))?;
            Ok((timing, peer.difference(&self.full)?))
        });
        self.record(recorder, "candle_fwd", "matmul softmax matmul".to_string(), [1, 1], &measured)
    }

    /// The tiles that a launch without given ones takes: measured ones, or those that ship for the GPU. Launches what needs them.
    /// What fails here fails again as a row, with its message.
    fn tiles_of_launches(&mut self) -> [Option<Tiles>; 3] {
        let Arguments { fwd_tiles, dkdv_tiles, dq_tiles, forward_only, .. } = self.arguments;
        let backward = self.form;
        let given = |tiles: &[Tiles]| tiles.first().copied();
        let options = Options {
            backward,
            forward_tiles: given(fwd_tiles),
            dkdv_tiles: given(dkdv_tiles),
            dq_tiles: given(dq_tiles),
            ..Options::new(self.problem.causal)
        };
        let need_backward =
            !forward_only && (dkdv_tiles.is_empty() || dq_tiles.is_empty() && self.form == Backward::TwoPass);
        let forward = (fwd_tiles.is_empty() || need_backward).then(|| self.full.forward(&options));
        if need_backward && matches!(forward, Some(Ok(()))) {
            let _ = self.full.backward(&options);
        }
        tiles::taken::<T>(&self.problem, self.full.modifier_names(), None, self.device, self.form != Backward::TwoPass)
    }

    /// Returns the tiles to measure for one pass: those of the command line, else those of a launch (`taken`), or the default, and,
    /// in a sweep, others.
    fn candidates(&self, pass: Pass, given: &[Tiles], taken: Option<Tiles>) -> Vec<Tiles> {
        if !given.is_empty() {
            return given.to_vec();
        }
        let d = self.problem.d.max(self.problem.d_v);
        let (bytes, target) = (T::dtype().bytes(), self.device.target());
        let mut list = vec![taken.unwrap_or_else(|| default_tiles(pass, d, bytes, &target))];
        if self.arguments.sweep {
            let others = tiles::sweep(pass).into_iter().filter(|&tiles| tiles != list[0]);
            list.extend(others.collect::<Vec<_>>());
        }
        list
    }

    /// Records a row. `products` are the matmuls along the head dimension of q, and along that of v: one of each in the forward pass,
    /// three and two in the backward pass.
    fn record(
        &self,
        recorder: &mut Recorder,
        kernel: &str,
        tiles: String,
        products: [usize; 2],
        measured: &Measured,
    ) -> Result<()> {
        let p = &self.problem;
        let heads = (p.batch * p.heads_q) as f64;
        let columns = products[0] * p.d + products[1] * p.d_v;
        let flop = 2.0 * heads * attention_modifiers::pairs(p) * columns as f64;
        let d_v = if p.d_v == p.d { String::new() } else { format!(" d_v={}", p.d_v) };
        let case = format!("{}{d_v}{}", if p.causal { "causal" } else { "full" }, self.arguments.modifiers.text());
        let row = Row::new(kernel, &[p.batch, p.heads_q, p.n_q, p.d], T::dtype().name())
            .case(&match self.arguments.splits {
                None => case,
                Some(splits) => format!("{case} splits={splits}"),
            })
            .tiles(tiles)
            .measured(measured, Work::Flop(flop));
        // A candidate that does not compile or launch fails the command only if there is no other candidate: without a
        // sweep, and with at most one choice of tiles per kernel.
        let alone = !self.arguments.sweep
            && [&self.arguments.fwd_tiles, &self.arguments.dkdv_tiles, &self.arguments.dq_tiles]
                .iter()
                .all(|l| l.len() < 2);
        match alone {
            true => recorder.push(row),
            false => recorder.push_choice(row, measured),
        }
    }

    fn backward_text(&self, choice: TileChoice) -> String {
        let dq = tiles::dq_text(self.form, choice.dq);
        format!("{} {dq}", tiles::text(choice.dkdv))
    }

    fn options(&self, choice: TileChoice) -> Options<'static> {
        Options {
            backward: self.form,
            forward_tiles: Some(choice.fwd),
            dkdv_tiles: Some(choice.dkdv),
            dq_tiles: Some(choice.dq),
            ..Options::new(self.problem.causal)
        }
    }

    fn forward(&mut self, choice: TileChoice) -> Measured {
        let options = self.options(choice);
        self.small.poison_forward()?;
        self.small.forward(&options)?;
        let error = self.small.check_forward(&self.expected)?;
        self.full.poison_forward()?;
        let timing = self.arguments.common.time(self.device, || self.full.forward(&options))?;
        Ok((timing, error.max(self.full.spot_check_forward()?)))
    }

    fn backward(&mut self, choice: TileChoice) -> Measured {
        let options = self.options(choice);
        self.small.poison_backward()?;
        self.small.backward(&options)?;
        let error = self.small.check_backward(&self.expected)?;
        self.full.poison_backward()?;
        let timing = self.arguments.common.time(self.device, || self.full.backward(&options))?;
        Ok((timing, error.max(self.full.spot_check_backward()?)))
    }

    /// Times forward and backward together. [`Bench::forward`] and [`Bench::backward`] have checked both.
    fn forward_backward(&mut self, choice: TileChoice) -> Measured {
        let options = self.options(choice);
        self.full.poison_forward()?;
        self.full.poison_backward()?;
        let timing = self.arguments.common.time(self.device, || {
            self.full.forward(&options)?;
            self.full.backward(&options)
        })?;
        Ok((timing, self.full.spot_check_forward()?.max(self.full.spot_check_backward()?)))
    }
}

fn keep_better(
    best: &mut TileChoice,
    best_ms: &mut f64,
    choice: TileChoice,
    measured: &Result<(Timing, f64), BenchError>,
) {
    if let Ok((timing, _)) = measured
        && timing.median < *best_ms
    {
        (*best, *best_ms) = (choice, timing.median);
    }
}
