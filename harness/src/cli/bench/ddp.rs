//! `tilewright bench ddp`: times data-parallel training steps by form of gradient synchronization.

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use candle_core::{DType, Device, Tensor};
use clap::{Args, ValueEnum};

use super::process_groups::{CommBackend, for_each_process_group};
use crate::cli::model_options::{ModelOptions, model_device};
use crate::cli::ranks::grad_sync;
use crate::cli::ranks::{self, ReserveSms, reserve_sms};
use crate::cli::{CliError, Result, expect_used};
use crate::dist::comm::{Communicator, Dtype, Op, Record, Reduce};
use crate::dist::ddp::{DdpOptions, GradSync, NCCL_CTAS};
use crate::dist::error::Error;
use crate::dist::sharded::Mode;
use crate::model::{Config, StepKind, Transformer};
use crate::optim::{AdamWOptions, LrSchedule};
use crate::report::plot::Bar;
use crate::report::{Axis, Cell, Column, Outputs, Plot, Report, Table};
use crate::train::{self, DataParallel, DataParallelOptions, Trainer, TrainerOptions, data_parallel_gradient_dtype};
use tilewright_cli::device::{self, DeviceArg};

/// Without a launcher (`tilewright launch`, mpirun, torchrun, srun), ranks are threads of this process.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    work: Work,
    /// Forms of gradient synchronization, separated by commas
    #[arg(long, value_delimiter = ',', default_values = GradSync::ALL.map(GradSync::name), value_parser = grad_sync())]
    form: Vec<GradSync>,
    /// Bucket sizes of the bucketed form, in megabytes (10⁶ bytes). Default: 1,10,25,100,1000
    #[arg(long, value_name = "MB,…", value_delimiter = ',', value_parser = crate::cli::value_parsers::bucket_mb)]
    buckets: Vec<f64>,
    /// Communication dtypes of gradients: f32 (no rounding), bf16 or f16
    #[arg(long, alias = "wires", value_name = "TYPE,…", value_delimiter = ',', default_value = "f32", value_parser = comm_dtype)]
    comm_dtypes: Vec<CommDtype>,
    /// Maximum number of CTAs (SMs) of NCCL during the backward pass (overlap and bucketed). Default: 24; 0 leaves it
    /// to NCCL
    #[arg(long, value_name = "N,…", value_delimiter = ',')]
    ctas: Vec<u32>,
    /// Use copy engines for communication during the backward pass, between GPUs of one host (overlap and bucketed):
    /// off, on, or off,on for both. Default: off
    #[arg(long, value_name = "SWITCH,…", value_enum, value_delimiter = ',')]
    copy_engines: Vec<Switch>,
    /// SMs reserved for communication (overlap and bucketed): matmuls use this many SMs fewer while gradients are in
    /// flight. Default: auto, as many as NCCL uses
    #[arg(long, alias = "leave-sms", value_name = "N,…", value_delimiter = ',', value_parser = reserve_sms)]
    reserve_sms: Vec<ReserveSms>,
    #[command(flatten)]
    outputs: Outputs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Switch {
    Off,
    On,
}

/// What is measured where the command line names nothing else.
const BUCKETS: [f64; 5] = [1.0, 10.0, 25.0, 100.0, 1000.0];
const CTAS: [u32; 1] = [NCCL_CTAS];
const COPY_ENGINES: [Switch; 1] = [Switch::Off];
const RESERVE_SMS: [ReserveSms; 1] = [ReserveSms(None)];

/// The values of an option, or the default ones.
fn or<'a, T>(given: &'a [T], default: &'a [T]) -> &'a [T] {
    if given.is_empty() { default } else { given }
}

impl Arguments {
    /// # Errors
    /// An option of a form of gradient synchronization that is not measured.
    fn check_forms(&self) -> Result<()> {
        let overlap = self.form.contains(&GradSync::Overlap);
        let bucketed = self.form.contains(&GradSync::Bucketed);
        let options = [
            ("--buckets", !self.buckets.is_empty() && !bucketed, "bucketed"),
            ("--ctas", !self.ctas.is_empty() && !bucketed && !overlap, "overlap or bucketed"),
            ("--copy-engines", !self.copy_engines.is_empty() && !bucketed && !overlap, "overlap or bucketed"),
            ("--reserve-sms", !self.reserve_sms.is_empty() && !bucketed && !overlap, "overlap or bucketed"),
        ];
        expect_used(options.map(|(option, is_unused, form)| {
            (option, is_unused, format!("it goes with `--form {form}`"), format!("omit it, or add {form} to --form"))
        }))
    }
}

/// A value of `--comm-dtypes`; `None` is f32.
type CommDtype = Option<Dtype>;

fn comm_dtype(word: &str) -> Result<CommDtype, String> {
    match word {
        "f32" => Ok(None),
        _ => ranks::comm_dtype(word).map(Some).map_err(|_| "expected f32, bf16 or f16".into()),
    }
}

/// The training job of every rank, shared by `bench ddp` and `bench shard`.
#[derive(Args)]
pub struct Work {
    #[command(flatten)]
    pub model: ModelOptions,
    /// Named model sizes (see --size), separated by commas
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', conflicts_with = "size")]
    pub sizes: Vec<String>,
    /// Device: cpu, cuda or cuda:N. Default: a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    pub device: Option<DeviceArg>,
    /// Global batch size: sequences per step, over all ranks
    #[arg(long, value_name = "SEQUENCES", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch: u32,
    /// Context length: tokens per sequence
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub context: u32,
    /// Numbers of ranks, if they are threads of this process
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [2])]
    pub ranks: Vec<u16>,
    /// Communication backends, if ranks are threads of this process
    #[arg(long, alias = "back-end", value_enum, value_delimiter = ',', default_values_t = [CommBackend::Threads])]
    pub backend: Vec<CommBackend>,
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

/// Formats the note below a table: sizes of the models, precision and batch.
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
pub enum TrainingMode {
    /// Without communication. Gradients have the dtype that they would have with this communication dtype.
    SingleRank(Option<Dtype>),
    DataParallel(DdpOptions, Option<Mode>),
}

/// A model with its optimizer and one batch, on one rank.
pub struct BenchModel {
    pub model: Transformer,
    pub trainer: Trainer,
    pub data_parallel: Option<DataParallel>,
    device: Device,
    inputs: Tensor,
    targets: Tensor,
}

/// Times of one step on one rank, in seconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Step {
    pub total: f64,
    /// Exposed communication: the wait for gradients after the backward pass.
    pub exposed: f64,
    /// All gradient collectives, overlapped or exposed.
    pub communication: f64,
    /// All collectives that distribute updated parameters.
    pub parameters: f64,
}

impl BenchModel {
    /// Creates a model with random parameters.
    ///
    /// # Errors
    /// Out of memory, or a batch that the number of ranks does not divide.
    pub fn new(
        work: &Work,
        config: &Config,
        comm: &Arc<Communicator>,
        training: TrainingMode,
    ) -> train::Result<BenchModel> {
        let other = |error: CliError| train::Error::from(Error::Misuse(error.to_string()));
        let device = model_device(work.device).map_err(other)?;
        let sequences = work.batch as usize / comm.world().max(1);
        let needed = config.step_bytes(sequences, 1, StepKind::TrainStep).total();
        tilewright_candle::memory::kernel_device(&device)?.check_memory(needed)?;
        let model = Transformer::new(config, &device, 0)?;
        let options = TrainerOptions {
            adamw: AdamWOptions::default(),
            schedule: LrSchedule { max_lr: 1e-3, min_lr: 1e-4, warmup_steps: 0, total_steps: 1000 },
            weight_decay: 0.1,
            decay_embeddings: false,
            clip: None,
        };
        let (batch, world) = (work.batch as usize, comm.world());
        let (ddp, shard) = match training {
            TrainingMode::SingleRank(comm_dtype) => (DdpOptions { comm_dtype, ..DdpOptions::default() }, None),
            TrainingMode::DataParallel(ddp, shard) => (ddp, shard),
        };
        let data_parallel = DataParallelOptions { comm: comm.clone(), ddp, shard };
        let (data_parallel, trainer) = match training {
            TrainingMode::SingleRank(_) => {
                model.params().set_grad_dtype(data_parallel_gradient_dtype(model.params(), &data_parallel, 1))?;
                (None, Trainer::new(model.params(), options)?)
            }
            TrainingMode::DataParallel(..) => {
                let (data_parallel, trainer) = DataParallel::new(&data_parallel, model.params(), options, batch, 1)?;
                (Some(data_parallel), trainer)
            }
        };
        // The time of a step does not depend on the tokens.
        let (sequences, context) = ((batch / world).max(1), config.context);
        let token = |i: usize| ((i + comm.rank() * 7919) * 2_654_435_761 % config.vocabulary) as u32;
        let tokens: Vec<u32> = (0..sequences * context + 1).map(token).collect();
        let tensor =
            |from: usize| Tensor::from_slice(&tokens[from..from + sequences * context], (sequences, context), &device);
        let (inputs, targets) = (tensor(0)?, tensor(1)?);
        Ok(BenchModel { model, trainer, data_parallel, device, inputs, targets })
    }

    /// Runs the forward and the backward pass.
    fn backward(&mut self) -> train::Result<()> {
        self.trainer.begin();
        let loss = self.model.loss(&self.inputs, &self.targets)?;
        self.trainer.backward(&loss, 1.0)
    }

    /// Runs forward and backward, and finishes the gradient synchronization.
    ///
    /// # Errors
    /// Errors of the model and of communication.
    pub fn gradients(&mut self) -> train::Result<()> {
        self.backward()?;
        if let Some(data_parallel) = &self.data_parallel {
            data_parallel.ddp().finish_gradient_synchronization()?;
        }
        Ok(())
    }

    /// Runs the optimizer and synchronizes the device.
    ///
    /// # Errors
    /// As [`BenchModel::gradients`].
    pub fn update(&mut self) -> train::Result<()> {
        self.trainer.update()?;
        Ok(self.device.synchronize()?)
    }

    /// Runs and times a step, after a barrier of all ranks.
    ///
    /// # Errors
    /// As [`BenchModel::gradients`].
    pub fn step(&mut self, comm: &Communicator) -> train::Result<Step> {
        comm.barrier().map_err(Error::from)?;
        comm.start_trace();
        let began = Instant::now();
        self.backward()?;
        let Some(data_parallel) = &self.data_parallel else {
            self.update()?;
            return Ok(Step { total: began.elapsed().as_secs_f64(), ..Step::default() });
        };
        let (sync, _) = data_parallel.finish_step(&mut self.trainer)?;
        self.device.synchronize()?;
        let total = began.elapsed().as_secs_f64();
        let trace = data_parallel.communicator().take_trace();
        // Collectives of gradients and parameters are f32 or bf16; control messages have other types.
        let seconds_of = |distributes_params: bool| {
            let tensors = trace.iter().filter(|record| matches!(record.call.dtype, Dtype::F32 | Dtype::Bf16));
            let distributes = |op| matches!(op, Op::Broadcast { .. } | Op::AllGather);
            tensors.filter(|record| distributes(record.call.op) == distributes_params).map(Record::seconds).sum()
        };
        let (communication, parameters) = (seconds_of(false), seconds_of(true));
        Ok(Step { total, exposed: sync.exposed_time().as_secs_f64(), communication, parameters })
    }
}

/// Runs warm-up and timed steps. Each time is the maximum over all ranks.
///
/// # Errors
/// As [`BenchModel::gradients`].
pub fn steps(work: &Work, bench_model: &mut BenchModel, comm: &Communicator) -> train::Result<Vec<Step>> {
    for _ in 0..work.warmup {
        bench_model.step(comm)?;
    }
    let mut steps = Vec::new();
    for _ in 0..work.repeat {
        let step = bench_model.step(comm)?;
        let mut numbers = [step.total, step.exposed, step.communication, step.parameters];
        comm.all_reduce(&mut numbers, Reduce::Max).map_err(Error::from)?;
        let [total, exposed, communication, parameters] = numbers;
        steps.push(Step { total, exposed, communication, parameters });
    }
    Ok(steps)
}

/// The result of one configuration.
struct DdpResult {
    size: String,
    form: &'static str,
    /// The dtype in which gradients are stored.
    gradients: &'static str,
    bucket_mb: Option<f64>,
    /// The communication dtype; `None` without communication.
    comm_dtype: Option<&'static str>,
    /// What transfers gradients during the backward pass; `None` if nothing is overlapped.
    transport: Option<&'static str>,
    /// The maximum number of CTAs, for NCCL.
    ctas: Option<u32>,
    /// SMs reserved for communication: matmuls do not use them.
    reserved_sms: Option<u32>,
    calls: Option<usize>,
    steps: Vec<Step>,
}

struct World {
    backend: &'static str,
    ranks: usize,
    found: Vec<DdpResult>,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    arguments.check_forms()?;
    arguments.outputs.check()?;
    let work = &arguments.work;
    let models = work.models()?;
    let worlds = for_each_process_group(&model_device(work.device)?, &work.backend, &work.ranks, |comm| {
        measure(arguments, &models, Arc::new(comm)).map_err(|error| CliError::Failure(error.to_string()))
    })?;
    if worlds.is_empty() {
        return Ok(());
    }
    Ok(arguments.outputs.write(report(&worlds, &models, work), out)?)
}

fn measure(arguments: &Arguments, models: &[(String, Config)], comm: Arc<Communicator>) -> train::Result<World> {
    let mut found = Vec::new();
    for ((size, config), training) in
        models.iter().flat_map(|model| training_modes(arguments, &model.1).map(move |training| (model, training)))
    {
        let mut bench_model = BenchModel::new(&arguments.work, config, &comm, training)?;
        let calls = bench_model.data_parallel.as_ref().map(|data_parallel| data_parallel.ddp().buckets().len());
        let peer_reads =
            bench_model.data_parallel.as_ref().is_some_and(|data_parallel| data_parallel.ddp().reads_peer_memory());
        let steps = steps(&arguments.work, &mut bench_model, &comm)?;
        let ddp = match training {
            TrainingMode::SingleRank(_) => None,
            TrainingMode::DataParallel(ddp, _) => Some(ddp),
        };
        let bucketed = ddp.filter(|ddp| ddp.form == GradSync::Bucketed);
        let eager = ddp.filter(|ddp| ddp.overlaps_backward() && comm.is_on_device() && comm.world() > 1);
        found.push(DdpResult {
            size: size.clone(),
            form: ddp.map_or("none", |ddp| ddp.form.name()),
            gradients: bench_model.model.params().grads().dtype().as_str(),
            bucket_mb: bucketed.and_then(|ddp| ddp.bucket_bytes).map(|bytes| bytes as f64 / 1e6),
            comm_dtype: ddp.map(|ddp| ddp.comm_dtype.unwrap_or(Dtype::F32).name()),
            transport: eager.map(|ddp| match (peer_reads, ddp.copy_engines) {
                (true, _) => "AdamW peer reads",
                (false, true) => "copy engines",
                (false, false) => "NCCL",
            }),
            ctas: eager.filter(|ddp| !ddp.copy_engines).map(|ddp| ddp.nccl_ctas),
            reserved_sms: eager.map(|ddp| ddp.reserved_sms()),
            calls,
            steps,
        });
    }
    Ok(World { backend: comm.backend(), ranks: comm.world(), found })
}

/// Returns all configurations to measure for a model.
fn training_modes(arguments: &Arguments, config: &Config) -> impl Iterator<Item = TrainingMode> {
    let is_bf16 = |dtype: &&CommDtype| **dtype == Some(Dtype::Bf16) && config.precision.dtype() == DType::BF16;
    let bf16_grads = arguments.comm_dtypes.iter().find(is_bf16).copied();
    let f32_grads = arguments.comm_dtypes.iter().any(|dtype| !is_bf16(&dtype)).then_some(None);
    let mut training_modes: Vec<TrainingMode> =
        f32_grads.into_iter().chain(bf16_grads).map(TrainingMode::SingleRank).collect();
    for &form in &arguments.form {
        let buckets = if form == GradSync::Bucketed { or(&arguments.buckets, &BUCKETS) } else { &[0.0] };
        let transports = match form {
            GradSync::Naive | GradSync::Flat => {
                vec![Transport { copy_engines: false, nccl_ctas: 0, reserve_sms: None }]
            }
            _ => transports(arguments),
        };
        for (&comm_dtype, &mb, &Transport { copy_engines, nccl_ctas, reserve_sms }) in
            cartesian_product(&arguments.comm_dtypes, buckets, &transports)
        {
            let bucket_bytes = Some((mb * 1e6) as usize);
            let options = DdpOptions {
                form,
                bucket_bytes,
                comm_dtype,
                nccl_ctas,
                copy_engines,
                reserve_sms,
                ..DdpOptions::default()
            };
            training_modes.push(TrainingMode::DataParallel(options, None));
        }
    }
    training_modes.into_iter()
}

/// What transfers gradients during the backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Transport {
    copy_engines: bool,
    /// Maximum number of CTAs of NCCL.
    nccl_ctas: u32,
    /// SMs reserved for communication; `None` for as many as NCCL uses.
    reserve_sms: Option<u32>,
}

/// Returns all transports to measure. Copy engines have no CTAs to limit.
fn transports(arguments: &Arguments) -> Vec<Transport> {
    let mut transports = Vec::new();
    for &switch in or(&arguments.copy_engines, &COPY_ENGINES) {
        let copy_engines = switch == Switch::On;
        let ctas: &[u32] = if copy_engines { &CTAS } else { or(&arguments.ctas, &CTAS) };
        for &nccl_ctas in ctas {
            let transport = |reserve: &ReserveSms| Transport { copy_engines, nccl_ctas, reserve_sms: reserve.0 };
            transports.extend(or(&arguments.reserve_sms, &RESERVE_SMS).iter().map(transport));
        }
    }
    transports
}

/// Returns the Cartesian product of three lists; the last list varies fastest.
fn cartesian_product<'a, A, B, C>(a: &'a [A], b: &'a [B], c: &'a [C]) -> impl Iterator<Item = (&'a A, &'a B, &'a C)> {
    a.iter().flat_map(move |a| b.iter().flat_map(move |b| c.iter().map(move |c| (a, b, c))))
}

fn mean(steps: &[Step], f: impl Fn(&Step) -> f64) -> f64 {
    steps.iter().map(f).sum::<f64>() / steps.len() as f64
}

fn report(worlds: &[World], models: &[(String, Config)], work: &Work) -> Report {
    let columns = [
        Column::text("backend"),
        Column::integer("ranks"),
        Column::text("size"),
        Column::text("form"),
        Column::text("grad dtype"),
        Column::number("bucket").unit("MB"),
        Column::text("comm dtype"),
        Column::text("transport"),
        Column::integer("CTAs"),
        Column::integer("reserved SMs"),
        Column::integer("calls"),
        Column::number("step").unit("ms"),
        Column::number("slowdown").decimals(3),
        Column::number("communication").unit("ms"),
        Column::number("exposed").unit("ms"),
        Column::number("exposed").unit("%").decimals(1).key("exposed_percent"),
        Column::number("overlapped").unit("%").decimals(1),
    ];
    let mut table = Table::new("ddp", "Training steps by form of gradient synchronization", columns);
    let mut bars = Vec::new();
    for world in worlds {
        for found in &world.found {
            let single_rank = found.calls.is_none();
            let same = |other: &&DdpResult| other.size == found.size && other.gradients == found.gradients;
            let baseline = world.found.iter().filter(|other| other.calls.is_none()).find(same);
            let base = baseline.map_or(f64::NAN, |baseline| mean(&baseline.steps, |s| s.total));
            let (total, exposed) = (mean(&found.steps, |s| s.total), mean(&found.steps, |s| s.exposed));
            let communication = mean(&found.steps, |s| s.communication);
            let number = |x: f64| if single_rank { Cell::Empty } else { Cell::from(x) };
            let overlapped = (1.0 - exposed / communication).clamp(0.0, 1.0);
            let times: Vec<f64> = found.steps.iter().map(|step| step.total * 1e3).collect();
            table.push([
                Cell::from(world.backend),
                world.ranks.into(),
                found.size.as_str().into(),
                found.form.into(),
                found.gradients.into(),
                found.bucket_mb.into(),
                found.comm_dtype.map_or(Cell::Empty, Cell::from),
                found.transport.map_or(Cell::Empty, Cell::from),
                found.ctas.map_or(Cell::Empty, |ctas| Cell::from(u64::from(ctas))),
                found.reserved_sms.map_or(Cell::Empty, |sms| Cell::from(u64::from(sms))),
                found.calls.into(),
                Cell::statistics(&times),
                number(total / base),
                number(communication * 1e3),
                number(exposed * 1e3),
                number(100.0 * exposed / total),
                number(100.0 * overlapped),
            ]);
            let mut label = found.bucket_mb.map(|mb| format!(" {mb} MB")).unwrap_or_default();
            label +=
                &found.comm_dtype.filter(|dtype| *dtype != "f32").map(|dtype| format!(" {dtype}")).unwrap_or_default();
            label += &found.transport.filter(|by| *by != "NCCL").map(|by| format!(" {by}")).unwrap_or_default();
            label += &found.ctas.filter(|ctas| *ctas > 0).map(|ctas| format!(" {ctas} CTAs")).unwrap_or_default();
            label += &found.reserved_sms.map(|sms| format!(", {sms} SMs reserved")).unwrap_or_default();
            let group = format!("{}, {} ranks, {}", found.size, world.ranks, world.backend);
            bars.push(Bar { name: format!("{}{label}", found.form), group, value: total * 1e3, error: None });
        }
    }
    let table = table
        .note(models_note(models, work) + " Each time is the maximum over ranks, averaged over steps.")
        .note(
            "Exposed communication is the wait after backward; overlapped is the part that runs during backward. The \
             form `none` communicates nothing; slowdown is the step time relative to it, with gradients of the same \
             dtype. Transport is what transfers gradients during backward; with AdamW peer reads, AdamW reads the \
             peer's gradients in its memory, nothing is sent, and communication is the wait for the other rank. CTAs \
             are the maximum number of SMs of NCCL during backward, 0 without limit; reserved SMs are those that \
             matmuls leave to communication.",
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
    fn copy_engines_add_one_variant_to_those_of_nccl() {
        let found = |words: &[&str]| {
            let line = Line::try_parse_from([&["ddp"], words].concat()).map_err(|error| error.to_string()).unwrap();
            transports(&line.arguments)
        };
        let transport = |copy_engines, nccl_ctas, reserve_sms| Transport { copy_engines, nccl_ctas, reserve_sms };
        assert_eq!(found(&[]), [transport(false, NCCL_CTAS, None)]);
        let both = [transport(false, 0, None), transport(false, 8, None), transport(true, NCCL_CTAS, None)];
        assert_eq!(found(&["--copy-engines", "off,on", "--ctas", "0,8"]), both);
        assert_eq!(found(&["--copy-engines", "on", "--reserve-sms", "8"]), [transport(true, NCCL_CTAS, Some(8))]);
    }
}
