//! Binary format of a cache entry: encoding, and verification on decoding.
//!
//! ```text
//! 8   magic  "TILEWRT\n"
//! 4   version of this format
//! 4   kind of code: 0 PTX, 1 object
//! 32  key
//! 8   length of the manifest
//! 8   length of the code
//! ..  manifest, JSON
//! ..  code
//! 32  blake3 of everything before
//! ```
//!
//! Numbers are little-endian. The total length is checked first, then the checksum, so later fields are not read from
//! damaged bytes.

use tilewright_codegen::target::{Artifact, Code};

use super::Key;

const MAGIC: &[u8; 8] = b"TILEWRT\n";
/// Incremented with every change of the layout above or of the manifest's fields.
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 8 + 4 + 4 + 32 + 8 + 8;
const CHECKSUM_BYTES: usize = 32;

pub(super) fn encode(artifact: &Artifact, key: &Key) -> Vec<u8> {
    let manifest = serde_json::to_vec(&artifact.manifest).unwrap_or_else(|error| {
        panic!("internal compiler error: cannot serialize a manifest: {error}; please report this")
    });
    let (kind, code): (u32, &[u8]) = match &artifact.code {
        Code::Ptx(text) => (0, text.as_bytes()),
        Code::Object(bytes) => (1, bytes),
    };
    let mut bytes = Vec::with_capacity(HEADER_BYTES + manifest.len() + code.len() + CHECKSUM_BYTES);
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(kind.to_le_bytes());
    bytes.extend(key.0);
    bytes.extend((manifest.len() as u64).to_le_bytes());
    bytes.extend((code.len() as u64).to_le_bytes());
    bytes.extend(manifest);
    bytes.extend(code);
    let checksum = blake3::hash(&bytes);
    bytes.extend(checksum.as_bytes());
    bytes
}

/// Decodes the artifact in `bytes`, or returns why `bytes` are no valid entry of `key`.
pub(super) fn decode(bytes: &[u8], key: &Key) -> Result<Artifact, String> {
    let (header, rest) = bytes
        .split_at_checked(HEADER_BYTES)
        .ok_or_else(|| format!("expected a header of {HEADER_BYTES} bytes, found {} bytes", bytes.len()))?;
    if header[..8] != MAGIC[..] {
        return Err("it is not a Tilewright cache entry".into());
    }
    let number = |at: usize, size: usize| header[at..at + size].iter().rev().fold(0, |n, &b| n << 8 | b as u64);
    let version = number(8, 4);
    if version != VERSION as u64 {
        return Err(format!("expected format version {VERSION}, found {version}"));
    }
    if header[16..48] != key.0 {
        let found: String = header[16..48].iter().map(|byte| format!("{byte:02x}")).collect();
        return Err(format!("expected key {key}, found {found}"));
    }
    let (manifest_len, code_len) = (number(48, 8), number(56, 8));
    let body_len = manifest_len.checked_add(code_len).and_then(|n| n.checked_add(CHECKSUM_BYTES as u64));
    if body_len != Some(rest.len() as u64) {
        return Err(format!(
            "expected {manifest_len} bytes of manifest, {code_len} of code and {CHECKSUM_BYTES} of checksum after the \
             header, found {} bytes",
            rest.len()
        ));
    }
    let (content, checksum) = bytes.split_at(bytes.len() - CHECKSUM_BYTES);
    if blake3::hash(content).as_bytes() != checksum {
        return Err("its checksum is wrong".into());
    }
    let (manifest, code) = content[HEADER_BYTES..].split_at(manifest_len as usize);
    let manifest = serde_json::from_slice(manifest).map_err(|error| format!("its manifest is invalid: {error}"))?;
    let code = match number(12, 4) {
        0 => Code::Ptx(String::from_utf8(code.to_vec()).map_err(|error| format!("its PTX is not UTF-8: {error}"))?),
        1 => Code::Object(code.to_vec()),
        kind => return Err(format!("expected kind of code 0 or 1, found {kind}")),
    };
    Ok(Artifact { manifest, code })
}
