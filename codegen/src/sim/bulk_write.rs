//! Bulk reductions (`cp.reduce.async.bulk`) and TMA stores (`cp.async.bulk.tensor` to global memory). Both read shared
//! memory from their issue until the issuing thread has waited for it, and write global memory at any time between their
//! issue and the end of the kernel, or, for stores, a wait for their completion.

use super::Global;
use super::barriers::{box_places, last_number, swizzled_chunks};
use super::global::{AccessKind, Accessor};
use super::machine::{Block, atomic, operand};
use super::memory::Shared;
use super::parse::{Operand, Ty};
use super::value::from_bytes;

/// A part of memory: address and length.
type Part = (u64, usize);

/// Bulk writes of one thread: the shared memory that those read which are not committed yet, and the committed groups,
/// and the global memory to which it has stored without waiting for it.
#[derive(Default)]
pub(super) struct BulkWrites {
    uncommitted: Vec<Part>,
    committed: Vec<Vec<Part>>,
    stores: Vec<Part>,
}

impl BulkWrites {
    /// Whether shared memory is still read.
    pub fn are_reading(&self) -> bool {
        !self.uncommitted.is_empty() || self.committed.iter().any(|group| !group.is_empty())
    }
}

/// Values that have been read from shared memory and not been written to global memory yet.
pub(super) struct BulkWrite {
    thread: u32,
    /// `AccessKind::BulkAdd`: adds f32 numbers. `AccessKind::BulkStore`: stores.
    kind: AccessKind,
    /// The addresses, with the bytes of one element each.
    elements: Vec<(u64, Vec<u8>)>,
}

impl BulkWrite {
    /// Writes to global memory.
    pub fn apply(self, shared: &Shared, program: u32, global: &mut Global) -> Result<(), String> {
        let accessor = Accessor { program, thread: self.thread, clocks: &shared.clocks };
        for (to, bytes) in self.elements {
            let len = bytes.len();
            global.update(to, len, &accessor, self.kind, |old| match self.kind {
                AccessKind::BulkAdd => {
                    let [old, by] = [old, &bytes].map(|bytes| from_bytes(&Ty::Float, bytes).bits());
                    Ok(Some(atomic("fadd", &Ty::Float, old?, by?)?.to_le_bytes()[..len].to_vec()))
                }
                _ => Ok(Some(bytes)),
            })?;
        }
        Ok(())
    }
}

impl Block<'_> {
    /// Executes assembly of bulk writes; `false` if the assembly is something else.
    pub(super) fn bulk_write_asm(
        &mut self,
        t: usize,
        text: &str,
        args: &[(Ty, Operand)],
        global: &mut Global,
    ) -> Result<bool, String> {
        let arg = |this: &Self, i: usize| this.bits(t, operand(args, i)?);
        let instruction = text.split([' ', ';']).next().unwrap_or("");
        match instruction {
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32" => {
                let bytes = last_number(text)? as usize;
                let (to, from) = (arg(self, 0)?, arg(self, 1)?);
                if !to.is_multiple_of(16) || !from.is_multiple_of(16) || !bytes.is_multiple_of(16) {
                    return Err(format!(
                        "a bulk reduction of {bytes} bytes from {from} to {to:#x}: expected multiples of 16"
                    ));
                }
                let numbers = self.read_bulk(t, from, bytes)?;
                let elements = numbers.chunks(4).zip((to..).step_by(4)).map(|(number, to)| (to, number.to_vec()));
                let elements = elements.collect();
                self.write_bulk(BulkWrite { thread: t as u32, kind: AccessKind::BulkAdd, elements }, global)?;
            }
            _ if instruction.contains(".async.bulk.tensor.") && instruction.contains(".global.shared::cta.") => {
                let adds = instruction.starts_with("cp.reduce.");
                if adds && !instruction.contains(".add.") {
                    return Ok(false);
                }
                let rank = args.len().saturating_sub(2);
                let map = self.tensor_map(arg(self, 0)?)?;
                let at = self.box_coordinates(t, args, 1..1 + rank)?;
                let (size, places) = box_places(map, self.launch.args, &at)?;
                if places.chunks(16 / size).any(|chunk| chunk.iter().any(Option::is_some) && chunk.contains(&None)) {
                    return Err("a store by TMA of a row that ends inside of 16 bytes: a GPU writes all 16".into());
                }
                let mut bytes = Vec::with_capacity(places.len() * size);
                for chunk in swizzled_chunks(map, arg(self, 1 + rank)?)?.take((places.len() * size).div_ceil(16)) {
                    bytes.extend(self.read_bulk(t, chunk, 16)?);
                }
                let inside = places.into_iter().zip(bytes.chunks(size));
                let elements: Vec<_> = inside.filter_map(|(to, bytes)| Some((to?, bytes.to_vec()))).collect();
                let kind = if adds { AccessKind::BulkAdd } else { AccessKind::BulkStore };
                if !adds {
                    self.threads[t].bulk_writes.stores.extend(elements.iter().map(|(to, bytes)| (*to, bytes.len())));
                }
                self.write_bulk(BulkWrite { thread: t as u32, kind, elements }, global)?;
            }
            "cp.async.bulk.commit_group" => {
                let writes = &mut self.threads[t].bulk_writes;
                writes.committed.push(std::mem::take(&mut writes.uncommitted));
            }
            "cp.async.bulk.wait_group.read" => self.end_bulk_reads(t, last_number(text)? as usize)?,
            "cp.async.bulk.wait_group" => {
                if last_number(text)? != 0 || !self.threads[t].bulk_writes.uncommitted.is_empty() {
                    return Err("a wait for some of the bulk writes of a thread: expected one for all".into());
                }
                self.end_bulk_reads(t, 0)?;
                let pending = std::mem::take(&mut self.pending_bulk_writes);
                let (own, others) = pending.into_iter().partition(|write| write.thread == t as u32);
                self.pending_bulk_writes = others;
                let own: Vec<BulkWrite> = own;
                for write in own {
                    write.apply(&self.shared, self.number, global)?;
                }
                let accessor = Accessor { program: self.number, thread: t as u32, clocks: &self.shared.clocks };
                for (to, len) in std::mem::take(&mut self.threads[t].bulk_writes.stores) {
                    global.complete_store(to, len, &accessor)?;
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Starts to read shared memory.
    fn read_bulk(&mut self, t: usize, from: u64, bytes: usize) -> Result<Vec<u8>, String> {
        let read = self.shared.read_async(from, bytes, t as u32)?;
        self.shared.begin_async_read(from, bytes, t as u32)?;
        self.threads[t].bulk_writes.uncommitted.push((from, bytes));
        Ok(read)
    }

    /// Writes now or later.
    fn write_bulk(&mut self, write: BulkWrite, global: &mut Global) -> Result<(), String> {
        match self.random.below(2) {
            0 => write.apply(&self.shared, self.number, global)?,
            _ => self.pending_bulk_writes.push(write),
        }
        Ok(())
    }

    /// Waits until all but the last `left` groups have read shared memory.
    fn end_bulk_reads(&mut self, t: usize, left: usize) -> Result<(), String> {
        let committed = &mut self.threads[t].bulk_writes.committed;
        let done = committed.len().saturating_sub(left);
        for (from, bytes) in committed.drain(..done).flatten().collect::<Vec<_>>() {
            self.shared.end_async_read(from, bytes, &[t as u32])?;
        }
        Ok(())
    }
}
