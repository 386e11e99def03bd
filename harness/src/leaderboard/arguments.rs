//! Command-line arguments of `leaderboard`, and the cases that they select.

use std::path::PathBuf;

use clap::Parser;
use tilewright::Device;
use tilewright::codegen::lang::Precision;
use tilewright::kernels::attention::Tiles;
use tilewright::kernels::attention::reference::Problem;

use super::measure::Plan;
use crate::cli::bench::tiles::{self, Passes};
use crate::cli::{CliError, Result};
use crate::report::Outputs;
use tilewright_cli::device::{self, DeviceArg, open};
use tilewright_cli::value_parsers::{milliseconds, seconds};

/// Benchmark FlashAttention-2, forward and backward: checked against f64, then timed with a cold L2 cache.
///
/// The default is the leaderboard case of CS336's second assignment: bf16, causal, batch 1, 16 heads, 16384 tokens,
/// head dimension 64. One step is the forward pass, the sum of its output, and the backward pass of that sum, whose
/// gradient of ones is written in every step. Each pass warms up for 1 s and is timed for 10 s. On the CPU, the default
/// is a small case of the same kind, and the output says so.
///
/// Checks: all outputs of a problem of about a thousand tokens, which compiles the same code with the same tiles, are
/// compared with naive attention in f64. In larger problems, rows at irregular positions of several heads are checked:
/// a row of O, its log-sum-exp and its dQ are computed in f64 from the inputs alone; a row of dK and dV is computed in
/// f64 from the inputs and from the kernel's O and log-sum-exp, which have been checked before. The sum of O is checked
/// against the sum in f64. A case with a wrong result gets no time, and the exit code is 1.
#[derive(Clone, Debug, Parser)]
#[command(name = "leaderboard", version = tilewright::codegen::VERSION, max_term_width = 100)]
pub struct Arguments {
    /// Device: cpu, cuda or cuda:N. Default: TILEWRIGHT_DEVICE, else a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    pub device: Option<DeviceArg>,
    #[arg(long, default_value_t = 1)]
    pub batch: usize,
    /// Number of heads. Default: 16, 2 on the CPU, 1 in a sweep
    #[arg(long)]
    pub heads: Option<usize>,
    /// Sequence length; in a sweep, several separated by commas. Default: 16384, or 512 on the CPU
    #[arg(long, alias = "length", value_delimiter = ',')]
    pub seq_len: Vec<usize>,
    /// Head dimension; in a sweep, several separated by commas. Default: 64
    #[arg(long, alias = "dim", value_delimiter = ',')]
    pub head_dim: Vec<usize>,
    /// Element type: bf16, f16 or f32; in a sweep, several separated by commas. Default: bf16
    #[arg(long, value_delimiter = ',', value_parser = ["bf16", "f16", "f32"])]
    pub dtype: Vec<String>,
    /// Precision of f32 on a GPU: tf32x3 (nearly as accurate as f32), tf32 or ieee; in a sweep, several separated by
    /// commas
    #[arg(long, value_delimiter = ',', value_parser = ["tf32x3", "tf32", "ieee"])]
    pub precision: Vec<String>,
    /// No causal mask: every query attends to all keys
    #[arg(long, alias = "full")]
    pub non_causal: bool,
    /// The assignment's table: sequence lengths from 128 to 65536, head dimensions from 16 to 128, bf16 and f32, each
    /// pass separately and all together; OOM where memory runs out
    #[arg(long)]
    pub sweep: bool,
    /// Compare with rows of other implementations from the same machine, as JSON lines
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Append the results to this file as JSON lines, in the format of harness/records
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
    /// Warm-up time of each pass, in milliseconds, at most a day. Default: 1000, or 25 in a sweep or on the CPU
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub warmup_ms: Option<f64>,
    /// Measurement time of each pass, in milliseconds, at most a day. Default: 10000, or 100 in a sweep or on the CPU
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    pub rep_ms: Option<f64>,
    /// Autotune each kernel first, for at most this many seconds (at most 86400)
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub tune: Option<f64>,
    #[command(flatten)]
    pub passes: Passes,
    /// Tiles of the forward kernel: q_tile,k_tile,warps,stages, and hints as in the table (`64,64,8,2,ws`). Default: the
    /// tuned configuration
    #[arg(long, alias = "forward", value_name = "TILES", value_parser = tiles::parse)]
    pub fwd_tiles: Option<Tiles>,
    /// Tiles of the dK/dV kernel
    #[arg(long, alias = "keys", value_name = "TILES", value_parser = tiles::parse)]
    pub dkdv_tiles: Option<Tiles>,
    /// Tiles of the dQ kernel
    #[arg(long, alias = "queries", value_name = "TILES", value_parser = tiles::parse)]
    pub dq_tiles: Option<Tiles>,
    #[command(flatten)]
    pub outputs: Outputs,
}

impl Arguments {
    /// Opens the device, and returns the cases to measure in the order of the table.
    ///
    /// # Errors
    /// No device, an invalid shape, or several values without `--sweep`.
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
        let lengths = if self.seq_len.is_empty() { lengths } else { &self.seq_len };
        let dims: &[usize] = if self.sweep { &[16, 32, 64, 128] } else { &[64] };
        let dims = if self.head_dim.is_empty() { dims } else { &self.head_dim };
        let words = |given: &[String], default: &[&str]| match given {
            [] => default.iter().map(|w| w.to_string()).collect::<Vec<_>>(),
            given => given.to_vec(),
        };
        let dtypes = words(&self.dtype, if self.sweep { &["bf16", "f32"] } else { &["bf16"] });
        let precisions = words(&self.precision, if self.sweep { &["tf32x3", "tf32"] } else { &["tf32x3"] });
        if !self.sweep && (lengths.len() > 1 || dims.len() > 1 || dtypes.len() > 1 || precisions.len() > 1) {
            return Err(CliError::usage(
                "several values need --sweep",
                "add --sweep, or give one value of --seq-len, --head-dim, --dtype and --precision",
            ));
        }
        let mut plans = Vec::new();
        for dtype in &dtypes {
            // Other types, and the CPU, have one precision.
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
                "invalid shape of attention",
                "--batch, --heads and --seq-len must be at least 1, head dimensions from 1 to 256",
            ));
        }
        let scale = f64::from(1.0 / (d as f32).sqrt());
        let (batch, causal) = (self.batch, !self.non_causal);
        let problem = Problem {
            batch,
            heads_q: heads,
            heads_kv: heads,
            n_q: n,
            n_k: n,
            d,
            d_v: d,
            causal,
            scale,
            modifiers: Default::default(),
        };
        Ok(Plan {
            problem,
            dtype: dtype.to_string(),
            precision,
            tiles: [self.fwd_tiles, self.dkdv_tiles, self.dq_tiles],
            backward: self.passes.backward(self.dq_tiles.is_some()),
            tune: self.tune,
        })
    }

    /// Returns warm-up and measurement time in milliseconds.
    pub fn times(&self, device: &Device) -> (f64, f64) {
        let (warmup, rep) = if self.sweep || !device.is_cuda() { (25.0, 100.0) } else { (1000.0, 10_000.0) };
        (self.warmup_ms.unwrap_or(warmup), self.rep_ms.unwrap_or(rep))
    }
}
