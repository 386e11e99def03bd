//! `tilewright bench`: benchmarks of kernels, models, collectives, launches and compilation.
//!
//! A kernel's results are checked against an f64 reference with the same tiles before it is timed: a wrong kernel gets
//! an error message in place of a time, and the command fails. Every row is appended to the `--record` file as soon as
//! it is measured; the table is printed at the end. `harness/records/README.md` documents the fields.

mod attention;
mod attention_8_bit;
pub(crate) mod attention_check;
mod attention_kinds;
mod attention_modifiers;
mod attention_peer;
mod comm;
mod compile;
mod copy;
pub(crate) mod data;
mod ddp;
mod decode;
mod fused;
mod kernels;
mod launch;
mod matmul;
mod model;
mod norm;
pub(in crate::cli) mod process_groups;
pub(crate) mod record;
pub(crate) mod rowwise;
mod scaled_matmul;
mod shard;
mod startup;
pub(crate) mod tiles;
mod wall_time;

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use tilewright::Device;
use tilewright::bench::{Timing, do_bench};

use self::record::Recorder;
use super::device::{self, DeviceArg, open};
use super::value_parsers::milliseconds;
use super::{Result, expect_used};
use crate::report::Outputs;

#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Subcommand)]
enum Subject {
    /// FlashAttention-2: forward, backward, and both, with given tiles or a sweep; with --kinds, attention under
    /// autograd
    Attention(attention::Arguments),
    /// Attention of a few queries per sequence to a cache of keys and values, in pages or not
    Decode(decode::Arguments),
    /// Transformers, end to end: forward, backward, optimizer
    Model(Box<model::Arguments>),
    /// Norms, forward and backward: tensor ops against our kernels
    Norm(norm::Arguments),
    /// Fusion: attention and whole models in tensor ops, against our kernels
    Fused(fused::Arguments),
    /// All other kernels: memory-bound kernels, and matmuls
    Kernels(kernels::Arguments),
    /// A copy within device memory: the upper bound of memory-bound kernels
    Copy(copy::Arguments),
    /// Collectives: all-reduce and others, by size, number of ranks and backend
    Comm(comm::Arguments),
    /// Data-parallel training steps: time, communication and its overlap with backward, by form and bucket size
    Ddp(ddp::Arguments),
    /// Memory and time of a step with replicated and with sharded optimizer state (ZeRO-1)
    Shard(shard::Arguments),
    /// Host overhead of a kernel launch
    Launch(launch::Arguments),
    /// Compile time by phase, cache hits, and the time from process start to the first launch
    Compile(compile::Arguments),
    /// One kernel by its name in `tilewright list`, with the options of `kernels`
    #[command(external_subcommand)]
    Kernel(Vec<String>),
}

/// Arguments of all kernel benchmarks.
#[derive(Args)]
struct Common {
    /// Device: cpu, cuda or cuda:N. Default: TILEWRIGHT_DEVICE, else a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    device: Option<DeviceArg>,
    /// Append each row to this file when it is measured, as JSON lines
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Warm-up time of each kernel, in milliseconds, at most a day. Default: 100
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    warmup_ms: Option<f64>,
    /// Measurement time of each kernel, in milliseconds, at most a day. Default: 400
    #[arg(long, value_name = "MS", value_parser = milliseconds)]
    rep_ms: Option<f64>,
    #[command(flatten)]
    outputs: Outputs,
}

impl Common {
    /// Opens the device, and a recorder for the rows of a benchmark.
    fn open(&self, subject: &str) -> Result<(Device, Recorder)> {
        let device = open(self.device)?;
        self.outputs.check_with(self.record.iter().map(|path| ("--record", path)))?;
        let recorder = Recorder::new(&device, self.outputs.commit.as_deref(), self.record.as_deref())?;
        Ok((device, recorder.writing(subject, self.outputs.clone())))
    }

    fn time(&self, device: &Device, f: impl FnMut() -> tilewright::Result<()>) -> tilewright::Result<Timing> {
        do_bench(device, self.warmup_ms.unwrap_or(100.0), self.rep_ms.unwrap_or(400.0), f)
    }

    /// Refuses the times of [`Common::time`], for a benchmark that counts instead, by `options`.
    fn expect_no_times(&self, options: &str) -> Result<()> {
        let times = [("--warmup-ms", self.warmup_ms), ("--rep-ms", self.rep_ms)];
        expect_used(times.map(|(option, time)| {
            let help = format!("omit it; {options} say how often it measures");
            (option, time.is_some(), "this benchmark does not measure for a time".to_string(), help)
        }))
    }
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    match &arguments.subject {
        Subject::Attention(arguments) => attention::run(arguments, out),
        Subject::Decode(arguments) => decode::run(arguments, out),
        Subject::Model(arguments) => model::run(arguments, out),
        Subject::Norm(arguments) => norm::run(arguments, out),
        Subject::Fused(arguments) => fused::run(arguments, out),
        Subject::Kernels(arguments) => kernels::run(arguments, out),
        Subject::Copy(arguments) => copy::run(arguments, out),
        Subject::Comm(arguments) => comm::run(arguments, out),
        Subject::Ddp(arguments) => ddp::run(arguments, out),
        Subject::Shard(arguments) => shard::run(arguments, out),
        Subject::Launch(arguments) => launch::run(arguments, out),
        Subject::Compile(arguments) => compile::run(arguments, out),
        Subject::Kernel(words) => kernels::run_named(words, out),
    }
}
