//! `tilewright bench shard`: what sharing the optimizer's state out saves, and costs.

use std::io::Write;
use std::sync::Arc;

use clap::Args;

use super::ddp::{Trainee, Work, steps};
use super::world::each_world;
use crate::cli::model_options::model_device;
use crate::cli::{CliError, Result};
use crate::dist::comm::{Communicator, Reduce};
use crate::dist::ddp::DdpOptions;
use crate::dist::error::Error;
use crate::dist::sharded::Mode;
use crate::model::Config;
use crate::ops::memory::kernel_device;
use crate::report::{Cell, Column, Outputs, Report, Table};
use crate::train;

/// Without ranks from outside (`tilewright launch`, mpirun, torchrun, srun), ranks are threads of this process, and what the process
/// holds is all ranks' together.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    work: Work,
    #[command(flatten)]
    outputs: Outputs,
}

/// What one way of keeping the state gave: bytes of the rank that has most.
struct Found {
    shard: Option<Mode>,
    parameters: f64,
    gradients: f64,
    optimizer: f64,
    /// Peaks after initialisation, before the update and after it.
    peaks: Option<[f64; 3]>,
    milliseconds: Vec<f64>,
}

struct World {
    back_end: &'static str,
    ranks: usize,
    found: Vec<Found>,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    arguments.outputs.check()?;
    let (work, config) = (&arguments.work, arguments.work.config()?);
    let worlds = each_world(&model_device(work.device)?, &work.back_end, &work.ranks, |comm| {
        measure(work, &config, Arc::new(comm)).map_err(|error| CliError::Failure(error.to_string()))
    })?;
    if worlds.is_empty() {
        return Ok(());
    }
    Ok(arguments.outputs.write(report(&worlds, &config, work), out)?)
}

fn measure(work: &Work, config: &Config, comm: Arc<Communicator>) -> train::Result<World> {
    let mut found = Vec::new();
    for shard in [None, Some(Mode::Broadcast), Some(Mode::Zero1)] {
        comm.barrier().map_err(Error::from)?;
        let before = Peak::start();
        let mut trainee = Trainee::new(work, config, &comm, Some(DdpOptions::default()), shard)?;
        let mut peaks = [before.read(&trainee)?, None, None];
        trainee.gradients()?;
        peaks[1] = before.read(&trainee)?;
        trainee.update()?;
        peaks[2] = before.read(&trainee)?;
        let flat = (trainee.model.params().flat_len() * size_of::<f32>()) as f64;
        let mut bytes = [trainee.learner.optimizer_bytes() as f64, 0.0, 0.0, 0.0];
        for (to, peak) in bytes[1..].iter_mut().zip(peaks) {
            *to = peak.unwrap_or(f64::NAN);
        }
        comm.all_reduce(&mut bytes, Reduce::Max).map_err(Error::from)?;
        let [optimizer, peaks @ ..] = bytes;
        let milliseconds = steps(work, &mut trainee, &comm)?.iter().map(|step| step.whole * 1e3).collect();
        let peaks = peaks.iter().all(|peak| peak.is_finite()).then_some(peaks);
        found.push(Found { shard, parameters: flat, gradients: flat, optimizer, peaks, milliseconds });
    }
    Ok(World { back_end: comm.back_end(), ranks: comm.world(), found })
}

/// Memory since a moment: on a GPU what is in use there, else the process's peak, where the system tells it.
struct Peak;

impl Peak {
    /// Forgets earlier peaks.
    fn start() -> Peak {
        // Linux: 5 sets the peak to what is resident now. Elsewhere there is no such file, and no peak either.
        let _ = std::fs::write("/proc/self/clear_refs", "5");
        Peak
    }

    /// Bytes.
    fn read(&self, trainee: &Trainee) -> train::Result<Option<f64>> {
        if let Some((free, total)) = kernel_device(trainee.model.params().device())?.memory_in_use()? {
            return Ok(Some((total - free) as f64));
        }
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
        Ok(kib.map(|kib| kib * 1024.0))
    }
}

fn report(worlds: &[World], config: &Config, work: &Work) -> Report {
    let columns = [
        Column::text("back end"),
        Column::integer("ranks"),
        Column::text("optimizer state"),
        Column::number("parameters").unit("MB"),
        Column::number("gradients").unit("MB"),
        Column::number("state").unit("MB"),
        Column::number("a fair part").unit("MB"),
        Column::number("after initialisation").unit("MB"),
        Column::number("before the update").unit("MB"),
        Column::number("after the update").unit("MB"),
        Column::number("activations and rest").unit("MB"),
        Column::number("step").unit("ms"),
    ];
    let mut table = Table::new("shard", "Memory and time with the optimizer's state whole and shared out", columns);
    let mb = |bytes: f64| Cell::from(bytes / 1e6);
    for world in worlds {
        for found in &world.found {
            let name = match found.shard {
                None => "whole",
                Some(Mode::Broadcast) => "shared out, broadcast",
                Some(Mode::Zero1) => "shared out, ZeRO-1",
            };
            let parts = if found.shard.is_some() { world.ranks as f64 } else { 1.0 };
            let state = found.parameters + found.gradients + found.optimizer;
            let peak = |at: usize| found.peaks.map(|peaks| peaks[at] / 1e6).into();
            table.push([
                Cell::from(world.back_end),
                world.ranks.into(),
                name.into(),
                mb(found.parameters),
                mb(found.gradients),
                mb(found.optimizer),
                mb(2.0 * found.parameters / parts),
                peak(0),
                peak(1),
                peak(2),
                found.peaks.map(|peaks| (peaks[2] - state) / 1e6).into(),
                Cell::statistics(&found.milliseconds),
            ]);
        }
    }
    let table = table
        .note(format!(
            "{:.2} M parameters, {}, {} windows of {} tokens in all; each number is that of the rank that has most. A fair part of \
             AdamW's state is 8 bytes a parameter, by the ranks that share it.",
            config.parameters() as f64 / 1e6,
            config.precision,
            work.batch,
            config.context
        ))
        .note(
            "Peaks: memory in use on a GPU; on the CPU the process's resident memory, libraries and caches included, and where ranks \
             are threads of one process all ranks together.",
        )
        .without_empty_columns();
    Report::new("shard", "Sharing the optimizer's state out").table(table)
}
