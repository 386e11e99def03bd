//! Global memory in buffers, with shadow state that records which program and thread accessed each byte.
//!
//! Two accesses of one byte conflict if at least one is a write and not both are atomic. Conflicting accesses are a
//! data race unless one happens before the other: within a program by its barriers (see [`super::clock`]), between
//! programs only by an atomic that releases what its program has done, and one that acquires what other programs have
//! released at this address. Relaxed atomics order nothing. Bulk reductions complete at the end of the
//! kernel: until then, every non-atomic access of their bytes is a race. TMA stores complete when the thread that
//! started them has waited for them, or at the end of the kernel: until then, every access of their bytes is a race.
//!
//! Of the reads since the last write of a byte, the latest of two programs are kept, each with its last thread. This
//! suffices to report a write that is not ordered after the reads of two programs, or, within one program, after the
//! latest read.

use super::clock::{Clocks, VectorClock, join};
use crate::ir::MemSem;
use std::collections::HashMap;

/// Buffers at synthetic addresses, far enough apart that no access runs from one buffer into the next.
#[derive(Clone, Debug, Default)]
pub struct Global {
    buffers: Vec<Buffer>,
    shadow: Vec<Vec<Shadow>>,
    /// Per program: its vector clock over the programs.
    programs: Vec<VectorClock>,
    /// Per address: what programs have released there.
    released: HashMap<u64, VectorClock>,
    /// Number of writes that changed a value; tells progress from livelock.
    pub(super) changes: u64,
}

/// Memory of one argument.
#[derive(Clone, Debug)]
struct Buffer {
    /// Name for messages.
    name: String,
    /// Offset of the buffer's first byte from the middle between two multiples of [`SPACING`]. The bytes before it
    /// belong to no other buffer.
    low: u64,
    bytes: Vec<u8>,
}

const SPACING: u64 = 1 << 40;
const NO_PROGRAM: u32 = u32::MAX;

/// The program and thread that access memory.
pub(super) struct Accessor<'a> {
    pub program: u32,
    pub thread: u32,
    pub clocks: &'a Clocks,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum AccessKind {
    Plain,
    Atomic,
    /// A bulk reduction, whose time is unknown.
    BulkAdd,
    /// A TMA store that no thread has waited for.
    BulkStore,
}

impl AccessKind {
    /// Whether accesses of these kinds may overlap in time.
    fn is_atomic(self) -> bool {
        matches!(self, AccessKind::Atomic | AccessKind::BulkAdd)
    }

    fn completes_later(self) -> bool {
        matches!(self, AccessKind::BulkAdd | AccessKind::BulkStore)
    }
}

/// An access: the program with its time, and the thread with its time.
#[derive(Clone, Copy, Debug)]
struct Access {
    program: u32,
    time: u32,
    thread: u32,
    when: u32,
}

const NO_ACCESS: Access = Access { program: NO_PROGRAM, time: 0, thread: 0, when: 0 };

/// Shadow state of one byte: its last write, and the reads since.
#[derive(Clone, Copy, Debug)]
struct Shadow {
    writer: Access,
    kind: AccessKind,
    readers: [Access; 2],
}

const UNACCESSED: Shadow = Shadow { writer: NO_ACCESS, kind: AccessKind::Plain, readers: [NO_ACCESS; 2] };

impl Global {
    /// Adds a buffer; returns its address.
    pub fn add(&mut self, bytes: Vec<u8>) -> u64 {
        self.add_named(format!("buffer {}", self.buffers.len()), bytes, 0)
    }

    /// Adds a buffer with a name for messages; returns its address, which is `low` more than a multiple of 2³⁹.
    pub fn add_named(&mut self, name: String, bytes: Vec<u8>, low: u64) -> u64 {
        self.buffers.push(Buffer { name, low, bytes });
        self.buffers.len() as u64 * SPACING + SPACING / 2 + low
    }

    /// Contents of the buffer at an address returned by [`Global::add`].
    pub fn bytes(&self, address: u64) -> &[u8] {
        &self.buffers[(address / SPACING - 1) as usize].bytes
    }

    /// Starts a launch: all earlier accesses happen before it.
    pub(super) fn begin_launch(&mut self, programs: usize) {
        self.shadow = vec![Vec::new(); self.buffers.len()];
        self.programs = vec![VectorClock::new(); programs];
        self.released.clear();
    }

    fn locate(&self, address: u64, len: usize) -> Result<(usize, usize), String> {
        let index = (address / SPACING) as usize;
        let Some(b) = index.checked_sub(1).and_then(|i| self.buffers.get(i)) else {
            return Err(format!("global access of {len} bytes at {address:#x}, outside of all buffers"));
        };
        let offset = (address % SPACING) as i64 - (SPACING / 2 + b.low) as i64;
        if offset < 0 || offset as usize + len > b.bytes.len() {
            return Err(format!(
                "global access of {len} bytes at offset {offset} of {}, which has {} bytes",
                b.name,
                b.bytes.len()
            ));
        }
        if !address.is_multiple_of(len.min(16) as u64) {
            return Err(format!("misaligned global access of {len} bytes at offset {offset} of {}", b.name));
        }
        Ok((index - 1, offset as usize))
    }

    pub(super) fn read(&mut self, address: u64, len: usize, accessor: &Accessor) -> Result<Vec<u8>, String> {
        let (b, at) = self.locate(address, len)?;
        self.record_access(b, at, len, accessor, AccessKind::Plain, false)?;
        Ok(self.buffers[b].bytes[at..at + len].to_vec())
    }

    pub(super) fn write(&mut self, address: u64, bytes: &[u8], accessor: &Accessor) -> Result<(), String> {
        let (b, at) = self.locate(address, bytes.len())?;
        self.record_access(b, at, bytes.len(), accessor, AccessKind::Plain, true)?;
        self.set(b, at, bytes);
        Ok(())
    }

    /// Atomic read-modify-write: `f` gives the new bytes, or `None` if nothing is to be written. Returns the old bytes.
    pub(super) fn update(
        &mut self,
        address: u64,
        len: usize,
        accessor: &Accessor,
        kind: AccessKind,
        f: impl FnOnce(&[u8]) -> Result<Option<Vec<u8>>, String>,
    ) -> Result<Vec<u8>, String> {
        let (b, at) = self.locate(address, len)?;
        let old = self.buffers[b].bytes[at..at + len].to_vec();
        self.record_access(b, at, len, accessor, kind, true)?;
        if let Some(new) = f(&old)? {
            self.set(b, at, &new);
        }
        Ok(old)
    }

    /// The thread has waited for its TMA stores to these bytes: they count as stores of this moment.
    pub(super) fn complete_store(&mut self, address: u64, len: usize, accessor: &Accessor) -> Result<(), String> {
        let (b, at) = self.locate(address, len)?;
        let (program, time) = (accessor.program, self.time(accessor.program));
        let (thread, when) = (accessor.thread, accessor.clocks.now(accessor.thread));
        for t in &mut self.shadow[b][at..at + len] {
            if t.kind == AccessKind::BulkStore && (t.writer.program, t.writer.thread) == (program, thread) {
                t.kind = AccessKind::Plain;
                t.writer = Access { program, time, thread, when };
            }
        }
        Ok(())
    }

    fn set(&mut self, b: usize, at: usize, bytes: &[u8]) {
        let place = &mut self.buffers[b].bytes[at..at + bytes.len()];
        if place != bytes {
            place.copy_from_slice(bytes);
            self.changes += 1;
        }
    }

    /// Releases what a program has done at an address, or acquires what other programs have released there, or both.
    pub(super) fn synchronize(&mut self, address: u64, program: u32, order: MemSem) {
        if order == MemSem::Relaxed {
            return;
        }
        let own = program as usize;
        let time = self.time(program);
        let known = &mut self.programs[own];
        if known.len() <= own {
            known.resize(own + 1, 0);
        }
        known[own] = time;
        let there = self.released.entry(address).or_default();
        if order.acquires() {
            join(known, there);
        }
        if order.releases() {
            join(there, known);
        }
        known[own] += 1;
    }

    /// A program's time: the number of its releases, from 1.
    fn time(&self, program: u32) -> u32 {
        self.programs[program as usize].get(program as usize).map_or(1, |&time| time.max(1))
    }

    /// Whether an event happens before the current action of `accessor`.
    fn happens_before(&self, event: &Access, accessor: &Accessor) -> bool {
        if event.program == NO_PROGRAM {
            return true;
        }
        if event.program == accessor.program {
            return accessor.clocks.happens_before(accessor.thread, event.thread, event.when);
        }
        self.programs[accessor.program as usize].get(event.program as usize).is_some_and(|&last| last >= event.time)
    }

    /// Records an access of these bytes; reports a race with an earlier access.
    fn record_access(
        &mut self,
        b: usize,
        at: usize,
        len: usize,
        accessor: &Accessor,
        kind: AccessKind,
        writes: bool,
    ) -> Result<(), String> {
        let now = Access {
            program: accessor.program,
            time: self.time(accessor.program),
            thread: accessor.thread,
            when: accessor.clocks.now(accessor.thread),
        };
        if self.shadow[b].is_empty() {
            self.shadow[b] = vec![UNACCESSED; self.buffers[b].bytes.len()];
        }
        for i in at..at + len {
            let t = self.shadow[b][i];
            let both_atomic = kind.is_atomic() && t.kind.is_atomic();
            if t.writer.program != NO_PROGRAM
                && !both_atomic
                && (t.kind.completes_later() || !self.happens_before(&t.writer, accessor))
            {
                return Err(race(
                    &self.buffers[b].name,
                    i,
                    &now,
                    if writes { "writes" } else { "reads" },
                    &t.writer,
                    match t.kind {
                        AccessKind::Plain => "wrote",
                        AccessKind::Atomic => "changed by an atomic",
                        AccessKind::BulkAdd => "changes by a bulk reduction, which completes with the kernel",
                        AccessKind::BulkStore => "writes by a TMA store that it has not waited for",
                    },
                ));
            }
            if writes && let Some(reader) = t.readers.iter().find(|r| !self.happens_before(r, accessor)) {
                return Err(race(&self.buffers[b].name, i, &now, "writes", reader, "read"));
            }
            let t = &mut self.shadow[b][i];
            if writes {
                *t = Shadow { writer: now, kind, readers: [NO_ACCESS; 2] };
            } else {
                let own = usize::from(t.readers[0].program != now.program && t.readers[0].program != NO_PROGRAM);
                t.readers[own] = now;
            }
        }
        Ok(())
    }
}

fn race(buffer: &str, byte: usize, now: &Access, does: &str, before: &Access, did: &str) -> String {
    let other = match before.program == now.program {
        true => format!("thread {} of this program", before.thread),
        false => format!("program {} (thread {})", before.program, before.thread),
    };
    let remedy = match before.program == now.program {
        true => "there is no barrier in between",
        false => "nothing orders the two (relaxed atomics do not: give them `sem = acq_rel`)",
    };
    format!("data race: {does} byte {byte} of {buffer}, which {other} {did}: {remedy}")
}
