//! Safetensors files with checksums, written from memory and read tensor by tensor.
//!
//! A file is what every reader of safetensors knows: the length of the header (u64, little-endian), the header (JSON),
//! the tensors. Its metadata, text by name, has two entries more than its writer gave it:
//!
//! | entry | what |
//! |---|---|
//! | `checksums` | a JSON object: the BLAKE3 hash of each tensor's bytes, as hexadecimal digits, by the tensor's name |
//! | `header_blake3` | the BLAKE3 hash of everything before the tensors, with zeros in the place of these 64 digits |
//!
//! [`TensorFile::open`] reads and verifies the header; [`TensorFile::read`] reads and verifies one tensor. Nothing is
//! mapped into memory: a file that another process changes or cuts short meanwhile gives an error. Files without
//! checksums are read too, and only their structure is verified.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rayon::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::json;

use crate::escape::printable;

/// Longest header, as the `safetensors` library has it.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const CHECKSUMS: &str = "checksums";
/// What stands before the digits of the header's hash. Inside of a JSON string its quotes would be escaped.
const HEADER_KEY: &str = "\"header_blake3\":\"";
const HASH_DIGITS: usize = 64;

/// A tensor to be written: f32, row-major.
pub struct Entry<'a> {
    pub name: String,
    pub shape: Vec<usize>,
    pub values: &'a [f32],
}

/// Writes a file of these tensors. The hashes are computed on all cores, before anything is written.
///
/// # Errors
/// Those of `file`.
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

/// The BLAKE3 hash of `bytes` as hexadecimal digits.
pub fn checksum(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}

/// Where the digits of the header's hash are, if there is one such place.
fn digits_of_header(start: &[u8]) -> Option<usize> {
    let mut places = start.windows(HEADER_KEY.len()).enumerate().filter(|(_, part)| *part == HEADER_KEY.as_bytes());
    let place = places.next()?.0 + HEADER_KEY.len();
    (places.next().is_none() && start.len() >= place + HASH_DIGITS).then_some(place)
}

/// Why a file cannot be used.
#[derive(Debug)]
pub enum TensorFileError {
    /// The file system's.
    File(io::Error),
    /// The contents', in words that may come from the file.
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

/// An open file whose header was verified.
pub struct TensorFile {
    file: File,
    /// Where the tensors begin.
    start: u64,
    metadata: Metadata,
    /// The hashes of the tensors, in files that have them.
    checksums: Option<HashMap<String, String>>,
    /// The hash of the header, in files that have one.
    hash: Option<String>,
}

impl TensorFile {
    /// Opens a file, and verifies its length and its header.
    ///
    /// # Errors
    /// A file that cannot be read, is cut short, has a name twice in its header, has a header that was changed, or is
    /// something else.
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
                "it does not begin as a safetensors file does: its header would have {header_len} bytes, expected at most {MAX_HEADER_BYTES}"
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

    /// The hash of the header, if there is one.
    fn verified_header(&self, bytes: &mut [u8]) -> Result<Option<String>, TensorFileError> {
        if self.checksums.is_none() && self.text("header_blake3").is_none() {
            return Ok(None);
        }
        let place = digits_of_header(bytes)
            .ok_or_else(|| TensorFileError::Damaged("its header has no hash of itself".into()))?;
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

    /// The hash of the header, which has the hashes of all tensors in it; none in files without checksums.
    pub fn hash(&self) -> Option<&str> {
        self.hash.as_deref()
    }

    /// An entry of the metadata.
    pub fn text(&self, name: &str) -> Option<&String> {
        self.metadata.metadata().as_ref()?.get(name)
    }

    /// The names of all tensors, in the order of the file.
    pub fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.metadata.info(name)
    }

    /// Bytes of all tensors.
    pub fn data_len(&self) -> usize {
        self.metadata.data_len()
    }

    /// The elements of a tensor of f32.
    ///
    /// # Errors
    /// No such tensor, one of another type, one whose hash is wrong, a file that was cut short since it was opened; no
    /// memory.
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
    TensorFileError::Damaged(format!("it was cut short: expected {expected} bytes, found {found}"))
}

fn read_at(file: &File, bytes: &mut [u8], place: u64) -> Result<(), TensorFileError> {
    file.read_exact_at(bytes, place).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => TensorFileError::Damaged("it was cut short while it was read".to_string()),
        _ => TensorFileError::File(error),
    })
}

/// Fails where the header of a safetensors file has a name twice: readers differ in which of the two they take.
///
/// # Errors
/// The first such name; JSON that is none.
pub fn check_unique_keys(header: &[u8]) -> Result<(), TensorFileError> {
    let damaged =
        |error: serde_json::Error| TensorFileError::Damaged(format!("its header is no JSON that can be used: {error}"));
    serde_json::from_slice::<UniqueKeys>(header).map(drop).map_err(damaged)
}

/// Any JSON whose objects have each name once.
struct UniqueKeys;

impl<'de> Deserialize<'de> for UniqueKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<UniqueKeys, D::Error> {
        deserializer.deserialize_any(UniqueKeys)
    }
}

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = UniqueKeys;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_i64<E>(self, _: i64) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_u64<E>(self, _: u64) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_f64<E>(self, _: f64) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_str<E>(self, _: &str) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_unit<E>(self) -> Result<UniqueKeys, E> {
        Ok(UniqueKeys)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<UniqueKeys, A::Error> {
        while list.next_element::<UniqueKeys>()?.is_some() {}
        Ok(UniqueKeys)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<UniqueKeys, A::Error> {
        let mut names = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            map.next_value::<UniqueKeys>()?;
            if let Some(name) = names.replace(name) {
                return Err(serde::de::Error::custom(format!("it has the name `{}` twice", printable(&name))));
            }
        }
        Ok(UniqueKeys)
    }
}
