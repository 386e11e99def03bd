//! `tilewright profile` of many ranks: the ranks of a launcher, else threads of this process.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use tilewright::trace::{Recording, Trace, thread_number};

use super::{Arguments, add_tables, described, options};
use crate::cli::bench::process_groups::{CommBackend, comm_failure, for_each_process_group};
use crate::cli::step::{Step, Work};
use crate::cli::{CliError, Result};
use crate::dist::comm::Communicator;
use crate::dist::ddp::GradSync;
use crate::dist::rank::Environment;
use crate::dist::sharded::Mode;
use crate::model::Config;
use crate::profile::ranks::{self, RankProfile};
use crate::profile::{Profile, STEP, chrome, flame, root_span};
use crate::report::Report;

/// The report, and the contents of the files to write.
pub struct RankReport {
    pub report: Report,
    pub trace: serde_json::Value,
    pub flame_graph: Option<String>,
}

/// Whether a launcher started ranks, or an option asks for several.
pub fn is_multi_rank(arguments: &Arguments) -> Result<bool> {
    let started = Environment::get().map_err(comm_failure)?.rank_info.is_some();
    Ok(started || arguments.ranks.is_some() || arguments.how.ddp.is_some() || arguments.how.shard.is_some())
}

/// Profiles all ranks, and returns the result of rank 0; `None` on other ranks of a launcher.
///
/// # Errors
/// The rendezvous fails, or a step fails.
pub fn profile(arguments: &Arguments) -> Result<Option<RankReport>> {
    if arguments.work == Work::Forward {
        return Err(CliError::usage("a forward pass has no communication between ranks", "use --work train-step"));
    }
    let config = arguments.step.config(arguments.context as usize)?;
    let device = arguments.step.device()?;
    let shared = Shared::default();
    let (backends, ranks) = ([arguments.backend.unwrap_or(CommBackend::Threads)], [arguments.ranks.unwrap_or(2)]);
    let found = for_each_process_group(&device, &backends, &ranks, |comm| {
        let comm = Arc::new(comm);
        // Abort the other ranks, so that they do not wait for this one.
        one_rank(arguments, &config, &comm, &shared).inspect_err(|error| comm.abort(&error.to_string()))
    })?;
    Ok(found.into_iter().next())
}

/// State shared by ranks that are threads of one process, which has a single recording.
#[derive(Default)]
struct Shared {
    started: OnceLock<Instant>,
    trace: Mutex<Option<Arc<Trace>>>,
}

fn one_rank(arguments: &Arguments, config: &Config, comm: &Arc<Communicator>, shared: &Shared) -> Result<RankReport> {
    let device = arguments.step.device()?;
    let data_parallel = arguments.how.data_parallel_options(comm.clone(), None);
    let mut step = Step::new(&arguments.step, config, &device, arguments.work, Some(&data_parallel))?;
    for _ in 0..arguments.warmup {
        step.run()?;
    }
    let barrier = || comm.host().barrier().map_err(comm_failure);
    let in_one_process = Environment::get().map_err(comm_failure)?.rank_info.is_none();
    barrier()?;
    let recording = match !in_one_process || comm.rank() == 0 {
        true => Some(Recording::start(options(arguments, &device)?)?),
        false => None,
    };
    if let Some(recording) = &recording {
        let _ = shared.started.set(recording.started());
    }
    barrier()?;
    let started = *shared.started.get_or_init(Instant::now);
    let offset = if in_one_process { 0 } else { ranks::clock_offset(comm, started).map_err(comm_failure)? };
    comm.start_trace();
    for _ in 0..arguments.steps {
        barrier()?;
        let _span = root_span(STEP);
        step.run()?;
    }
    let (records, thread) = (comm.take_trace(), thread_number());
    barrier()?;
    if let Some(recording) = recording {
        let trace = Arc::new(recording.finish()?);
        *shared.trace.lock().unwrap_or_else(PoisonError::into_inner) = Some(trace);
    }
    barrier()?;
    let trace = shared.trace.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default();
    let trace = match thread.filter(|_| in_one_process) {
        Some(thread) => Arc::new(ranks::of_thread(&trace, thread)),
        None => trace,
    };
    let own = RankProfile::new(comm.rank(), &trace, &records, started, offset);
    let all = ranks::gather(comm, &own).map_err(comm_failure)?;
    Ok(rank_report(arguments, config, comm, &trace, all))
}

fn rank_report(
    arguments: &Arguments,
    config: &Config,
    comm: &Communicator,
    trace: &Trace,
    mut all: Vec<RankProfile>,
) -> RankReport {
    let profile = Profile::new(trace);
    let form = arguments.how.ddp.unwrap_or(GradSync::Bucketed).name();
    let state = match arguments.how.shard.and_then(|shard| shard.0) {
        None => "replicated",
        Some(Mode::Broadcast) => "sharded, broadcast",
        Some(Mode::Zero1) => "sharded, ZeRO-1",
    };
    let how = format!("{} ranks over {}, gradients {form}, optimizer state {state}", comm.world(), comm.backend());
    let title = format!("Profile of {}, {how}", described(config, arguments.step.batch as usize));
    let overlap = ranks::table(&all, &how, profile.on_gpu());
    let report = Report::new("profile", &title).table(overlap).plot(ranks::plot(&all));
    let report = report.text("The tables below are those of rank 0.");
    let report = add_tables(report, arguments, config, &profile);
    let events = all.iter_mut().flat_map(|profile| std::mem::take(&mut profile.events)).collect();
    RankReport { report, trace: chrome::file(events), flame_graph: flame::svg(&profile) }
}
