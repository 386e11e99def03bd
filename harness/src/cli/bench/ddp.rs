//! `tilewright bench ddp`: times data-parallel training steps by gradient synchronization scheme.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use clap::{Args, ValueEnum};

use super::world::{Carrier, each_world};
use crate::cli::model_options::{ModelOptions, model_device};
use crate::cli::ranks::{self, LeaveSms, leave_sms};
use crate::cli::run::{Choice, device};
use crate::cli::{CliError, Result};
use crate::dist::comm::{Communicator, Dtype, Op, Record, Reduce};
use crate::dist::ddp::{DdpOptions, Form, NCCL_CTAS};
use crate::dist::error::Error;
use crate::dist::sharded::Mode;
use crate::model::{Config, Kind, Transformer};
use crate::optim::{AdamWOptions, Schedule};
use crate::report::plot::Bar;
use crate::report::{Axis, Cell, Column, Outputs, Plot, Report, Table};
use crate::train::{self, Learner, LearnerOptions, Team, TeamOptions, team_gradient_dtype};

/// Without a launcher (`tilewright launch`, mpirun, torchrun, srun), ranks are threads of this process.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    work: Work,
    /// Gradient synchronization schemes, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Form::Naive, Form::Flat, Form::Overlap, Form::Bucketed])]
    form: Vec<Form>,
    /// Bucket sizes of the bucketed scheme, in megabytes (10⁶ bytes)
    #[arg(long, value_name = "MB,…", value_delimiter = ',', default_values_t = [1.0, 10.0, 25.0, 100.0, 1000.0], value_parser = crate::cli::numbers::bucket_mb)]
    buckets: Vec<f64>,
    /// Communication dtypes of gradients: f32 (no rounding), bf16 or f16
    #[arg(long, value_name = "TYPE,…", value_delimiter = ',', default_value = "f32", value_parser = wire)]
    wires: Vec<Wire>,
    /// Maximum number of CTAs (SMs) of NCCL during the backward pass (overlap and bucketed); 0 leaves it to NCCL
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [NCCL_CTAS])]
    ctas: Vec<u32>,
    /// Use copy engines for communication during the backward pass, between GPUs of one host: off, on, or off,on for
    /// both
    #[arg(long, value_name = "SWITCH,…", value_enum, value_delimiter = ',', default_values_t = [Switch::Off])]
    copy_engines: Vec<Switch>,
    /// SMs reserved for communication: matmuls use this many SMs fewer while gradients are in flight. auto: as many as
    /// NCCL uses
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "auto", value_parser = leave_sms)]
    leave_sms: Vec<LeaveSms>,
    #[command(flatten)]
    outputs: Outputs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    Off,
    On,
}

/// A value of `--wires`; `None` is f32.
type Wire = Option<Dtype>;

fn wire(word: &str) -> Result<Wire, String> {
    match word {
        "f32" => Ok(None),
        _ => ranks::wire(word).map(Some).map_err(|_| "expected f32, bf16 or f16".into()),
    }
}

/// The training job of every rank, shared by `bench ddp` and `bench shard`.
#[derive(Args)]
pub struct Work {
    #[command(flatten)]
    pub model: ModelOptions,
    /// Model sizes of the assignment, separated by commas
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', conflicts_with = "size")]
    pub sizes: Vec<String>,
    /// Device: cpu, cuda or cuda:N. Default: a GPU if there is one
    #[arg(long, value_parser = device)]
    pub device: Option<Choice>,
    /// Global batch size: sequences per step, over all ranks
    #[arg(long, value_name = "WINDOWS", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch: u32,
    /// Context length: tokens per sequence
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub context: u32,
    /// Numbers of ranks, if they are threads of this process
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [2])]
    pub ranks: Vec<u16>,
    /// Communication backends, if ranks are threads of this process
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Carrier::Threads])]
    pub back_end: Vec<Carrier>,
    /// Number of warm-up steps
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub warmup: u32,
    /// Number of timed steps
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub repeat: u32,
}

impl Work {
    /// Returns the models with their names.
    ///
    /// # Errors
    /// An unknown size, or hyperparameters that contradict each other.
    pub fn models(&self) -> Result<Vec<(String, Config)>> {
        let base = Config { context: self.context as usize, ..Config::default() };
        let named = |size: Option<&String>| {
            let model = ModelOptions { size: size.or(self.model.size.as_ref()).cloned(), ..self.model.clone() };
            let config = model.config(base.clone())?;
            let name = config.size_name().map_or_else(|| "custom".to_string(), str::to_string);
            Ok((name, config))
        };
        match self.sizes.as_slice() {
            [] => Ok(vec![named(None)?]),
            sizes => sizes.iter().map(|size| named(Some(size))).collect(),
        }
    }
}

/// Returns the note below a table: sizes of the models, precision and batch.
pub fn models_note(models: &[(String, Config)], work: &Work) -> String {
    let millions = |config: &Config| format!("{:.2} M", config.parameters() as f64 / 1e6);
    let sizes: Vec<String> = match models {
        [(_, config)] => vec![format!("{} parameters", millions(config))],
        _ => models.iter().map(|(name, config)| format!("{name}: {} parameters", millions(config))).collect(),
    };
    let precision = models.first().map_or(String::new(), |(_, config)| config.precision.to_string());
    format!("{}, {precision}, global batch of {} sequences of {} tokens.", sizes.join(", "), work.batch, work.context)
}

/// How a rank trains.
#[derive(Clone, Copy)]
pub enum Way {
    /// By itself, without communication. Gradients have the dtype that they would have with this communication dtype.
    Alone(Option<Dtype>),
    Together(DdpOptions, Option<Mode>),
}

/// A model with its optimizer and one batch, on one rank.
pub struct Trainee {
    pub model: Transformer,
    pub learner: Learner,
    pub team: Option<Team>,
    device: Device,
    inputs: Tensor,
    targets: Tensor,
}

/// Times of one step on one rank, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step {
    pub whole: f64,
    /// Exposed communication: the wait for gradients after the backward pass.
    pub waited: f64,
    /// All gradient collectives, overlapped or exposed.
    pub communication: f64,
    /// All collectives that distribute updated parameters.
    pub parameters: f64,
}

impl Trainee {
    /// Creates a model with random parameters.
    ///
    /// # Errors
    /// Out of memory, or a batch that the number of ranks does not divide.
    pub fn new(work: &Work, config: &Config, comm: &Arc<Communicator>, way: Way) -> train::Result<Trainee> {
        let other = |error: CliError| train::Error::from(Error::Misuse(error.to_string()));
        let device = model_device(work.device).map_err(other)?;
        let windows = work.batch as usize / comm.world().max(1);
        let needed = config.step_bytes(windows, 1, Kind::TrainStep).total();
        crate::ops::memory::kernel_device(&device)?.expect_memory(needed)?;
        let model = Transformer::new(config, &device, 0)?;
        let options = LearnerOptions {
            adamw: AdamWOptions::default(),
            schedule: Schedule { peak: 1e-3, floor: 1e-4, warmup: 0, total: 1000 },
            weight_decay: 0.1,
            decay_embeddings: false,
            clip: None,
        };
        let (batch, world) = (work.batch as usize, comm.world());
        let (ddp, shard) = match way {
            Way::Alone(wire) => (DdpOptions { wire, ..DdpOptions::default() }, None),
            Way::Together(ddp, shard) => (ddp, shard),
        };
        let team = TeamOptions { comm: comm.clone(), ddp, shard };
        let (team, learner) = match way {
            Way::Alone(_) => {
                model.params().keep_grads(team_gradient_dtype(model.params(), &team, 1))?;
                (None, Learner::new(model.params(), options)?)
            }
            Way::Together(..) => {
                let (team, learner) = Team::form(&team, model.params(), options, batch, 1)?;
                (Some(team), learner)
            }
        };
        // The time of a step does not depend on the tokens.
        let (windows, context) = ((batch / world).max(1), config.context);
        let token = |i: usize| ((i + comm.rank() * 7919) * 2_654_435_761 % config.vocabulary) as u32;
        let tokens: Vec<u32> = (0..windows * context + 1).map(token).collect();
        let tensor =
            |from: usize| Tensor::from_slice(&tokens[from..from + windows * context], (windows, context), &device);
        let (inputs, targets) = (tensor(0)?, tensor(1)?);
        Ok(Trainee { model, learner, team, device, inputs, targets })
    }

    /// Runs the forward and the backward pass.
    fn backward(&mut self) -> train::Result<()> {
        self.learner.begin()?;
        let loss = self.model.loss(&self.inputs, &self.targets)?;
        self.learner.backward(&loss, 1.0)
    }

    /// Runs forward and backward, and finishes the gradient synchronization.
    ///
    /// # Errors
    /// Errors of the model and of communication.
    pub fn gradients(&mut self) -> train::Result<()> {
        self.backward()?;
        if let Some(team) = &self.team {
            team.ddp().finish_gradient_synchronization()?;
        }
        Ok(())
    }

    /// Runs the optimizer and synchronizes the device.
    ///
    /// # Errors
    /// As [`Trainee::gradients`].
    pub fn update(&mut self) -> train::Result<()> {
        self.learner.update()?;
        Ok(self.device.synchronize()?)
    }

    /// Runs and times a step, after a barrier of all ranks.
    ///
    /// # Errors
    /// As [`Trainee::gradients`].
    pub fn step(&mut self, comm: &Communicator) -> train::Result<Step> {
        comm.barrier().map_err(Error::from)?;
        comm.start_trace();
        let began = Instant::now();
        self.backward()?;
        let Some(team) = &self.team else {
            self.update()?;
            return Ok(Step { whole: began.elapsed().as_secs_f64(), ..Step::default() });
        };
        let (sent, _) = team.finish(&mut self.learner)?;
        self.device.synchronize()?;
        let whole = began.elapsed().as_secs_f64();
        let trace = team.communicator().take_trace();
        // Collectives of gradients and parameters are f32 or bf16; control messages have other types.
        let of = |gives: bool| {
            let flats = trace.iter().filter(|record| matches!(record.call.dtype, Dtype::F32 | Dtype::Bf16));
            let is_one = |op| matches!(op, Op::Broadcast { .. } | Op::AllGather) == gives;
            flats.filter(|record| is_one(record.call.op)).map(Record::seconds).sum()
        };
        let (communication, parameters) = (of(false), of(true));
        Ok(Step { whole, waited: sent.left_over().as_secs_f64(), communication, parameters })
    }
}

/// Runs warm-up and timed steps. Each time is the maximum over all ranks.
///
/// # Errors
/// As [`Trainee::gradients`].
pub fn steps(work: &Work, trainee: &mut Trainee, comm: &Communicator) -> train::Result<Vec<Step>> {
    for _ in 0..work.warmup {
        trainee.step(comm)?;
    }
    let mut steps = Vec::new();
    for _ in 0..work.repeat {
        let step = trainee.step(comm)?;
        let mut numbers = [step.whole, step.waited, step.communication, step.parameters];
        comm.all_reduce(&mut numbers, Reduce::Max).map_err(Error::from)?;
        let [whole, waited, communication, parameters] = numbers;
        steps.push(Step { whole, waited, communication, parameters });
    }
    Ok(steps)
}

/// The result of one configuration.
struct Found {
    size: String,
    form: &'static str,
    /// The dtype in which gradients are stored.
    gradients: &'static str,
    bucket_mb: Option<f64>,
    /// The communication dtype; `None` without communication.
    wire: Option<&'static str>,
    /// What transfers gradients during the backward pass; `None` if nothing is overlapped.
    by: Option<&'static str>,
    /// The maximum number of CTAs, for NCCL.
    ctas: Option<u32>,
    /// SMs that matmuls leave to communication.
    left: Option<u32>,
    calls: Option<usize>,
    steps: Vec<Step>,
}

struct World {
    back_end: &'static str,
    ranks: usize,
    found: Vec<Found>,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    arguments.outputs.check()?;
    let work = &arguments.work;
    let models = work.models()?;
    let worlds = each_world(&model_device(work.device)?, &work.back_end, &work.ranks, |comm| {
        measure(arguments, &models, Arc::new(comm)).map_err(|error| CliError::Failure(error.to_string()))
    })?;
    if worlds.is_empty() {
        return Ok(());
    }
    Ok(arguments.outputs.write(report(&worlds, &models, work), out)?)
}

fn measure(arguments: &Arguments, models: &[(String, Config)], comm: Arc<Communicator>) -> train::Result<World> {
    let mut found = Vec::new();
    for ((size, config), way) in models.iter().flat_map(|model| ways(arguments, &model.1).map(move |way| (model, way)))
    {
        let mut trainee = Trainee::new(&arguments.work, config, &comm, way)?;
        let calls = trainee.team.as_ref().map(|team| team.ddp().buckets().len());
        let in_place = trainee.team.as_ref().is_some_and(|team| team.ddp().reads_in_place());
        let steps = steps(&arguments.work, &mut trainee, &comm)?;
        let ddp = match way {
            Way::Alone(_) => None,
            Way::Together(ddp, _) => Some(ddp),
        };
        let bucketed = ddp.filter(|ddp| ddp.form == Form::Bucketed);
        let eager = ddp.filter(|ddp| ddp.is_eager() && comm.is_on_device() && comm.world() > 1);
        found.push(Found {
            size: size.clone(),
            form: ddp.map_or("none", |ddp| ddp.form.name()),
            gradients: trainee.model.params().grads().dtype().as_str(),
            bucket_mb: bucketed.and_then(|ddp| ddp.bucket_bytes).map(|bytes| bytes as f64 / 1e6),
            wire: ddp.map(|ddp| ddp.wire.unwrap_or(Dtype::F32).name()),
            by: eager.map(|ddp| match (in_place, ddp.copies) {
                (true, _) => "AdamW, in place",
                (false, true) => "copy engines",
                (false, false) => "NCCL",
            }),
            ctas: eager.filter(|ddp| !ddp.copies).map(|ddp| ddp.nccl_ctas),
            left: eager.map(|ddp| ddp.left_multiprocessors()),
            calls,
            steps,
        });
    }
    Ok(World { back_end: comm.back_end(), ranks: comm.world(), found })
}

/// Returns all configurations to measure for a model.
fn ways(arguments: &Arguments, config: &Config) -> impl Iterator<Item = Way> {
    let is_kept = |wire: &&Wire| **wire == Some(Dtype::Bf16) && config.precision.dtype() == DType::BF16;
    let kept = arguments.wires.iter().find(is_kept).copied();
    let exact = arguments.wires.iter().any(|wire| !is_kept(&wire)).then_some(None);
    let mut ways: Vec<Way> = exact.into_iter().chain(kept).map(Way::Alone).collect();
    for &form in &arguments.form {
        let buckets = if form == Form::Bucketed { arguments.buckets.as_slice() } else { &[0.0] };
        let shared: Vec<(bool, u32, LeaveSms)> = match form {
            Form::Naive | Form::Flat => vec![(false, 0, LeaveSms(None))],
            _ => carriers(arguments),
        };
        for (&wire, &mb, &(copies, nccl_ctas, LeaveSms(leave_sms))) in triples(&arguments.wires, buckets, &shared) {
            let bucket_bytes = Some((mb * 1e6) as usize);
            let options =
                DdpOptions { form, bucket_bytes, wire, nccl_ctas, copies, leave_sms, ..DdpOptions::default() };
            ways.push(Way::Together(options, None));
        }
    }
    ways.into_iter()
}

/// Returns all combinations of (copy engines, CTAs of NCCL, reserved SMs). Copy engines have no CTAs to limit.
fn carriers(arguments: &Arguments) -> Vec<(bool, u32, LeaveSms)> {
    let mut carriers = Vec::new();
    for &switch in &arguments.copy_engines {
        let copies = switch == Switch::On;
        let ctas = if copies { &[NCCL_CTAS] } else { arguments.ctas.as_slice() };
        carriers.extend(ctas.iter().flat_map(|&ctas| arguments.leave_sms.iter().map(move |&n| (copies, ctas, n))));
    }
    carriers
}

/// Returns the Cartesian product of three lists; the last list varies fastest.
fn triples<'a, A, B, C>(a: &'a [A], b: &'a [B], c: &'a [C]) -> impl Iterator<Item = (&'a A, &'a B, &'a C)> {
    a.iter().flat_map(move |a| b.iter().flat_map(move |b| c.iter().map(move |c| (a, b, c))))
}

fn mean(steps: &[Step], f: impl Fn(&Step) -> f64) -> f64 {
    steps.iter().map(f).sum::<f64>() / steps.len() as f64
}

fn report(worlds: &[World], models: &[(String, Config)], work: &Work) -> Report {
    let columns = [
        Column::text("back end"),
        Column::integer("ranks"),
        Column::text("size"),
        Column::text("form"),
        Column::text("gradients"),
        Column::number("bucket").unit("MB"),
        Column::text("wire"),
        Column::text("carried by"),
        Column::integer("CTAs"),
        Column::integer("left to them").key("left_sms"),
        Column::integer("calls"),
        Column::number("step").unit("ms"),
        Column::number("of none").decimals(3),
        Column::number("communication").unit("ms"),
        Column::number("left over").unit("ms"),
        Column::number("left over").unit("%").decimals(1).key("left_over_percent"),
        Column::number("hidden").unit("%").decimals(1),
    ];
    let mut table = Table::new("ddp", "Training steps by gradient synchronization scheme", columns);
    let mut bars = Vec::new();
    for world in worlds {
        for found in &world.found {
            let alone = found.calls.is_none();
            let same = |none: &&Found| none.size == found.size && none.gradients == found.gradients;
            let none = world.found.iter().filter(|none| none.calls.is_none()).find(same);
            let base = none.map_or(f64::NAN, |none| mean(&none.steps, |s| s.whole));
            let (whole, waited) = (mean(&found.steps, |s| s.whole), mean(&found.steps, |s| s.waited));
            let communication = mean(&found.steps, |s| s.communication);
            let number = |x: f64| if alone { Cell::Empty } else { Cell::from(x) };
            let hidden = (1.0 - waited / communication).clamp(0.0, 1.0);
            let times: Vec<f64> = found.steps.iter().map(|step| step.whole * 1e3).collect();
            table.push([
                Cell::from(world.back_end),
                world.ranks.into(),
                found.size.as_str().into(),
                found.form.into(),
                found.gradients.into(),
                found.bucket_mb.into(),
                found.wire.map_or(Cell::Empty, Cell::from),
                found.by.map_or(Cell::Empty, Cell::from),
                found.ctas.map_or(Cell::Empty, |ctas| Cell::from(u64::from(ctas))),
                found.left.map_or(Cell::Empty, |left| Cell::from(u64::from(left))),
                found.calls.into(),
                Cell::statistics(&times),
                number(whole / base),
                number(communication * 1e3),
                number(waited * 1e3),
                number(100.0 * waited / whole),
                number(100.0 * hidden),
            ]);
            let mut size = found.bucket_mb.map(|mb| format!(" {mb} MB")).unwrap_or_default();
            size += &found.wire.filter(|wire| *wire != "f32").map(|wire| format!(" {wire}")).unwrap_or_default();
            size += found.by.filter(|by| *by != "NCCL").map_or("", |_| " copy engines");
            size += &found.ctas.filter(|ctas| *ctas > 0).map(|ctas| format!(" {ctas} CTAs")).unwrap_or_default();
            size += &found.left.map(|left| format!(", {left} SMs reserved")).unwrap_or_default();
            let group = format!("{}, {} ranks, {}", found.size, world.ranks, world.back_end);
            bars.push(Bar { name: format!("{}{size}", found.form), group, value: whole * 1e3, error: None });
        }
    }
    let table = table
        .note(models_note(models, work) + " Every time is the mean over steps of the slowest rank's.")
        .note(
            "Left over is exposed communication: the wait after backward; hidden is communication overlapped with \
               computing. `none` sends nothing; of none is the step time relative to that one with gradients of the \
               same dtype. Carried by is the transport during backward; where AdamW reads the peer's gradients in \
               place, nothing is sent, and communication is the wait for the other rank. CTAs are the maximum number \
               of SMs of NCCL during backward, 0 without limit; left to them is the number of SMs reserved for \
               communication.",
        )
        .without_empty_columns();
    let plot = Plot::bars("ddp", "Training steps", Axis::linear("ms"), bars);
    Report::new("ddp", "Data-parallel training").table(table).plot(plot)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn copy_engines_are_one_variant_beside_those_of_nccl() {
        let carried = |words: &[&str]| {
            let line = Line::try_parse_from([&["ddp"], words].concat()).map_err(|error| error.to_string()).unwrap();
            carriers(&line.arguments)
                .into_iter()
                .map(|(copies, ctas, leave)| (copies, ctas, leave.0))
                .collect::<Vec<_>>()
        };
        assert_eq!(carried(&[]), [(false, NCCL_CTAS, None)]);
        let both = [(false, 0, None), (false, 8, None), (true, NCCL_CTAS, None)];
        assert_eq!(carried(&["--copy-engines", "off,on", "--ctas", "0,8"]), both);
        assert_eq!(carried(&["--copy-engines", "on", "--leave-sms", "8"]), [(true, NCCL_CTAS, Some(8))]);
    }
}
