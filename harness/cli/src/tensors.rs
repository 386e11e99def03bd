//! Reads and writes tensors in safetensors files, and copies them to and from devices.

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{KernelDef, ParamKind};
use tilewright_runtime::kernel::{KernelArg, MemoryMut};
use tilewright_runtime::{Buffer, Device, Element, F8E4M3, F8E5M2, LaunchArg};

use crate::unique_keys;
use crate::{CliError, Result};
use tilewright_runtime::escape::printable;

/// A dense, row-major tensor in host memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Little-endian elements.
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// Converts every element to f64, whatever its type.
    pub fn to_f64(&self) -> Vec<f64> {
        use tilewright_codegen::num;
        let width = self.dtype.bytes();
        let bits = self.bytes.chunks_exact(width).map(|chunk| {
            let mut word = [0; 8];
            word[..width].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        });
        match self.dtype {
            DType::Bool => bits.map(|b| f64::from(u8::from(b != 0))).collect(),
            dtype if dtype.is_float() => bits.map(|b| num::decode(dtype, b)).collect(),
            dtype => bits.map(|b| num::decode_int(dtype, b) as f64).collect(),
        }
    }

    /// Creates a tensor of `values`, rounded to the float type `dtype`.
    pub fn from_f64(dtype: DType, shape: &[usize], values: &[f64]) -> Tensor {
        use tilewright_codegen::num;
        let width = dtype.bytes();
        let bytes = values.iter().flat_map(|&x| num::encode(dtype, x).to_le_bytes().into_iter().take(width)).collect();
        Tensor { dtype, shape: shape.to_vec(), bytes }
    }

    /// Rounds the numbers to another float type.
    pub fn rounded(&self, dtype: DType) -> Tensor {
        Tensor::from_f64(dtype, &self.shape, &self.to_f64())
    }
}

/// Reads all tensors of a file, sorted by name.
///
/// # Errors
/// A file that cannot be read or is not a safetensors file, or a tensor of a type that kernels do not support.
pub fn read(path: &Path) -> Result<Vec<(String, Tensor)>> {
    let bytes = crate::files::read(path).map_err(|error| CliError::file("read", path, error))?;
    parse(&bytes).map_err(|message| CliError::file("use", path, message))
}

/// Parses the contents of a safetensors file. The tensors are sorted by name.
///
/// # Errors
/// Contents of another format, two tensors of the same name, or a tensor of a type that kernels do not support.
pub fn parse(bytes: &[u8]) -> Result<Vec<(String, Tensor)>, String> {
    if let Some(format) = other_format(bytes) {
        return Err(format!(
            "it is {format}, expected a safetensors file, as `safetensors.numpy.save_file` of Python writes"
        ));
    }
    let no_file =
        |reason: &dyn std::fmt::Display| format!("it is not a safetensors file: {}", printable(&reason.to_string()));
    let file = SafeTensors::deserialize(bytes).map_err(|error| no_file(&error))?;
    let header = bytes.split_first_chunk().map(|(len, rest)| &rest[..u64::from_le_bytes(*len) as usize]);
    unique_keys::check(header.unwrap_or_default())
        .map_err(|problem| no_file(&format!("its header is not valid JSON: {problem}")))?;
    let mut names = file.names();
    names.sort_unstable();
    names
        .into_iter()
        .map(|name| {
            let view = file.tensor(name).map_err(|error| error.to_string())?;
            let dtype = from_file(view.dtype()).ok_or_else(|| {
                format!("tensor `{}` has type {:?}, which kernels do not support", printable(name), view.dtype())
            })?;
            let tensor = Tensor { dtype, shape: view.shape().to_vec(), bytes: view.data().to_vec() };
            Ok((name.to_string(), tensor))
        })
        .collect()
}

/// The format of a file of arrays that is no safetensors file, by its first bytes.
fn other_format(bytes: &[u8]) -> Option<&'static str> {
    let formats: [(&[u8], &str); 3] = [
        (b"\x93NUMPY", "an array of NumPy (.npy)"),
        (b"PK\x03\x04", "a ZIP archive, as .npz and .pt files are"),
        (b"\x89HDF\r\n", "an HDF5 file"),
    ];
    formats.into_iter().find(|(first, _)| bytes.starts_with(first)).map(|(_, format)| format)
}

/// Returns the contents of a safetensors file with these tensors.
pub fn serialize(tensors: &[(String, Tensor)]) -> Result<Vec<u8>, String> {
    let mut views = Vec::new();
    for (name, tensor) in tensors {
        let view = TensorView::new(to_file(tensor.dtype), tensor.shape.clone(), &tensor.bytes);
        views.push((name.as_str(), view.map_err(|error| format!("tensor `{name}`: {error}"))?));
    }
    safetensors::serialize(views, None).map_err(|error| error.to_string())
}

/// Writes a safetensors file with these tensors.
///
/// # Errors
/// The file cannot be written.
pub fn write(path: &Path, tensors: &[(String, Tensor)]) -> Result<()> {
    let bytes = serialize(tensors).map_err(|error| CliError::file("write", path, error))?;
    crate::files::replace(path, |file| file.write_all(&bytes)).map_err(|error| CliError::file("write", path, error))
}

fn from_file(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::BOOL => DType::Bool,
        Dtype::I8 => DType::I8,
        Dtype::I16 => DType::I16,
        Dtype::I32 => DType::I32,
        Dtype::I64 => DType::I64,
        Dtype::U8 => DType::U8,
        Dtype::U16 => DType::U16,
        Dtype::U32 => DType::U32,
        Dtype::U64 => DType::U64,
        Dtype::F8_E4M3 => DType::F8E4M3,
        Dtype::F8_E5M2 => DType::F8E5M2,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::F32 => DType::F32,
        Dtype::F64 => DType::F64,
        // `Dtype` is non-exhaustive: it also has complex numbers and packed formats.
        _ => return None,
    })
}

fn to_file(dtype: DType) -> Dtype {
    match dtype {
        DType::Bool => Dtype::BOOL,
        DType::I8 => Dtype::I8,
        DType::I16 => Dtype::I16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::U8 => Dtype::U8,
        DType::U16 => Dtype::U16,
        DType::U32 => Dtype::U32,
        DType::U64 => Dtype::U64,
        DType::F8E4M3 => Dtype::F8_E4M3,
        DType::F8E5M2 => Dtype::F8_E5M2,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
    }
}

/// A tensor of any element type in the memory of a device.
pub trait OnDevice: MemoryMut {
    /// Copies the elements to the host.
    fn download(&self) -> tilewright_runtime::Result<Vec<u8>>;
}

impl<T: Element> OnDevice for Buffer<T> {
    fn download(&self) -> tilewright_runtime::Result<Vec<u8>> {
        Ok(T::as_bytes(&self.to_vec()?).to_vec())
    }
}

/// The initial contents of a tensor on a device.
#[derive(Clone, Copy, Debug)]
pub enum Contents<'a> {
    /// A copy of these bytes.
    Bytes(&'a [u8]),
    /// This many elements of all-ones bytes: NaN for float types; −1 or the largest number for integer types.
    Poison(usize),
}

/// Allocates a tensor in the memory of a device and fills it.
pub fn upload(device: &Device, dtype: DType, contents: Contents<'_>) -> tilewright_runtime::Result<Box<dyn OnDevice>> {
    match dtype {
        DType::Bool => typed::<bool>(device, contents),
        DType::I8 => typed::<i8>(device, contents),
        DType::I16 => typed::<i16>(device, contents),
        DType::I32 => typed::<i32>(device, contents),
        DType::I64 => typed::<i64>(device, contents),
        DType::U8 => typed::<u8>(device, contents),
        DType::U16 => typed::<u16>(device, contents),
        DType::U32 => typed::<u32>(device, contents),
        DType::U64 => typed::<u64>(device, contents),
        DType::F8E4M3 => typed::<F8E4M3>(device, contents),
        DType::F8E5M2 => typed::<F8E5M2>(device, contents),
        DType::F16 => typed::<f16>(device, contents),
        DType::BF16 => typed::<bf16>(device, contents),
        DType::F32 => typed::<f32>(device, contents),
        DType::F64 => typed::<f64>(device, contents),
    }
}

fn typed<T: Element>(device: &Device, contents: Contents<'_>) -> tilewright_runtime::Result<Box<dyn OnDevice>> {
    Ok(Box::new(match contents {
        Contents::Poison(len) => Buffer::<T>::poisoned(device, len)?,
        Contents::Bytes(bytes) => {
            let values = T::from_bytes(bytes.len() / size_of::<T>(), |memory| {
                memory.copy_from_slice(bytes);
                Ok(())
            })?;
            Buffer::from_slice(device, &values)?
        }
    }))
}

/// Returns the kernel's arguments in order, from memory and scalars by parameter name. A parameter without a value is
/// omitted, which the launch reports.
pub fn kernel_args<'a>(
    def: &KernelDef,
    memory: &mut BTreeMap<&str, &'a mut Box<dyn OnDevice>>,
    scalars: &BTreeMap<&str, LaunchArg>,
) -> Vec<KernelArg<'a>> {
    let mut args = Vec::new();
    for param in def.params {
        let arg = match param.kind {
            ParamKind::In(_) => memory.remove(param.name).map(|memory| KernelArg::In(&**memory)),
            ParamKind::Out(_) | ParamKind::InOut(_) => {
                memory.remove(param.name).map(|memory| KernelArg::Out(&mut **memory))
            }
            ParamKind::Scalar(_) => scalars.get(param.name).map(|value| KernelArg::Scalar(*value)),
            ParamKind::Constexpr { .. } => None,
        };
        args.extend(arg);
    }
    args
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_survives_file_and_device() {
        for dtype in DType::ALL {
            let width = dtype.bytes();
            let bytes: Vec<u8> = (0..6 * width).map(|i| if dtype == DType::Bool { 1 } else { i as u8 }).collect();
            let tensor = Tensor { dtype, shape: vec![2, 3], bytes };
            let named = vec![("t".to_string(), tensor.clone())];
            assert_eq!(parse(&serialize(&named).unwrap()).unwrap(), named);
            let uploaded = upload(&Device::cpu(), dtype, Contents::Bytes(&tensor.bytes)).unwrap();
            assert_eq!(uploaded.download().unwrap(), tensor.bytes, "{dtype}");
        }
    }

    #[test]
    fn numbers_become_f64_and_back() {
        let values = [1.0, -0.5, 3.0];
        for dtype in [DType::BF16, DType::F16, DType::F32, DType::F64] {
            assert_eq!(Tensor::from_f64(dtype, &[3], &values).to_f64(), values, "{dtype}");
        }
        let ints = Tensor { dtype: DType::I16, shape: vec![2], bytes: vec![0xff, 0xff, 2, 0] };
        assert_eq!(ints.to_f64(), [-1.0, 2.0]);
    }

    #[test]
    fn a_duplicate_name_is_an_escaped_error() {
        let one = r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#;
        let name = r"\u001b[2Jx";
        let header = format!(r#"{{"{name}":{one},"{name}":{one}}}"#);
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 4]].concat();
        let message = parse(&bytes).unwrap_err();
        assert!(message.contains("duplicate") && message.contains("[2Jx") && !message.contains('\u{1b}'), "{message}");
    }

    #[test]
    fn files_of_other_formats_are_named() {
        for (start, format) in
            [(&b"\x93NUMPY\x01\0v\0{'descr': '<f4'"[..], "(.npy)"), (b"PK\x03\x04\x14\0\0\0\0", ".npz")]
        {
            let message = parse(start).unwrap_err();
            assert!(message.contains(format) && message.contains("expected a safetensors file"), "{message}");
        }
    }

    #[test]
    fn damaged_files_are_errors() {
        let whole = serialize(&[("t".into(), Tensor::from_f64(DType::F32, &[4], &[0.0; 4]))]).unwrap();
        for len in 0..whole.len() {
            assert!(parse(&whole[..len]).is_err(), "{len} bytes of {}", whole.len());
        }
    }
}
