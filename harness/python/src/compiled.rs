//! `tilewright.Compiled`: code that was compiled ahead of time, with its manifest.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use pyo3::exceptions::{PyOSError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};
use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::kernel::{ConstValue, KernelDef};
use tilewright::codegen::target::{ArgType, Artifact, Code, CompileOptions, Manifest};
use tilewright::kernel::ir_dtype;
use tilewright::precompiled::{Access, Document, MemoryArg};
use tilewright::{CompiledKernel, LaunchArg};

use crate::array::Array;
use crate::call::{Error, shown, without_gil};
use crate::device::Place;
use crate::kernel::grid as parse_grid;
use crate::{ops, options};

/// Code that was compiled ahead of time, here or elsewhere, with its manifest.
#[pyclass(frozen, module = "tilewright")]
pub struct Compiled {
    artifact: Artifact,
    document: Document,
    loaded: Mutex<HashMap<Option<usize>, CompiledKernel>>,
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
        std::fs::read(path)
            .map_err(|error| PyOSError::new_err(format!("cannot read {}: {error}", shown(path.display()))))
    };
    let path = folder.join("manifest.json");
    let wrong = |reason: &str| PyValueError::new_err(format!("{}: {reason}", shown(path.display())));
    let text = String::from_utf8(read(&path)?).map_err(|_| wrong("it is not text"))?;
    let document = Document::from_json(&text).map_err(|error| wrong(&error.to_string()))?;
    // A manifest is read from its own folder only, and written to it by `save`.
    if let Some(name) = document.files.values().find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
        return Err(wrong(&format!("`{}` is not the name of a file in its folder", shown(name))));
    }
    let file = |kind: &str| document.files.get(kind).map(|name| folder.join(name));
    let bytes = match (file("ptx"), file("obj")) {
        (Some(path), _) | (None, Some(path)) => read(&path)?,
        (None, None) => return Err(wrong("it names no file with PTX or an object file")),
    };
    document.check_code(&bytes).map_err(|error| wrong(&error.to_string()))?;
    let code = match document.manifest.target.as_str() {
        "host" => Code::Object(bytes),
        _ => Code::Ptx(String::from_utf8(bytes).map_err(|_| wrong("its PTX is not text"))?),
    };
    Compiled::of(Artifact { manifest: document.manifest.clone(), code }, document).map_err(|reason| wrong(&reason))
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
        let document = Document::new(def, dtypes, constants, options, &artifact, &files);
        Compiled::of(artifact, document).map_err(PyValueError::new_err)
    }

    fn of(artifact: Artifact, document: Document) -> Result<Compiled, String> {
        let mut memory = artifact.manifest.args.iter().filter(|arg| arg.ty == ArgType::Ptr);
        match memory.find(|arg| !document.memory.contains_key(&arg.name)) {
            Some(arg) => Err(format!("it does not say how the kernel accesses `{}`", arg.name)),
            None => Ok(Compiled { artifact, document, loaded: Mutex::default() }),
        }
    }

    /// Arguments by position and name, in the manifest's order.
    fn bind<'py>(
        &self,
        positional: &Bound<'py, PyTuple>,
        named: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Vec<(&str, ArgType, Bound<'py, PyAny>)>> {
        let kernel = &self.artifact.manifest.kernel;
        let passed: Vec<_> = self.artifact.manifest.args.iter().filter(|arg| arg.ty.is_passed()).collect();
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
        ArgType::Ptr | ArgType::Clocks | ArgType::TensorMap => None,
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
        py.import("json")?.call_method1("loads", (self.document.to_json(),))
    }

    /// Writes the code and `manifest.json` to a folder, which is created if it does not exist.
    fn save(&self, folder: PathBuf) -> PyResult<()> {
        let failed = |path: &Path, error: std::io::Error| {
            PyOSError::new_err(format!("cannot write {}: {error}", shown(path.display())))
        };
        std::fs::create_dir_all(&folder).map_err(|error| failed(&folder, error))?;
        let (kind, default) = code_file(&self.artifact.manifest.kernel, &self.artifact.code);
        let name = self.document.files.get(kind).unwrap_or(&default);
        let text = self.document.to_json();
        let bytes = match &self.artifact.code {
            Code::Ptx(ptx) => ptx.as_bytes(),
            Code::Object(bytes) => bytes,
        };
        for (name, bytes) in [(name.as_str(), bytes), ("manifest.json", text.as_bytes())] {
            let path = folder.join(name);
            std::fs::write(&path, bytes).map_err(|error| failed(&path, error))?;
        }
        Ok(())
    }

    /// Launches the code. The launch is refused unless all accesses are proven to stay inside the arrays, by the
    /// manifest's footprint; with `unchecked=True` the caller guarantees it.
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
            let MemoryArg { access, elem: dtype } = self.document.memory[*name];
            if ir_dtype(array.dtype) != dtype {
                return Err(PyTypeError::new_err(format!(
                    "kernel `{kernel}`: `{name}` expects elements of type {dtype}, found {}",
                    array.dtype
                )));
            }
            arrays.push((*name, array, access != Access::In));
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
        if self.artifact.manifest.footprint.is_none() && !unchecked {
            return Err(Error::new_err(format!(
                "kernel `{kernel}`: its manifest has no access footprint, so its accesses cannot be checked\n  help: \
                 compile it again with this version, or pass unchecked=True if grid and arguments keep all accesses \
                 inside the arrays"
            )));
        }
        let place = arrays.first().map_or(Place::Cpu, |(_, array, _)| array.place);
        let key = match place {
            Place::Cpu => None,
            Place::Gpu(ordinal) => Some(ordinal),
        };
        without_gil(py, || {
            let extents = grid.checked(&kernel)?;
            let mut loaded = self.loaded.lock().unwrap_or_else(|e| e.into_inner());
            let code = match loaded.get(&key) {
                Some(code) => code.clone(),
                None => loaded.entry(key).or_insert(device.load(&self.artifact)?).clone(),
            };
            drop(loaded);
            if !unchecked {
                code.check(extents, &values)?;
            }
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
