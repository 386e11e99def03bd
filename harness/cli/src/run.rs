//! `tilewright run`: runs a kernel on tensors from a safetensors file and writes its outputs to another.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use tilewright_codegen::analysis::memory_effects;
use tilewright_codegen::ir::{DType, Func, Value};
use tilewright_codegen::lang::kernel::{
    ConstValue, ElemDef, Evaluate, KernelDef, Lookup, ParamDef, ParamKind, Specialization,
};
use tilewright_codegen::num;
use tilewright_codegen::passes::dce;
use tilewright_runtime::kernel::{KernelArg, launch_erased, render_with_source};
use tilewright_runtime::{Device, Error, LaunchArg, LaunchConfig, terminal};

use crate::bind::{self, Extents, Strides};
use crate::compile::Options;
use crate::device::{self, DeviceArg};
use crate::files;
use crate::missing::CommandLine;
use crate::tensors::{self, Contents, OnDevice, Tensor};
use crate::tuned::Plan;
use crate::{CliError, Kernels, Result, choose, shapes};

#[derive(Args)]
pub struct Arguments {
    /// Safetensors file with the inputs; tensors have the names of the kernel's parameters
    #[arg(short, long, value_name = "FILE")]
    input: PathBuf,
    /// Safetensors file for the outputs
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    launch: Launch,
    /// Shape of an output that is not in the input file, as expressions like --grid's: `lse=heads,n_q`, or `o=q` for
    /// the shape of `q`
    #[arg(long, value_name = "NAME=X,Y,…")]
    shape: Vec<String>,
    /// Device: cpu, cuda or cuda:N. Default: TILEWRIGHT_DEVICE, else a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    device: Option<DeviceArg>,
    #[command(flatten)]
    options: Options,
}

/// A launch of a kernel, except for its tensors.
#[derive(Args, Clone)]
pub struct Launch {
    /// Name of the kernel, as `list` prints it
    pub kernel: String,
    /// Number of programs along each axis: numbers, or names of arguments, constants and dimensions with `*` and `/`
    /// (which rounds up), as in `rows/rows_tile`. Default: the grid that the kernel gives, if it does
    #[arg(long, value_name = "X,Y,Z")]
    pub grid: Option<String>,
    /// Constants of the kernel: `q_tile=64,k_tile=32`. Default: those of the nearest configuration, one that `tune` chose
    /// or one that ships, else of the kernel's default
    #[arg(long, value_name = "NAME=VALUE,…")]
    pub set: Vec<String>,
    /// Scalar arguments that cannot be derived from tensors: `scale=0.125`. Default of `programs`, with constants of a
    /// configuration: as many as the device has SMs or threads
    #[arg(long, value_name = "NAME=VALUE,…")]
    pub arg: Vec<String>,
    /// Element types of type parameters without a tensor: `bf16`, or `T=bf16`. Default: that of the tensors
    #[arg(long, value_name = "TYPE")]
    pub dtype: Vec<String>,
}

/// The tensors that a command line gives.
pub struct Tensors {
    /// Tensors by name.
    pub given: Vec<(String, Tensor)>,
    /// Where they come from, for messages.
    pub source: Source,
    /// Shapes of other tensors, as on the command line.
    pub shapes: Vec<String>,
}

/// Where the tensors of a command line come from.
pub enum Source {
    /// All from this file.
    File(String),
    /// From this file, if there is one, and random ones for shapes.
    Shapes(Option<String>),
}

pub fn run(arguments: &Arguments, kernels: &Kernels, out: &mut dyn Write) -> Result<()> {
    let Arguments { input, output, launch, shape, device, options } = arguments;
    let inputs: Vec<&Path> = std::iter::once(input).chain(options.table()).map(PathBuf::as_path).collect();
    files::check_distinct(&[output], &inputs)?;
    files::check_writable(output).map_err(|error| CliError::file("write", output, error))?;
    let tensors = || {
        Ok(Tensors {
            given: tensors::read(input)?,
            source: Source::File(input.display().to_string()),
            shapes: shape.clone(),
        })
    };
    let plan = Plan::new(kernels, launch, &launch.set, &tensors)?;
    let device = device::open(*device)?;
    options.use_table(kernels.find(&launch.kernel)?, &device.target())?;
    options.note_unused(&device.target());
    let (job, base) = plan.on(&device)?;
    for name in &job.unused {
        let kernel = job.def.name;
        terminal::print_stderr(format_args!("note: with these constants, `{kernel}` does not use the tensor `{name}`"));
    }
    let config = job.config(&options.over(base))?;
    let mut buffers = job.upload(&device)?;
    job.start(&device, &config, &mut buffers)?;
    device.synchronize()?;
    let outputs = job.outputs(&buffers)?;
    tensors::write(output, &outputs)?;
    let [x, y, z] = job.grid;
    let mut stderr = std::io::stderr();
    let out: &mut dyn Write = if files::is_stdout(output) { &mut stderr } else { out };
    writeln!(out, "`{}` ran on {device}, grid ({x}, {y}, {z})", job.def.name)?;
    for (name, tensor) in &outputs {
        writeln!(out, "{name}: {} {:?} in {}", tensor.dtype, tensor.shape, output.display())?;
        let (missed, all) = (job.unwritten(name, tensor), tensor.bytes.len() / tensor.dtype.bytes());
        if missed > 0 {
            terminal::print_stderr(format_args!(
                "warning: {missed} of the {all} elements of output `{name}` are what memory has that no program wrote, \
                 NaN: {}",
                match missed == all {
                    true => "these constants may have no use for it".to_string(),
                    false => format!("the grid ({x}, {y}, {z}) may be too small, or the shape of the output too large"),
                }
            ));
        }
    }
    Ok(())
}

/// A launch with all of its arguments, before a device is opened.
pub struct Job {
    pub def: &'static KernelDef,
    pub dtypes: Vec<DType>,
    pub constants: Vec<(&'static str, ConstValue)>,
    /// Tensors of the input file that the kernel has parameters for.
    given: BTreeMap<&'static str, Tensor>,
    /// Those that it does not use with these constants.
    unused: Vec<&'static str>,
    /// Shape and element type of all memory parameters.
    pub memory: BTreeMap<&'static str, (Vec<usize>, DType)>,
    scalars: BTreeMap<&'static str, LaunchArg>,
    /// The constants, and the arguments that are given.
    known: Vec<(&'static str, ConstValue)>,
    /// The extents of the tensors, and the numbers that are given.
    extents: Extents,
    grid: [i64; 3],
}

/// The memory of a launch, by the names of parameters.
pub type Buffers = BTreeMap<&'static str, Box<dyn OnDevice>>;

impl Job {
    /// Plans the launch with the constants `set`, and checks that shapes and outputs fit.
    ///
    /// # Errors
    /// A name or value that does not fit the kernel, an argument that has no value, inconsistent shapes.
    pub fn plan(
        def: &'static KernelDef,
        arguments: &Launch,
        set: &[String],
        tensors: impl FnOnce() -> Result<Tensors>,
    ) -> Result<Job> {
        let mut constants = choose::constants(def, set)?;
        let words = scalar_arguments(def, &arguments.arg)?;
        let Tensors { given, source, shapes } = tensors()?;
        let shapes = shape_arguments(def, &shapes)?;
        let names: Vec<String> = given.iter().map(|(name, _)| name.clone()).collect();
        let given = given_tensors(def, given);
        if let Some((name, tensor)) = shapes.keys().find_map(|name| given.get_key_value(name)) {
            let (shape, Source::File(input) | Source::Shapes(Some(input))) = (&tensor.shape, &source) else {
                return Err(choose::named_twice("--shape", name));
            };
            let message = format!("--shape {name} is unused: {input} has a tensor `{name}` of shape {shape:?}");
            return Err(CliError::usage(message, "omit it: --shape is for tensors that are not in the input file"));
        }
        let command_line = CommandLine { def, given: &given, source: &source, names: &names };
        let dtypes = command_line.complete_types(element_types(def, &given, &arguments.dtype)?, &constants)?;
        let strides = bind::strides(def);

        let mut extents = Extents::default();
        for (name, tensor) in &given {
            bind::check_rank(def, name, tensor.shape.len(), strides.get(name))?;
            extents.add_tensor(name, &tensor.shape, strides.get(name));
        }
        let of_given = given.iter().map(|(&name, tensor)| (name, &tensor.shape[..]));
        shapes::check_constants(def, &constants, &of_given.collect())?;
        for (name, value) in constants.iter().chain(&defaults(def, &constants)) {
            if let ConstValue::Int(n) = value {
                extents.add_number(name, *n);
            }
        }
        for (name, text) in &words {
            if let Ok(n) = text.parse() {
                extents.add_number(name, n);
            }
        }
        for name in choose::missing_constants(def, &constants) {
            if let Ok(Some(extent)) = extents.of_name(name) {
                constants.push((name, ConstValue::Int(extent)));
                extents.add_number(name, extent);
            }
        }
        let is_given = |param: &&ParamDef| words.contains_key(param.name);
        let arg: Vec<_> =
            def.params.iter().filter(is_given).map(|p| (p.name, ConstValue::from_text(words[p.name]))).collect();
        constants.extend(def.heuristics(&|name| extents.value(&[&constants[..], &arg].concat(), name)));
        command_line.check_constants(&constants, &strides)?;
        let func = recorded(def, &dtypes, &constants)?;
        let (unused, unread) = (unused_memory(def, &func), unread_memory(def, &func));
        command_line.check_tensors(&unread)?;

        let mut memory = BTreeMap::new();
        for (param, elem) in memory_params(def) {
            let dtype = elem.resolve(&dtypes).unwrap_or(DType::F32);
            let shape = match (given.get(param.name), shapes.get(param.name)) {
                (Some(tensor), _) => tensor.shape.clone(),
                (None, Some(text)) => extents.evaluate_shape(text).map_err(|why| {
                    CliError::usage(format!("--shape {}={text}: {why}", param.name), "see `tilewright run --help`")
                })?,
                (None, None) if unused.contains(&param.name) => {
                    vec![0; strides.get(param.name).map_or(1, |strides| strides.params.len())]
                }
                (None, None) => output_shape(def, param.name, strides.get(param.name), &extents)?,
            };
            bind::check_rank(def, param.name, shape.len(), strides.get(param.name))?;
            // A tensor that the kernel does not access does not define dimensions.
            let touched = given.contains_key(param.name) || !unused.contains(&param.name);
            extents.add_tensor(param.name, &shape, strides.get(param.name).filter(|_| touched));
            memory.insert(param.name, (shape, dtype));
        }
        let touched = |name: &&'static str| given.contains_key(name) || !unused.contains(name);
        let shapes = memory.iter().filter(|(name, _)| touched(name)).map(|(&name, (shape, _))| (name, &shape[..]));
        bind::check_extents(def, &shapes.collect())?;
        let scalars = scalars(def, &dtypes, &words, &strides, &extents, &func)?;
        constants.extend(def.heuristics(&|name| extents.value(&[&constants[..], &arg].concat(), name)));
        let known = [&constants[..], &arg].concat();
        // Arguments that follow from tensors, or that the kernel does not use.
        let mut numbers = extents.clone();
        for (name, value) in &scalars {
            match value {
                LaunchArg::I32(n) => numbers.add_number(name, i64::from(*n)),
                LaunchArg::I64(n) => numbers.add_number(name, *n),
                _ => {}
            }
        }
        let (grid, grid_text) = match (&arguments.grid, def.grid) {
            (Some(text), _) => (grid(text, &numbers)?, format!("--grid {text}")),
            (None, Some(of_kernel)) => {
                let value = |name: &'static str| numbers.value(&known, name).or_else(|| def.default_of(name));
                (own_grid(def, of_kernel, &value)?, "the kernel's grid".into())
            }
            (None, None) => {
                let message = format!("kernel `{}` does not give its grid, and --grid is missing", def.name);
                return Err(CliError::usage(message, "one to three extents, as in `--grid rows/rows_tile,heads`"));
            }
        };
        let unused = unused.into_iter().filter(|name| given.contains_key(name)).collect();
        let job = Job { def, dtypes, constants, given, unused, memory, scalars, known, extents, grid };
        job.check_shapes(&func)?;
        job.check_outputs(&grid_text)?;
        Ok(job)
    }

    /// Checks that the kernel's views have the shapes of the file's tensors. The launch reports mistakes in the kernel
    /// itself.
    fn check_shapes(&self, func: &Func) -> Result<()> {
        let given = self.given.iter().map(|(name, tensor)| (*name, tensor.shape.clone())).collect();
        shapes::check(func, &self.scalars, &given)
    }

    /// Checks that at least one program runs to write the outputs, and that their elements have distinct addresses.
    fn check_outputs(&self, grid: &str) -> Result<()> {
        let strides = bind::strides(self.def);
        for (param, _) in memory_params(self.def).filter(|(param, _)| !matches!(param.kind, ParamKind::In(_))) {
            let (name, (shape, _)) = (param.name, &self.memory[param.name]);
            if shape.contains(&0) {
                continue;
            }
            if self.grid.contains(&0) {
                let [x, y, z] = self.grid;
                return Err(CliError::usage(
                    format!(
                        "{grid} is ({x}, {y}, {z}): no program runs, so output `{name}` of shape \
                         {shape:?} is not written"
                    ),
                    "give a grid of at least 1 along every axis",
                ));
            }
            let of_tensor = strides.get(name).map_or(&[][..], |strides| &strides.params);
            let mut row_major: i64 = 1;
            for (stride, &extent) in of_tensor.iter().zip(shape).rev() {
                let given = match self.scalars.get(stride) {
                    Some(LaunchArg::I32(given)) => i64::from(*given),
                    Some(LaunchArg::I64(given)) => *given,
                    _ => row_major,
                };
                if extent > 1 && given != row_major {
                    return Err(CliError::usage(
                        format!(
                            "`{stride}` is {given}: output `{name}` is written to a file in row-major order, where it \
                             is {row_major}"
                        ),
                        "only inputs can have other strides; omit --arg",
                    ));
                }
                row_major = row_major.saturating_mul(i64::try_from(extent).unwrap_or(i64::MAX));
            }
        }
        Ok(())
    }

    /// The configuration of the launch.
    ///
    /// # Errors
    /// Options that GPUs do not support.
    pub fn config(&self, options: &Options) -> Result<LaunchConfig> {
        let options = options.compile_options()?;
        let mut config = LaunchConfig::new(self.grid);
        config.num_warps = options.num_warps;
        config.num_ctas = options.num_ctas;
        config.num_stages = options.num_stages;
        config.debug_asserts = options.debug_asserts;
        config.fp_fusion = options.fp_fusion;
        config.max_registers = options.max_registers;
        config.loops = options.loops;
        config.schedule = options.schedule;
        Ok(config)
    }

    /// Copies the given tensors to the device, and allocates the others.
    ///
    /// # Errors
    /// Tensors that are too large.
    pub fn upload(&self, device: &Device) -> Result<Buffers> {
        let mut buffers = Buffers::new();
        for (name, (shape, dtype)) in &self.memory {
            let contents = match self.given.get(name) {
                Some(tensor) => Contents::Bytes(&tensor.bytes),
                None => Contents::Poison(elements(name, shape)?),
            };
            buffers.insert(name, tensors::upload(device, *dtype, contents)?);
        }
        Ok(buffers)
    }

    /// The arguments of the launch, in order.
    pub fn arguments<'b>(&self, buffers: &'b mut Buffers) -> Vec<KernelArg<'b>> {
        let mut memory = buffers.iter_mut().map(|(name, buffer)| (*name, buffer)).collect();
        tensors::kernel_args(self.def, &mut memory, &self.scalars)
    }

    /// Number of programs along each axis.
    pub fn grid(&self) -> [i64; 3] {
        self.grid
    }

    /// Whether the command line or a tensor gives a constant or an argument.
    pub fn is_given(&self, name: &str) -> bool {
        self.known.iter().any(|(known, _)| *known == name) || self.def.dims.contains(&name)
    }

    /// The value of a constant, an argument or an extent; `None` if it is not known.
    pub fn value(&self, name: &str) -> Option<ConstValue> {
        self.extents.value(&self.known, name)
    }

    /// Launches the kernel. On a GPU the launch is asynchronous.
    ///
    /// # Errors
    /// What the launch refuses, a mistake in the kernel.
    pub fn start(&self, device: &Device, config: &LaunchConfig, buffers: &mut Buffers) -> Result<()> {
        let mut args = self.arguments(buffers);
        let launched = launch_erased(self.def, device, config, &self.dtypes, &mut args, &self.constants);
        launched.map_err(|error| match error {
            Error::OutOfBounds { name, elements, farthest_element, .. } => CliError::usage(
                format!(
                    "`{name}` has {elements} elements: kernel `{}` may access element {farthest_element}",
                    self.def.name
                ),
                "check that the shapes of the tensors, --arg and --grid are consistent",
            ),
            Error::NegativeExtent { name, found, dim, .. } => CliError::usage(
                format!(
                    "`{name}` is {found}, but kernel `{}` uses it as the extent of dimension {dim}: expected 0 or more",
                    self.def.name
                ),
                "pass --arg with the tensor's number of elements along this dimension",
            ),
            error => error.into(),
        })
    }

    /// The number of elements of an output that are as [`Job::upload`] filled them; 0 where they may be results: in
    /// types of integers and of 8 bits, and in tensors that are given.
    fn unwritten(&self, name: &str, tensor: &Tensor) -> usize {
        let width = tensor.dtype.bytes();
        if self.given.contains_key(name) || !tensor.dtype.is_float() || width == 1 {
            return 0;
        }
        tensor.bytes.chunks_exact(width).filter(|element| element.iter().all(|&byte| byte == 0xff)).count()
    }

    /// Copies the outputs to the host.
    fn outputs(&self, buffers: &Buffers) -> Result<Vec<(String, Tensor)>> {
        let mut outputs = Vec::new();
        for (param, _) in memory_params(self.def).filter(|(param, _)| !matches!(param.kind, ParamKind::In(_))) {
            let (shape, dtype) = &self.memory[param.name];
            let bytes = buffers[param.name].download()?;
            outputs.push((param.name.to_string(), Tensor { dtype: *dtype, shape: shape.clone(), bytes }));
        }
        Ok(outputs)
    }
}

/// Iterates over the memory parameters, in the order of the signature.
pub fn memory_params(def: &'static KernelDef) -> impl Iterator<Item = (&'static ParamDef, ElemDef)> {
    def.params.iter().filter_map(|p| match p.kind {
        ParamKind::In(elem) | ParamKind::Out(elem) | ParamKind::InOut(elem) => Some((p, elem)),
        ParamKind::Scalar(_) | ParamKind::Constexpr { .. } => None,
    })
}

/// The number of elements of a tensor.
///
/// # Errors
/// It does not fit into a `usize`.
pub fn elements(name: &str, shape: &[usize]) -> Result<usize> {
    let product = shape.iter().try_fold(1_usize, |product, &extent| product.checked_mul(extent));
    product.ok_or_else(|| CliError::Failure(format!("`{name}` with shape {shape:?} is too large")))
}

/// Returns the constants that are not given but have a default, without those that follow from other values.
fn defaults(def: &'static KernelDef, given: &[(&str, ConstValue)]) -> Vec<(&'static str, ConstValue)> {
    let default = |p: &'static ParamDef| match p.kind {
        ParamKind::Constexpr { default: Some(default), .. }
            if p.heuristic.is_none() && !given.iter().any(|(name, _)| *name == p.name) =>
        {
            Some((p.name, ConstValue::from(default)))
        }
        _ => None,
    };
    def.params.iter().filter_map(default).collect()
}

/// Parses `--arg` and checks the names against the kernel's scalar parameters.
fn scalar_arguments<'a>(def: &'static KernelDef, words: &'a [String]) -> Result<BTreeMap<&'a str, &'a str>> {
    let known: Vec<&str> =
        def.params.iter().filter(|p| matches!(p.kind, ParamKind::Scalar(_))).map(|p| p.name).collect();
    let mut pairs = choose::assignments(words, "--arg")?;
    for (name, _) in &mut pairs {
        *name = def.param_name(name);
        if !known.contains(name) {
            let help = match def.params.iter().find(|p| p.name == *name).map(|p| p.kind) {
                Some(ParamKind::Constexpr { .. }) => format!("`{name}` is a constant: --set {name}=…"),
                Some(_) => format!("`{name}` is a tensor: it belongs in the input file"),
                None => choose::suggest(name, &known, "the arguments are"),
            };
            let message = format!("--arg {name} is unused: kernel `{}` has no scalar argument `{name}`", def.name);
            return Err(CliError::usage(message, help));
        }
    }
    Ok(pairs.into_iter().collect())
}

/// Parses `--shape` and checks the names against the kernel's memory parameters.
///
/// # Errors
/// Text of another form, a name that is not a tensor's, or a name that is given twice.
pub fn shape_arguments<'a>(def: &'static KernelDef, words: &'a [String]) -> Result<BTreeMap<&'a str, &'a str>> {
    let known: Vec<&str> = memory_params(def).map(|(p, _)| p.name).collect();
    let mut shapes = BTreeMap::new();
    for word in words {
        let (name, shape) = choose::assignment(word, "--shape")?;
        let name = def.param_name(name);
        if !known.contains(&name) {
            let help = choose::suggest(name, &known, "the tensors are");
            let message = format!("--shape {name} is unused: kernel `{}` has no tensor `{name}`", def.name);
            return Err(CliError::usage(message, help));
        }
        if shapes.insert(name, shape).is_some() {
            return Err(choose::named_twice("--shape", name));
        }
    }
    Ok(shapes)
}

/// Returns the tensors of the file that the kernel has parameters for.
fn given_tensors(def: &'static KernelDef, file: Vec<(String, Tensor)>) -> BTreeMap<&'static str, Tensor> {
    let mut by_name: BTreeMap<String, Tensor> =
        file.into_iter().map(|(name, tensor)| (def.param_name(&name).to_string(), tensor)).collect();
    memory_params(def).filter_map(|(p, _)| Some((p.name, by_name.remove(p.name)?))).collect()
}

/// Records the kernel with these types and constants, and removes dead code.
///
/// # Errors
/// A type or constant that the kernel does not take, or a mistake in the kernel.
pub fn recorded(def: &'static KernelDef, dtypes: &[DType], constants: &[(&'static str, ConstValue)]) -> Result<Func> {
    let recorded = def.record(dtypes, constants, &Specialization::default());
    let mut func = recorded.map_err(|diagnostic| CliError::Failure(render_with_source(&diagnostic)))?;
    dce::run(&mut func);
    Ok(func)
}

/// Returns the memory parameters that the recorded function does not use, such as the bias of a matmul without one.
pub fn unused_memory(def: &'static KernelDef, func: &Func) -> Vec<&'static str> {
    memory_params_without(def, func, |v| !func.uses(v).is_empty())
}

/// Returns the memory parameters that the recorded function does not read: unused ones, and accumulators that start at
/// zero.
pub fn unread_memory(def: &'static KernelDef, func: &Func) -> Vec<&'static str> {
    let read = memory_effects::read_pointers(func);
    memory_params_without(def, func, |v| read.contains(&v))
}

/// Whether a recorded function uses the argument of a parameter.
fn is_used(func: &Func, name: &str) -> bool {
    let params = &func.block(func.body).params;
    func.args.iter().zip(params).any(|(arg, &v)| *arg.name == *name && !func.uses(v).is_empty())
}

/// Returns the memory parameters whose pointers do not satisfy `is`.
fn memory_params_without(def: &'static KernelDef, func: &Func, is: impl Fn(Value) -> bool) -> Vec<&'static str> {
    let params = &func.block(func.body).params;
    let among = |name: &str| func.args.iter().zip(params).any(|(arg, &v)| *arg.name == *name && is(v));
    memory_params(def).map(|(p, _)| p.name).filter(|name| !among(name)).collect()
}

/// Determines the element types of the type parameters from the tensors and from `--dtype`, so far as they tell.
fn element_types(
    def: &'static KernelDef,
    given: &BTreeMap<&'static str, Tensor>,
    words: &[String],
) -> Result<Vec<Option<DType>>> {
    let mut found: Vec<Option<(&str, DType)>> = vec![None; def.generics.len()];
    for (param, elem) in memory_params(def) {
        let Some(tensor) = given.get(param.name) else { continue };
        let mismatch = |expected: DType, why: String| {
            CliError::usage(
                format!("tensor `{}` is {}: kernel `{}` expects {expected}", param.name, tensor.dtype, def.name),
                why,
            )
        };
        match elem {
            ElemDef::Fixed(dtype) if dtype != tensor.dtype => {
                return Err(mismatch(dtype, format!("convert it to {dtype} first")));
            }
            ElemDef::Fixed(_) => {}
            ElemDef::Generic(index) => match found[index] {
                Some((other, dtype)) if dtype != tensor.dtype => {
                    return Err(mismatch(dtype, format!("tensor `{other}` of the same type parameter is {dtype}")));
                }
                Some(_) => {}
                None => {
                    choose::check_member(def, index, tensor.dtype)?;
                    found[index] = Some((param.name, tensor.dtype));
                }
            },
        }
    }
    // `--dtype` is checked for all parameters that it names, even those whose type follows from a tensor.
    let chosen = choose::partial_dtypes(def, words)?;
    let mut untyped = found.iter().zip(&chosen).filter(|(found, chosen)| found.is_none() && chosen.is_some());
    let is_used = untyped.next().is_some();
    for ((generic, found), chosen) in def.generics.iter().zip(&found).zip(&chosen) {
        // The type of a tensor takes precedence over a `--dtype` without a parameter name, which then applies to the
        // parameters without tensors only.
        let named = choose::comma_separated(words)
            .any(|word| word.split('=').next().is_some_and(|name| name.trim() == generic.name));
        if let (Some((tensor, dtype)), Some(chosen)) = (found, chosen)
            && dtype != chosen
            && (named || !is_used)
        {
            return Err(CliError::usage(
                format!("--dtype {chosen} is unused: tensor `{tensor}` determines that `{}` is {dtype}", generic.name),
                "omit it, or convert the tensor first",
            ));
        }
    }
    let all = found.iter().zip(chosen).map(|(found, chosen)| found.map(|(_, dtype)| dtype).or(chosen));
    let mut all: Vec<Option<DType>> = all.collect();
    // An output is of the type of the inputs, where these have only one.
    let of_inputs: BTreeSet<DType> = all.iter().copied().flatten().collect();
    if let [only] = of_inputs.into_iter().collect::<Vec<_>>()[..] {
        for (generic, dtype) in def.generics.iter().zip(&mut all) {
            *dtype = dtype.or(Some(only)).filter(|dtype| generic.members().contains(dtype));
        }
    }
    Ok(all)
}

/// Derives the shape of an output from the names of its dimensions.
///
/// # Errors
/// A dimension has no name, or its name denotes no extent, several extents or a negative extent.
pub fn output_shape(def: &KernelDef, name: &str, strides: Option<&Strides>, extents: &Extents) -> Result<Vec<usize>> {
    let unknown = |why: &str| {
        CliError::usage(
            format!("the shape of `{name}`, an output of `{}`, is unknown{why}", def.name),
            format!("--shape {name}=…, with numbers, names of dimensions, or the name of a tensor of the same shape"),
        )
    };
    let strides = strides.ok_or_else(|| unknown(""))?;
    let extent = |dim: &Option<&'static str>| {
        let dim = dim.ok_or_else(|| unknown(": its dimension has no name"))?;
        match extents.of_name(dim) {
            Ok(Some(extent)) => usize::try_from(extent).map_err(|_| {
                let message = format!("`{dim}`, a dimension of `{name}`, is negative, {extent}: expected 0 or more");
                CliError::usage(message, format!("--arg {dim}=… with the number of elements of `{name}` along it"))
            }),
            Ok(None) => Err(unknown(&format!(": no input has a dimension `{dim}`"))),
            Err(why) => Err(unknown(&format!(": dimension `{dim}` is ambiguous: {why}"))),
        }
    };
    strides.dims.iter().map(extent).collect()
}

/// Determines the values of all scalar parameters: from `--arg`, else as strides, else as extents; 0 if the recorded
/// function does not use it.
fn scalars(
    def: &'static KernelDef,
    dtypes: &[DType],
    words: &BTreeMap<&str, &str>,
    strides: &BTreeMap<&'static str, Strides>,
    extents: &Extents,
    func: &Func,
) -> Result<BTreeMap<&'static str, LaunchArg>> {
    let mut known_strides: BTreeMap<&str, i64> = BTreeMap::new();
    for (tensor, strides) in strides {
        let shape = extents.shape(tensor).unwrap_or_default();
        known_strides.extend(strides.params.iter().copied().zip(bind::dense_strides(shape)));
    }
    let mut scalars = BTreeMap::new();
    let mut missing = Vec::new();
    for param in def.params {
        let ParamKind::Scalar(elem) = param.kind else { continue };
        let dtype = elem.resolve(dtypes).unwrap_or(DType::I64);
        let text = match (words.get(param.name), known_strides.get(param.name)) {
            (Some(text), _) => (*text).to_string(),
            (None, Some(stride)) => stride.to_string(),
            (None, None) => match extents.of_name(param.name) {
                Ok(Some(extent)) => extent.to_string(),
                Ok(None) if !is_used(func, param.name) => match dtype {
                    DType::Bool => "false".to_string(),
                    _ => "0".to_string(),
                },
                Ok(None) => {
                    missing.push(format!("{}=… ({dtype})", param.name));
                    continue;
                }
                Err(why) => {
                    return Err(CliError::usage(
                        format!("kernel `{}`: `{}` is ambiguous: {why}", def.name, param.name),
                        format!("--arg {}=…", param.name),
                    ));
                }
            },
        };
        scalars.insert(param.name, number(param.name, dtype, &text)?);
    }
    if missing.is_empty() {
        return Ok(scalars);
    }
    Err(CliError::usage(
        format!("kernel `{}` has arguments that cannot be derived from tensors", def.name),
        format!("--arg {}", missing.join(", ")),
    ))
}

/// Parses a number as a launch argument: unsigned integers become signed ones, 8- and 16-bit floats become their bits.
fn number(name: &str, dtype: DType, text: &str) -> Result<LaunchArg> {
    let wrong = || CliError::usage(format!("`{name}` cannot be {text}"), format!("its type is {dtype}"));
    let bits = match dtype {
        DType::Bool => u64::from(text.parse::<bool>().map_err(|_| wrong())?),
        float if float.is_float() => {
            let value: f64 = text.parse().map_err(|_| wrong())?;
            let bits = num::encode(float, value);
            if !choose::names_no_number(text) && exceeds(float, value, bits) {
                let message = format!("`{name}` cannot be {text}");
                return Err(CliError::usage(message, choose::beyond_largest(text, float)));
            }
            bits
        }
        int => {
            let value: i128 = text.parse().map_err(|_| wrong())?;
            let (low, high) = num::int_range(int);
            if !(low..=high).contains(&value) {
                return Err(wrong());
            }
            num::encode_int(int, value)
        }
    };
    Ok(match (dtype, dtype.bytes()) {
        (DType::F32, _) => LaunchArg::F32(f32::from_bits(bits as u32)),
        (DType::F64, _) => LaunchArg::F64(f64::from_bits(bits)),
        (_, 1) => LaunchArg::I8(bits as i8),
        (_, 2) => LaunchArg::I16(bits as i16),
        (_, 4) => LaunchArg::I32(bits as i32),
        _ => LaunchArg::I64(bits as i64),
    })
}

/// Whether a finite number is beyond the finite numbers of a float type, whose element nearest to it is `bits`.
fn exceeds(dtype: DType, value: f64, bits: u64) -> bool {
    // 8-bit formats without infinity.
    let largest = num::decode(dtype, num::encode(dtype, f64::INFINITY));
    num::decode(dtype, bits).is_infinite() || value.abs() > largest
}

/// The grid that a kernel gives.
fn own_grid(def: &KernelDef, grid: Evaluate<[i64; 3]>, value: &Lookup<'_>) -> Result<[i64; 3]> {
    grid(value).map_err(|name| {
        let is_constant = def.params.iter().any(|p| p.name == name && matches!(p.kind, ParamKind::Constexpr { .. }));
        let option = if is_constant { "--set" } else { "--arg" };
        let why = match value(name) {
            Some(ConstValue::Int(n)) if n < 0 => format!("is negative, {n}: expected 0 or more"),
            Some(other) => format!("cannot be {other}"),
            None => "is not known".to_string(),
        };
        let message = format!("the grid of kernel `{}` depends on `{name}`, which {why}", def.name);
        CliError::usage(message, format!("{option} {name}=…, or --grid …"))
    })
}

/// Evaluates the three extents of the grid.
fn grid(text: &str, extents: &Extents) -> Result<[i64; 3]> {
    let wrong = |why: String| {
        CliError::usage(format!("--grid {text}: {why}"), "one to three extents, as in `rows/rows_tile,heads`")
    };
    let mut grid = [1; 3];
    let parts: Vec<&str> = text.split(',').collect();
    if parts.len() > grid.len() {
        return Err(wrong(format!("a grid has three axes, found {}", parts.len())));
    }
    for (extent, part) in grid.iter_mut().zip(parts) {
        *extent = extents.evaluate(part).map_err(wrong)?;
        if *extent < 0 {
            return Err(wrong(format!("an extent cannot be {extent}")));
        }
    }
    Ok(grid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_range_of_their_type() {
        assert_eq!(number("n", DType::I32, "-5").unwrap(), LaunchArg::I32(-5));
        assert_eq!(number("n", DType::U8, "255").unwrap(), LaunchArg::I8(-1));
        assert_eq!(number("n", DType::F32, "0.5").unwrap(), LaunchArg::F32(0.5));
        assert_eq!(number("n", DType::BF16, "1").unwrap(), LaunchArg::I16(0x3f80));
        assert_eq!(number("n", DType::Bool, "true").unwrap(), LaunchArg::I8(1));
        assert_eq!(number("n", DType::F32, "-inf").unwrap(), LaunchArg::F32(f32::NEG_INFINITY));
        assert!(matches!(number("n", DType::F64, "nan").unwrap(), LaunchArg::F64(x) if x.is_nan()));
        assert_eq!(number("n", DType::F16, "65504").unwrap(), LaunchArg::I16(0x7bff));
        for (dtype, text) in [
            (DType::F32, "1e50"),
            (DType::F32, "1e400"),
            (DType::F64, "1e400"),
            (DType::F16, "1e5"),
            (DType::F8E4M3, "1000"),
        ] {
            let message = number("n", dtype, text).unwrap_err().to_string();
            assert!(message.contains(&format!("{text} is larger than the largest {dtype}")), "{message}");
        }
        for (dtype, text) in [(DType::I32, "2147483648"), (DType::U8, "-1"), (DType::F32, "x"), (DType::Bool, "2")] {
            assert!(number("n", dtype, text).is_err(), "{text}");
        }
    }
}
