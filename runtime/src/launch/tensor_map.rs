//! Tensor maps: descriptors of tensors for the Tensor Memory Accelerator (TMA). The driver encodes them from the
//! launch's arguments.
//!
//! The rules are those of `cuTensorMapEncodeTiled` (CUDA Driver API, "Tensor Map Object Management"). They are checked
//! here first, because the driver reports every mistake as "invalid value".

use cudarc::driver::sys;
use sys::CUtensorMapDataType as Type;
use sys::CUtensorMapSwizzle as Swizzle;
use tilewright_codegen::target::{HostExpr, Manifest, TensorMapDesc};

use super::{LaunchArg, Slots};
use crate::error::{CudaFailure, Error, Result};

/// The encoded map, in the format of the kernel's parameter.
pub(super) type TensorMap = sys::CUtensorMap;

/// Maximum number of dimensions of a map.
const MAX_RANK: usize = 5;

/// All inputs of a map: equal keys encode to equal maps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Key {
    /// Index in the manifest.
    index: usize,
    base: u64,
    /// Extents, innermost first.
    shape: [u64; MAX_RANK],
    /// Strides in bytes of all dimensions except the innermost.
    strides: [u64; MAX_RANK - 1],
}

/// Maps of earlier launches: the same tensors tend to recur.
#[derive(Default)]
pub(super) struct TensorMaps {
    entries: Vec<(Key, TensorMap)>,
    next: usize,
}

/// Maximum number of cached maps.
const CACHED_MAPS: usize = 32;

impl TensorMaps {
    /// The map of description `index` of the manifest, for these arguments.
    pub(super) fn get(&mut self, manifest: &Manifest, index: usize, slots: &Slots, label: &str) -> Result<TensorMap> {
        let description = &manifest.tensor_maps[index];
        let key = checked_key(manifest, index, slots, label)?;
        if let Some((_, map)) = self.entries.iter().find(|(known, _)| *known == key) {
            return Ok(*map);
        }
        let map = encode(&key, description).map_err(|reason| tensor_map_error(manifest, index, label, reason))?;
        match self.entries.get_mut(self.next) {
            Some(oldest) => *oldest = (key, map),
            None => self.entries.push((key, map)),
        }
        self.next = (self.next + 1) % CACHED_MAPS;
        Ok(map)
    }
}

/// The inputs of the map of description `index` of the manifest, for these arguments.
fn checked_key(manifest: &Manifest, index: usize, slots: &Slots, label: &str) -> Result<Key> {
    let description = &manifest.tensor_maps[index];
    let evaluate = |expr: &HostExpr| match *expr {
        HostExpr::Const(value) => value,
        HostExpr::Arg(arg) => integer_of(manifest, arg, slots),
    };
    let key = key_of(index, description, slots[description.base], evaluate);
    key.map_err(|reason| tensor_map_error(manifest, index, label, reason))
}

/// The parameters of `cuTensorMapEncodeTiled` that depend on a launch's arguments, as launches encode them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorMapParameters {
    /// Index in the manifest of the argument that is the encoded map.
    pub arg: usize,
    /// `globalAddress`.
    pub base: u64,
    /// `globalDim`, innermost first.
    pub shape: Vec<u64>,
    /// `globalStrides` in bytes, of all dimensions except the innermost.
    pub strides: Vec<u64>,
}

/// The parameters of each tensor map of a launch, for programs that encode them on their own. `args` are the arguments
/// in the manifest's order, without the tensor maps.
///
/// # Errors
/// A wrong number of arguments, and a tensor that no tensor map can describe.
pub fn tensor_maps(manifest: &Manifest, args: &[LaunchArg]) -> Result<Vec<TensorMapParameters>> {
    let passed = super::check::passed_arguments(manifest);
    if args.len() != passed.len() {
        let kernel = manifest.kernel.clone();
        return Err(Error::ArgCount { kernel, expected: passed.len(), found: args.len() });
    }
    let mut slots = Slots::from_elem(0, manifest.args.len());
    passed.iter().zip(args).for_each(|(&index, arg)| slots[index] = arg.bits());
    let parameters = |index: usize| {
        let TensorMapDesc { arg, shape, .. } = &manifest.tensor_maps[index];
        let key = checked_key(manifest, index, &slots, &manifest.kernel)?;
        let (shape, strides) = (key.shape[..shape.len()].to_vec(), key.strides[..shape.len() - 1].to_vec());
        Ok(TensorMapParameters { arg: *arg, base: key.base, shape, strides })
    };
    (0..manifest.tensor_maps.len()).map(parameters).collect()
}

fn tensor_map_error(manifest: &Manifest, index: usize, label: &str, reason: String) -> Error {
    let tensor = manifest.args[manifest.tensor_maps[index].base].name.clone();
    Error::TensorMap { kernel: label.to_string(), tensor, reason }
}

/// Checks, without a driver, whether tensor maps can describe the kernel's tensors.
///
/// # Errors
/// Which tensor cannot be described, and why.
pub(super) fn check(manifest: &Manifest, slots: &Slots, label: &str) -> Result<()> {
    (0..manifest.tensor_maps.len()).try_for_each(|index| checked_key(manifest, index, slots, label).map(drop))
}

/// The value of an integer argument, sign-extended from its size.
fn integer_of(manifest: &Manifest, arg: usize, slots: &Slots) -> i64 {
    let shift = 64 - 8 * manifest.args[arg].ty.size().min(8);
    ((slots[arg] << shift) as i64) >> shift
}

/// The driver's name and size in bytes of a Tile IR element type.
fn element_type(name: &str) -> Option<(Type, u64)> {
    Some(match name {
        "bool" | "i8" | "u8" | "f8e4m3" | "f8e5m2" => (Type::CU_TENSOR_MAP_DATA_TYPE_UINT8, 1),
        "i16" | "u16" => (Type::CU_TENSOR_MAP_DATA_TYPE_UINT16, 2),
        "f16" => (Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2),
        "bf16" => (Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2),
        "i32" => (Type::CU_TENSOR_MAP_DATA_TYPE_INT32, 4),
        "u32" => (Type::CU_TENSOR_MAP_DATA_TYPE_UINT32, 4),
        "f32" => (Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4),
        "i64" => (Type::CU_TENSOR_MAP_DATA_TYPE_INT64, 8),
        "u64" => (Type::CU_TENSOR_MAP_DATA_TYPE_UINT64, 8),
        "f64" => (Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 8),
        _ => return None,
    })
}

/// Evaluates and checks the parts that depend on the launch.
fn key_of(
    index: usize,
    description: &TensorMapDesc,
    base: u64,
    evaluate: impl Fn(&HostExpr) -> i64,
) -> Result<Key, String> {
    let rank = description.shape.len();
    let Some((_, size)) = element_type(&description.elem) else {
        return Err(format!("elements of type {} are not supported", description.elem));
    };
    if !(1..=MAX_RANK).contains(&rank) || description.strides.len() != rank - 1 || description.block.len() != rank {
        return Err(format!("{rank} dimensions: a tensor map has 1 to {MAX_RANK}"));
    }
    if !base.is_multiple_of(16) || base == 0 {
        return Err(format!("its address {base:#x} is not a multiple of 16"));
    }
    let mut key = Key { index, base, shape: [1; MAX_RANK], strides: [0; MAX_RANK - 1] };
    for (axis, expr) in description.shape.iter().enumerate() {
        let extent = evaluate(expr);
        // The driver accepts 2^32, but the kernel's coordinates are i32.
        if !(1..=i64::from(i32::MAX)).contains(&extent) {
            return Err(format!("dimension {axis} (innermost is 0) has extent {extent}: it must be 1 to 2^31 - 1"));
        }
        key.shape[axis] = extent as u64;
    }
    for (axis, expr) in description.strides.iter().enumerate() {
        let stride = evaluate(expr) as i128 * size as i128;
        // The stride of a dimension with one element is never used, so any valid one works.
        let stride = if key.shape[axis + 1] == 1 { 16 } else { stride };
        if stride % 16 != 0 || !(0..1 << 40).contains(&stride) {
            return Err(format!(
                "dimension {} has a stride of {stride} bytes: it must be a multiple of 16 below 2^40",
                axis + 1
            ));
        }
        key.strides[axis] = stride as u64;
    }
    Ok(key)
}

fn encode(key: &Key, description: &TensorMapDesc) -> Result<TensorMap, String> {
    let rank = description.shape.len();
    let (ty, _) = element_type(&description.elem).ok_or("its element type is not supported")?;
    description.check().map_err(|reason| format!("internal compiler error: {reason}; please report this"))?;
    let swizzle = match description.swizzle_bytes {
        32 => Swizzle::CU_TENSOR_MAP_SWIZZLE_32B,
        64 => Swizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        128 => Swizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        _ => Swizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
    };
    let mut map = TensorMap { opaque: [0; 16] };
    let element_strides = [1_u32; MAX_RANK];
    // SAFETY: all arrays have `rank` entries (strides one less), `map` is valid for the write, and the base is only
    // recorded, not read.
    let outcome = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            ty,
            rank as u32,
            std::ptr::with_exposed_provenance_mut(key.base as usize),
            key.shape.as_ptr(),
            key.strides.as_ptr(),
            description.block.as_ptr(),
            element_strides.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    match outcome.result() {
        Ok(()) => Ok(map),
        Err(error) => Err(format!(
            "the driver rejects it ({}): shape {:?}, strides {:?} bytes, block {:?}",
            CudaFailure::from(error).code_name(),
            &key.shape[..rank],
            &key.strides[..rank - 1],
            description.block
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn description() -> TensorMapDesc {
        TensorMapDesc {
            arg: 3,
            base: 0,
            elem: "bf16".to_string(),
            shape: vec![HostExpr::Arg(1), HostExpr::Const(128)],
            strides: vec![HostExpr::Arg(2)],
            block: vec![64, 64],
            swizzle_bytes: 128,
        }
    }

    fn key(base: u64, columns: i64, stride: i64) -> Result<Key, String> {
        key_of(0, &description(), base, |expr| match expr {
            HostExpr::Const(value) => *value,
            HostExpr::Arg(1) => columns,
            HostExpr::Arg(_) => stride,
        })
    }

    #[test]
    fn strides_are_counted_in_bytes() {
        let key = key(0x1000, 100, 104).unwrap();
        assert_eq!((key.shape[..2].to_vec(), key.strides[0]), (vec![100, 128], 208));
    }

    #[test]
    fn every_rule_is_named() {
        for (result, part) in [
            (key(0x1008, 64, 64), "0x1008"),
            (key(0, 64, 64), "address"),
            (key(0x1000, 0, 64), "extent 0"),
            (key(0x1000, 64, 65), "130 bytes"),
            (key(0x1000, 64, -64), "-128 bytes"),
            (key(0x1000, 64, 1 << 40), "2^40"),
        ] {
            let message = result.unwrap_err();
            assert!(message.contains(part), "`{part}` is missing in: {message}");
        }
    }

    #[test]
    fn stride_of_a_single_row_is_ignored() {
        let mut description = description();
        description.shape[1] = HostExpr::Const(1);
        let key = key_of(0, &description, 0x1000, |_| 1).unwrap();
        assert_eq!(key.strides[0] % 16, 0);
    }

    #[test]
    fn blocks_respect_tma_limits() {
        let mut description = description();
        assert_eq!(description.check(), Ok(()));
        description.block = vec![128, 64];
        assert!(description.check().unwrap_err().contains("256 bytes"));
        description.block = vec![64, 257];
        assert!(description.check().unwrap_err().contains("257"));
        description = TensorMapDesc { swizzle_bytes: 256, ..self::description() };
        assert!(description.check().unwrap_err().contains("swizzle of 256"));
    }
}
