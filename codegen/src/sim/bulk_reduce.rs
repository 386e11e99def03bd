//! Bulk reductions (`cp.reduce.async.bulk`). A bulk reduction reads shared memory from its issue until the issuing
//! thread has waited for it, and adds to global memory at any time between its issue and the end of the kernel.

use super::Global;
use super::global::{AccessKind, Accessor};
use super::machine::{Block, atomic, from_bytes, operand};
use super::memory::Shared;
use super::parse::{Operand, Ty};

/// Bulk reductions of one thread, as addresses and lengths in shared memory: those not committed yet, and the committed
/// groups.
#[derive(Default)]
pub(super) struct BulkReductions {
    uncommitted: Vec<(u64, usize)>,
    committed: Vec<Vec<(u64, usize)>>,
}

impl BulkReductions {
    pub fn is_empty(&self) -> bool {
        self.uncommitted.is_empty() && self.committed.iter().all(Vec::is_empty)
    }
}

/// Values that have been read from shared memory and not been added to global memory yet.
pub(super) struct BulkReduction {
    to: u64,
    numbers: Vec<u8>,
    thread: u32,
}

impl BulkReduction {
    /// Adds the values to global memory.
    pub fn apply(self, shared: &Shared, program: u32, global: &mut Global) -> Result<(), String> {
        let accessor = Accessor { program, thread: self.thread, clocks: &shared.clocks };
        for (i, number) in self.numbers.chunks(4).enumerate() {
            let number = from_bytes(&Ty::Float, number).bits()?;
            global.update(self.to + 4 * i as u64, 4, &accessor, AccessKind::Bulk, |old| {
                let new = atomic("fadd", &Ty::Float, from_bytes(&Ty::Float, old).bits()?, number)?;
                Ok(Some(new.to_le_bytes()[..4].to_vec()))
            })?;
        }
        Ok(())
    }
}

impl Block<'_> {
    /// Executes assembly of bulk reductions; `false` if the assembly is something else.
    pub(super) fn bulk_reduce_asm(
        &mut self,
        t: usize,
        text: &str,
        args: &[(Ty, Operand)],
        global: &mut Global,
    ) -> Result<bool, String> {
        match text.split([' ', ';']).next().unwrap_or("") {
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32" => {
                let bytes = super::barriers::last_number(text)? as usize;
                let (to, from) = (self.bits(t, operand(args, 0)?)?, self.bits(t, operand(args, 1)?)?);
                if !to.is_multiple_of(16) || !from.is_multiple_of(16) || !bytes.is_multiple_of(16) {
                    return Err(format!(
                        "a bulk reduction of {bytes} bytes from {from} to {to:#x}: expected multiples of 16"
                    ));
                }
                let numbers = self.shared.read_async(from, bytes, t as u32)?;
                self.shared.begin_async_read(from, bytes)?;
                self.threads[t].reductions.uncommitted.push((from, bytes));
                let reduction = BulkReduction { to, numbers, thread: t as u32 };
                match self.random.below(2) {
                    0 => reduction.apply(&self.shared, self.number, global)?,
                    _ => self.pending_reductions.push(reduction),
                }
            }
            "cp.async.bulk.commit_group" => {
                let reductions = &mut self.threads[t].reductions;
                reductions.committed.push(std::mem::take(&mut reductions.uncommitted));
            }
            "cp.async.bulk.wait_group.read" => {
                let pending = super::barriers::last_number(text)? as usize;
                let committed = &mut self.threads[t].reductions.committed;
                let done = committed.len().saturating_sub(pending);
                for (from, bytes) in committed.drain(..done).flatten().collect::<Vec<_>>() {
                    self.shared.end_async_read(from, bytes, &[t as u32])?;
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}
