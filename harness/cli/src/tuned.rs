//! Launches with the configuration that a program would launch with: the one that `tune` chose, else the one that ships.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ConstValue, ElemDef, KernelDef, ParamKind};
use tilewright_codegen::target::CompileOptions;
use tilewright_runtime::autotune::{
    self, Autotune, CandidateLaunch, Choice, Config, KeyPart, KeyValue, Source, size_bucket,
};
use tilewright_runtime::{Device, Error, LaunchConfig, terminal};

use crate::choose;
use crate::run::{Buffers, Job, Launch, Tensors};
use crate::{CliError, Kernels, Result};

/// A launch whose constants, so far as they are not given, may depend on a device.
pub enum Plan<'a> {
    /// All constants are given.
    Given(Box<Job>),
    /// A configuration gives the others.
    Tuned(TunedLaunch<'a>),
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
            Some(autotune) => {
                let tuned = TunedLaunch { autotune, launch, set: set.to_vec(), tensors };
                tuned.check()?;
                Ok(Plan::Tuned(tuned))
            }
        }
    }

    /// The launch on a device, and the options that a configuration gives.
    ///
    /// # Errors
    /// A configuration that does not fit the launch.
    pub fn on(self, device: &Device) -> Result<(Job, CompileOptions)> {
        let tuned = match self {
            Plan::Given(job) => return Ok((*job, CompileOptions::default())),
            Plan::Tuned(tuned) => tuned,
        };
        let choice = tuned.choose(device)?;
        let (config, from) = (&choice.config, source(choice.source));
        let used = choose::without(config, &choose::constants(tuned.def(), &tuned.set)?);
        terminal::print_stderr(format_args!("note: constants that are not given are those of {from}: {used}"));
        Ok((tuned.job(config)?, config.options()))
    }
}

/// The origin of a configuration in words.
fn source(source: Source) -> &'static str {
    match source {
        Source::Embedded => "the embedded code",
        Source::Measured => "the configuration that was measured here",
        Source::Shipped => "the configuration that ships",
        Source::Nearest => "the configuration for the nearest sizes",
        Source::Default => "the default configuration",
    }
}

/// A launch of a kernel with configurations.
pub struct TunedLaunch<'a> {
    pub autotune: &'static Autotune,
    pub launch: &'a Launch,
    /// Constants, as `--set` gives them; configurations do not change them.
    pub set: Vec<String>,
    pub tensors: &'a dyn Fn() -> Result<Tensors>,
}

impl TunedLaunch<'_> {
    fn def(&self) -> &'static KernelDef {
        self.autotune.def
    }

    /// A configuration of small tiles: the shapes of tensors do not depend on it, and constants that are given fit beside it.
    fn small_config(&self) -> Config {
        let size = |config: &Config| {
            let numbers = config.constants.iter().filter_map(|(_, value)| match value {
                ConstValue::Int(n) => Some(*n as f64),
                _ => None,
            });
            numbers.product::<f64>()
        };
        self.autotune.configs().min_by(|a, b| size(a).total_cmp(&size(b))).unwrap_or_default()
    }

    /// Reports mistakes that do not depend on the device.
    ///
    /// # Errors
    /// As [`Job::plan`].
    pub fn check(&self) -> Result<()> {
        self.job(&self.small_config()).map(drop)
    }

    /// The launch with the constants of a configuration.
    ///
    /// # Errors
    /// As [`Job::plan`].
    pub fn job(&self, config: &Config) -> Result<Job> {
        let given = choose::constants(self.def(), &self.set)?;
        let tuned =
            choose::without(config, &given).constants.into_iter().map(|(name, value)| format!("{name}={value}"));
        let set: Vec<String> = tuned.chain(self.set.iter().cloned()).collect();
        Job::plan(self.def(), self.launch, &set, self.tensors)
    }

    /// All constants of a launch, in order.
    fn constants(&self, job: &Job) -> Result<Vec<ConstValue>> {
        self.def().complete_consts(&job.constants).map_err(|error| CliError::Failure(error.render(None)))
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

    /// The configuration of the launch on a device; while [`autotune::tuning`], the fastest one.
    ///
    /// # Errors
    /// As [`Job::plan`], and what tuning reports.
    pub fn choose(&self, device: &Device) -> Result<Arc<Choice>> {
        let job = self.job(&self.small_config())?;
        let parts = self.key(&job, &self.constants(&job)?);
        let words: Vec<u64> = parts.iter().map(key_word).collect();
        let buffers: RefCell<Option<Buffers>> = RefCell::new(None);
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
                    let candidate = self.job(config)?;
                    let mut buffers = buffers.borrow_mut();
                    let buffers = match &mut *buffers {
                        Some(buffers) => buffers,
                        none => none.insert(job.upload(device)?),
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

/// Different for different parts of keys.
fn key_word(part: &KeyPart) -> u64 {
    let text = part.to_string();
    // FNV-1a.
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}
