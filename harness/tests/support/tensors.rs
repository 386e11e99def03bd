//! Reads the tensor data of safetensors files.

use std::path::Path;

/// Returns the data of all tensors of a safetensors file, without the header, which also contains the options of the
/// run.
pub fn tensors(path: &Path) -> Vec<u8> {
    let mut bytes = std::fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes.split_off(8 + header)
}
