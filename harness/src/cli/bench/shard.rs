//! `tilewright bench shard`: measures memory and time of optimizer-state sharding.

use std::io::Write;
use std::sync::Arc;

use clap::Args;
use tilewright_candle::memory::kernel_device;

use super::ddp::{BenchModel, TrainingMode, Work, models_note, steps};
use super::process_groups::for_each_process_group;
use crate::cli::model_options::model_device;
use crate::cli::ranks::{ReserveSms, bucket_bytes_of, reserve_sms};
use crate::cli::value_parsers::bucket_mb;
use crate::cli::{CliError, Result};
use crate::dist::comm::{Communicator, Reduce};
use crate::dist::ddp::{DdpOptions, NCCL_CTAS};
use crate::dist::error::Error;
use crate::dist::sharded::Mode;
use crate::model::Config;
use crate::report::{Cell, Column, Outputs, Report, Table};
use crate::train;

/// Without a launcher (`tilewright launch`, mpirun, torchrun, srun), ranks are threads of this process, and memory is
/// measured over all ranks together.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    work: Work,
    /// Maximum bucket size in megabytes (10⁶ bytes). Default: 25; between GPUs, larger for large models
    #[arg(long, value_name = "MB", value_parser = bucket_mb)]
    bucket_mb: Option<f64>,
    /// Maximum number of CTAs (SMs) of NCCL during the backward pass; 0 leaves it to NCCL
    #[arg(long, value_name = "N", default_value_t = NCCL_CTAS)]
    nccl_ctas: u32,
    /// Use copy engines for communication during the backward pass, between GPUs of one host
    #[arg(long)]
    copy_engines: bool,
    /// SMs reserved for communication: matmuls use this many SMs fewer while gradients are in flight. auto: as many as
    /// NCCL uses
    #[arg(long, alias = "leave-sms", value_name = "N", default_value = "auto", value_parser = reserve_sms)]
    reserve_sms: ReserveSms,
    #[command(flatten)]
    outputs: Outputs,
}

/// The result of one sharding mode: bytes of the rank that has the most.
struct ShardResult {
    size: String,
    shard: Option<Mode>,
    parameters: f64,
    gradients: f64,
    optimizer: f64,
    /// Peak memory after initialization, before the update and after the update.
    peaks: Option<[f64; 3]>,
    milliseconds: Vec<f64>,
    /// Mean time per step of the collectives that distribute updated parameters, in milliseconds.
    param_sync_ms: f64,
}

struct World {
    backend: &'static str,
    ranks: usize,
    found: Vec<ShardResult>,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    arguments.outputs.expect_no_plot()?;
    arguments.outputs.check()?;
    let (bucket_bytes, nccl_ctas) = (arguments.bucket_mb.map(bucket_bytes_of), arguments.nccl_ctas);
    let (copies, reserve_sms) = (arguments.copy_engines, arguments.reserve_sms.0);
    let ddp = DdpOptions { bucket_bytes, nccl_ctas, copy_engines: copies, reserve_sms, ..DdpOptions::default() };
    let (work, models) = (&arguments.work, arguments.work.models()?);
    let worlds = for_each_process_group(&model_device(work.device)?, &work.backend, &work.ranks, |comm| {
        measure(work, &models, ddp, Arc::new(comm)).map_err(|error| CliError::Failure(error.to_string()))
    })?;
    if worlds.is_empty() {
        return Ok(());
    }
    Ok(arguments.outputs.write(report(&worlds, &models, work), out)?)
}

fn measure(work: &Work, models: &[(String, Config)], ddp: DdpOptions, comm: Arc<Communicator>) -> train::Result<World> {
    let mut found = Vec::new();
    let modes = [None, Some(Mode::Broadcast), Some(Mode::Zero1)];
    for ((size, config), shard) in models.iter().flat_map(|model| modes.map(|mode| (model, mode))) {
        comm.barrier().map_err(Error::from)?;
        let before = Peak::start(work)?;
        let mut bench_model = BenchModel::new(work, config, &comm, TrainingMode::DataParallel(ddp, shard))?;
        let mut peaks = [before.read()?, None, None];
        bench_model.gradients()?;
        peaks[1] = before.read()?;
        bench_model.update()?;
        peaks[2] = before.read()?;
        let flat = (bench_model.model.params().flat_len() * size_of::<f32>()) as f64;
        let mut bytes = [bench_model.trainer.optimizer_bytes() as f64, 0.0, 0.0, 0.0];
        for (to, peak) in bytes[1..].iter_mut().zip(peaks) {
            *to = peak.unwrap_or(f64::NAN);
        }
        comm.all_reduce(&mut bytes, Reduce::Max).map_err(Error::from)?;
        let [optimizer, peaks @ ..] = bytes;
        let steps = steps(work, &mut bench_model, &comm)?;
        let milliseconds = steps.iter().map(|step| step.total * 1e3).collect();
        let param_sync_ms = steps.iter().map(|step| step.parameters * 1e3).sum::<f64>() / steps.len() as f64;
        let peaks = peaks.iter().all(|peak| peak.is_finite()).then_some(peaks);
        let (size, parameters, gradients) = (size.clone(), flat, flat);
        found.push(ShardResult { size, shard, parameters, gradients, optimizer, peaks, milliseconds, param_sync_ms });
    }
    Ok(World { backend: comm.backend(), ranks: comm.world(), found })
}

/// Peak memory since [`Peak::start`]: allocated bytes on a GPU, else the resident memory of the process where the
/// system reports it.
struct Peak(&'static tilewright::Device);

impl Peak {
    /// Resets the peak.
    fn start(work: &Work) -> train::Result<Peak> {
        let other = |error: CliError| train::Error::from(Error::Misuse(error.to_string()));
        let device = kernel_device(&model_device(work.device).map_err(other)?)?;
        // Wait until the memory of the previous case is freed.
        device.synchronize()?;
        device.reset_peak_memory()?;
        // Linux: 5 resets the peak resident set size. Other systems do not have this file, and no peak is reported.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        Ok(Peak(device))
    }

    /// Returns the peak in bytes; `None` where the system does not report it.
    fn read(&self) -> train::Result<Option<f64>> {
        self.0.synchronize()?;
        if let Some(bytes) = self.0.peak_memory()? {
            return Ok(Some(bytes as f64));
        }
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
        Ok(kib.map(|kib| kib * 1024.0))
    }
}

fn report(worlds: &[World], models: &[(String, Config)], work: &Work) -> Report {
    let columns = [
        Column::text("backend"),
        Column::integer("ranks"),
        Column::text("size"),
        Column::text("optimizer state"),
        Column::number("parameters").unit("MB"),
        Column::number("gradients").unit("MB"),
        Column::number("state").unit("MB"),
        Column::number("ideal shard").unit("MB"),
        Column::number("after initialization").unit("MB"),
        Column::number("before the update").unit("MB"),
        Column::number("after the update").unit("MB"),
        Column::number("activations and other").unit("MB"),
        Column::number("saved").unit("MB"),
        Column::number("saved, predicted").unit("MB").key("saved_predicted_mb"),
        Column::number("step").unit("ms"),
        Column::number("parameter sync").unit("ms").key("parameter_sync_ms"),
        Column::number("parameter sync").unit("%").decimals(1).key("parameter_sync_percent"),
    ];
    let mut table = Table::new("shard", "Memory and time with replicated and sharded optimizer state", columns);
    let mb = |bytes: f64| Cell::from(bytes / 1e6);
    for world in worlds {
        for found in &world.found {
            let name = match found.shard {
                None => "replicated",
                Some(Mode::Broadcast) => "sharded, broadcast",
                Some(Mode::Zero1) => "sharded, ZeRO-1",
            };
            let shards = if found.shard.is_some() { world.ranks as f64 } else { 1.0 };
            let state = found.parameters + found.gradients + found.optimizer;
            let peak = |at: usize| found.peaks.map(|peaks| peaks[at] / 1e6).into();
            let replicated = world.found.iter().find(|other| other.size == found.size).and_then(|other| other.peaks);
            let sharded = found.shard.is_some();
            let mean = found.milliseconds.iter().sum::<f64>() / found.milliseconds.len() as f64;
            let saved = replicated.zip(found.peaks).map(|(replicated, own)| (replicated[2] - own[2]) / 1e6).into();
            table.push([
                Cell::from(world.backend),
                world.ranks.into(),
                found.size.as_str().into(),
                name.into(),
                mb(found.parameters),
                mb(found.gradients),
                mb(found.optimizer),
                mb(2.0 * found.parameters / shards),
                peak(0),
                peak(1),
                peak(2),
                found.peaks.map(|peaks| (peaks[2] - state) / 1e6).into(),
                saved,
                mb(2.0 * found.parameters * (1.0 - 1.0 / shards)),
                Cell::statistics(&found.milliseconds),
                sharded.then_some(found.param_sync_ms).into(),
                sharded.then_some(100.0 * found.param_sync_ms / mean).into(),
            ]);
        }
    }
    let table = table
        .note(
            models_note(models, work)
                + " Each number is that of the rank that has the most. The ideal shard of AdamW's state is 8 bytes per \
                   parameter, divided by the number of ranks that shard it.",
        )
        .note(
            "Peaks: allocated memory on a GPU; on the CPU the resident memory of the process, including libraries and \
             caches, and of all ranks together if they are threads. Saved is the reduction of the peak after the \
             update relative to the replicated state; predicted is the part of the 8 bytes per parameter that other \
             ranks hold.",
        )
        .without_empty_columns();
    Report::new("shard", "Optimizer-state sharding").table(table)
}
