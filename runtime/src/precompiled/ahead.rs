//! Compilation ahead of time: what to compile a kernel for, and the result.

use std::path::{Path, PathBuf};

use tilewright_codegen::analysis::bounds::Footprint;
use tilewright_codegen::diag::Diagnostic;
use tilewright_codegen::ir::{Arg, DType, Func};
use tilewright_codegen::lang::kernel::{
    ArgSpec, ConstValue, Constexpr, ElemDef, KernelDef, ParamDef, ParamKind, Specialization,
};
use tilewright_codegen::num::int_range;
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{Artifact, Code, CompileOptions, Target};

use super::Document;
use crate::autotune::{Autotune, Config};
use crate::error::{Error, Result};
use crate::kernel;

/// A compilation of a kernel ahead of time: target, element types, constants, assumptions and options.
///
/// ```no_run
/// use tilewright_runtime::prelude::*;
///
/// /// y = a · x
/// #[kernel]
/// pub fn scale<T: Float>(x: In<T>, y: Out<T>, a: f32, n: i32, #[constexpr] tile: usize) {
///     let i = program_id(0) * tile + arange(0, tile);
///     let product = load(x + i, mask = i < n).to::<f32>() * a;
///     store(y + i, product.to::<T>(), mask = i < n);
/// }
///
/// // Writes out/scale.ptx and out/manifest.json.
/// Scale::<bf16>::compile_for(GpuArch::Sm80).constant("tile", 1024usize).assume("n % 16").compile()?.write("out")?;
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct AheadOfTime {
    def: &'static KernelDef,
    autotune: Option<&'static Autotune>,
    target: Target,
    dtypes: Vec<DType>,
    constants: Vec<(String, ConstValue)>,
    assumptions: Vec<String>,
    sizes: Vec<(String, i64)>,
    options: Option<CompileOptions>,
}

/// Constants by name.
type Constants = Vec<(String, ConstValue)>;

/// The result of a compilation ahead of time.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The manifest.
    pub document: Document,
    pub code: Code,
}

impl AheadOfTime {
    /// A compilation of `def` with the compiler's default options. `dtypes` has one entry per type parameter. The struct
    /// of a kernel's arguments has `compile_for`, which calls this.
    pub fn new(def: &'static KernelDef, dtypes: &[DType], target: impl Into<Target>) -> AheadOfTime {
        AheadOfTime {
            def,
            autotune: None,
            target: target.into(),
            dtypes: dtypes.to_vec(),
            constants: Vec::new(),
            assumptions: Vec::new(),
            sizes: Vec::new(),
            options: None,
        }
    }

    /// Takes constants and options that are not given from the kernel's configurations: the one that this machine
    /// measured, if the target is its CPU, else the nearest one that ships, else the default
    /// ([`Autotune::configuration_for`]).
    pub fn tuned(mut self, autotune: &'static Autotune) -> AheadOfTime {
        self.autotune = Some(autotune);
        self
    }

    /// Sets a constant.
    pub fn constant(mut self, name: &str, value: impl Constexpr) -> AheadOfTime {
        self.constants.push((name.to_string(), value.to_const()));
        self
    }

    /// Assumes `"k % 16"` (a multiple of 16), `"stride = 1"` (equal to 1), or several of these, separated by commas.
    /// Pointers are assumed to be aligned to 16 bytes; `"x % 1"` drops that assumption. Launches check assumptions.
    pub fn assume(mut self, assumptions: &str) -> AheadOfTime {
        self.assumptions.push(assumptions.to_string());
        self
    }

    /// The usual value of an integer argument or extent on which the configuration depends.
    pub fn size(mut self, name: &str, size: i64) -> AheadOfTime {
        self.sizes.push((name.to_string(), size));
        self
    }

    /// Sets the compiler's options, in place of those of a configuration.
    pub fn options(mut self, options: CompileOptions) -> AheadOfTime {
        self.options = Some(options);
        self
    }

    /// The kernel's name.
    pub(super) fn name(&self) -> &'static str {
        self.def.name
    }

    /// Compiles, or takes the code from the cache on disk.
    ///
    /// # Errors
    /// A constant, an assumption or a size that does not fit the kernel; a mistake in the kernel; a feature that the
    /// target lacks; a build without LLVM.
    pub fn compile(&self) -> Result<Compiled> {
        self.compile_as(self.def.name)
    }

    /// As [`AheadOfTime::compile`], with the entry of the kernel `name`.
    pub(super) fn compile_as(&self, name: &str) -> Result<Compiled> {
        let wrong = |message: String, help: String| Error::AheadOfTime { kernel: self.def.name, message, help };
        let specialization = assumptions(
            self.def,
            Specialization::aligned_memory(self.def),
            self.assumptions.iter().flat_map(|text| text.split(',')),
        )
        .and_then(|assumed| {
            let sizes = self.sizes.iter().map(|(name, size)| (self.def.param_name(name), *size));
            check_sizes(self.def, &assumed, sizes).map(|()| assumed)
        })
        .map_err(|AssumptionError { message, help, .. }| wrong(message, help))?;
        self.check_constant_names()?;
        let (constants, config) = self.configuration()?;
        let given: Vec<(&str, ConstValue)> =
            constants.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        let options = self.options.clone().unwrap_or_else(|| config.map(|c| c.options()).unwrap_or_default());
        let mut func = kernel::record(self.def, &self.dtypes, &given, &specialization)?;
        let ir_hash = super::ir_hash(&func);
        let sizes: Vec<(String, i64)> =
            self.sizes.iter().map(|(name, size)| (self.def.param_name(name).to_string(), *size)).collect();
        let footprint = footprint(&func, &sizes)?;
        func.name = name.to_string();
        let mut artifact = kernel::compile_func(&func, &self.target, &options)?;
        artifact.manifest.kernel = self.def.name.to_string();
        artifact.manifest.footprint = Some(footprint);
        let Artifact { code, .. } = &artifact;
        let kind = match code {
            Code::Ptx(_) => "ptx",
            Code::Object(_) => "obj",
        };
        let files = [(kind, format!("{}.{}", self.def.name, extension(code)))];
        let mut document = Document::new(self.def, &self.dtypes, &given, &options, &artifact, &files);
        document.ir_hash = ir_hash;
        if let Target::Host(cpu) = &self.target {
            document.cpu = Some(cpu.clone());
        }
        Ok(Compiled { document, code: artifact.code })
    }

    /// Fails if a given constant is none of the kernel's. Checked first: a misspelled name leaves one without a value.
    fn check_constant_names(&self) -> Result<()> {
        let names: Vec<&str> = constant_names(self.def).collect();
        match self.constants.iter().find(|(name, _)| !names.contains(&self.def.param_name(name))) {
            None => Ok(()),
            Some((unknown, _)) => Err(Error::AheadOfTime {
                kernel: self.def.name,
                message: format!("there is no constexpr parameter `{unknown}`"),
                help: match names.is_empty() {
                    true => "the kernel has no constexpr parameters".into(),
                    false => format!("the constexpr parameters are {}", names.join(", ")),
                },
            }),
        }
    }

    /// The constants by name, with those of the configuration and those that follow from them, and the configuration.
    fn configuration(&self) -> Result<(Constants, Option<Config>)> {
        let named = |name: &str| self.def.param_name(name).to_string();
        let mut constants: Constants =
            self.constants.iter().map(|(name, value)| (named(name), value.clone())).collect();
        let sizes: Vec<_> = self.sizes.iter().map(|(name, size)| (named(name), *size)).collect();
        let keys = self.autotune.map_or(Vec::new(), |autotune| autotune.sizes(&self.dtypes));
        if let Some((name, _)) = sizes.iter().find(|(name, _)| !keys.contains(&&**name)) {
            let keys = if keys.is_empty() { "no size".to_string() } else { keys.join(", ") };
            return Err(Error::AheadOfTime {
                kernel: self.def.name,
                message: format!("the size of `{name}` selects no configuration"),
                help: format!("its configurations depend on {keys}"),
            });
        }
        let with_heuristics = |mut constants: Constants| {
            let known = |name: &str| constants.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
            let found = self.def.heuristics(&known);
            constants.extend(found.into_iter().map(|(name, value)| (name.to_string(), value)));
            constants
        };
        let Some(autotune) = self.autotune else { return Ok((with_heuristics(constants), None)) };
        let size = |name: &str| sizes.iter().find(|(known, _)| known == name).map(|(_, size)| *size);
        let constant = |name: &str| constants.iter().find(|(known, _)| known == name).map(|(_, value)| value.clone());
        let (config, _) = autotune.configuration_for(&self.target, &self.dtypes, &constant, &size)?;
        for (name, value) in &config.constants {
            if !constants.iter().any(|(known, _)| known == name) {
                constants.push((name.to_string(), value.clone()));
            }
        }
        Ok((with_heuristics(constants), Some(config)))
    }
}

impl Compiled {
    /// Writes the code (`KERNEL.ptx` or `KERNEL.o`) and `manifest.json` to a folder, which is created if needed, and
    /// returns their paths.
    ///
    /// # Errors
    /// A folder or file that cannot be written.
    pub fn write(&self, folder: impl AsRef<Path>) -> Result<[PathBuf; 2]> {
        let folder = folder.as_ref();
        let name = format!("{}.{}", self.document.manifest.kernel, extension(&self.code));
        let paths = [folder.join(name), folder.join("manifest.json")];
        write(&paths[0], self.bytes())?;
        write(&paths[1], self.document.to_json().as_bytes())?;
        Ok(paths)
    }

    /// The PTX or the object file.
    pub fn bytes(&self) -> &[u8] {
        match &self.code {
            Code::Ptx(text) => text.as_bytes(),
            Code::Object(object) => object,
        }
    }
}

/// The names of the kernel's constants.
pub(super) fn constant_names(def: &KernelDef) -> impl Iterator<Item = &'static str> {
    def.params.iter().filter(|p| matches!(p.kind, ParamKind::Constexpr { .. })).map(|p| p.name)
}

/// Writes a file, and creates its folder.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    folder
        .and_then(|()| std::fs::write(path, bytes))
        .map_err(|error| Error::WriteFile { path: path.to_path_buf(), reason: error.to_string() })
}

fn extension(code: &Code) -> &'static str {
    match code {
        Code::Ptx(_) => "ptx",
        Code::Object(_) => "o",
    }
}

/// An assumption that cannot be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AssumptionError {
    pub message: String,
    pub help: String,
    /// The name in the assumption, if the kernel has no such argument.
    pub unknown: Option<String>,
}

/// The footprint of a kernel that is compiled ahead of time. `sizes` are usual values of arguments, by name.
///
/// # Errors
/// An `assume` of the kernel that is false for every launch, or for those of the sizes: constants, assumptions about
/// arguments, or sizes contradict it.
pub fn footprint(func: &Func, sizes: &[(String, i64)]) -> Result<Footprint> {
    let footprint = pipeline::footprint(func);
    let mut usual = func.args.clone();
    for arg in &mut usual {
        let size = sizes.iter().find(|(name, _)| *name == arg.name).map(|(_, size)| *size);
        arg.equal_to = arg.equal_to.or(size);
    }
    let (condition, loc, for_every_launch) = match footprint.false_assumption(&func.args) {
        Some((condition, loc)) => (condition, loc, true),
        None => match footprint.false_assumption(&usual) {
            Some((condition, loc)) => (condition, loc, false),
            None => return Ok(footprint),
        },
    };
    let is_in_condition = |name: &str| {
        let mut words = condition.split(|c: char| !c.is_alphanumeric() && c != '_');
        words.any(|word| word == name)
    };
    let assumptions: Vec<String> = func
        .args
        .iter()
        .filter_map(|Arg { name, divisible_by, equal_to }| match equal_to {
            Some(value) => Some(format!("`{name} = {value}`")),
            None => (*divisible_by > 1 && is_in_condition(name)).then(|| format!("`{name} % {divisible_by}`")),
        })
        .collect();
    let in_condition = sizes.iter().filter(|(name, _)| !for_every_launch && is_in_condition(name));
    let of_sizes: Vec<String> = in_condition.map(|(name, size)| format!("`{name} = {size}`")).collect();
    let found = if for_every_launch { "false for every launch" } else { "false for these sizes" };
    let mut given = vec!["the constants".to_string()];
    given.extend((!assumptions.is_empty()).then(|| format!("the assumptions {}", assumptions.join(", "))));
    given.extend((!of_sizes.is_empty()).then(|| format!("the sizes {}", of_sizes.join(", "))));
    let message = format!("kernel {}: {} contradict an `assume` of the kernel", func.name, given.join(" and "));
    let diagnostic = Diagnostic::new(message, loc.clone())
        .label(format!("{} is {found}", if condition == "false" { "this condition" } else { &*condition }))
        .help("compile for other constants or sizes, or assume something else about the arguments");
    Err(Error::Kernel(kernel::render_with_source(&diagnostic)))
}

/// Checks that the usual sizes of arguments are among what is assumed of them.
///
/// # Errors
/// A size that an assumption excludes.
pub fn check_sizes<'a>(
    def: &KernelDef,
    specialization: &Specialization,
    sizes: impl IntoIterator<Item = (&'a str, i64)>,
) -> Result<(), AssumptionError> {
    for (name, size) in sizes {
        let passed = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. }));
        let Some((_, assumed)) = passed.zip(&specialization.args).find(|(p, _)| p.name == name) else { continue };
        let assumption = match assumed.equal_to {
            Some(value) if value != size => format!("{name} = {value}"),
            None if size % assumed.divisible_by as i64 != 0 => format!("{name} % {}", assumed.divisible_by),
            Some(_) | None => continue,
        };
        return Err(AssumptionError {
            message: format!("the size {name} = {size} contradicts the assumption `{assumption}`"),
            help: "give a size that the assumption allows, or another assumption".into(),
            unknown: None,
        });
    }
    Ok(())
}

/// Whether a text is like a name or a number, without operators and spaces.
fn is_word(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '+' | '.'))
}

/// Parses assumptions about arguments: `k % 16` assumes a multiple, `k = 1` an equal number. What is assumed of the other
/// arguments is in `default`, as [`Specialization::aligned_memory`].
///
/// # Errors
/// An item of another form, an unknown argument, an argument with two assumptions, or an assumption that the type of
/// the argument excludes.
pub fn assumptions<'a>(
    def: &KernelDef,
    default: Specialization,
    words: impl IntoIterator<Item = &'a str>,
) -> Result<Specialization, AssumptionError> {
    let mut specialization = default;
    let passed: Vec<&ParamDef> = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. })).collect();
    let mut seen = Vec::new();
    for part in words.into_iter().map(str::trim) {
        let wrong = |message: String| {
            let help =
                "write `name%16` (a multiple of a power of two) or `name=1` (equal to a number), once for each name";
            let help = help.to_string();
            Err(AssumptionError { message, help, unknown: None })
        };
        let is_multiple = part.contains('%');
        let sides = part.split_once(if is_multiple { '%' } else { '=' });
        let sides = sides.map(|(name, number)| (name.trim(), number.trim()));
        let Some((name, number)) = sides.filter(|(name, number)| is_word(name) && is_word(number)) else {
            return wrong(format!("`{part}` is not an assumption"));
        };
        let name = def.param_name(name);
        if def.params.iter().any(|p| p.name == name && matches!(p.kind, ParamKind::Constexpr { .. })) {
            let message = format!("`{name}` is a constant of kernel `{}`, not an argument", def.name);
            let help =
                format!("omit the assumption, and give the constant a value: `tilewright compile --set {name}=…`");
            return Err(AssumptionError { message, help, unknown: None });
        }
        let Some(index) = passed.iter().position(|p| p.name == name) else {
            let names: Vec<&str> = passed.iter().map(|p| p.name).collect();
            return Err(AssumptionError {
                message: format!("kernel `{}` has no argument `{name}`", def.name),
                help: format!("the arguments are {}", names.join(", ")),
                unknown: Some(name.to_string()),
            });
        };
        let kind = &passed[index].kind;
        let is_memory = !matches!(kind, ParamKind::Scalar(_));
        if let (ParamKind::Scalar(ElemDef::Fixed(dtype)), false, Ok(n)) = (kind, is_multiple, number.parse::<i64>())
            && !dtype.is_float()
            && let (low, high) = int_range(*dtype)
            && !(low..=high).contains(&i128::from(n))
        {
            return wrong(format!("`{name}` cannot be {n}: it is of type {dtype}, which holds {low} to {high}"));
        }
        if let ParamKind::Scalar(ElemDef::Fixed(dtype)) = kind
            && dtype.is_float()
        {
            return wrong(format!("`{name}` is of type {dtype}: assumptions apply to pointers and integers only"));
        }
        if seen.contains(&index) {
            return wrong(format!("`{name}` has two assumptions"));
        }
        seen.push(index);
        specialization.args[index] = match (is_multiple, number.parse::<i64>()) {
            (true, Ok(n)) if n > 0 && (n as u64).is_power_of_two() && n <= 1 << 20 => {
                ArgSpec { divisible_by: n as u64, equal_to: None }
            }
            (false, Ok(n)) if n < 0 && def.dims.contains(&name) => {
                return wrong(format!("`{name}` cannot be {n}: it is an extent of tensors, which is at least 0"));
            }
            (false, Ok(n)) if !is_memory => ArgSpec { divisible_by: 1, equal_to: Some(n) },
            (false, Ok(_)) => return wrong(format!("the pointer `{name}` cannot be assumed to be {number}")),
            (true, _) => return wrong(format!("`{name}` cannot be a multiple of {number}: expected a power of two")),
            (false, Err(_)) => return wrong(format!("`{name}` cannot be {number}: expected a number")),
        };
    }
    Ok(specialization)
}
