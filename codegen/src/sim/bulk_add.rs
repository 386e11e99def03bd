//! Additions by the bulk copy engine. It reads shared memory from when it is asked to until the thread that asked has waited for it, and
//! adds to global memory at once.

use super::machine::{Block, atomic, from_bytes};
use super::memory::Global;
use super::parse::{Operand, Ty};

/// What a thread has asked for: in the open group, and in groups that it has committed.
#[derive(Default)]
pub(super) struct Additions {
    open: Vec<(u64, usize)>,
    committed: Vec<(u64, usize)>,
}

impl Additions {
    pub fn is_empty(&self) -> bool {
        self.open.is_empty() && self.committed.is_empty()
    }
}

impl Block<'_> {
    /// Assembly on additions; `false` where it is other assembly.
    pub(super) fn bulk_add_asm(
        &mut self,
        t: usize,
        text: &str,
        args: &[(Ty, Operand)],
        global: &mut Global,
    ) -> Result<bool, String> {
        match text.split([' ', ';']).next().unwrap_or("") {
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32" => {
                let bytes = super::barriers::last_number(text)? as usize;
                let (to, from) = (self.bits(t, &args[0].1)?, self.bits(t, &args[1].1)?);
                if !to.is_multiple_of(16) || !from.is_multiple_of(16) || !bytes.is_multiple_of(16) {
                    return Err(format!(
                        "an addition of {bytes} bytes from {from} to {to:#x}: all should be multiples of 16"
                    ));
                }
                let numbers = self.shared.read_async(from, bytes, t as u32)?;
                self.shared.begin_product(from, bytes)?;
                self.threads[t].additions.open.push((from, bytes));
                for (i, number) in numbers.chunks(4).enumerate() {
                    let at = to + 4 * i as u64;
                    let old = from_bytes(&Ty::Float, &global.read(at, 4)?).bits()?;
                    let new = atomic("fadd", &Ty::Float, old, from_bytes(&Ty::Float, number).bits()?)?;
                    global.write(at, &new.to_le_bytes()[..4])?;
                }
            }
            "cp.async.bulk.commit_group" => {
                let additions = &mut self.threads[t].additions;
                additions.committed.append(&mut additions.open);
            }
            "cp.async.bulk.wait_group.read" => {
                for (from, bytes) in std::mem::take(&mut self.threads[t].additions.committed) {
                    self.shared.end_product(from, bytes, t as u32)?;
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}
