//! `tilewright bench`: times of kernels, launches and compilations, each beside a check of what was timed.
//!
//! A kernel's results are held against an f64 reference before its time is taken, with the same tiles: a wrong kernel
//! gets a reason in place of a time, and the command fails. Every row goes to the `--record` file as soon as it is known;
//! the table comes last. `harness/records/README.md` says what the fields mean.

mod attention;
pub(crate) mod attention_check;
mod attention_kinds;
mod attention_peer;
mod comm;
mod compile;
mod copy;
pub(crate) mod data;
mod ddp;
mod fused;
mod kernels;
mod launch;
mod matmul;
mod model;
mod norm;
pub(crate) mod record;
pub(crate) mod rows;
mod shard;
mod start;
pub(crate) mod tiles;
mod wall;
pub(in crate::cli) mod world;

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use tilewright::Device;
use tilewright::bench::{Timing, do_bench};

use self::record::Recorder;
use super::Result;
use super::numbers::milliseconds;
use super::run::{Choice, device, open};
use crate::report::Outputs;

#[derive(Args)]
pub struct Arguments {
    #[command(subcommand)]
    subject: Subject,
}

#[derive(Subcommand)]
enum Subject {
    /// FlashAttention-2: forward, backward, and both, with the tiles that you name or a sweep over many; with --kinds, attention
    /// as models use it
    Attention(attention::Arguments),
    /// Transformers, end to end: forward, backward, optimizer
    Model(Box<model::Arguments>),
    /// Norms, forward and backward: in tensor ops and by our kernels
    Norm(norm::Arguments),
    /// What fusing is worth: attention and whole models in tensor ops, and by our kernels
    Fused(fused::Arguments),
    /// All other kernels: those that are bound by memory, and matrix products
    Kernels(kernels::Arguments),
    /// A copy within the device's memory: the most that a memory-bound kernel can reach
    Copy(copy::Arguments),
    /// Collectives between ranks: all-reduce and others, by size, number of ranks and back end
    Comm(comm::Arguments),
    /// Training steps on many ranks: time, communication, and how much of it backward hides, by form and bucket size
    Ddp(ddp::Arguments),
    /// Memory and time of a step with the optimizer's state whole and shared out
    Shard(shard::Arguments),
    /// How long it takes to issue a launch
    Launch(launch::Arguments),
    /// How long each phase takes from a kernel to PTX, a hit in the cache on disk, and a process until its first launch is done
    Compile(compile::Arguments),
    /// One kernel by its name in `tilewright list`, with the options of `kernels`
    #[command(external_subcommand)]
    Kernel(Vec<String>),
}

/// What all benchmarks take.
#[derive(Args)]
struct Common {
    /// Where to run: cpu, cuda or cuda:N; without it, where TILEWRIGHT_DEVICE says, else on a GPU if there is one
    #[arg(long, value_parser = device)]
    device: Option<Choice>,
    /// Append the rows to this file as they are found, a JSON object a line
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// How long each kernel runs before it is timed, in milliseconds, at most a day
    #[arg(long, value_name = "MS", default_value_t = 100.0, value_parser = milliseconds)]
    warmup_ms: f64,
    /// How long each kernel is timed, in milliseconds, at most a day
    #[arg(long, value_name = "MS", default_value_t = 400.0, value_parser = milliseconds)]
    rep_ms: f64,
    #[command(flatten)]
    outputs: Outputs,
}

impl Common {
    /// The device, and what takes the rows of a benchmark.
    fn open(&self, subject: &str) -> Result<(Device, Recorder)> {
        let device = open(self.device)?;
        self.outputs.check_beside(&self.record)?;
        let recorder = Recorder::new(&device, self.outputs.commit.as_deref(), self.record.as_deref())?;
        Ok((device, recorder.writing(subject, self.outputs.clone())))
    }

    fn time(&self, device: &Device, f: impl FnMut() -> tilewright::Result<()>) -> tilewright::Result<Timing> {
        do_bench(device, self.warmup_ms, self.rep_ms, f)
    }
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    match &arguments.subject {
        Subject::Attention(arguments) => attention::run(arguments, out),
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
