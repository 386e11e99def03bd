//! Numbers, constants, element types and compiler options from Python objects.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyMapping, PyString};
use tilewright::LaunchArg;
use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::kernel::{ConstValue, KernelDef, ParamKind};
use tilewright::codegen::pipeline::{MAX_REGISTERS, NUM_CTAS};
use tilewright::codegen::target::CompileOptions;
use tilewright::kernel::ir_dtype;

use crate::array::DTYPES;
use crate::call::shown;

/// A number of the type `dtype` for the argument `name`.
///
/// # Errors
/// `TypeError` for an object that is no such number, `ValueError` for one out of range.
pub fn scalar(kernel: &str, name: &str, value: &Bound<'_, PyAny>, dtype: DType) -> PyResult<LaunchArg> {
    let wrong = || {
        let found = match value.is_instance_of::<PyInt>() {
            true => shown(value),
            false => value.get_type().name().map_or_else(|_| "an object".into(), |name| name.to_string()),
        };
        PyTypeError::new_err(format!("kernel `{kernel}`: `{name}` expects a number of type {dtype}, found {found}"))
    };
    if dtype.is_float() {
        let x: f64 = value.extract().map_err(|_| wrong())?;
        return Ok(match dtype {
            DType::F64 => LaunchArg::F64(x),
            DType::F32 => LaunchArg::F32(x as f32),
            DType::F16 => LaunchArg::I16(half::f16::from_f64(x).to_bits() as i16),
            DType::BF16 => LaunchArg::I16(half::bf16::from_f64(x).to_bits() as i16),
            _ => return Err(wrong()),
        });
    }
    let n: i128 = match value.extract::<i64>() {
        Ok(n) => n.into(),
        Err(error) if value.is_instance_of::<PyFloat>() => {
            return Err(if error.is_instance_of::<PyTypeError>(value.py()) { wrong() } else { error });
        }
        Err(_) => value.extract::<u64>().map_err(|_| wrong())?.into(),
    };
    let out_of_range =
        || PyValueError::new_err(format!("kernel `{kernel}`: `{name}` is of type {dtype}: {n} is out of range"));
    Ok(match dtype {
        DType::Bool => LaunchArg::I8(i8::from(value.is_truthy()?)),
        DType::I8 => LaunchArg::I8(n.try_into().map_err(|_| out_of_range())?),
        DType::U8 => LaunchArg::I8(u8::try_from(n).map_err(|_| out_of_range())? as i8),
        DType::I16 => LaunchArg::I16(n.try_into().map_err(|_| out_of_range())?),
        DType::U16 => LaunchArg::I16(u16::try_from(n).map_err(|_| out_of_range())? as i16),
        DType::I32 => LaunchArg::I32(n.try_into().map_err(|_| out_of_range())?),
        DType::U32 => LaunchArg::I32(u32::try_from(n).map_err(|_| out_of_range())? as i32),
        DType::I64 => LaunchArg::I64(n.try_into().map_err(|_| out_of_range())?),
        DType::U64 => LaunchArg::I64(u64::try_from(n).map_err(|_| out_of_range())? as i64),
        _ => return Err(wrong()),
    })
}

/// The value of the constant `name`: a number, a bool, or the name of a variant.
///
/// # Errors
/// `TypeError` for another object or a value of another type than the parameter's.
pub fn constant(def: &KernelDef, name: &str, ty: &str, value: &Bound<'_, PyAny>) -> PyResult<ConstValue> {
    let wrong = || {
        let found = value.repr().map_or_else(|_| "an object".into(), shown);
        PyTypeError::new_err(format!("kernel `{}`: the constant `{name}` ({ty}) cannot be {found}", def.name))
    };
    let constant = if value.is_instance_of::<PyBool>() {
        ConstValue::Bool(value.is_truthy()?)
    } else if let Ok(word) = value.cast::<PyString>() {
        ConstValue::Variant(word.to_string())
    } else if let Ok(n) = value.extract::<i64>() {
        ConstValue::Int(n)
    } else {
        ConstValue::Float(value.extract().map_err(|_| wrong())?)
    };
    let fits = match (ty, &constant) {
        ("usize" | "u64", ConstValue::Int(n)) => *n >= 0,
        ("u32", ConstValue::Int(n)) => u32::try_from(*n).is_ok(),
        ("i32", ConstValue::Int(n)) => i32::try_from(*n).is_ok(),
        ("i64", ConstValue::Int(_)) | ("f32" | "f64", ConstValue::Float(_) | ConstValue::Int(_)) => true,
        ("bool", ConstValue::Bool(_)) => true,
        ("usize" | "u64" | "u32" | "i32" | "i64" | "f32" | "f64" | "bool", _) => false,
        (_, constant) => matches!(constant, ConstValue::Variant(_)),
    };
    // Names of variants are short.
    let fits = fits && !matches!(&constant, ConstValue::Variant(word) if word.len() > 200);
    if fits { Ok(constant) } else { Err(wrong()) }
}

/// The element type with this name, as kernels write it (`bf16`) or as NumPy and PyTorch do (`torch.bfloat16`).
fn dtype_of(name: &str) -> Option<DType> {
    let name = name.trim_start_matches("<class 'numpy.").trim_end_matches("'>").trim_start_matches("torch.");
    let by_name = || DTYPES.iter().find(|(known, _)| *known == name).map(|(_, dtype)| ir_dtype(*dtype));
    DType::from_name(name).or_else(by_name)
}

/// The element types of the type parameters that `types` gives: a name for all, or a dict from parameter to name.
///
/// # Errors
/// `ValueError` for an unknown parameter or type, or a type that the parameter cannot be.
pub fn types(def: &KernelDef, types: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<Option<DType>>> {
    let mut chosen = vec![None; def.generics.len()];
    let mut set = |index: usize, name: &str| {
        let generic = &def.generics[index];
        let members = || generic.members().iter().map(|d| d.name()).collect::<Vec<_>>().join(", ");
        let dtype = dtype_of(name).filter(|dtype| generic.members().contains(dtype)).ok_or_else(|| {
            PyValueError::new_err(format!(
                "kernel `{}`: `{}` cannot be {}: expected one of {}",
                def.name,
                generic.name,
                shown(name),
                members()
            ))
        })?;
        chosen[index] = Some(dtype);
        PyResult::Ok(())
    };
    let Some(types) = types else { return Ok(chosen) };
    // A name, or a type of PyTorch or NumPy, whose text ends in its name.
    let Ok(types) = types.cast::<PyMapping>() else {
        let name = types.str()?;
        for index in 0..def.generics.len() {
            set(index, &name.to_string_lossy())?;
        }
        return Ok(chosen);
    };
    for item in types.items()?.iter() {
        let (parameter, name): (String, Bound<'_, PyAny>) = item.extract().map_err(|_| {
            PyTypeError::new_err(format!("types: expected names of type parameters, found {}", shown(item)))
        })?;
        let name = name.str()?.to_string_lossy().into_owned();
        let Some(index) = def.generics.iter().position(|generic| generic.name == parameter) else {
            let names: Vec<&str> = def.generics.iter().map(|generic| generic.name).collect();
            return Err(PyValueError::new_err(format!(
                "kernel `{}` has no type parameter `{}`: it has {}",
                def.name,
                shown(parameter),
                if names.is_empty() { "none".to_string() } else { names.join(", ") }
            )));
        };
        set(index, &name)?;
    }
    Ok(chosen)
}

/// All type parameters' element types.
///
/// # Errors
/// `ValueError` for a parameter without one.
pub fn complete_types(def: &KernelDef, chosen: Vec<Option<DType>>) -> PyResult<Vec<DType>> {
    let missing = |generic: &str| {
        PyValueError::new_err(format!(
            "kernel `{}`: the type parameter `{generic}` has no element type: pass types={{\"{generic}\": …}}",
            def.name
        ))
    };
    def.generics.iter().zip(chosen).map(|(generic, dtype)| dtype.ok_or_else(|| missing(generic.name))).collect()
}

/// Names of compiler options.
pub const OPTIONS: [&str; 12] = [
    "num_warps",
    "num_ctas",
    "num_stages",
    "max_registers",
    "asserts",
    "fp_fusion",
    "tma",
    "warp_specialize",
    "overlap",
    "pingpong",
    "wgmma_f32",
    "tma_stores",
];

/// The compiler options of the dict `given`.
///
/// # Errors
/// `ValueError` for an unknown option or a value that no GPU supports.
pub fn compile_options(given: Option<&Bound<'_, PyDict>>) -> PyResult<CompileOptions> {
    let mut options = CompileOptions::default();
    for (name, value) in given.into_iter().flat_map(|given| given.iter()) {
        let name: String = name.extract()?;
        let wrong = |expected: &str| {
            PyValueError::new_err(format!("options: `{}` is {}: expected {expected}", shown(&name), shown(&value)))
        };
        let number = |expected: &str| value.extract::<u32>().map_err(|_| wrong(expected));
        let choice = || value.extract::<Option<bool>>().map_err(|_| wrong("True, False or None"));
        match name.as_str() {
            "num_warps" => {
                let expected = "1, 2, 4, 8, 16 or 32";
                options.num_warps = number(expected)?;
                if !options.num_warps.is_power_of_two() || options.num_warps > 32 {
                    return Err(wrong(expected));
                }
            }
            "num_ctas" => {
                let expected = "1, 2, 4 or 8";
                options.num_ctas = number(expected)?;
                if !NUM_CTAS.contains(&options.num_ctas) {
                    return Err(wrong(expected));
                }
            }
            "num_stages" => {
                options.num_stages = number("1 to 16")?;
                if !(1..=16).contains(&options.num_stages) {
                    return Err(wrong("1 to 16"));
                }
            }
            "max_registers" => {
                let expected = "24 to 255, or None";
                options.max_registers = value.extract().map_err(|_| wrong(expected))?;
                if options.max_registers.is_some_and(|n| !MAX_REGISTERS.contains(&n)) {
                    return Err(wrong(expected));
                }
            }
            "asserts" => options.debug_asserts = value.extract().map_err(|_| wrong("True or False"))?,
            "fp_fusion" => options.fp_fusion = value.extract().map_err(|_| wrong("True or False"))?,
            "tma" => options.schedule.tma = choice()?,
            "warp_specialize" => options.schedule.warp_specialize = choice()?,
            "overlap" => options.schedule.overlap = choice()?,
            "pingpong" => options.schedule.pingpong = choice()?,
            "wgmma_f32" => options.schedule.wgmma_f32 = choice()?,
            "tma_stores" => options.schedule.tma_stores = choice()?,
            _ => {
                let (name, all) = (shown(name), OPTIONS.join(", "));
                return Err(PyValueError::new_err(format!("options: there is no option `{name}`: there are {all}")));
            }
        }
    }
    Ok(options)
}

/// The constants among `named`, in the order of the parameters; those given are removed from `named`.
///
/// # Errors
/// `TypeError` for a value of another type.
pub fn constants<'py>(
    def: &'static KernelDef,
    named: &Bound<'py, PyDict>,
) -> PyResult<Vec<(&'static str, ConstValue)>> {
    let mut constants = Vec::new();
    for param in def.params {
        let ParamKind::Constexpr { ty, .. } = param.kind else { continue };
        if let Some(value) = named.get_item(param.name)? {
            constants.push((param.name, constant(def, param.name, ty, &value)?));
            named.del_item(param.name)?;
        }
    }
    Ok(constants)
}
