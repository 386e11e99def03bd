//! `tilewright.Compiled`: code that was compiled ahead of time, with its manifest.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use pyo3::exceptions::{PyOSError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use serde_json::Value;
use tilewright::codegen::analysis::bounds::Footprint;
use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::kernel::{ConstValue, KernelDef};
use tilewright::codegen::target::{ArgType, Artifact, Code, CompileOptions, Manifest};
use tilewright::kernel::{check_bounds, footprint, ir_dtype};
use tilewright::kernels::KERNELS;
use tilewright::manifest::{Compilation, FORMAT};
use tilewright::{CompiledKernel, LaunchArg};

use crate::array::Array;
use crate::call::{Error, without_gil};
use crate::device::Place;
use crate::kernel::grid as parse_grid;
use crate::{ops, options};

/// Code that was compiled ahead of time, here or elsewhere, with its manifest.
#[pyclass(frozen, module = "tilewright")]
pub struct Compiled {
    artifact: Artifact,
    /// The manifest's text.
    text: String,
    /// Element type of each memory argument, and whether the kernel writes it.
    memory: BTreeMap<String, (DType, bool)>,
    /// The kernel that the code was compiled from, if this package ships it.
    origin: Option<Origin>,
    loaded: Mutex<HashMap<Option<usize>, CompiledKernel>>,
}

struct Origin {
    def: &'static KernelDef,
    dtypes: Vec<DType>,
    constants: Vec<(String, ConstValue)>,
    footprint: OnceLock<Footprint>,
}

/// Kind and name of the file with the code.
fn code_file(kernel: &str, code: &Code) -> (&'static str, String) {
    match code {
        Code::Ptx(_) => ("ptx", format!("{kernel}.ptx")),
        Code::Object(_) => ("obj", format!("{kernel}.o")),
    }
}

/// Loads the code that `tilewright compile` or `Compiled.save` wrote to a folder.
#[pyfunction]
pub fn load(folder: PathBuf) -> PyResult<Compiled> {
    let read = |path: &Path| {
        std::fs::read(path).map_err(|error| PyOSError::new_err(format!("cannot read {}: {error}", path.display())))
    };
    let path = folder.join("manifest.json");
    let wrong = |reason: &str| PyValueError::new_err(format!("{}: {reason}", path.display()));
    let text = String::from_utf8(read(&path)?).map_err(|_| wrong("it is not text"))?;
    let document: Value = serde_json::from_str(&text).map_err(|error| wrong(&format!("it is not JSON: {error}")))?;
    if document["format"] != FORMAT {
        return Err(wrong(&format!("its format is {}: expected {FORMAT}", document["format"])));
    }
    let manifest: Manifest =
        serde_json::from_value(document.clone()).map_err(|error| wrong(&format!("it is no manifest: {error}")))?;
    let file = |kind: &str| document["files"][kind].as_str().map(|name| folder.join(name));
    let code = match (file("ptx"), file("obj")) {
        (Some(path), _) => Code::Ptx(String::from_utf8(read(&path)?).map_err(|_| wrong("its PTX is not text"))?),
        (None, Some(path)) => Code::Object(read(&path)?),
        (None, None) => return Err(wrong("it names no file with PTX or an object file")),
    };
    let mut compiled = Compiled::from_manifest(Artifact { manifest, code }, text, &document).map_err(|e| wrong(&e))?;
    compiled.origin = Origin::of(&document);
    Ok(compiled)
}

impl Origin {
    /// The shipped kernel that a manifest names, with its types and constants.
    fn of(document: &Value) -> Option<Origin> {
        let def = KERNELS.iter().copied().find(|def| Some(def.name) == document["kernel"].as_str())?;
        let dtype = |name: &str| DType::from_name(document["types"][name].as_str()?);
        let dtypes = def.generics.iter().map(|generic| dtype(generic.name)).collect::<Option<Vec<_>>>()?;
        let constant = |value: &Value| {
            Some(match value {
                Value::Bool(b) => ConstValue::Bool(*b),
                Value::Number(n) => {
                    n.as_i64().map_or_else(|| n.as_f64().map(ConstValue::Float), |n| Some(ConstValue::Int(n)))?
                }
                Value::String(word) => ConstValue::Variant(word.clone()),
                _ => return None,
            })
        };
        let constants = document["constants"].as_object()?.iter();
        let constants = constants.map(|(name, value)| Some((name.clone(), constant(value)?))).collect::<Option<_>>()?;
        Some(Origin { def, dtypes, constants, footprint: OnceLock::new() })
    }

    fn footprint(&self) -> tilewright::Result<&Footprint> {
        if let Some(known) = self.footprint.get() {
            return Ok(known);
        }
        let constants: Vec<(&str, ConstValue)> =
            self.constants.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        let made = footprint(self.def, &self.dtypes, &constants)?;
        Ok(self.footprint.get_or_init(|| made))
    }
}

impl Compiled {
    pub fn new(
        def: &'static KernelDef,
        artifact: Artifact,
        dtypes: &[DType],
        constants: &[(&'static str, ConstValue)],
        options: &CompileOptions,
    ) -> PyResult<Compiled> {
        let files = [code_file(def.name, &artifact.code)];
        let text = Compilation { def, dtypes, constants, options }.manifest(&artifact, &files);
        let document: Value = serde_json::from_str(&text).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let mut compiled = Compiled::from_manifest(artifact, text, &document).map_err(PyValueError::new_err)?;
        compiled.origin = Origin::of(&document);
        Ok(compiled)
    }

    fn from_manifest(artifact: Artifact, text: String, document: &Value) -> Result<Compiled, String> {
        let mut memory = BTreeMap::new();
        for arg in artifact.manifest.args.iter().filter(|arg| arg.ty == ArgType::Ptr) {
            let entry = &document["memory"][&arg.name];
            let dtype = entry["type"].as_str().and_then(DType::from_name);
            match (dtype, entry["access"].as_str()) {
                (Some(dtype), Some(access @ ("in" | "out" | "inout"))) => {
                    memory.insert(arg.name.clone(), (dtype, access != "in"))
                }
                _ => return Err(format!("it does not say how the kernel accesses `{}`", arg.name)),
            };
        }
        Ok(Compiled { artifact, text, memory, origin: None, loaded: Mutex::default() })
    }

    /// Arguments by position and name, in the manifest's order.
    fn bind<'py>(
        &self,
        positional: &Bound<'py, PyTuple>,
        named: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Vec<(&str, ArgType, Bound<'py, PyAny>)>> {
        let kernel = &self.artifact.manifest.kernel;
        let passed: Vec<_> = self.artifact.manifest.args.iter().filter(|arg| arg.ty != ArgType::TensorMap).collect();
        let mut used = positional.len();
        let mut bound = Vec::new();
        for (index, arg) in passed.iter().enumerate() {
            let by_name = named.map(|named| named.get_item(&arg.name)).transpose()?.flatten();
            used += usize::from(by_name.is_some());
            let value = match (positional.get_item(index).ok(), by_name) {
                (Some(value), None) | (None, Some(value)) => value,
                (Some(_), Some(_)) => {
                    return Err(PyTypeError::new_err(format!("kernel `{kernel}`: `{}` is given twice", arg.name)));
                }
                (None, None) => {
                    return Err(PyTypeError::new_err(format!("kernel `{kernel}`: `{}` is missing", arg.name)));
                }
            };
            bound.push((arg.name.as_str(), arg.ty, value));
        }
        let given = positional.len() + named.map_or(0, |named| named.len());
        if used != given || positional.len() > passed.len() {
            let names: Vec<&str> = passed.iter().map(|arg| arg.name.as_str()).collect();
            return Err(PyTypeError::new_err(format!(
                "kernel `{kernel}` takes {}: found {given} arguments",
                names.join(", ")
            )));
        }
        Ok(bound)
    }
}

/// The type of a number in a manifest; f16 and bf16 are passed as the i16 with their bits.
fn number_type(ty: ArgType) -> Option<DType> {
    match ty {
        ArgType::I8 => Some(DType::I8),
        ArgType::I16 => Some(DType::I16),
        ArgType::I32 => Some(DType::I32),
        ArgType::I64 => Some(DType::I64),
        ArgType::F32 => Some(DType::F32),
        ArgType::F64 => Some(DType::F64),
        ArgType::Ptr | ArgType::TensorMap => None,
    }
}

#[pymethods]
impl Compiled {
    /// The PTX; None for code of the CPU.
    #[getter]
    fn ptx(&self) -> Option<&str> {
        match &self.artifact.code {
            Code::Ptx(ptx) => Some(ptx),
            Code::Object(_) => None,
        }
    }

    /// The object file; None for code of a GPU.
    #[getter]
    fn object<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        match &self.artifact.code {
            Code::Ptx(_) => None,
            Code::Object(bytes) => Some(PyBytes::new(py, bytes)),
        }
    }

    /// The manifest: entry, arguments, threads, shared memory, tensor maps.
    #[getter]
    fn manifest<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("json")?.call_method1("loads", (&self.text,))
    }

    /// Writes the code and `manifest.json` to a folder, which is created if it does not exist.
    fn save(&self, folder: PathBuf) -> PyResult<()> {
        let failed = |path: &Path, error: std::io::Error| {
            PyOSError::new_err(format!("cannot write {}: {error}", path.display()))
        };
        std::fs::create_dir_all(&folder).map_err(|error| failed(&folder, error))?;
        let document: Value =
            serde_json::from_str(&self.text).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let (kind, default) = code_file(&self.artifact.manifest.kernel, &self.artifact.code);
        let name = document["files"][kind].as_str().unwrap_or(&default);
        let bytes = match &self.artifact.code {
            Code::Ptx(ptx) => ptx.as_bytes(),
            Code::Object(bytes) => bytes,
        };
        for (name, bytes) in [(name, bytes), ("manifest.json", self.text.as_bytes())] {
            let path = folder.join(name);
            std::fs::write(&path, bytes).map_err(|error| failed(&path, error))?;
        }
        Ok(())
    }

    /// Launches the code. If this package ships the kernel, the launch is refused unless all accesses are proven to
    /// stay inside the arrays; code of other kernels needs `unchecked=True`, by which the caller guarantees it.
    #[pyo3(signature = (*args, grid, stream=None, unchecked=false, **named))]
    fn __call__(
        &self,
        py: Python<'_>,
        args: &Bound<'_, PyTuple>,
        grid: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
        unchecked: bool,
        named: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<()> {
        let kernel = self.artifact.manifest.kernel.as_str();
        let bound = self.bind(args, named)?;
        let mut arrays = Vec::new();
        for (name, _, value) in bound.iter().filter(|(_, ty, _)| *ty == ArgType::Ptr) {
            let array = Array::new(name, value)?;
            let (dtype, writes) = self.memory[*name];
            if ir_dtype(array.dtype) != dtype {
                return Err(PyTypeError::new_err(format!(
                    "kernel `{kernel}`: `{name}` expects elements of type {dtype}, found {}",
                    array.dtype
                )));
            }
            arrays.push((*name, array, writes));
        }
        let of = |wanted: bool| {
            arrays.iter().filter(move |(.., writes)| *writes == wanted).map(|(name, array, _)| (*name, array))
        };
        let (inputs, outputs): (Vec<_>, Vec<_>) = (of(false).collect(), of(true).collect());
        let device = ops::prepare(py, kernel, &inputs, &outputs, stream)?;
        let mut memory = arrays.iter().map(|(_, array, _)| LaunchArg::Ptr {
            addr: array.address,
            bytes: (array.span() * array.dtype.size()) as u64,
        });
        let mut values = Vec::with_capacity(bound.len());
        for (name, ty, value) in &bound {
            values.extend(match number_type(*ty) {
                Some(dtype) => Some(options::scalar(kernel, name, value, dtype)?),
                None => memory.next(),
            });
        }
        let grid = parse_grid(grid)?;
        if self.origin.is_none() && !unchecked {
            return Err(Error::new_err(format!(
                "kernel `{kernel}` is not one of this package's: its accesses cannot be checked\n  help: pass \
                 unchecked=True if grid and arguments keep all accesses inside the arrays"
            )));
        }
        let place = arrays.first().map_or(Place::Cpu, |(_, array, _)| array.place);
        let key = match place {
            Place::Cpu => None,
            Place::Gpu(ordinal) => Some(ordinal),
        };
        without_gil(py, || {
            let extents = match &self.origin {
                Some(origin) if !unchecked => check_bounds(origin.def, origin.footprint()?, grid, &values)?,
                _ => grid.checked(&kernel)?,
            };
            let mut loaded = self.loaded.lock().unwrap_or_else(|e| e.into_inner());
            let code = match loaded.get(&key) {
                Some(code) => code.clone(),
                None => loaded.entry(key).or_insert(device.load(&self.artifact)?).clone(),
            };
            drop(loaded);
            // SAFETY: the arrays are alive, of this device, and none that is written overlaps another; accesses are in
            // bounds as checked above, or as the caller guarantees.
            unsafe { code.launch_on(&device.stream(), extents, &values) }
        })?;
        outputs.iter().try_for_each(|(_, array)| ops::mark_written(py, array))
    }

    fn __repr__(&self) -> String {
        let Manifest { kernel, target, .. } = &self.artifact.manifest;
        format!("tilewright.Compiled({kernel} for {target})")
    }
}
