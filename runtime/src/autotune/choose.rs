//! Selects a configuration for a launch that names none.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, RwLock};
use std::time::Duration;

use smallvec::SmallVec;
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ParamKind, Specialization};
use tilewright_codegen::target::CompileOptions;
use tilewright_codegen::text;

use super::config::{Autotune, Config, KeyPart, KeyValue, Problem};
use super::journal::{Event, Journal};
use super::store::{self, DeviceId};
use super::table::{Entry, Table};
use super::tuner::{self, CandidateLaunch, Job, Report};
use crate::cache::Cache;
use crate::device::{Device, Inner};
use crate::env::Env;
use crate::error::{Error, Result};
use crate::kernel::{LaunchConfig, render_with_source};
use crate::precompiled::embedded;

/// Origin of a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// From the table of [`use_table`].
    Given,
    /// Of the code that this program embeds.
    Embedded,
    /// Measured on this machine, by this process or an earlier one.
    Measured,
    /// From a table that ships with the kernel, for this device and key.
    Shipped,
    /// Measured or shipped for other sizes.
    Nearest,
    /// The kernel's default.
    Default,
}

/// A configuration for launches with the same key.
#[derive(Clone, Debug)]
pub struct Choice {
    pub kernel: &'static str,
    /// In the format of [`Problem::key`].
    pub key: String,
    pub config: Config,
    pub source: Source,
    choice_key: ChoiceKey,
    default: Config,
}

/// Options of a tuning run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Time limit for one kernel and key.
    pub budget: Duration,
    /// Measure again even if a result is stored.
    pub remeasure: bool,
    /// Only this kernel; `None` means every launched kernel.
    pub kernel: Option<String>,
    /// Time limit for one run of a candidate (GPU).
    pub limit: Duration,
    /// Path of the log; `None` means next to the stored choices.
    pub log: Option<std::path::PathBuf>,
}

impl Options {
    /// Options with this time limit for one kernel and key, and 10 seconds for one run of a candidate.
    pub fn new(budget: Duration) -> Options {
        Options { budget, remeasure: false, kernel: None, limit: Duration::from_secs(10), log: None }
    }
}

thread_local! {
    /// The options of [`tuning`] on this thread, and its results.
    static REQUESTED: RefCell<Option<(Options, Vec<Report>)>> = const { RefCell::new(None) };
}

/// Runs `f`; launches in it, on this thread, tune their kernel first. Returns the result of `f`, and one report per
/// tuning run.
pub fn tuning<R>(options: &Options, f: impl FnOnce() -> R) -> (R, Vec<Report>) {
    /// Restores the previous request, after a panic too.
    struct Restore(Option<(Options, Vec<Report>)>);
    impl Drop for Restore {
        fn drop(&mut self) {
            let before = self.0.take();
            REQUESTED.with(|requested| *requested.borrow_mut() = before);
        }
    }
    let before = REQUESTED.with(|requested| requested.borrow_mut().replace((options.clone(), Vec::new())));
    let restore = Restore(before);
    let result = f();
    let reports =
        REQUESTED.with(|requested| requested.borrow_mut().take()).map(|(_, reports)| reports).unwrap_or_default();
    drop(restore);
    (result, reports)
}

/// The options of [`tuning`], else those of the environment.
fn requested_options(kernel: &str) -> Result<Option<Options>> {
    let scoped = REQUESTED.with(|requested| requested.borrow().as_ref().map(|(options, _)| options.clone()));
    let options = match scoped {
        Some(options) => Some(options),
        None => Env::get()?.tune.map(Options::new),
    };
    Ok(options.filter(|options| options.kernel.as_deref().is_none_or(|only| only == kernel)))
}

/// The table of [`use_table`].
static GIVEN: RwLock<Option<Table>> = RwLock::new(None);

/// Takes the configurations of this process from a table, where it is for the target and has an entry of the kernel with the
/// same key or a near one, before all others. Those that are chosen already stay.
pub fn use_table(table: Table) {
    *GIVEN.write().unwrap_or_else(|e| e.into_inner()) = Some(table);
}

/// Whether there is a table of [`use_table`].
pub fn has_table() -> bool {
    GIVEN.read().unwrap_or_else(|e| e.into_inner()).is_some()
}

/// The nearest configuration in the table of [`use_table`].
pub(super) fn given_config(autotune: &Autotune, problem: &Problem) -> Option<Config> {
    let given = GIVEN.read().unwrap_or_else(|e| e.into_inner());
    let table = given.as_ref().filter(|table| table.is_for(&problem.target))?.clone().renamed(autotune.def);
    let (entry, _) = table.nearest(autotune.def.name, &problem.key())?;
    parse_entry(autotune, entry)
}

/// The configuration of an entry, if it is one of this kernel's.
fn parse_entry(autotune: &Autotune, entry: &Entry) -> Option<Config> {
    let parsed = autotune.parse_config(&entry.config);
    if let Err(why) = &parsed {
        tracing::warn!("the tuned configuration `{}` of `{}` is ignored: {why}", entry.config, entry.kernel);
    }
    parsed.ok()
}

/// Key of [`CHOICES`]: kernel, device, element types, and the values of the autotuning key.
type ChoiceKey = SmallVec<[u64; 16]>;

/// Choices that this process has made.
static CHOICES: LazyLock<RwLock<HashMap<ChoiceKey, Arc<Choice>>>> = LazyLock::new(RwLock::default);

fn choice_key(autotune: &'static Autotune, device: &Device, dtypes: &[DType], key: &[u64]) -> ChoiceKey {
    let mut choice_key = ChoiceKey::new();
    choice_key.push(std::ptr::from_ref(autotune) as u64);
    choice_key.push(match device.inner() {
        Inner::Cpu(_) => 0,
        Inner::Simulated(simulated) => std::ptr::from_ref(simulated) as u64,
        // Identifies a GPU by its context, which lives as long as the driver.
        Inner::Cuda(cuda) => cuda.context.cu_ctx() as u64,
    });
    choice_key.extend(dtypes.iter().map(|&dtype| dtype as u64));
    choice_key.extend_from_slice(key);
    choice_key
}

fn insert_choice(choice: Choice) -> Arc<Choice> {
    let choice = Arc::new(choice);
    CHOICES.write().unwrap_or_else(|e| e.into_inner()).insert(choice.choice_key.clone(), choice.clone());
    choice
}

/// The configuration that this process uses for each kernel and key, sorted by both.
pub fn current_choices() -> Vec<Arc<Choice>> {
    let choices = CHOICES.read().unwrap_or_else(|e| e.into_inner());
    let mut list: Vec<Arc<Choice>> = choices.values().cloned().collect();
    list.sort_by(|a, b| (a.kernel, &a.key).cmp(&(b.kernel, &b.key)));
    list
}

/// Returns the configuration for a launch. `key_parts` gives the named parts of `key`, which must differ if they differ;
/// `attempt` builds the launch of a configuration.
///
/// # Errors
/// An invalid `TILEWRIGHT_TUNE`; during requested tuning: no candidate runs, or the device is lost.
pub fn choose(
    autotune: &'static Autotune,
    device: &Device,
    base: &LaunchConfig,
    dtypes: &[DType],
    key: &[u64],
    key_parts: &dyn Fn() -> Vec<KeyPart>,
    attempt: &mut dyn FnMut(&Config) -> Result<CandidateLaunch>,
) -> Result<Arc<Choice>> {
    let choice_key = choice_key(autotune, device, dtypes, key);
    // A simulated GPU has no times.
    let options = requested_options(autotune.def.name)?.filter(|_| !device.is_simulated());
    let known = CHOICES.read().unwrap_or_else(|e| e.into_inner()).get(&choice_key[..]).cloned();
    if let Some(choice) = &known {
        let remeasure = options.as_ref().is_some_and(|options| options.remeasure);
        let measured = choice.source == Source::Measured && !remeasure;
        if options.is_none() || measured {
            return Ok(choice.clone());
        }
    }
    let problem = Problem { target: device.target(), def: autotune.def, dtypes, parts: key_parts() };
    let default = autotune.default_config(&problem);
    if options.is_none() {
        let given = given_config(autotune, &problem).map(|config| (config, Source::Given));
        let embedded = || embedded_config(autotune, device, &problem).map(|config| (config, Source::Embedded));
        if let Some((config, source)) = given.or_else(embedded) {
            let (kernel, key) = (autotune.def.name, problem.key());
            return Ok(insert_choice(Choice { kernel, key, config, source, choice_key, default }));
        }
    }
    let search =
        Search { autotune, device, problem: &problem, base, id: DeviceId::of(device), default: default.clone() };
    let (config, source) = search.run(options.as_ref(), attempt)?;
    tracing::debug!("{} with {}: {config} ({source:?})", autotune.def.name, problem.key());
    Ok(insert_choice(Choice { kernel: autotune.def.name, key: problem.key(), config, source, choice_key, default }))
}

/// The configuration of the code that this program embeds for the kernel, types and constants of the key.
fn embedded_config(autotune: &'static Autotune, device: &Device, problem: &Problem) -> Option<Config> {
    let constants = problem.parts.iter().filter_map(|part| match &part.value {
        KeyValue::Exact(value) if is_constant(autotune, part.name) => Some((part.name, value.clone())),
        KeyValue::Exact(_) | KeyValue::Size(_) => None,
    });
    let known: Vec<_> = constants.collect();
    let (constants, CompileOptions { num_warps, num_ctas, num_stages, max_registers, loops, schedule, .. }) =
        embedded::configuration(autotune.def, device, problem.dtypes, &known, autotune.tuned)?;
    Some(Config { constants, num_warps, num_ctas, num_stages, max_registers, loops, schedule })
}

fn is_constant(autotune: &Autotune, name: &str) -> bool {
    autotune.def.params.iter().any(|p| p.name == name && matches!(p.kind, ParamKind::Constexpr { .. }))
}

impl Choice {
    /// Returns the configuration to launch after this choice failed to compile or to load: the default.
    ///
    /// # Errors
    /// `error`, if this choice is the default already, or if the error does not depend on the configuration.
    pub fn fallback(&self, error: Error) -> Result<Arc<Choice>> {
        let depends_on_config =
            matches!(error, Error::SharedMemory { .. } | Error::TooManyThreads { .. } | Error::Kernel(_));
        if !depends_on_config || self.source == Source::Default {
            return Err(error);
        }
        tracing::warn!(
            "using the default configuration {} instead of {}, which does not run: {error}",
            self.default,
            self.config
        );
        Ok(insert_choice(Choice { config: self.default.clone(), source: Source::Default, ..self.clone() }))
    }
}

struct Search<'a> {
    autotune: &'static Autotune,
    device: &'a Device,
    problem: &'a Problem<'a>,
    base: &'a LaunchConfig,
    id: DeviceId,
    default: Config,
}

impl Search<'_> {
    fn run(
        &self,
        options: Option<&Options>,
        attempt: &mut dyn FnMut(&Config) -> Result<CandidateLaunch>,
    ) -> Result<(Config, Source)> {
        let (kernel, key) = (self.autotune.def.name, self.problem.key());
        let cache = Cache::from_env()?;
        let mut saved_choices = store::load_choices(cache, kernel, &self.id);
        for former in self.autotune.def.aliases {
            saved_choices.entries.extend(store::load_choices(cache, former, &self.id).entries);
        }
        let saved_choices = saved_choices.renamed(self.autotune.def);
        let shipped = self.shipped();
        // The kernel is recorded only for tuning, or for comparison with a stored choice.
        let wanted = match options.is_some() || saved_choices.exact(kernel, &key).is_some() {
            true => Some(self.entry(key.clone(), attempt)?),
            false => None,
        };
        let log = |wanted: &Entry| {
            let named = options.and_then(|options| options.log.clone());
            named.or_else(|| store::log_path(cache, &self.id, wanted))
        };
        if let Some(wanted) = &wanted {
            let same = |entry: &&Entry| {
                (&entry.key, &entry.compiler, &entry.ir) == (&wanted.key, &wanted.compiler, &wanted.ir)
            };
            let exact = saved_choices.entries.iter().find(same).and_then(|entry| self.parse_entry(entry));
            if let Some(config) = exact
                && options.is_none_or(|options| !options.remeasure && !is_unfinished(log(wanted)))
            {
                return Ok((config, Source::Measured));
            }
        }
        if let Some((options, wanted)) = options.zip(wanted.as_ref()) {
            let config = self.tune(options, wanted, log(wanted), attempt)?;
            return Ok((config, Source::Measured));
        }
        if let Some(config) = shipped.exact(kernel, &key).and_then(|entry| self.parse_entry(entry)) {
            return Ok((config, Source::Shipped));
        }
        let near = [saved_choices.nearest(kernel, &key), shipped.nearest(kernel, &key)];
        if let Some((entry, _)) = near.into_iter().flatten().min_by_key(|(_, distance)| *distance)
            && let Some(config) = self.parse_entry(entry)
        {
            return Ok((config, Source::Nearest));
        }
        Ok((self.default.clone(), Source::Default))
    }

    fn parse_entry(&self, entry: &Entry) -> Option<Config> {
        parse_entry(self.autotune, entry)
    }

    /// The entries for this device in the tables that ship with the kernel.
    fn shipped(&self) -> Table {
        let mut found = Table::new(self.id.clone(), Vec::new());
        for text in self.autotune.tables {
            match Table::parse(text) {
                Ok(table) if table.device == self.id => found.entries.extend(table.renamed(self.autotune.def).entries),
                Ok(_) => {}
                Err(why) => tracing::warn!("a tuning table of `{}` is ignored: {why}", self.autotune.def.name),
            }
        }
        found
    }

    /// The table entry under which a choice for this problem is stored, without the configuration.
    fn entry(&self, key: String, attempt: &mut dyn FnMut(&Config) -> Result<CandidateLaunch>) -> Result<Entry> {
        let def = self.autotune.def;
        let attempt = attempt(&self.default)?;
        // Without the alignment facts of this launch, which the key does not contain.
        let recorded = def.record(self.problem.dtypes, &attempt.constants, &Specialization::aligned_memory(def));
        let func = recorded.map_err(|d| Error::Kernel(render_with_source(&d)))?;
        let ir = blake3::hash(text::print(&func).as_bytes()).to_hex()[..16].to_string();
        let compiler = tilewright_codegen::compiler_id().to_string();
        let kernel = def.name.to_string();
        Ok(Entry { kernel, key, compiler: Some(compiler), ir: Some(ir), ..Entry::default() })
    }

    fn tune(
        &self,
        options: &Options,
        wanted: &Entry,
        log: Option<std::path::PathBuf>,
        attempt: &mut dyn FnMut(&Config) -> Result<CandidateLaunch>,
    ) -> Result<Config> {
        let candidates = self.autotune.candidates(self.problem);
        let candidates = candidates
            .into_iter()
            .map(|config| {
                let attempt = attempt(&config);
                (config, attempt)
            })
            .collect();
        let job = Job {
            def: self.autotune.def,
            device: self.device,
            base: self.base,
            dtypes: self.problem.dtypes,
            key: wanted.key.clone(),
            budget: options.budget,
            limit: options.limit,
        };
        let text = [&wanted.compiler, &wanted.ir].map(|part| part.clone().unwrap_or_default()).join(" ");
        let mut journal =
            Journal::open(log.as_deref(), &format!("{} {} {} {text}", self.id, wanted.kernel, wanted.key));
        let report = tuner::tune(&job, candidates, &mut journal)?;
        let (config, median_ms) = report.chosen.clone();
        let entry = Entry { config: config.to_string(), median_ms: Some(median_ms), ..wanted.clone() };
        store::save_choice(Cache::from_env()?, &self.id, &entry);
        REQUESTED.with(|requested| {
            if let Some((_, reports)) = requested.borrow_mut().as_mut() {
                reports.push(report);
            }
        });
        Ok(config)
    }
}

/// Whether there is a log of an unfinished run.
fn is_unfinished(log: Option<std::path::PathBuf>) -> bool {
    let events = log.map(|path| Journal::read(&path)).unwrap_or_default();
    !events.is_empty() && !events.iter().any(|event| matches!(event, Event::Chosen { .. }))
}
