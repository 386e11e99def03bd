//! `tilewright.Kernel`: any kernel that ships, compiled and launched with arguments from Python.

use pyo3::exceptions::{PyKeyError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::kernel::{
    ArgSpec, ConstDefault, ConstValue, ElemDef, KernelDef, ParamDef, ParamKind, Specialization,
};
use tilewright::codegen::target::{GpuArch, HostCpu, Target};
use tilewright::kernel::{KernelArg, Memory, MemoryMut, compile as compile_kernel, ir_dtype, launch_erased};
use tilewright::kernels::KERNELS;
use tilewright::{Device, Dtype, Grid, LaunchArg, LaunchConfig};

use crate::array::Array;
use crate::call::{shown, without_gil};
use crate::compiled::Compiled;
use crate::{ops, options};

/// A kernel that ships with Tilewright.
#[pyclass(frozen, module = "tilewright")]
pub struct Kernel {
    def: &'static KernelDef,
}

/// The names of all kernels, sorted.
#[pyfunction]
pub fn kernel_names() -> Vec<&'static str> {
    KERNELS.iter().map(|def| def.name).collect()
}

/// Memory of an array, of any element type.
pub struct ErasedMemory {
    pub device: &'static Device,
    pub address: u64,
    pub bytes: u64,
    pub dtype: Dtype,
}

impl Memory for ErasedMemory {
    fn launch_arg(&self) -> LaunchArg {
        LaunchArg::Ptr { addr: self.address, bytes: self.bytes }
    }
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn memory_device(&self) -> &Device {
        self.device
    }
}

impl MemoryMut for ErasedMemory {}

/// An argument of a launch.
enum Given<'py> {
    Array(Array),
    Number(Bound<'py, PyAny>),
}

/// Positional and named arguments as one per parameter that is not a constant; names that remain are mistakes.
fn bind<'py>(
    def: &'static KernelDef,
    positional: &Bound<'py, PyTuple>,
    named: &Bound<'py, PyDict>,
) -> PyResult<Vec<(&'static ParamDef, Given<'py>)>> {
    let params: Vec<&ParamDef> = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. })).collect();
    if positional.len() > params.len() {
        return Err(PyTypeError::new_err(format!(
            "kernel `{}` takes {} arguments besides its constants: found {}",
            def.name,
            params.len(),
            positional.len()
        )));
    }
    let mut given = Vec::with_capacity(params.len());
    for (index, param) in params.into_iter().enumerate() {
        let by_name = named.get_item(param.name)?;
        let value = match (positional.get_item(index).ok(), by_name) {
            (Some(value), None) => value,
            (None, Some(value)) => {
                named.del_item(param.name)?;
                value
            }
            (Some(_), Some(_)) => {
                return Err(PyTypeError::new_err(format!("kernel `{}`: `{}` is given twice", def.name, param.name)));
            }
            (None, None) => {
                return Err(PyTypeError::new_err(format!("kernel `{}`: `{}` is missing", def.name, param.name)));
            }
        };
        let memory = !matches!(param.kind, ParamKind::Scalar(_));
        given.push((param, if memory { Given::Array(Array::new(param.name, &value)?) } else { Given::Number(value) }));
    }
    no_more(def, named)?;
    Ok(given)
}

/// Fails if there are names that no parameter has.
fn no_more(def: &KernelDef, named: &Bound<'_, PyDict>) -> PyResult<()> {
    let Some(name) = named.keys().iter().next().map(shown) else { return Ok(()) };
    let names: Vec<&str> = def.params.iter().map(|p| p.name).collect();
    if options::OPTIONS.contains(&name.as_str()) {
        let text =
            format!("kernel `{}`: `{name}` is an option of the compiler: pass options={{\"{name}\": …}}", def.name);
        return Err(PyTypeError::new_err(text));
    }
    Err(PyTypeError::new_err(format!(
        "kernel `{}` has no parameter `{name}`: its parameters are {}",
        def.name,
        names.join(", ")
    )))
}

/// The extents of a grid: a number, or one to three numbers.
pub fn grid(value: &Bound<'_, PyAny>) -> PyResult<Grid> {
    if let Ok(x) = value.extract::<i64>() {
        return Ok(x.into());
    }
    let wrong = || PyTypeError::new_err(format!("grid: expected one to three integers, found {}", shown(value)));
    match value.extract::<Vec<i64>>().map_err(|_| wrong())?.as_slice() {
        [x] => Ok((*x).into()),
        [x, y] => Ok((*x, *y).into()),
        [x, y, z] => Ok((*x, *y, *z).into()),
        _ => Err(wrong()),
    }
}

#[pymethods]
impl Kernel {
    #[new]
    fn new(name: &str) -> PyResult<Kernel> {
        let def = KERNELS.iter().copied().find(|def| def.has_name(name));
        let def = def.ok_or_else(|| {
            let names = kernel_names().join(", ");
            PyKeyError::new_err(format!("there is no kernel `{}`: the kernels are {names}", shown(name)))
        })?;
        Ok(Kernel { def })
    }

    /// The kernel's name.
    #[getter]
    fn name(&self) -> &'static str {
        self.def.name
    }

    /// What it computes, and on which grid.
    #[getter]
    fn doc(&self) -> &'static str {
        self.def.doc.trim()
    }

    /// The parameters, in order: (name, kind, type, default). The kind is "in", "out", "inout", "scalar" or "constant".
    #[getter]
    fn parameters<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let elem = |elem: ElemDef| match elem {
            ElemDef::Fixed(dtype) => dtype.name().to_string(),
            ElemDef::Generic(index) => self.def.generics[index].name.to_string(),
        };
        let describe = |param: &ParamDef| {
            let (kind, ty, default) = match param.kind {
                ParamKind::In(ty) => ("in", elem(ty), None),
                ParamKind::Out(ty) => ("out", elem(ty), None),
                ParamKind::InOut(ty) => ("inout", elem(ty), None),
                ParamKind::Scalar(ty) => ("scalar", elem(ty), None),
                ParamKind::Constexpr { ty, default } => ("constant", ty.trim().to_string(), default),
            };
            let default = match default {
                None => py.None().into_bound(py),
                Some(ConstDefault::Int(n)) => n.into_pyobject(py)?.into_any(),
                Some(ConstDefault::Float(x)) => x.into_pyobject(py)?.into_any(),
                Some(ConstDefault::Bool(b)) => b.into_pyobject(py)?.to_owned().into_any(),
                Some(ConstDefault::Variant(word)) => word.into_pyobject(py)?.into_any(),
            };
            (param.name, kind, ty, default).into_pyobject(py)
        };
        self.def.params.iter().map(describe).collect()
    }

    /// The element types that each type parameter can be.
    #[getter]
    fn types<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let types = PyDict::new(py);
        for generic in self.def.generics {
            types.set_item(generic.name, generic.members().iter().map(|d| d.name()).collect::<Vec<_>>())?;
        }
        Ok(types)
    }

    /// Launches the kernel. The launch is refused unless all accesses are proven to stay inside the arrays.
    #[pyo3(signature = (*args, grid, types=None, options=None, stream=None, **named))]
    fn __call__(
        &self,
        py: Python<'_>,
        args: &Bound<'_, PyTuple>,
        grid: &Bound<'_, PyAny>,
        types: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
        stream: Option<&Bound<'_, PyAny>>,
        named: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let def = self.def;
        let named = named.map_or_else(|| PyDict::new(py), Clone::clone);
        let constants = options::constants(def, &named)?;
        let mut dtypes = options::types(def, types)?;
        let given = bind(def, args, &named)?;
        infer_types(&given, &mut dtypes);
        let dtypes = options::complete_types(def, dtypes)?;
        let writes = |param: &ParamDef| matches!(param.kind, ParamKind::Out(_) | ParamKind::InOut(_));
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for (param, given) in &given {
            let Given::Array(array) = given else { continue };
            if writes(param) { &mut outputs } else { &mut inputs }.push((param.name, array));
        }
        let device = ops::prepare(py, def.name, &inputs, &outputs, stream)?;
        let mut memory = Vec::new();
        let mut scalars = Vec::new();
        for (param, given) in &given {
            match (given, param.kind) {
                (Given::Array(array), _) => memory.push(ErasedMemory {
                    device,
                    address: array.address,
                    bytes: (array.span() * array.dtype.size()) as u64,
                    dtype: array.dtype,
                }),
                (Given::Number(value), ParamKind::Scalar(elem)) => {
                    let dtype =
                        elem.resolve(&dtypes).ok_or_else(|| PyValueError::new_err("internal error: no type"))?;
                    scalars.push(options::scalar(def.name, param.name, value, dtype)?);
                }
                (Given::Number(_), _) => {}
            }
        }
        let chosen = options::compile_options(options)?;
        let grid = self::grid(grid)?;
        let kinds: Vec<(bool, bool)> =
            given.iter().map(|(param, given)| (matches!(given, Given::Array(_)), writes(param))).collect();
        without_gil(py, move || {
            let (mut memory, mut scalars) = (memory.iter_mut(), scalars.iter());
            let mut args = Vec::with_capacity(kinds.len());
            for (is_memory, writes) in kinds {
                args.extend(match (is_memory, writes) {
                    (true, true) => memory.next().map(|memory| KernelArg::Out(memory)),
                    (true, false) => memory.next().map(|memory| KernelArg::In(memory)),
                    (false, _) => scalars.next().map(|value| KernelArg::Scalar(*value)),
                });
            }
            let config = LaunchConfig {
                num_warps: chosen.num_warps,
                num_ctas: chosen.num_ctas,
                num_stages: chosen.num_stages,
                debug_asserts: chosen.debug_asserts,
                fp_fusion: chosen.fp_fusion,
                max_registers: chosen.max_registers,
                schedule: chosen.schedule,
                ..LaunchConfig::new(grid)
            };
            launch_erased(def, device, &config, &dtypes, &mut args, &constants)
        })?;
        outputs.iter().try_for_each(|(_, array)| ops::mark_written(py, array))
    }

    /// Compiles the kernel for `target` ("sm_80", "sm_86", "sm_89", "sm_90a" or "host"), ahead of time.
    #[pyo3(signature = (target, types=None, options=None, multiple_of=None, equal_to=None, ptx_version=84, **constants))]
    fn compile(
        &self,
        py: Python<'_>,
        target: &str,
        types: Option<&Bound<'_, PyAny>>,
        options: Option<&Bound<'_, PyDict>>,
        multiple_of: Option<&Bound<'_, PyDict>>,
        equal_to: Option<&Bound<'_, PyDict>>,
        ptx_version: u32,
        constants: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Compiled> {
        let def = self.def;
        let named = constants.map_or_else(|| PyDict::new(py), Clone::clone);
        let constants = options::constants(def, &named)?;
        no_more(def, &named)?;
        let dtypes = options::complete_types(def, options::types(def, types)?)?;
        let specialization = specialization(def, multiple_of, equal_to)?;
        let mut options = options::compile_options(options)?;
        if !(80..=99).contains(&ptx_version) {
            return Err(PyValueError::new_err(format!("ptx_version is {ptx_version}: expected 80 (PTX 8.0) to 99")));
        }
        options.ptx_version = ptx_version;
        let target = match target {
            "host" => Target::Host(HostCpu::native()),
            name => Target::Nvptx(name.parse::<GpuArch>().map_err(|_| {
                PyValueError::new_err(format!(
                    "there is no target `{}`: the targets are sm_80, sm_86, sm_89, sm_90a and host",
                    shown(name)
                ))
            })?),
        };
        let artifact = without_gil(py, || {
            let values = named_constants(def, &constants)?;
            compile_kernel(def, &dtypes, &values, &specialization, &target, &options)
        })?;
        Compiled::new(def, artifact, &dtypes, &constants, &options)
    }

    fn __repr__(&self) -> String {
        let names: Vec<&str> = self.def.params.iter().map(|p| p.name).collect();
        format!("tilewright.Kernel({}({}))", self.def.name, names.join(", "))
    }
}

/// The constants with their defaults, by name.
fn named_constants(
    def: &'static KernelDef,
    given: &[(&'static str, ConstValue)],
) -> tilewright::Result<Vec<(&'static str, ConstValue)>> {
    let given: Vec<(&str, ConstValue)> = given.to_vec();
    let values = def.complete_consts(&given).map_err(|d| tilewright::Error::Kernel(d.to_string()))?;
    let names = def.params.iter().filter(|p| matches!(p.kind, ParamKind::Constexpr { .. })).map(|p| p.name);
    Ok(names.zip(values).collect())
}

/// Element types of type parameters, from the arrays.
fn infer_types(given: &[(&'static ParamDef, Given<'_>)], dtypes: &mut [Option<DType>]) {
    for (param, given) in given {
        let (ParamKind::In(elem) | ParamKind::Out(elem) | ParamKind::InOut(elem)) = param.kind else { continue };
        if let (ElemDef::Generic(index), Given::Array(array)) = (elem, given) {
            dtypes[index].get_or_insert(ir_dtype(array.dtype));
        }
    }
}

/// What the code may assume about arguments, on top of memory that is aligned to 16 bytes.
fn specialization(
    def: &KernelDef,
    multiple_of: Option<&Bound<'_, PyDict>>,
    equal_to: Option<&Bound<'_, PyDict>>,
) -> PyResult<Specialization> {
    let mut specialization = Specialization::aligned_memory(def);
    let passed: Vec<&ParamDef> = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. })).collect();
    for (given, is_multiple) in [(multiple_of, true), (equal_to, false)] {
        for (name, number) in given.into_iter().flat_map(|given| given.iter()) {
            let (name, number): (String, i64) = (name.extract()?, number.extract()?);
            let wrong = |reason: &str| {
                PyValueError::new_err(format!(
                    "kernel `{}`: an assumption about `{}`: {reason}",
                    def.name,
                    shown(&name)
                ))
            };
            let Some(index) = passed.iter().position(|p| p.name == name) else {
                return Err(wrong("there is no such argument"));
            };
            let memory = !matches!(passed[index].kind, ParamKind::Scalar(_));
            if let ParamKind::Scalar(ElemDef::Fixed(dtype)) = passed[index].kind
                && dtype.is_float()
            {
                return Err(wrong("assumptions apply to arrays and integers only"));
            }
            specialization.args[index] = match is_multiple {
                true if number > 0 && (number as u64).is_power_of_two() && number <= 1 << 20 => {
                    ArgSpec { divisible_by: number as u64, equal_to: None }
                }
                true => return Err(wrong("a multiple is of a power of two, at most 2²⁰")),
                false if memory => return Err(wrong("an array is not equal to a number")),
                false => ArgSpec { divisible_by: 1, equal_to: Some(number) },
            };
        }
    }
    Ok(specialization)
}
