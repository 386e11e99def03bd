//! `bench`: times a kernel at given shapes, and beside it the same kernel with other constants.
//!
//! The variants are timed in interleaved rounds, so that a change of the clock rate affects all of them. On a GPU, each
//! launch finds a cold L2 cache ([`do_bench`]). Outputs are not checked: `run` writes them to a file.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{KernelDef, ParamKind};
use tilewright_runtime::bench::{Timing, do_bench};
use tilewright_runtime::{Device, LaunchConfig};

use crate::compile::Options;
use crate::device::DeviceArg;
use crate::report::{Cell, Column, Outputs, Report, Table};
use crate::run::{self, Job, Launch, Source, Tensors};
use crate::tensors::{self, Tensor};
use crate::tuned::Plan;
use crate::value_parsers::milliseconds;
use crate::{CliError, Kernels, Result, choose, device, files};

/// Number of interleaved rounds.
const ROUNDS: usize = 5;

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    launch: Launch,
    #[command(flatten)]
    inputs: Inputs,
    /// Device: cpu, cuda or cuda:N. Default: TILEWRIGHT_DEVICE, else a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    device: Option<DeviceArg>,
    #[command(flatten)]
    options: Options,
    /// Constants to time beside those of --set, which apply where these do not: `rows_tile=16`. May be repeated
    #[arg(long, value_name = "NAME=VALUE,…")]
    against: Vec<String>,
    /// Append each row to this file, as JSON lines
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Warm-up time of each variant, in milliseconds, at most a day
    #[arg(long, value_name = "MS", default_value_t = 100.0, value_parser = milliseconds)]
    warmup_ms: f64,
    /// Measurement time of each variant, in milliseconds, at most a day
    #[arg(long, value_name = "MS", default_value_t = 400.0, value_parser = milliseconds)]
    rep_ms: f64,
    #[command(flatten)]
    outputs: Outputs,
}

/// The tensors of a launch on a command line.
#[derive(Args)]
pub struct Inputs {
    /// Shapes of tensors: numbers for what the kernel reads (`x=4096,1024`), which is filled with random numbers between
    /// -1 and 1, integers with 0; for outputs also expressions like --grid's, where names of dimensions do not tell
    #[arg(long, value_name = "NAME=X,Y,…")]
    pub shape: Vec<String>,
    /// Safetensors file with tensors in place of random numbers
    #[arg(short, long, value_name = "FILE")]
    pub input: Option<PathBuf>,
}

/// A measurement, as `--record` writes it.
#[derive(Serialize)]
struct Row {
    device: String,
    kernel: &'static str,
    /// Shape of the first tensor.
    shape: Vec<usize>,
    dtype: String,
    constants: String,
    mean_ms: f64,
    median_ms: f64,
    p20_ms: f64,
    p80_ms: f64,
    n: usize,
    gbps: f64,
}

pub fn run(arguments: &Arguments, kernels: &Kernels, out: &mut dyn Write) -> Result<()> {
    let Arguments { launch, record, inputs: Inputs { input, .. }, .. } = arguments;
    let outputs = arguments.outputs.protecting_inputs(input.iter().chain(arguments.options.table()));
    outputs.expect_no_plot()?;
    outputs.check_with(record.iter().map(|path| ("--record", path)))?;
    let def = kernels.find(&launch.kernel)?;
    let device = device::open(arguments.device)?;
    arguments.options.use_table(def, &device.target())?;
    arguments.options.note_unused(&device.target());
    let tensors = || arguments.inputs.tensors(def, &launch.dtype);
    let mut jobs = Vec::new();
    for variant in std::iter::once(None).chain(arguments.against.iter().map(Some)) {
        let set = constants(def, &launch.set, variant)?;
        let (job, base) = Plan::new(kernels, launch, &set, &tensors)?.on(&device)?;
        let config = job.config(&arguments.options.over(base))?;
        jobs.push((job, config));
    }
    let cannot_append = |path: &Path, error| CliError::file("append to", path, error);
    let open = |path| files::append_rows(path).map(|file| (path, file)).map_err(|error| cannot_append(path, error));
    let mut records = record.as_deref().map(open).transpose()?;
    let timings = arguments.time(&device, &jobs)?;
    let columns = [
        Column::text("constants"),
        Column::number("median").unit("ms"),
        Column::number("p20").unit("ms"),
        Column::number("p80").unit("ms"),
        Column::integer("runs"),
        Column::number("rate").unit("GB/s"),
    ];
    let title = format!("{} on {device}", def.name);
    let mut table = Table::new("bench", &title, columns)
        .note("Rates count every input once and every output once. Outputs are not checked.");
    for ((job, _), timing) in jobs.iter().zip(&timings) {
        let constants: Vec<String> = job.constants.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let row = row(job, &device, timing, constants.join(","));
        if let Some((path, file)) = &mut records {
            let line = serde_json::to_string(&row)?;
            writeln!(file, "{line}").map_err(|error| cannot_append(path, error))?;
        }
        table.push([
            Cell::from(row.constants),
            Cell::from(timing.median),
            Cell::from(timing.p20),
            Cell::from(timing.p80),
            Cell::from(timing.n),
            Cell::from(row.gbps),
        ]);
    }
    outputs.write(Report::new("bench", &title).table(table), out)?;
    Ok(())
}

/// The constants of a variant: its own, and those of `--set` that it does not name.
fn constants(def: &KernelDef, set: &[String], variant: Option<&String>) -> Result<Vec<String>> {
    let Some(variant) = variant else { return Ok(set.to_vec()) };
    let own = std::slice::from_ref(variant);
    let named = choose::assignments(own, "--against")?;
    let is_own = |name: &str| named.iter().any(|(own, _)| def.param_name(own) == def.param_name(name));
    let base = choose::assignments(set, "--set")?.into_iter().filter(|(name, _)| !is_own(name));
    Ok(base.chain(named.iter().copied()).map(|(name, value)| format!("{name}={value}")).collect())
}

impl Inputs {
    /// The tensors of `--input`, and random ones for what else the kernel reads.
    ///
    /// # Errors
    /// A file that cannot be read, a shape that is not of numbers, a missing element type.
    pub fn tensors(&self, def: &'static KernelDef, dtype: &[String]) -> Result<Tensors> {
        let mut given = match &self.input {
            Some(path) => tensors::read(path)?,
            None => Vec::new(),
        };
        let from_file: Vec<&str> = run::memory_params(def)
            .map(|(param, _)| param.name)
            .filter(|name| given.iter().any(|(known, _)| def.param_name(known) == *name))
            .collect();
        let source = Source::Shapes(self.input.as_ref().map(|path| path.display().to_string()));
        let by_name = run::shape_arguments(def, &self.shape)?;
        let types = choose::partial_dtypes(def, dtype)?;
        for (param, elem) in run::memory_params(def).filter(|(param, _)| !matches!(param.kind, ParamKind::Out(_))) {
            if from_file.contains(&param.name) {
                continue;
            }
            let Some(text) = by_name.get(param.name) else { continue };
            let shape: Option<Vec<usize>> = text.split(',').map(|n| n.trim().parse().ok()).collect();
            let shape = shape.ok_or_else(|| {
                let message = format!("--shape {}={text}: `{}` reads `{}`", param.name, def.name, param.name);
                CliError::usage(message, "give its shape in numbers, as in --shape x=4096,64, each tensor with a --shape of its own; or the tensor in the file of --input")
            })?;
            let dtypes: Vec<DType> = choose::complete_dtypes(def, types.clone())?;
            let dtype = elem.resolve(&dtypes).unwrap_or(DType::F32);
            given.push((param.name.to_string(), random(param.name, dtype, &shape)?));
        }
        let is_given = |word: &String| {
            let name = word.split('=').next().map(|name| def.param_name(name.trim()));
            run::memory_params(def).any(|(param, _)| {
                Some(param.name) == name && !matches!(param.kind, ParamKind::Out(_)) && !from_file.contains(&param.name)
            })
        };
        let shapes = self.shape.iter().filter(|word| !is_given(word)).cloned().collect();
        Ok(Tensors { given, source, shapes })
    }
}

impl Arguments {
    /// Times the jobs in interleaved rounds.
    fn time(&self, device: &Device, jobs: &[(Job, LaunchConfig)]) -> Result<Vec<Timing>> {
        let mut prepared = Vec::new();
        for (job, config) in jobs {
            prepared.push((job, config, job.upload(device)?, Vec::new()));
        }
        for round in 0..ROUNDS {
            for (job, config, buffers, samples) in &mut prepared {
                let warmup = if round == 0 { self.warmup_ms } else { 0.0 };
                let mut refused = None;
                let timing = do_bench(device, warmup, self.rep_ms / ROUNDS as f64, || {
                    job.start(device, config, buffers).map_err(|error| {
                        let text = error.to_string();
                        refused = Some(error);
                        tilewright_runtime::Error::Kernel(text)
                    })
                });
                if let Some(error) = refused {
                    return Err(error);
                }
                samples.extend(timing?.samples);
            }
        }
        Ok(prepared.into_iter().map(|(.., samples)| Timing::from_samples(samples)).collect())
    }
}

fn row(job: &Job, device: &Device, timing: &Timing, constants: String) -> Row {
    let first = run::memory_params(job.def).next().and_then(|(param, _)| job.memory.get(param.name));
    let types: Vec<String> = job.dtypes.iter().map(DType::to_string).collect();
    Row {
        device: device.to_string(),
        kernel: job.def.name,
        shape: first.map(|(shape, _)| shape.clone()).unwrap_or_default(),
        dtype: types.join(","),
        constants,
        mean_ms: timing.mean,
        median_ms: timing.median,
        p20_ms: timing.p20,
        p80_ms: timing.p80,
        n: timing.n,
        gbps: timing.gbps(bytes(job)),
    }
}

/// Bytes of a launch that reads every input once and writes every output once.
fn bytes(job: &Job) -> f64 {
    let of_param = |kind: ParamKind, (shape, dtype): &(Vec<usize>, DType)| {
        let times = if matches!(kind, ParamKind::InOut(_)) { 2.0 } else { 1.0 };
        times * dtype.bytes() as f64 * shape.iter().map(|&n| n as f64).product::<f64>()
    };
    run::memory_params(job.def).filter_map(|(p, _)| Some(of_param(p.kind, job.memory.get(p.name)?))).sum()
}

/// A tensor of numbers between -1 and 1, the same in every run; integers are 0.
fn random(name: &str, dtype: DType, shape: &[usize]) -> Result<Tensor> {
    let elements = run::elements(name, shape)?;
    tilewright_runtime::check_host_memory(elements as f64 * 16.0)?;
    let mut state = name.bytes().fold(0x9e37_79b9_7f4a_7c15_u64, |state, byte| state.rotate_left(8) ^ u64::from(byte));
    let mut next = || {
        // xorshift64 (Marsaglia, 2003).
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    };
    if !dtype.is_float() {
        return Ok(Tensor { dtype, shape: shape.to_vec(), bytes: vec![0; elements * dtype.bytes()] });
    }
    let values: Vec<f64> = (0..elements).map(|_| next()).collect();
    Ok(Tensor::from_f64(dtype, shape, &values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_a_variant_replace_those_of_set() {
        let def = crate::kernels::shipped().find("softmax_rows").unwrap();
        let set = ["rows_tile=4,d_tile=64".to_string()];
        assert_eq!(constants(def, &set, None).unwrap(), set);
        assert_eq!(constants(def, &set, Some(&"d_tile=128".into())).unwrap(), ["rows_tile=4", "d_tile=128"]);
        assert!(constants(def, &set, Some(&"d_tile".into())).is_err());
    }

    #[test]
    fn random_numbers_are_spread_between_minus_one_and_one() {
        let values = random("x", DType::F32, &[100, 100]).unwrap().to_f64();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64;
        // Uniform: mean 0, variance 1/3.
        assert!(mean.abs() < 0.03 && (variance - 1.0 / 3.0).abs() < 0.02, "{mean} {variance}");
        assert!(values.iter().all(|x| (-1.0..=1.0).contains(x)));
        assert_eq!(random("ids", DType::I64, &[2]).unwrap().to_f64(), [0.0, 0.0]);
        assert!(random("x", DType::F32, &[usize::MAX, 2]).is_err());
    }
}
