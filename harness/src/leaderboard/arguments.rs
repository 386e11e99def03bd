//! What the program takes.

use std::path::PathBuf;

use clap::Parser;
use tilewright::Device;
use tilewright::codegen::lang::Precision;
use tilewright::kernels::attention::Tiles;
use tilewright::kernels::attention::reference::Problem;

use super::measure::Plan;
use crate::cli::bench::tiles;
use crate::cli::numbers::{milliseconds, seconds};
use crate::cli::run::{Choice, device, open};
use crate::cli::{CliError, Result};
use crate::report::Outputs;

/// The time of FlashAttention-2, forward and backward: checked against f64, then timed with a cold L2 cache.
///
/// Without arguments, the leaderboard's case of CS336's second assignment: bf16, causal, batch 1, 16 heads, 16384 tokens, head
/// dimension 64; one step is the forward pass, the sum of its output, and the backward pass of that sum, whose gradient
/// of ones is written in every step. It runs for 1 s before and for 10 s while it is timed. On the CPU the default is a
/// small case of the same kind, and the output says so.
///
/// How results are checked: all outputs of a problem of about a thousand tokens, which compiles the same code with the
/// same tiles, against attention by its definition in f64. Of a problem too large for that, rows at irregular places of
/// several heads: a row of O, its log-sum-exp and its dQ are exact in f64 from the inputs alone; a row of dK and dV is
/// computed in f64 from the inputs and from the kernel's own O and log-sum-exp, which have been checked then. The sum of O is
/// checked against the sum in f64. A case that is wrong anywhere gets no time, and the exit code is 1.
#[derive(Clone, Debug, Parser)]
#[command(name = "leaderboard", version = tilewright::codegen::VERSION, max_term_width = 100)]
pub struct Arguments {
    /// Where to run: cpu, cuda or cuda:N; without it, where TILEWRIGHT_DEVICE says, else on a GPU if there is one
    #[arg(long, value_parser = device)]
    pub device: Option<Choice>,
    #[arg(long, default_value_t = 1)]
    pub batch: usize,
    /// Heads; 16, 2 on the CPU, and 1 in a sweep
    #[arg(long)]
    pub heads: Option<usize>,
    /// Tokens, several with commas in a sweep; 16384, 512 on the CPU
    #[arg(long, value_delimiter = ',')]
    pub length: Vec<usize>,
    /// Head dimension, several with commas in a sweep; 64
    #[arg(long, value_delimiter = ',')]
    pub dim: Vec<usize>,
    /// bf16, f16 or f32, several with commas in a sweep; bf16
    #[arg(long, value_delimiter = ',', value_parser = ["bf16", "f16", "f32"])]
    pub dtype: Vec<String>,
    /// How f32 multiplies on a GPU: tf32x3 (nearly exact), tf32 or ieee, several with commas in a sweep
    #[arg(long, value_delimiter = ',', value_parser = ["tf32x3", "tf32", "ieee"])]
    pub precision: Vec<String>,
    /// Every row sees all keys
    #[arg(long)]
    pub full: bool,
    /// The assignment's table: lengths from 128 to 65536, head dimensions from 16 to 128, bf16 and f32, each pass by itself and
    /// together; N/A where the device's memory ends
    #[arg(long)]
    pub sweep: bool,
    /// Rows of other implementations from the same machine, a JSON object a line; they stand beside ours
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Append what was measured to this file, a JSON object a line, as harness/records keeps it
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// How long each pass runs before it is timed, in milliseconds, at most a day; 1000, and 25 in a sweep or on the CPU
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub warmup_ms: Option<f64>,
    /// How long each pass is timed, in milliseconds, at most a day; 10000, and 100 in a sweep or on the CPU
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub rep_ms: Option<f64>,
    /// Tune the kernels before, for at most so many seconds each, at most 86400
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub tune: Option<f64>,
    /// Sum dQ up in the kernel that makes dK and dV, atomically: faster where it is, and not the same bits in every run
    #[arg(long)]
    pub one_pass: bool,
    /// Tiles of the forward kernel, as q_tile,k_tile,warps,stages; without it what the autotuner knows
    #[arg(long, value_name = "TILES", value_parser = tiles::parse)]
    pub forward: Option<Tiles>,
    /// Tiles of the kernel that makes dK and dV
    #[arg(long, value_name = "TILES", value_parser = tiles::parse)]
    pub keys: Option<Tiles>,
    /// Tiles of the kernel that makes dQ
    #[arg(long, value_name = "TILES", value_parser = tiles::parse)]
    pub queries: Option<Tiles>,
    #[command(flatten)]
    pub outputs: Outputs,
}

impl Arguments {
    /// The device, and everything that is measured on it, in the order of the table.
    ///
    /// # Errors
    /// No device; shapes that no attention has; several values where one case is asked for.
    pub fn plans(&self) -> Result<(Device, Vec<Plan>)> {
        let device = open(self.device)?;
        let gpu = device.is_cuda();
        let heads = self.heads.unwrap_or(if self.sweep {
            1
        } else if gpu {
            16
        } else {
            2
        });
        let lengths: &[usize] = match (self.sweep, gpu) {
            (true, true) => &[128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536],
            (true, false) => &[128, 256],
            (false, true) => &[16384],
            (false, false) => &[512],
        };
        let lengths = if self.length.is_empty() { lengths } else { &self.length };
        let dims: &[usize] = if self.sweep { &[16, 32, 64, 128] } else { &[64] };
        let dims = if self.dim.is_empty() { dims } else { &self.dim };
        let words = |given: &[String], default: &[&str]| match given {
            [] => default.iter().map(|w| w.to_string()).collect::<Vec<_>>(),
            given => given.to_vec(),
        };
        let dtypes = words(&self.dtype, if self.sweep { &["bf16", "f32"] } else { &["bf16"] });
        let precisions = words(&self.precision, if self.sweep { &["tf32x3", "tf32"] } else { &["tf32x3"] });
        if !self.sweep && (lengths.len() > 1 || dims.len() > 1 || dtypes.len() > 1 || precisions.len() > 1) {
            return Err(CliError::usage(
                "several shapes are a sweep",
                "add --sweep, or name one length, dim and dtype",
            ));
        }
        let mut plans = Vec::new();
        for dtype in &dtypes {
            // Products of other types, and on the CPU, have one precision.
            let chosen: Vec<Option<Precision>> = match dtype == "f32" && gpu {
                true => precisions.iter().map(|word| Precision::from_name(word)).collect(),
                false => vec![None],
            };
            for precision in chosen {
                for &d in dims {
                    for &n in lengths {
                        plans.push(self.plan(dtype, precision, heads, n, d)?);
                    }
                }
            }
        }
        Ok((device, plans))
    }

    fn plan(&self, dtype: &str, precision: Option<Precision>, heads: usize, n: usize, d: usize) -> Result<Plan> {
        if [self.batch, heads, n].contains(&0) || !(1..=256).contains(&d) {
            return Err(CliError::usage(
                "there is no attention of this shape",
                "batch, heads and length are at least 1, head dimensions from 1 to 256",
            ));
        }
        let scale = f64::from(1.0 / (d as f32).sqrt());
        let (batch, causal) = (self.batch, !self.full);
        let problem = Problem { batch, heads_q: heads, heads_kv: heads, n_q: n, n_k: n, d, causal, scale };
        Ok(Plan {
            problem,
            dtype: dtype.to_string(),
            precision,
            tiles: [self.forward, self.keys, self.queries],
            one_pass: self.one_pass,
            tune: self.tune,
        })
    }

    /// Warm-up and repetition in milliseconds.
    pub fn times(&self, device: &Device) -> (f64, f64) {
        let (warmup, rep) = if self.sweep || !device.is_cuda() { (25.0, 100.0) } else { (1000.0, 10_000.0) };
        (self.warmup_ms.unwrap_or(warmup), self.rep_ms.unwrap_or(rep))
    }
}
