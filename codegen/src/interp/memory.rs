//! Global memory of the interpreter: buffers with addresses; every access is checked.

use super::races::{AccessKind, RaceDetector};
use std::cell::Cell;

/// A buffer of a [`Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId(usize);

/// Buffers in one address space, far apart. An access that is not entirely inside one buffer is an error.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Memory {
    buffers: Vec<Buffer>,
    races: RaceDetector,
}

#[derive(Clone, Debug, PartialEq)]
struct Buffer {
    address: u64,
    bytes: Vec<u8>,
    /// Initialized bytes; `None` if all bytes are initialized.
    written: Option<Vec<bool>>,
    /// End of the bytes read so far, and of the bytes written so far: 0 for none.
    ends: [Cell<usize>; 2],
}

const READ: usize = 0;
const WRITTEN: usize = 1;

/// Distance between buffers: out-of-bounds indices miss every other buffer.
const GAP: u64 = 1 << 33;
/// Alignment of buffers in bytes, as in CUDA's allocator.
const ALIGNMENT: u64 = 256;

impl Memory {
    pub fn new() -> Memory {
        Memory::default()
    }

    /// Adds a buffer with these bytes.
    pub fn add(&mut self, bytes: Vec<u8>) -> BufferId {
        let end = self.buffers.iter().map(|b| b.address + b.bytes.len() as u64).max().unwrap_or(0);
        self.buffers.push(Buffer {
            address: (end + GAP).next_multiple_of(ALIGNMENT),
            bytes,
            written: None,
            ends: Default::default(),
        });
        BufferId(self.buffers.len() - 1)
    }

    /// Adds a buffer of `len` uninitialized bytes, which must be written before they are read.
    pub fn add_uninit(&mut self, len: usize) -> BufferId {
        let id = self.add(vec![0; len]);
        self.buffers[id.0].written = Some(vec![false; len]);
        id
    }

    /// Address of the first byte; a multiple of 256.
    pub fn address(&self, id: BufferId) -> u64 {
        self.buffers[id.0].address
    }

    pub fn bytes(&self, id: BufferId) -> &[u8] {
        &self.buffers[id.0].bytes
    }

    pub fn bytes_mut(&mut self, id: BufferId) -> &mut [u8] {
        &mut self.buffers[id.0].bytes
    }

    /// End of the bytes of a buffer that runs have read, and of those that they have written; 0 for none.
    pub fn accessed(&self, id: BufferId) -> [usize; 2] {
        self.buffers[id.0].ends.each_ref().map(Cell::get)
    }

    /// The `len` (at most 8) bytes at an address as a little-endian number.
    ///
    /// # Errors
    /// If they are not all inside one buffer, or some are uninitialized.
    pub fn read(&self, address: u64, len: usize) -> Result<u64, String> {
        let (i, offset) = self.find(address, len)?;
        let value = self.value(i, offset, len)?;
        let end = &self.buffers[i].ends[READ];
        end.set(end.get().max(offset + len));
        Ok(value)
    }

    /// The bytes at an offset of a buffer.
    fn value(&self, i: usize, offset: usize, len: usize) -> Result<u64, String> {
        let buffer = &self.buffers[i];
        let range = offset..offset + len;
        if buffer.written.as_ref().is_some_and(|w| w[range.clone()].contains(&false)) {
            return Err(format!("reads uninitialized bytes of buffer {i} at offset {offset}"));
        }
        let mut bytes = [0; 8];
        bytes[..len].copy_from_slice(&buffer.bytes[range]);
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes the low `len` (at most 8) bytes of a number to an address.
    ///
    /// # Errors
    /// If they are not all inside one buffer.
    pub fn write(&mut self, address: u64, len: usize, value: u64) -> Result<(), String> {
        let (i, offset) = self.find(address, len)?;
        let buffer = &mut self.buffers[i];
        buffer.ends[WRITTEN].set(buffer.ends[WRITTEN].get().max(offset + len));
        buffer.bytes[offset..offset + len].copy_from_slice(&value.to_le_bytes()[..len]);
        if let Some(written) = &mut buffer.written {
            written[offset..offset + len].fill(true);
        }
        Ok(())
    }

    /// [`Memory::read`] by the running program; checks for data races.
    pub(super) fn load(&mut self, address: u64, len: usize) -> Result<u64, String> {
        let value = self.read(address, len)?;
        self.record_access(address, len, AccessKind::Read)?;
        Ok(value)
    }

    /// [`Memory::write`] by the running program; checks for data races.
    pub(super) fn store(&mut self, address: u64, len: usize, value: u64) -> Result<(), String> {
        self.find(address, len)?;
        self.record_access(address, len, AccessKind::Write)?;
        self.change(address, len, value)
    }

    /// Atomically replaces an element by a function of it; returns the old value.
    pub(super) fn update(&mut self, address: u64, len: usize, f: impl Fn(u64) -> u64) -> Result<u64, String> {
        let old = self.read(address, len)?;
        self.record_access(address, len, AccessKind::Atomic)?;
        self.change(address, len, f(old))?;
        Ok(old)
    }

    fn change(&mut self, address: u64, len: usize, value: u64) -> Result<(), String> {
        let (i, offset) = self.find(address, len)?;
        if self.value(i, offset, len) != Ok(value) {
            self.races.changes += 1;
        }
        self.write(address, len, value)
    }

    fn record_access(&mut self, address: u64, len: usize, kind: AccessKind) -> Result<(), String> {
        let (buffer, offset) = self.find(address, len)?;
        let size = self.buffers[buffer].bytes.len();
        self.races.record_access(buffer, size, offset..offset + len, kind)
    }

    /// Acquires and releases of the running program at an address.
    pub(super) fn synchronize(&mut self, address: u64, order: crate::ir::MemSem) {
        self.races.synchronize(address, order);
    }

    /// Starts a launch of `programs` programs.
    pub(super) fn begin_launch(&mut self, programs: usize) {
        self.races = RaceDetector::new(programs, self.buffers.len());
    }

    pub(super) fn end_launch(&mut self) {
        self.races = RaceDetector::default();
    }

    pub(super) fn set_program(&mut self, number: usize) {
        self.races.program = number as u32;
    }

    /// Number of changes of elements so far.
    pub(super) fn changes(&self) -> u64 {
        self.races.changes
    }

    /// Buffer and offset of an access.
    fn find(&self, address: u64, len: usize) -> Result<(usize, usize), String> {
        let inside = |b: &Buffer| {
            address.checked_sub(b.address).filter(|&o| o.saturating_add(len as u64) <= b.bytes.len() as u64)
        };
        if let Some((i, offset)) = self.buffers.iter().enumerate().find_map(|(i, b)| Some((i, inside(b)?))) {
            return Ok((i, offset as usize));
        }
        let distance = |b: &Buffer| address as i128 - b.address as i128;
        let nearest = self.buffers.iter().enumerate().min_by_key(|(_, b)| distance(b).abs());
        Err(match nearest {
            Some((i, b)) => format!(
                "accesses {len} bytes at offset {} of buffer {i}, which has {} bytes",
                distance(b),
                b.bytes.len()
            ),
            None => format!("accesses address {address:#x}, but there are no buffers"),
        })
    }
}
