//! Safetensors files with checksums, written from memory and read tensor by tensor.
//!
//! A file has the standard safetensors layout: length of the header (u64, little-endian), header (JSON), tensors. Its
//! metadata, a map of strings, has two entries in addition to the caller's:
//!
//! | entry | content |
//! |---|---|
//! | `checksums` | a JSON object: the BLAKE3 hash of each tensor's bytes, in hexadecimal, by the tensor's name |
//! | `header_blake3` | the BLAKE3 hash of everything before the tensors, computed with zeros as these 64 digits |
//!
//! [`TensorFile::open`] reads and verifies the header; [`TensorFile::read`] reads and verifies one tensor. Files are
//! not memory-mapped: a file that another process modifies or truncates gives an error. Of files without checksums only
//! the structure is verified.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rayon::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::json;
use tilewright_cli::unique_keys;

use crate::escape::printable;

/// Maximum length of a header; the limit of the `safetensors` library.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const CHECKSUMS: &str = "checksums";
/// The text before the digits of the header's hash. Its quotes would be escaped inside of a JSON string.
const HEADER_KEY: &str = "\"header_blake3\":\"";
const HASH_DIGITS: usize = 64;

/// A tensor to be written: f32, row-major.
pub struct Entry<'a> {
    pub name: String,
    pub shape: Vec<usize>,
    pub values: &'a [f32],
}

/// Writes a file with these tensors. The hashes are computed on all cores, before the first write.
///
/// # Errors
/// Errors of `file`.
pub fn write(file: &mut dyn Write, metadata: &BTreeMap<&str, String>, entries: &[Entry<'_>]) -> io::Result<()> {
    let checksums: BTreeMap<&str, String> =
        entries.par_iter().map(|entry| (entry.name.as_str(), checksum(&bytes_of(entry.values)))).collect();
    let mut metadata = metadata.clone();
    metadata.insert(CHECKSUMS, serde_json::to_string(&checksums)?);
    metadata.insert("header_blake3", "0".repeat(HASH_DIGITS));
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".to_string(), json!(metadata));
    let mut end = 0;
    for entry in entries {
        let start = end;
        end += size_of_val(entry.values);
        let info = json!({ "dtype": "F32", "shape": entry.shape, "data_offsets": [start, end] });
        header.insert(entry.name.clone(), info);
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut start = [&(header.len() as u64).to_le_bytes(), header.as_slice()].concat();
    let digits = digits_of_header(&start).ok_or_else(|| io::Error::other("its header has no place for a hash"))?;
    let hash = checksum(&start);
    start[digits..digits + HASH_DIGITS].copy_from_slice(hash.as_bytes());
    file.write_all(&start)?;
    entries.iter().try_for_each(|entry| file.write_all(&bytes_of(entry.values)))
}

/// The little-endian bytes of `values`.
fn bytes_of(values: &[f32]) -> std::borrow::Cow<'_, [u8]> {
    match cfg!(target_endian = "little") {
        true => bytemuck::cast_slice(values).into(),
        false => values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into(),
    }
}

/// The BLAKE3 hash of `bytes` in hexadecimal.
pub fn checksum(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// Offset of the digits of the header's hash, if it is unique.
fn digits_of_header(start: &[u8]) -> Option<usize> {
    let mut places = start.windows(HEADER_KEY.len()).enumerate().filter(|(_, part)| *part == HEADER_KEY.as_bytes());
    let place = places.next()?.0 + HEADER_KEY.len();
    (places.next().is_none() && start.len() >= place + HASH_DIGITS).then_some(place)
}

/// Why a file cannot be used.
#[derive(Debug)]
pub enum TensorFileError {
    /// An error of the file system.
    File(io::Error),
    /// Invalid contents; the reason may contain text of the file.
    Damaged(String),
}

impl fmt::Display for TensorFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TensorFileError::File(error) => error.fmt(f),
            TensorFileError::Damaged(reason) => f.write_str(&printable(reason)),
        }
    }
}

/// An open file with a verified header.
pub struct TensorFile {
    file: File,
    /// Offset of the tensors.
    start: u64,
    metadata: Metadata,
    /// The hashes of the tensors, if the file has them.
    checksums: Option<HashMap<String, String>>,
    /// The hash of the header, if the file has one.
    hash: Option<String>,
}

impl TensorFile {
    /// Opens a file, and verifies its length and its header.
    ///
    /// # Errors
    /// A file that cannot be read, is truncated, has a duplicate name or a wrong hash in its header, or has another
    /// format.
    pub fn open(path: &Path) -> Result<TensorFile, TensorFileError> {
        let file = crate::files::open_regular(path).map_err(TensorFileError::File)?;
        let found = file.metadata().map_err(TensorFileError::File)?.len();
        let mut length = [0; 8];
        if found < 8 {
            return Err(truncated(8, found));
        }
        read_at(&file, &mut length, 0)?;
        let header_len = u64::from_le_bytes(length);
        if header_len > MAX_HEADER_BYTES {
            return Err(TensorFileError::Damaged(format!(
                "it is not a safetensors file: its header would have {header_len} bytes, expected at most {MAX_HEADER_BYTES}"
            )));
        }
        let start = 8 + header_len;
        if found < start {
            return Err(truncated(start, found));
        }
        let mut bytes = vec![0; start as usize];
        read_at(&file, &mut bytes, 0)?;
        let header = &bytes[8..];
        check_unique_keys(header)?;
        let damaged = |error: serde_json::Error| TensorFileError::Damaged(format!("its header is damaged: {error}"));
        let metadata: Metadata = serde_json::from_slice(header).map_err(damaged)?;
        let expected = start + metadata.data_len() as u64;
        if found < expected {
            return Err(truncated(expected, found));
        }
        if found > expected {
            return Err(TensorFileError::Damaged(format!("expected {expected} bytes, found {found}")));
        }
        let text = metadata.metadata().as_ref().and_then(|metadata| metadata.get(CHECKSUMS));
        let checksums = text.map(|text| serde_json::from_str(text)).transpose().map_err(damaged)?;
        let file = TensorFile { file, start, metadata, checksums, hash: None };
        Ok(TensorFile { hash: file.verified_header(&mut bytes)?, ..file })
    }

    /// Verifies and returns the hash of the header, if there is one.
    fn verified_header(&self, bytes: &mut [u8]) -> Result<Option<String>, TensorFileError> {
        if self.checksums.is_none() && self.text("header_blake3").is_none() {
            return Ok(None);
        }
        let place = digits_of_header(bytes)
            .ok_or_else(|| TensorFileError::Damaged("its header does not contain its own hash".into()))?;
        let stated = String::from_utf8_lossy(&bytes[place..place + HASH_DIGITS]).into_owned();
        bytes[place..place + HASH_DIGITS].fill(b'0');
        let found = checksum(bytes);
        match stated == found {
            true => Ok(Some(stated)),
            false => Err(TensorFileError::Damaged(format!(
                "its header was changed: expected the BLAKE3 hash {stated}, found {found}"
            ))),
        }
    }

    /// The hash of the header, which contains the hashes of all tensors; `None` for files without checksums.
    pub fn hash(&self) -> Option<&str> {
        self.hash.as_deref()
    }

    /// An entry of the metadata.
    pub fn text(&self, name: &str) -> Option<&String> {
        self.metadata.metadata().as_ref()?.get(name)
    }

    /// The names of all tensors, in file order.
    pub fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.metadata.info(name)
    }

    /// Total bytes of all tensors.
    pub fn data_len(&self) -> usize {
        self.metadata.data_len()
    }

    /// Reads an f32 tensor and verifies its hash.
    ///
    /// # Errors
    /// No such tensor, one of another type, a wrong hash, a file that was truncated after it was opened; no memory.
    pub fn read(&self, name: &str) -> Result<Vec<f32>, TensorFileError> {
        let shown = printable(name);
        let info = self.info(name).ok_or_else(|| TensorFileError::Damaged(format!("it has no tensor `{shown}`")))?;
        if info.dtype != Dtype::F32 {
            return Err(TensorFileError::Damaged(format!("the tensor `{shown}` is {:?}, expected F32", info.dtype)));
        }
        let (start, end) = info.data_offsets;
        let mut values = Vec::new();
        values.try_reserve_exact((end - start) / size_of::<f32>()).map_err(|_| {
            TensorFileError::File(io::Error::new(
                io::ErrorKind::OutOfMemory,
                format!("no memory for the tensor `{shown}`"),
            ))
        })?;
        values.resize((end - start) / size_of::<f32>(), 0.0_f32);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        read_at(&self.file, bytes, self.start + start as u64)?;
        if let Some(checksums) = &self.checksums {
            let stated = checksums.get(name).map_or("none", String::as_str);
            let found = checksum(bytes);
            if stated != found {
                return Err(TensorFileError::Damaged(format!(
                    "the tensor `{shown}` is damaged: expected the BLAKE3 hash {stated}, found {found}"
                )));
            }
        }
        if cfg!(target_endian = "big") {
            values.iter_mut().for_each(|value| *value = f32::from_bits(value.to_bits().swap_bytes()));
        }
        Ok(values)
    }
}

fn truncated(expected: u64, found: u64) -> TensorFileError {
    TensorFileError::Damaged(format!("it is truncated: expected {expected} bytes, found {found}"))
}

fn read_at(file: &File, bytes: &mut [u8], place: u64) -> Result<(), TensorFileError> {
    file.read_exact_at(bytes, place).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => TensorFileError::Damaged("it was truncated while it was read".to_string()),
        _ => TensorFileError::File(error),
    })
}

/// Fails for a safetensors header with a duplicate name: readers differ in which of the two they use.
///
/// # Errors
/// The first duplicate name; invalid JSON.
pub fn check_unique_keys(header: &[u8]) -> Result<(), TensorFileError> {
    unique_keys::check(header)
        .map_err(|error| TensorFileError::Damaged(format!("its header is not valid JSON: {error}")))
}
