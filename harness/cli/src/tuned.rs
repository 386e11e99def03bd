//! Launches with the configuration that a program would launch with: the one that `tune` chose, else the one that ships.

use std::cell::RefCell;
use std::sync::Arc;

use tilewright_codegen::lang::kernel::{ConstValue, KernelDef, ParamKind};
use tilewright_codegen::target::CompileOptions;
use tilewright_runtime::autotune::{self, Autotune, CandidateLaunch, Choice, Config, KeyPart};
use tilewright_runtime::{Device, Error, LaunchConfig};

use crate::choose;
use crate::run::{Buffers, Job, Launch, Tensors};
use crate::{CliError, Kernels, Result};

/// A launch whose constants, so far as they are not given, may depend on a device.
pub enum Plan<'a> {
    /// All constants are given.
    Given(Box<Job>),
    /// A configuration gives the others.
    Tuned(Box<TunedLaunch<'a>>),
}

impl<'a> Plan<'a> {
    /// Plans a launch with the constants `set`, and reports mistakes in it.
    ///
    /// # Errors
    /// As [`Job::plan`].
    pub fn new(
        kernels: &Kernels,
        launch: &'a Launch,
        set: &[String],
        tensors: &'a dyn Fn() -> Result<Tensors>,
    ) -> Result<Plan<'a>> {
        let def = kernels.find(&launch.kernel)?;
        let given = choose::constants(def, set)?;
        match kernels.autotune(def).filter(|autotune| choose::needs_configuration(autotune, &given)) {
            None => Ok(Plan::Given(Box::new(Job::plan(def, launch, set, tensors)?))),
            Some(autotune) => TunedLaunch::new(autotune, launch, set, tensors).map(Box::new).map(Plan::Tuned),
        }
    }

    /// The launch on a device, and the options that a configuration gives.
    ///
    /// # Errors
    /// A configuration that does not fit the launch.
    pub fn on(self, device: &Device) -> Result<(Job, CompileOptions)> {
        let tuned = match self {
            Plan::Given(job) => {
                choose::expect_table(None)?;
                return Ok((*job, CompileOptions::default()));
            }
            Plan::Tuned(tuned) => tuned,
        };
        let given = choose::constants(tuned.def(), &tuned.set)?;
        let (config, from) = match tuned.key(device) {
            Ok(_) => {
                let choice = tuned.choose(device)?;
                choose::expect_table(Some(choice.source))?;
                (choice.config.clone(), choose::origin(choice.source).to_string())
            }
            Err(name) => {
                let from = format!("a configuration for any `{name}`, which --arg {name}=… would give");
                (tuned.for_any(device)?, from)
            }
        };
        let used = choose::without(&config, &given);
        choose::note_configuration(&from, &used);
        Ok((tuned.job(&config, device)?, config.options()))
    }
}

/// A launch of a kernel with configurations.
pub struct TunedLaunch<'a> {
    pub autotune: &'static Autotune,
    pub launch: &'a Launch,
    /// Constants, as `--set` gives them; configurations do not change them.
    set: Vec<String>,
    tensors: &'a dyn Fn() -> Result<Tensors>,
    /// The launch with a configuration of small tiles: the shapes of tensors do not depend on it, and constants that are
    /// given fit beside it.
    small: Job,
}

impl<'a> TunedLaunch<'a> {
    /// Plans a launch, and reports mistakes that do not depend on the device.
    ///
    /// # Errors
    /// As [`Job::plan`].
    pub fn new(
        autotune: &'static Autotune,
        launch: &'a Launch,
        set: &[String],
        tensors: &'a dyn Fn() -> Result<Tensors>,
    ) -> Result<TunedLaunch<'a>> {
        let size = |config: &Config| {
            let numbers = config.constants.iter().filter_map(|(_, value)| match value {
                ConstValue::Int(n) => Some(*n as f64),
                _ => None,
            });
            numbers.product::<f64>()
        };
        let config = autotune.configs().min_by(|a, b| size(a).total_cmp(&size(b))).unwrap_or_default();
        let small = plan(autotune, launch, set, tensors, &config)?;
        Ok(TunedLaunch { autotune, launch, set: set.to_vec(), tensors, small })
    }

    fn def(&self) -> &'static KernelDef {
        self.autotune.def
    }

    /// The launch with the constants of a configuration, on a device.
    ///
    /// # Errors
    /// As [`Job::plan`].
    fn job(&self, config: &Config, device: &Device) -> Result<Job> {
        let (mut launch, mut set) = (self.launch.clone(), self.set.clone());
        match self.programs(device) {
            Some((ParamKind::Constexpr { .. }, number)) => set.push(format!("{}={number}", choose::PROGRAMS)),
            Some((_, number)) => launch.arg.push(format!("{}={number}", choose::PROGRAMS)),
            None => {}
        }
        plan(self.autotune, &launch, &set, self.tensors, config)
    }

    /// The number of programs that a persistent kernel takes, if it is not given: as its host functions do, one for each SM
    /// of the device, or for each thread of the CPU.
    fn programs(&self, device: &Device) -> Option<(ParamKind, u32)> {
        let param = self.def().params.iter().find(|p| p.name == choose::PROGRAMS)?;
        (!self.small.is_given(choose::PROGRAMS)).then(|| (param.kind, device.info().compute_units.max(1)))
    }

    /// All constants of a launch, in order.
    fn constants(&self, job: &Job) -> Result<Vec<ConstValue>> {
        self.def().complete_consts(&job.constants).map_err(|error| CliError::Failure(error.render(None)))
    }

    /// The key of the configurations.
    ///
    /// # Errors
    /// The name of an argument on which they depend and that has no value.
    fn key(&self, device: &Device) -> Result<Vec<KeyPart>, &'static str> {
        let programs = self.programs(device).map(|(_, number)| ConstValue::Int(number.into()));
        let value = |name: &'static str| match name {
            choose::PROGRAMS => programs.clone().or_else(|| self.small.value(name)),
            _ if self.def().is_absent(name, |flag| self.small.value(flag)) => Some(ConstValue::Int(0)),
            _ => self.small.value(name),
        };
        self.autotune.key_of(&self.small.dtypes, &value)
    }

    /// The configuration for a device where an argument has no value.
    fn for_any(&self, device: &Device) -> Result<Config> {
        let constant = |name: &str| self.small.value(name);
        let size = |name: &str| match constant(name) {
            Some(ConstValue::Int(n)) => Some(n),
            Some(ConstValue::Bool(b)) => Some(b.into()),
            _ => None,
        };
        Ok(choose::configuration_for(self.autotune, &device.target(), &self.small.dtypes, &constant, &size)?.0)
    }

    /// The configuration of the launch on a device; while [`autotune::tuning`], the fastest one.
    ///
    /// # Errors
    /// As [`Job::plan`], and what tuning reports.
    pub fn choose(&self, device: &Device) -> Result<Arc<Choice>> {
        let parts = self.key(device).map_err(|name| {
            let kernel = self.def().name;
            let message = format!("the configuration of kernel `{kernel}` depends on `{name}`, which has no value");
            CliError::usage(message, format!("--arg {name}=…"))
        })?;
        let words: Vec<u64> = parts.iter().map(|part| part.value.word()).collect();
        let buffers: RefCell<Option<Buffers>> = RefCell::new(None);
        let mut refused = None;
        let chosen = autotune::choose(
            self.autotune,
            device,
            &LaunchConfig::new(0),
            &self.small.dtypes,
            &words,
            &|| parts.clone(),
            &mut |config| {
                let attempt = || -> Result<CandidateLaunch> {
                    let candidate = self.job(config, device)?;
                    let mut buffers = buffers.borrow_mut();
                    let buffers = match &mut *buffers {
                        Some(buffers) => buffers,
                        none => none.insert(self.small.upload(device)?),
                    };
                    let args = candidate.arguments(buffers);
                    let constants = self.constants(&candidate)?;
                    Ok(CandidateLaunch::new(self.def(), candidate.grid().into(), constants, &args))
                };
                attempt().map_err(|error| {
                    let text = error.to_string();
                    refused.get_or_insert(error);
                    Error::Kernel(text)
                })
            },
        );
        match (chosen, refused) {
            (Ok(choice), _) => Ok(choice),
            (Err(_), Some(refused)) => Err(refused),
            (Err(error), None) => Err(error.into()),
        }
    }
}

/// A launch with the constants `set`, and others of a configuration.
fn plan(
    autotune: &Autotune,
    launch: &Launch,
    set: &[String],
    tensors: &dyn Fn() -> Result<Tensors>,
    config: &Config,
) -> Result<Job> {
    let given = choose::constants(autotune.def, set)?;
    let tuned = choose::without(config, &given).constants.into_iter().map(|(name, value)| format!("{name}={value}"));
    let set: Vec<String> = tuned.chain(set.iter().cloned()).collect();
    Job::plan(autotune.def, launch, &set, tensors)
}
