//! `tune` for kernels of a user's own: the problem is a launch at given shapes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ConstValue, ElemDef, KernelDef, ParamKind};
use tilewright_runtime::autotune::{self, Autotune, CandidateLaunch, Config, KeyPart, KeyValue, size_bucket};
use tilewright_runtime::{Device, Error, LaunchConfig};

use super::{Problem, Settings};
use crate::bench::Inputs;
use crate::choose;
use crate::run::{Buffers, Job, Launch};
use crate::{CliError, Kernels, Result};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    launch: Launch,
    #[command(flatten)]
    inputs: Inputs,
    #[command(flatten)]
    settings: Settings,
}

pub fn run(arguments: &Arguments, kernels: &Kernels, out: &mut dyn Write) -> Result<()> {
    let def = kernels.find(&arguments.launch.kernel)?;
    let autotune = kernels.autotune(def).ok_or_else(|| {
        CliError::usage(
            format!("kernel `{}` has no configurations", def.name),
            "list them with #[autotune(configs = [Config(…), …], key = […])] above #[kernel], and pass its static \
             (NAME_AUTOTUNE) to the command line",
        )
    })?;
    let problem = KernelProblem { autotune, launch: &arguments.launch, inputs: &arguments.inputs };
    // Mistakes on the command line are found before a worker starts.
    let (job, _) = problem.job(&first_config(autotune))?;
    drop(job);
    super::tune(&[problem], &arguments.settings, kernels, out)
}

/// Any configuration: the shapes of tensors do not depend on it.
fn first_config(autotune: &Autotune) -> Config {
    autotune.configs().next().unwrap_or_default()
}

struct KernelProblem<'a> {
    autotune: &'static Autotune,
    launch: &'a Launch,
    inputs: &'a Inputs,
}

impl KernelProblem<'_> {
    fn def(&self) -> &'static KernelDef {
        self.autotune.def
    }

    /// The launch with the constants of a configuration, and all constants in order.
    fn job(&self, config: &Config) -> Result<(Job, Vec<ConstValue>)> {
        let tuned = config.constants.iter().map(|(name, value)| format!("{name}={value}"));
        let given = choose::assignments(&self.launch.set, "--set")?;
        if let Some((name, _)) =
            given.iter().find(|(name, _)| self.autotune.tuned.contains(&self.def().param_name(name)))
        {
            let message = format!("--set {name} is unused: the configurations set it");
            return Err(CliError::usage(message, "omit it; `bench` times given constants"));
        }
        let set: Vec<String> = tuned.chain(self.launch.set.iter().cloned()).collect();
        let job = Job::plan(self.def(), self.launch, &set, || self.inputs.tensors(self.def(), &self.launch.dtype))?;
        let constants = self.def().complete_consts(&job.constants);
        let constants = constants.map_err(|error| CliError::Failure(error.render(None)))?;
        Ok((job, constants))
    }

    /// The key of the configurations, for a launch.
    fn key(&self, job: &Job, constants: &[ConstValue]) -> Vec<KeyPart> {
        let is_constant = |kind: ParamKind| matches!(kind, ParamKind::Constexpr { .. });
        let names = self.def().params.iter().filter(|p| is_constant(p.kind)).map(|p| p.name);
        let constants: BTreeMap<&str, &ConstValue> = names.zip(constants).collect();
        let part = |&name: &&'static str| {
            let kind = self.def().params.iter().find(|p| p.name == name).map(|p| p.kind);
            let number = job.integer(name);
            let value = match (constants.get(name), kind) {
                (Some(value), _) => KeyValue::Exact((*value).clone()),
                (None, Some(ParamKind::Scalar(ElemDef::Fixed(DType::Bool)))) => {
                    KeyValue::Exact(ConstValue::Bool(number == Some(1)))
                }
                (None, _) => KeyValue::Size(size_bucket(number.unwrap_or(0))),
            };
            KeyPart { name, value }
        };
        self.autotune.key.iter().map(part).collect()
    }

    fn choose(&self, device: &Device) -> Result<()> {
        let (job, constants) = self.job(&first_config(self.autotune))?;
        let parts = self.key(&job, &constants);
        let words: Vec<u64> = parts.iter().map(key_word).collect();
        let buffers: RefCell<Buffers> = RefCell::new(job.upload(device)?);
        let mut refused = None;
        let chosen = autotune::choose(
            self.autotune,
            device,
            &LaunchConfig::new(0),
            &job.dtypes,
            &words,
            &|| parts.clone(),
            &mut |config| {
                let attempt = || -> Result<CandidateLaunch> {
                    let (job, constants) = self.job(config)?;
                    let mut buffers = buffers.borrow_mut();
                    let args = job.arguments(&mut buffers);
                    Ok(CandidateLaunch::new(self.def(), job.grid().into(), constants, &args))
                };
                attempt().map_err(|error| {
                    let text = error.to_string();
                    refused.get_or_insert(error);
                    Error::Kernel(text)
                })
            },
        );
        match (chosen, refused) {
            (Ok(_), _) => Ok(()),
            (Err(_), Some(refused)) => Err(refused),
            (Err(error), None) => Err(error.into()),
        }
    }
}

/// Different for different parts of keys.
fn key_word(part: &KeyPart) -> u64 {
    let text = part.to_string();
    // FNV-1a.
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

impl Problem for KernelProblem<'_> {
    fn title(&self) -> String {
        self.arguments().join(" ")
    }

    fn kernel(&self) -> &'static str {
        self.def().name
    }

    fn arguments(&self) -> Vec<String> {
        let Launch { kernel: _, grid, set, arg, dtype } = self.launch;
        let Inputs { shape, input } = self.inputs;
        let mut words = vec![self.def().name.to_string()];
        words.extend(grid.iter().flat_map(|grid| ["--grid".to_string(), grid.clone()]));
        for (name, values) in [("--set", set), ("--arg", arg), ("--dtype", dtype), ("--shape", shape)] {
            words.extend(values.iter().flat_map(|value| [name.to_string(), value.clone()]));
        }
        let input: Option<&PathBuf> = input.as_ref();
        words.extend(input.iter().flat_map(|path| ["--input".to_string(), path.display().to_string()]));
        words
    }

    fn launch(&self, device: &Device) -> tilewright_runtime::Result<()> {
        self.choose(device).map_err(|error| Error::Kernel(error.to_string()))
    }
}
