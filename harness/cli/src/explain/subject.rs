//! Selects the variant of a kernel that is explained, from the command line, a record row, the shipped configurations
//! and defaults.

use std::collections::BTreeMap;

use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ArgSpec, ConstValue, GenericDef, KernelDef, ParamKind, Specialization};
use tilewright_codegen::schedule::given;
use tilewright_codegen::target::{self, GpuArch, Target};
use tilewright_runtime::autotune::Config;
use tilewright_runtime::precompiled;

use super::roofline::Work;
use super::{Arguments, Row};
use crate::bind::{self, Extents};
use crate::compile::{Request, assumptions};
use crate::{CliError, Hints, Kernels, Result, choose, run, shapes};

/// A variant of a kernel, and the shapes of its problem.
pub struct Subject {
    pub request: Request,
    /// Values that were assumed, for the report.
    pub notes: Vec<String>,
    extents: Extents,
    hints: &'static dyn Hints,
}

impl Subject {
    pub fn new(arguments: &Arguments, kernels: &Kernels, row: Option<&Row>) -> Result<Subject> {
        let (def, hints) = (kernels.find(&arguments.kernel)?, kernels.hints());
        arguments.options.use_table(def, &Target::Nvptx(arguments.target))?;
        let dtypes = match row.filter(|_| arguments.dtype.is_empty()) {
            Some(row) => types_of_row(def, &row.dtype)?,
            None => with_usual_types(def, choose::partial_dtypes(def, &arguments.dtype)?)?,
        };
        let mut constants = choose::constants(def, &arguments.set)?;
        let given = match arguments.assume.is_empty() {
            true => None,
            false => Some(assumptions(def, &arguments.assume)?),
        };
        for (name, value) in row.and_then(|row| row.constants(hints)).unwrap_or_default() {
            let exists = def.params.iter().any(|p| p.name == name);
            if exists && !constants.iter().any(|(known, _)| *known == name) {
                constants.push((name, value));
            }
        }
        let (mut extents, sizes) = extents(def, hints, arguments, row, &constants)?;
        if let Some(given) = &given {
            let sizes = sizes.iter().map(|(name, size)| (name.as_str(), *size));
            precompiled::check_sizes(def, given, sizes).map_err(|error| {
                CliError::usage(error.message, format!("change --shape or --assume: {}", error.help))
            })?;
        }
        add_assumed(def, given.as_ref().unwrap_or(&dense(def)), &mut extents);
        let mut notes = Vec::new();
        apply_extents(def, &extents, &mut constants);
        let mut assumed = Vec::new();
        let config = match kernels.autotune(def) {
            Some(autotune) => {
                default_constants(def, hints, &extents, autotune.tuned, &mut constants, &mut assumed);
                let constant = |name: &str| choose::given(&constants, name);
                let size = |name: &str| extents.of_name(name).ok().flatten();
                let target = Target::Nvptx(arguments.target);
                let (config, _) = choose::configuration_for(autotune, &target, &dtypes, &constant, &size)?;
                for (name, value) in &config.constants {
                    if !constants.iter().any(|(known, _)| known == name) {
                        constants.push((name, value.clone()));
                    }
                }
                config
            }
            None => {
                choose::expect_table(None)?;
                default_constants(def, hints, &extents, &[], &mut constants, &mut assumed);
                default_config(&constants)
            }
        };
        // As a launch with these extents would compute them.
        constants.extend(def.heuristics(&|name| extents.value(&constants, name)));
        choose::check_complete(def, &constants)?;
        if !assumed.is_empty() {
            notes.push(format!("Assumed: {}. Change with --set.", assumed.join(", ")));
        }
        let specialization = given.unwrap_or_else(|| usual_assumptions(def, &dtypes, &constants, &sizes, &extents));
        let options = arguments.options.over(config.options());
        let target = Target::Nvptx(arguments.target);
        let options = options.compile_options()?;
        let request = Request { def, dtypes, constants, specialization, sizes, target, options };
        Ok(Subject { request, notes, extents, hints })
    }

    /// A variant that was launched.
    pub fn recorded(request: Request, kernels: &Kernels, note: String) -> Subject {
        Subject {
            request,
            notes: vec![format!("Measured: {note}.")],
            extents: Extents::default(),
            hints: kernels.hints(),
        }
    }

    /// Formats kernel, types and target.
    pub fn title(&self, arch: GpuArch) -> String {
        let types: Vec<String> = self.request.dtypes.iter().map(DType::to_string).collect();
        format!("{} {} for {}", self.request.def.name, types.join(" "), arch.name()).replace("  ", " ")
    }

    /// Formats constants, warps, stages, registers and schedule.
    pub fn configuration(&self) -> String {
        let Request { constants, options, .. } = &self.request;
        let mut words: Vec<String> = constants.iter().map(|(name, value)| format!("{name}={value}")).collect();
        words.push(format!("num_warps={}", options.num_warps));
        if options.num_ctas != 1 {
            words.push(format!("num_ctas={}", options.num_ctas));
        }
        words.push(format!("num_stages={}", options.num_stages));
        words.extend(options.max_registers.map(|registers| format!("max_registers={registers}")));
        let target::Schedule { tma, warp_specialize, overlap, pingpong, wgmma_f32, tma_stores } = options.schedule;
        // In the order of the command line's help.
        let schedule = [
            ("tma", tma),
            ("warp_specialize", warp_specialize),
            ("overlap", overlap),
            ("pingpong", pingpong),
            ("wgmma_f32", wgmma_f32),
            ("tma_stores", tma_stores),
        ];
        words.extend(schedule.iter().filter_map(|(name, value)| value.map(|value| format!("{name}={value}"))));
        words.extend(options.loops.iter().map(|loops| match given::is_text(loops) {
            true => "loops=(of a file)".to_string(),
            false => format!("loops={loops}"),
        }));
        words.join(" ")
    }

    /// Returns the type of the first type parameter, which is the element type of most tensors.
    pub fn main_type(&self) -> DType {
        self.request.dtypes.first().copied().unwrap_or(DType::F32)
    }

    /// Returns the precision of f32 dots.
    pub fn precision(&self) -> &str {
        let found = self.request.constants.iter().find(|(name, _)| *name == "precision");
        match found {
            Some((_, ConstValue::Variant(word))) => word,
            _ => "ieee",
        }
    }

    /// Returns the minimum work of a launch on these shapes; empty if no shape is known. Memory of unknown shape is not
    /// counted, and a note is added.
    pub fn work(&mut self) -> Work {
        let Request { def, dtypes, constants, .. } = &self.request;
        let strides = bind::strides(def);
        let mut extents = self.extents.clone();
        let (mut bytes, mut unknown) = (0.0, Vec::new());
        // With these constants, the kernel may not use all of its memory. A mistake in the kernel was reported before.
        let (unused, unread) = match run::recorded(def, dtypes, constants) {
            Ok(func) => (run::unused_memory(def, &func), run::unread_memory(def, &func)),
            Err(_) => (Vec::new(), Vec::new()),
        };
        for (param, elem) in run::memory_params(def).filter(|(param, _)| !unused.contains(&param.name)) {
            if extents.shape(param.name).is_none()
                && let Ok(shape) = run::output_shape(def, param.name, strides.get(param.name), &extents)
            {
                extents.add_tensor(param.name, &shape, strides.get(param.name));
            }
            let size = elem.resolve(dtypes).map_or(4, DType::bytes);
            let is_read_too = matches!(param.kind, ParamKind::InOut(_)) && !unread.contains(&param.name);
            let times = if is_read_too { 2.0 } else { 1.0 };
            match extents.shape(param.name) {
                Some(shape) => bytes += times * size as f64 * shape.iter().map(|&n| n as f64).product::<f64>(),
                None => unknown.push(param.name),
            }
        }
        // Without a given shape, there is no bound.
        let known = run::memory_params(def).any(|(param, _)| self.extents.shape(param.name).is_some());
        if !known {
            return Work::default();
        }
        if !unknown.is_empty() {
            let names = unknown.join(", ");
            self.notes
                .push(format!("The shape of {names} is unknown, so that it is not counted: give it with --shape."));
        }
        Work { flop: self.hints.flop(def, &extents, constants), bytes: Some(bytes) }
    }
}

/// Completes element types with a usual type for every parameter without one: bf16, else i64.
///
/// # Errors
/// A parameter that can be neither.
fn with_usual_types(def: &KernelDef, chosen: Vec<Option<DType>>) -> Result<Vec<DType>> {
    let usual = |generic: &GenericDef| {
        let members = generic.members();
        [DType::BF16, DType::I64].into_iter().find(|dtype| members.contains(dtype))
    };
    let all = def.generics.iter().zip(chosen).map(|(generic, dtype)| dtype.or_else(|| usual(generic)));
    choose::complete_dtypes(def, all.collect())
}

/// The element types of a record row: its type for the parameters that can have it. The kernel may have none.
///
/// # Errors
/// As [`with_usual_types`], and the name of an unknown type.
fn types_of_row(def: &KernelDef, name: &str) -> Result<Vec<DType>> {
    let Some(dtype) = DType::from_name(name) else {
        let help = "a row of a benchmark has the name of an element type, such as bf16, as `dtype`";
        return Err(CliError::usage(format!("the row of the record has the dtype `{name}`"), help));
    };
    let of_row = |generic: &GenericDef| Some(dtype).filter(|dtype| generic.members().contains(dtype));
    with_usual_types(def, def.generics.iter().map(of_row).collect())
}

/// Whether a row of a record is of the element types and constants that are given: its type is that of the first type
/// parameter that can have it.
pub fn is_of(
    row: &Row,
    def: &KernelDef,
    hints: &dyn Hints,
    types: &[Option<DType>],
    constants: &[(&'static str, ConstValue)],
) -> bool {
    let is_of_types = match DType::from_name(&row.dtype) {
        None => types.iter().all(Option::is_none),
        Some(of_row) => {
            let main = def.generics.iter().zip(types).find(|(generic, _)| generic.members().contains(&of_row));
            main.is_none_or(|(_, given)| given.is_none_or(|given| given == of_row))
        }
    };
    let is_given = |(name, value)| choose::given(constants, name).is_none_or(|given| given == value);
    is_of_types && row.constants(hints).is_some_and(|of_row| of_row.into_iter().all(is_given))
}

/// Adds the values of arguments that are assumed to be equal to a number, unless a shape gives them.
fn add_assumed(def: &KernelDef, specialization: &Specialization, extents: &mut Extents) {
    let passed = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. }));
    for (param, assumed) in passed.zip(&specialization.args) {
        if let (Some(value), Ok(None)) = (assumed.equal_to, extents.of_name(param.name)) {
            extents.add_number(param.name, value);
        }
    }
}

/// Determines shapes from `--shape` and a record row, and the arguments that follow from these alone.
///
/// # Errors
/// Shapes that contradict each other or `constants`.
fn extents(
    def: &'static KernelDef,
    hints: &dyn Hints,
    arguments: &Arguments,
    row: Option<&Row>,
    constants: &[(&'static str, ConstValue)],
) -> Result<(Extents, Vec<(String, i64)>)> {
    let strides = bind::strides(def);
    let mut extents = Extents::default();
    let mut given: BTreeMap<&'static str, Vec<usize>> = BTreeMap::new();
    let mut add = |given: &mut BTreeMap<&'static str, Vec<usize>>, name: &str, shape: &[usize]| -> Result<()> {
        let memory: Vec<&'static str> = run::memory_params(def).map(|(param, _)| param.name).collect();
        let Some(name) = memory.iter().copied().find(|known| *known == name) else {
            let help = choose::suggest(name, &memory, "the tensors are");
            return Err(CliError::usage(format!("kernel `{}` has no tensor `{name}`", def.name), help));
        };
        bind::check_rank(def, name, shape.len(), strides.get(name))?;
        extents.add_tensor(name, shape, strides.get(name));
        match given.insert(name, shape.to_vec()) {
            Some(_) => Err(choose::named_twice("--shape", name)),
            None => Ok(()),
        }
    };
    for word in &arguments.shape {
        let (name, shape) = choose::assignment(word, "--shape")?;
        let name = def.param_name(name);
        let numbers: Option<Vec<usize>> = shape.split(',').map(|n| n.trim().parse().ok()).collect();
        let numbers =
            numbers.ok_or_else(|| CliError::usage(format!("--shape got `{word}`"), "write --shape q=1,16,16384,64"))?;
        add(&mut given, name, &numbers)?;
    }
    // Without strides of that rank, --shape says what the shape of a row means.
    let fits = |name: &str, shape: &[usize]| strides.get(name).is_none_or(|of| of.params.len() == shape.len());
    let of_row = row.map_or(Vec::new(), |row| shapes_of_row(def, hints, row)).into_iter();
    for (name, shape) in of_row.filter(|(name, shape)| arguments.shape.is_empty() || fits(name, shape)) {
        match given.get(name) {
            None => add(&mut given, name, &shape)?,
            Some(known) if *known == shape => {}
            Some(known) => {
                return Err(CliError::usage(
                    format!("--shape: `{name}` has shape {known:?}, and {shape:?} in the row of the record"),
                    "omit it, or give the time of a launch with --time-ms",
                ));
            }
        }
    }
    let known: BTreeMap<&'static str, &[usize]> = given.iter().map(|(&name, shape)| (name, &shape[..])).collect();
    bind::check_extents(def, &known)?;
    shapes::check_constants(def, constants, &known)?;
    let scalars = def.params.iter().filter(|p| matches!(p.kind, ParamKind::Scalar(_)));
    let sizes = scalars.filter_map(|p| Some((p.name.to_string(), extents.of_name(p.name).ok().flatten()?))).collect();
    hints.complete_shapes(def, &mut extents, constants);
    Ok((extents, sizes))
}

/// The shapes of a record row, by tensor.
fn shapes_of_row(def: &'static KernelDef, hints: &dyn Hints, row: &Row) -> Vec<(&'static str, Vec<usize>)> {
    let shapes = hints.record_shapes(def, &row.shape);
    match run::memory_params(def).next() {
        Some((first, _)) if shapes.is_empty() => vec![(first.name, row.shape.clone())],
        _ => shapes,
    }
}

/// Sets constants that are extents of the shapes.
fn apply_extents(def: &KernelDef, extents: &Extents, constants: &mut Vec<(&'static str, ConstValue)>) {
    for name in choose::missing_constants(def, constants) {
        if let Ok(Some(extent)) = extents.of_name(name) {
            constants.push((name, ConstValue::Int(extent)));
        }
    }
}

/// Sets missing constants to common values, which may depend on extents. Those with a heuristic follow from others.
fn default_constants(
    def: &KernelDef,
    hints: &dyn Hints,
    extents: &Extents,
    tuned: &[&str],
    constants: &mut Vec<(&'static str, ConstValue)>,
    assumed: &mut Vec<String>,
) {
    let follows = |name: &str| def.params.iter().any(|p| p.name == name && p.heuristic.is_some());
    let missing = choose::missing_constants(def, constants);
    for name in missing.into_iter().filter(|name| !tuned.contains(name) && !follows(name)) {
        let dims = def.dims.iter().filter_map(|&dim| Some((dim, extents.value(&[], dim)?)));
        let known: Vec<_> = constants.iter().cloned().chain(dims).collect();
        if let Some(value) = hints.constant(name, &known) {
            assumed.push(format!("{name}={value}"));
            constants.push((name, value));
        }
    }
}

/// Chooses the number of warps for a tile, from 4 to 16: 32 elements per thread.
fn default_config(constants: &[(&str, ConstValue)]) -> Config {
    let tile: i64 = constants
        .iter()
        .filter(|(name, _)| name.ends_with("tile"))
        .map(|(_, value)| if let ConstValue::Int(n) = value { *n } else { 1 })
        .fold(1, i64::saturating_mul);
    let warps = u32::try_from(tile / 1024).unwrap_or(4).clamp(4, 16);
    Config::default().num_warps(warps.next_power_of_two())
}

/// The default assumptions: those of [`dense`] that hold for the extents, or only those about strides and rows where the
/// kernel's `assume`s, with arguments of these sizes, contradict the others.
pub fn usual_assumptions(
    def: &'static KernelDef,
    dtypes: &[DType],
    constants: &[(&'static str, ConstValue)],
    sizes: &[(String, i64)],
    extents: &Extents,
) -> Specialization {
    let fitted = |mut specialization: Specialization| {
        let passed = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. }));
        for (param, assumed) in passed.zip(&mut specialization.args) {
            if let (Ok(Some(size)), None) = (extents.of_name(param.name), assumed.equal_to)
                && size % assumed.divisible_by as i64 != 0
            {
                assumed.divisible_by = 1 << size.trailing_zeros();
            }
        }
        specialization
    };
    let all = fitted(dense(def));
    let recorded = def.record(dtypes, constants, &all);
    match recorded.is_ok_and(|func| precompiled::footprint(&func, sizes).is_err()) {
        true => fitted(bind::row_major(def)),
        false => all,
    }
}

/// Returns the specialization for dense tensors whose extents are multiples of 16.
fn dense(def: &'static KernelDef) -> Specialization {
    let mut specialization = bind::row_major(def);
    let passed = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. }));
    for (param, assumed) in passed.zip(&mut specialization.args) {
        let is_integer = matches!(param.kind, ParamKind::Scalar(elem) if elem.resolve(&[]).is_some_and(DType::is_int));
        if !param.specialize {
            *assumed = ArgSpec::default();
        } else if is_integer && assumed.equal_to.is_none() {
            *assumed = ArgSpec { divisible_by: 16, equal_to: None };
        }
    }
    specialization
}
