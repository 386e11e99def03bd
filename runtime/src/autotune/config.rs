//! Configurations and keys, and their text form.
//!
//! Both are comma-separated lists, as on the command line: a configuration
//! `q_tile=64,k_tile=128,num_warps=4,num_stages=2`, a key `T=bf16,d=64,causal=true,n_q<=16384`. `=` is an exact value;
//! `<=` is a size bucket, which covers the sizes above half of it, up to it.

use std::cell::RefCell;
use std::fmt;

use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ConstDefault, ConstValue, Constexpr, ElemDef, KernelDef, Lookup, ParamKind};
use tilewright_codegen::pipeline::NUM_CTAS;
use tilewright_codegen::schedule::problem::LoopSchedules;
use tilewright_codegen::target::{CompileOptions, GpuArch, Schedule, Target};

use super::choose::{Source, given_config};
use super::store::saved_choices;
use super::table::Table;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::kernel::{Grid, LaunchConfig};

/// The `#[autotune]` attribute of a kernel. One static per kernel.
#[derive(Debug)]
pub struct Autotune {
    pub def: &'static KernelDef,
    /// The constants that configurations set. One that does not set a constant takes its default.
    pub tuned: &'static [&'static str],
    pub configs: &'static [ConfigDef],
    /// The key; element types are always part of it.
    pub key: &'static [KeyDef],
    /// Whether a configuration is worth measuring for a problem; `None` keeps all.
    pub keep: Option<fn(&Problem, &Config) -> bool>,
    /// Computes the default configuration; if `None`, it is the first of `configs`.
    pub default: Option<fn(&Problem) -> Config>,
    /// Texts of [`Table`](super::Table)s that ship with the kernel.
    pub tables: &'static [&'static str],
}

/// An entry of a key, as written in `#[autotune]`.
#[derive(Clone, Copy, Debug)]
pub struct KeyDef {
    /// The name of an argument, extent or constant, or that of the expression.
    pub name: &'static str,
    /// For an expression: its value from the element types, and from values by name. If it needs one that is not known,
    /// its name is the error.
    pub value: Option<EvaluateKey>,
}

/// See [`KeyDef::value`].
pub type EvaluateKey = fn(&[DType], &Lookup<'_>) -> Result<KeyValue, &'static str>;

/// Returns `other`, whose configurations a kernel with `#[autotune(configs = OTHER_AUTOTUNE)]` shares. Checks that they
/// set only `constants` of that kernel, none of which is in its `key`.
///
/// # Panics
/// Those configurations do not fit the kernel; evaluated at compile time.
#[doc(hidden)]
pub const fn shared_configs(other: &'static Autotune, constants: &[&str], key: &[&str]) -> &'static Autotune {
    let mut i = 0;
    while i < other.tuned.len() {
        assert!(
            is_among(other.tuned[i], constants),
            "these configurations choose a constant that the kernel does not have"
        );
        assert!(!is_among(other.tuned[i], key), "these configurations choose a constant that is in the key");
        i += 1;
    }
    other
}

const fn is_among(name: &str, names: &[&str]) -> bool {
    let mut i = 0;
    while i < names.len() {
        let (a, b) = (name.as_bytes(), names[i].as_bytes());
        let mut same = 0;
        while same < a.len() && same < b.len() && a[same] == b[same] {
            same += 1;
        }
        if same == a.len() && same == b.len() {
            return true;
        }
        i += 1;
    }
    false
}

/// A configuration as written in `#[autotune]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConfigDef {
    /// One value for each of [`Autotune::tuned`].
    pub constants: &'static [ConstDefault],
    pub num_warps: Option<u32>,
    pub num_ctas: Option<u32>,
    pub num_stages: Option<u32>,
    pub max_registers: Option<u32>,
    pub schedule: Schedule,
}

/// A configuration: constants of the kernel, and compiler options.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    pub constants: Vec<(&'static str, ConstValue)>,
    pub num_warps: u32,
    /// [`CompileOptions::num_ctas`].
    pub num_ctas: u32,
    pub num_stages: u32,
    pub max_registers: Option<u32>,
    /// Schedules of loops that a solver found, with the bound that it proved ([`CompileOptions::loops`]).
    pub loops: Option<String>,
    pub schedule: Schedule,
}

impl Default for Config {
    /// No constants, and the compiler's defaults.
    fn default() -> Config {
        let CompileOptions { num_warps, num_ctas, num_stages, max_registers, .. } = CompileOptions::default();
        Config {
            constants: Vec::new(),
            num_warps,
            num_ctas,
            num_stages,
            max_registers,
            loops: None,
            schedule: Schedule::default(),
        }
    }
}

impl Config {
    /// Sets a constant.
    pub fn set(mut self, name: &'static str, value: impl Constexpr) -> Config {
        self.constants.retain(|(other, _)| *other != name);
        self.constants.push((name, value.to_const()));
        self
    }

    pub fn num_warps(mut self, num_warps: u32) -> Config {
        self.num_warps = num_warps;
        self
    }

    /// Sets [`Config::num_ctas`].
    pub fn num_ctas(mut self, num_ctas: u32) -> Config {
        self.num_ctas = num_ctas;
        self
    }

    pub fn num_stages(mut self, num_stages: u32) -> Config {
        self.num_stages = num_stages;
        self
    }

    /// The value of a constant.
    pub fn constant(&self, name: &str) -> Option<&ConstValue> {
        self.constants.iter().find(|(other, _)| *other == name).map(|(_, value)| value)
    }

    /// The value of a constant as the type that the kernel declares; `None` if it has no value of that type.
    pub fn get<T: Constexpr>(&self, name: &str) -> Option<T> {
        self.constant(name).and_then(T::from_const)
    }

    /// Like [`Config::get`], or the default of the constant, for the argument struct of `def`.
    #[doc(hidden)]
    pub fn value<T: Constexpr>(&self, def: &'static KernelDef, name: &'static str) -> Result<T> {
        let default = || def.default_of(name).as_ref().and_then(T::from_const);
        self.get(name).or_else(default).ok_or_else(|| Error::Argument {
            kernel: format!("`{}` ({}:{})", def.name, def.file, def.line),
            name,
            expected: T::TYPE.trim_end().to_string(),
            found: self.constant(name).map_or("no value in the configuration".to_string(), ConstValue::to_string),
        })
    }

    /// The compiler's options of this configuration.
    pub fn options(&self) -> CompileOptions {
        CompileOptions {
            num_warps: self.num_warps,
            num_ctas: self.num_ctas,
            num_stages: self.num_stages,
            max_registers: self.max_registers,
            loops: self.loops.clone(),
            schedule: self.schedule,
            ..CompileOptions::default()
        }
    }

    /// `base` with this configuration and grid.
    pub fn launch_config(&self, base: &LaunchConfig, grid: impl Into<Grid>) -> LaunchConfig {
        LaunchConfig {
            grid: grid.into(),
            num_warps: self.num_warps,
            num_ctas: self.num_ctas,
            num_stages: self.num_stages,
            max_registers: self.max_registers.or(base.max_registers),
            loops: self.loops.clone().or_else(|| base.loops.clone()),
            schedule: self.schedule.or(base.schedule),
            ..base.clone()
        }
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.constants {
            write!(f, "{name}={value},")?;
        }
        write!(f, "num_warps={},", self.num_warps)?;
        if self.num_ctas != 1 {
            write!(f, "num_ctas={},", self.num_ctas)?;
        }
        write!(f, "num_stages={}", self.num_stages)?;
        if let Some(registers) = self.max_registers {
            write!(f, ",max_registers={registers}")?;
        }
        if let Some(loops) = &self.loops {
            write!(f, ",loops={loops}")?;
        }
        for (name, flag) in self.schedule.named() {
            if let Some(flag) = flag {
                write!(f, ",{name}={flag}")?;
            }
        }
        Ok(())
    }
}

impl Autotune {
    /// The configurations that `#[autotune]` lists, in order.
    pub fn configs(&self) -> impl Iterator<Item = Config> + '_ {
        self.configs.iter().map(|def| {
            let default = Config::default();
            Config {
                constants: self.tuned.iter().copied().zip(def.constants.iter().map(|&c| c.into())).collect(),
                num_warps: def.num_warps.unwrap_or(default.num_warps),
                num_ctas: def.num_ctas.unwrap_or(default.num_ctas),
                num_stages: def.num_stages.unwrap_or(default.num_stages),
                max_registers: def.max_registers,
                loops: None,
                schedule: def.schedule,
            }
        })
    }

    /// The result of [`Autotune::default`], else the first configuration; the compiler's defaults if there is neither.
    pub fn default_config(&self, problem: &Problem) -> Config {
        let declared = self.default.map(|default| default(problem));
        let mut config = declared.or_else(|| self.configs().next()).unwrap_or_default();
        self.set_defaults(&mut config);
        config
    }

    /// Gives the tuned constants without a value their defaults, and puts all of them in order.
    fn set_defaults(&self, config: &mut Config) {
        for &name in self.tuned {
            if config.constant(name).is_none()
                && let Some(default) = self.def.default_of(name)
            {
                config.constants.push((name, default));
            }
        }
        config.constants.sort_by_key(|(name, _)| self.tuned.iter().position(|tuned| tuned == name));
    }

    /// The configurations that tuning measures for a problem, the default first: those that `keep` keeps and that differ
    /// on its target.
    pub fn candidates(&self, problem: &Problem) -> Vec<Config> {
        let mut candidates = vec![self.default_config(problem)];
        let on_gpu = problem.is_gpu();
        for config in self.configs() {
            let is_kept = self.keep.is_none_or(|keep| keep(problem, &config));
            // On the CPU a program is one thread, whatever the number of warps.
            let same = |other: &Config| if on_gpu { *other == config } else { other.constants == config.constants };
            if is_kept && problem.is_relevant(&config) && !candidates.iter().any(same) {
                candidates.push(config);
            }
        }
        candidates
    }

    /// An entry of the key of a launch, from the values of arguments, extents and constants by name. Constants without a
    /// value have their default.
    ///
    /// # Errors
    /// The name of an argument, extent or constant whose value is not known.
    fn key_part(&self, key: &KeyDef, dtypes: &[DType], values: &Lookup<'_>) -> Result<KeyPart, &'static str> {
        let KeyDef { name, value } = *key;
        let known = |name: &'static str| values(name).or_else(|| self.def.default_of(name));
        let is_exact = self.def.params.iter().find(|p| p.name == name).is_some_and(|p| {
            matches!(p.kind, ParamKind::Constexpr { .. } | ParamKind::Scalar(ElemDef::Fixed(DType::Bool)))
        });
        let value = match (value, known(name)) {
            (Some(evaluate), _) => evaluate(dtypes, &known)?,
            (None, Some(value)) if is_exact => KeyValue::Exact(value),
            (None, Some(ConstValue::Int(n))) => KeyValue::Size(size_bucket(n)),
            (None, _) => return Err(name),
        };
        Ok(KeyPart { name, value })
    }

    /// The key of a launch, from the values of arguments, extents and constants by name. Constants without a value have
    /// their default.
    ///
    /// # Errors
    /// The name of an argument, extent or constant whose value is not known.
    pub fn key_of(&self, dtypes: &[DType], values: &Lookup<'_>) -> Result<Vec<KeyPart>, &'static str> {
        self.key.iter().map(|key| self.key_part(key, dtypes, values)).collect()
    }

    /// The arguments and extents on which the configurations depend.
    pub fn sizes(&self, dtypes: &[DType]) -> Vec<&'static str> {
        let names = RefCell::new(Vec::new());
        // Any value will do, but enums have few, and defaults are among them.
        let record = |name: &'static str| {
            let default = self.def.default_of(name);
            let mut names = names.borrow_mut();
            let is_size = self.def.dims.contains(&name)
                || self.def.params.iter().any(|p| p.name == name && matches!(p.kind, ParamKind::Scalar(_)));
            if is_size && !names.contains(&name) {
                names.push(name);
            }
            Some(default.unwrap_or(ConstValue::Int(1)))
        };
        for key in self.key {
            match key.value {
                None => drop(record(key.name)),
                // What an expression reads after a value of the wrong type is not found.
                Some(evaluate) => drop(evaluate(dtypes, &record)),
            }
        }
        names.into_inner()
    }

    /// The configuration to compile for ahead of time: that of the table of [`use_table`](super::use_table), else the
    /// nearest one that this machine measured, if the target is its CPU, else the nearest one that ships for the
    /// architecture, else the default. The key is that of the values of `constant` or their defaults, and of the sizes of
    /// `size`, where 1 is `true`. Sizes and extents that are not given are 16384, those of optional tensors alone 64, or 0
    /// where these are left out; `bool`s are `false`, and an expression of other arguments that are not given is left out.
    /// Also returns the origin of the configuration.
    ///
    /// # Errors
    /// A constant in the key has no value; an invalid environment variable.
    pub fn configuration_for(
        &self,
        target: &Target,
        dtypes: &[DType],
        constant: &dyn Fn(&str) -> Option<ConstValue>,
        size: &dyn Fn(&str) -> Option<i64>,
    ) -> Result<(Config, Source)> {
        // Optional tensors have pages and sequences, of many rows each.
        let usual = |name: &str| {
            if self.def.is_absent(name, constant) {
                0
            } else if self.def.is_of_optional(name) {
                64
            } else {
                16384
            }
        };
        let param = |name: &str| self.def.params.iter().find(|p| p.name == name).map(|p| p.kind);
        let derived = self.def.heuristics(&|name| constant(name));
        let derived = |name: &str| derived.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
        let values = |name: &'static str| {
            let is_size = self.key.iter().any(|key| key.name == name) || self.def.dims.contains(&name);
            match param(name) {
                Some(ParamKind::Constexpr { .. }) => constant(name).or_else(|| derived(name)),
                Some(ParamKind::Scalar(ElemDef::Fixed(DType::Bool))) => {
                    Some(ConstValue::Bool(size(name).is_some_and(|n| n != 0)))
                }
                _ => size(name).or_else(|| is_size.then(|| usual(name))).map(ConstValue::Int),
            }
        };
        let mut parts = Vec::new();
        for key in self.key {
            match self.key_part(key, dtypes, &values) {
                Ok(part) => parts.push(part),
                Err(name) if matches!(param(name), Some(ParamKind::Constexpr { .. })) => {
                    return Err(Error::NoConstant { kernel: self.def.name, name });
                }
                Err(_) => {}
            }
        }
        let problem = Problem { target: target.clone(), def: self.def, dtypes, parts };
        if let Some(config) = given_config(self, &problem) {
            return Ok((config, Source::Given));
        }
        let tables: Vec<(Table, Source)> = match target {
            Target::Nvptx(arch) => {
                let is_same = |t: &Table| t.device.compute_capability.as_deref() == Some(arch.compute_capability());
                self.shipped_tables().filter(is_same).map(|table| (table, Source::Shipped)).collect()
            }
            Target::Host(_) => {
                vec![(saved_choices(self.def.name, &Device::cpu()).renamed(self.def), Source::Measured)]
            }
        };
        let key = problem.key();
        let near = tables.iter().filter_map(|(table, source)| {
            let (entry, distance) = table.nearest(self.def.name, &key)?;
            let source = if entry.key == key { *source } else { Source::Nearest };
            Some((distance, self.parse_config(&entry.config).ok()?, source))
        });
        let nearest = near.min_by_key(|(distance, ..)| *distance).map(|(_, config, source)| (config, source));
        Ok(nearest.unwrap_or_else(|| (self.default_config(&problem), Source::Default)))
    }

    fn shipped_tables(&self) -> impl Iterator<Item = Table> {
        self.tables.iter().filter_map(|text| Some(Table::parse(text).ok()?.renamed(self.def)))
    }

    /// The configurations of this kernel in the tables that ship with it, with their keys.
    pub fn shipped(&self) -> Vec<(String, Config)> {
        let entries =
            self.shipped_tables().flat_map(|table| table.entries).filter(|entry| entry.kernel == self.def.name);
        entries.filter_map(|entry| Some((entry.key, self.parse_config(&entry.config).ok()?))).collect()
    }

    /// Parses the text form of a [`Config`].
    ///
    /// # Errors
    /// The reason why the text is not a configuration of this kernel.
    pub fn parse_config(&self, text: &str) -> Result<Config, String> {
        let mut config = Config::default();
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            let (name, value) =
                word.split_once('=').ok_or_else(|| format!("`{word}` is not of the form name=value"))?;
            let number = || value.parse::<u32>().map_err(|_| format!("{name} must be a number, not `{value}`"));
            if let Some(choice) = config.schedule.choice(name) {
                *choice = Some(value.parse().map_err(|_| format!("{name} must be true or false, not `{value}`"))?);
                continue;
            }
            match name {
                "num_warps" => config.num_warps = number()?,
                "num_ctas" => config.num_ctas = number()?,
                "num_stages" => config.num_stages = number()?,
                "max_registers" => config.max_registers = Some(number()?),
                "loops" => config.loops = Some(value.parse::<LoopSchedules>()?.to_string()),
                _ => {
                    let name = self.def.param_name(name);
                    let known = self.tuned.iter().find(|tuned| **tuned == name);
                    let name = known.ok_or_else(|| format!("`{}` has no tuned constant `{name}`", self.def.name))?;
                    if config.constant(name).is_some() {
                        return Err(format!("`{name}` is given twice"));
                    }
                    let value = ConstValue::from_text(value);
                    let like = self.configs().find_map(|config| config.constant(name).cloned());
                    if like.is_some_and(|like| std::mem::discriminant(&like) != std::mem::discriminant(&value)) {
                        return Err(format!("`{name}` cannot be {value}"));
                    }
                    config.constants.push((name, value));
                }
            }
        }
        self.set_defaults(&mut config);
        if let Some(missing) = self.tuned.iter().find(|name| config.constant(name).is_none()) {
            return Err(format!("`{missing}` has no value"));
        }
        if !config.num_warps.is_power_of_two() || config.num_warps > 32 || config.num_stages == 0 {
            return Err("num_warps must be a power of two up to 32, and num_stages at least 1".into());
        }
        if !NUM_CTAS.contains(&config.num_ctas) {
            return Err(format!("num_ctas must be 1, 2, 4 or 8, not {}", config.num_ctas));
        }
        Ok(config)
    }
}

/// Placeholder in the argument struct for a constant that `launch_tuned` sets.
pub fn tuned<T: Constexpr>() -> T {
    T::PLACEHOLDER
}

/// The size bucket of `n`: the smallest power of two that is at least `n`; 0 if `n` is not positive.
pub fn size_bucket(n: i64) -> u64 {
    u64::try_from(n).ok().filter(|&n| n > 0).map_or(0, |n| n.checked_next_power_of_two().unwrap_or(1 << 63))
}

/// One entry of a key.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyPart {
    pub name: &'static str,
    pub value: KeyValue,
}

#[derive(Clone, Debug, PartialEq)]
pub enum KeyValue {
    /// The value of a constant, or of a `bool` argument.
    Exact(ConstValue),
    /// The [`size_bucket`] of an integer argument.
    Size(u64),
}

impl KeyValue {
    /// The bucket of a size that an expression computes.
    pub fn size(n: usize) -> KeyValue {
        KeyValue::Size(size_bucket(i64::try_from(n).unwrap_or(i64::MAX)))
    }

    /// Different for different values of one key.
    pub fn word(&self) -> u64 {
        match self {
            KeyValue::Exact(ConstValue::Int(n)) => *n as u64,
            KeyValue::Exact(ConstValue::Bool(b)) => u64::from(*b),
            KeyValue::Exact(value) => crate::kernel::erased_key(value),
            KeyValue::Size(size) => *size,
        }
    }
}

impl<C: Constexpr> From<C> for KeyValue {
    fn from(value: C) -> KeyValue {
        KeyValue::Exact(value.to_const())
    }
}

impl fmt::Display for KeyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            KeyValue::Exact(value) => write!(f, "{}={value}", self.name),
            KeyValue::Size(size) => write!(f, "{}<={size}", self.name),
        }
    }
}

/// The problem that a configuration is selected for.
#[derive(Debug)]
pub struct Problem<'a> {
    /// The compilation target.
    pub target: Target,
    pub def: &'static KernelDef,
    /// One per type parameter.
    pub dtypes: &'a [DType],
    pub parts: Vec<KeyPart>,
}

impl Problem<'_> {
    pub fn is_gpu(&self) -> bool {
        matches!(self.target, Target::Nvptx(_))
    }

    /// Whether a configuration can differ from the same one without its schedule options on this target: `wgmma_f32`
    /// has an effect only on Hopper, in kernels with f32.
    pub fn is_relevant(&self, config: &Config) -> bool {
        let hopper = matches!(self.target, Target::Nvptx(arch) if arch >= GpuArch::Sm90a);
        config.schedule.wgmma_f32 != Some(true) || (hopper && self.dtypes.contains(&DType::F32))
    }

    /// The key as text: element types first.
    pub fn key(&self) -> String {
        let types =
            self.def.generics.iter().zip(self.dtypes).map(|(generic, dtype)| format!("{}={dtype}", generic.name));
        types.chain(self.parts.iter().map(KeyPart::to_string)).collect::<Vec<_>>().join(",")
    }

    /// The integer of that name in the key; for a size, its bucket.
    pub fn int(&self, name: &str) -> Option<i64> {
        match &self.parts.iter().find(|part| part.name == name)?.value {
            KeyValue::Exact(ConstValue::Int(n)) => Some(*n),
            KeyValue::Size(n) => i64::try_from(*n).ok(),
            KeyValue::Exact(_) => None,
        }
    }

    /// The constant of that name in the key.
    pub fn get<T: Constexpr>(&self, name: &str) -> Option<T> {
        match &self.parts.iter().find(|part| part.name == name)?.value {
            KeyValue::Exact(value) => T::from_const(value),
            KeyValue::Size(_) => None,
        }
    }
}

/// The distance of two keys: the sum of the differences of their sizes, in powers of two. `None` if they differ in more
/// than sizes, or if one size is more than 16 times the other: tiles for rows of 8192 numbers do not suit rows of 16.
pub(super) fn distance(a: &str, b: &str) -> Option<u32> {
    let (mut left, mut right) = (a.split(','), b.split(','));
    let mut sum = 0;
    loop {
        match (left.next(), right.next()) {
            (None, None) => return Some(sum),
            (Some(x), Some(y)) if x == y => {}
            (Some(x), Some(y)) => {
                let ((x, m), (y, n)) = (x.split_once("<=")?, y.split_once("<=")?);
                let log = |text: &str| text.parse::<u64>().ok().map(|n| n.max(1).ilog2());
                let apart = log(m)?.abs_diff(log(n)?);
                if x != y || apart > 4 {
                    return None;
                }
                sum += apart.max(1);
            }
            (Some(_), None) | (None, Some(_)) => return None,
        }
    }
}
