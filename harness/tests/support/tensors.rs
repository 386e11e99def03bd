//! Reads the tensor bytes of a file.

use std::path::Path;

/// All tensors of a safetensors file as bytes: everything after the header, which also has the run's settings.
pub fn tensors(path: &Path) -> Vec<u8> {
    let mut bytes = std::fs::read(path).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes.split_off(8 + header)
}
