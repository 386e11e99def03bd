//! The bytes of a file of tensors.

use std::path::Path;

/// All tensors of a file in the safetensors format, one behind the other: what is behind the header, which also says how a run was started.
pub fn tensors(path: &Path) -> Vec<u8> {
    let mut bytes = std::fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes.split_off(8 + header)
}
