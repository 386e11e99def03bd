//! Mbarriers: phases, arrivals, expected bytes, and the copies that they track.

use super::shared::SharedMemory;
use super::value::{Barriers, Shared, Tile};
use crate::ir::OpId;
use std::collections::HashMap;

/// One mbarrier.
#[derive(Clone, Copy, Debug)]
struct Barrier {
    /// Number of arrivals of a phase, and the number still pending in the current one.
    arrivals: u32,
    pending: u32,
    /// Expected bytes that are not yet written.
    bytes: u32,
    /// Number of completed phases.
    phase: u64,
    freed: bool,
}

/// A copy that no thread has waited for: its bytes are not visible yet.
struct PendingCopy {
    barrier: usize,
    phase: u64,
    to: Shared,
    tile: Tile,
}

/// The mbarriers of one program.
#[derive(Default)]
pub(super) struct BarrierTable {
    barriers: Vec<Barrier>,
    copies: Vec<PendingCopy>,
    /// For a wait for a turn that has not returned yet: the buffers that the other programs have used so far, of each
    /// ring.
    used_by_others: HashMap<OpId, Vec<i128>>,
}

/// Buffers of a ring that other programs of the block use before this one.
pub(super) struct UsedByOthers {
    pub full: Barriers,
    pub empty: Barriers,
    pub slot: i128,
    pub parity: i128,
    pub count: i128,
}

impl BarrierTable {
    pub fn alloc(&mut self, count: usize, arrivals: u32) -> Barriers {
        let first = self.barriers.len();
        let new = Barrier { arrivals, pending: arrivals, bytes: 0, phase: 0, freed: false };
        self.barriers.resize(first + count, new);
        Barriers { first, count }
    }

    pub fn free(&mut self, group: &Barriers) -> Result<(), String> {
        for i in group.first..group.first + group.count {
            let b = &mut self.barriers[i];
            if b.pending != b.arrivals || b.bytes != 0 {
                return Err(format!(
                    "mbarrier {} is freed in the middle of a phase: {} arrivals and {} bytes are pending",
                    i - group.first,
                    b.pending,
                    b.bytes
                ));
            }
            b.freed = true;
        }
        Ok(())
    }

    fn at(&mut self, group: &Barriers, index: i128) -> Result<(usize, &mut Barrier), String> {
        let Some(i) = usize::try_from(index).ok().filter(|&i| i < group.count) else {
            return Err(format!("mbarrier index {index} is out of range: the group has {}", group.count));
        };
        let number = group.first + i;
        let b = &mut self.barriers[number];
        if b.freed { Err("uses an mbarrier after it was freed".into()) } else { Ok((number, b)) }
    }

    /// Arrivals of a phase of these mbarriers.
    pub fn arrivals(&self, group: &Barriers) -> u32 {
        self.barriers[group.first].arrivals
    }

    pub fn arrive(&mut self, group: &Barriers, index: i128, count: u32) -> Result<(), String> {
        let (_, b) = self.at(group, index)?;
        if count > b.pending {
            return Err(format!(
                "{count} arrivals, but only {} of {} are pending in this phase",
                b.pending, b.arrivals
            ));
        }
        b.pending -= count;
        b.complete();
        Ok(())
    }

    pub fn expect(&mut self, group: &Barriers, index: i128, bytes: u32) -> Result<(), String> {
        self.at(group, index)?.1.bytes += bytes;
        self.arrive(group, index, 1)
    }

    /// Performs a copy that an mbarrier tracks. Its bytes become visible when a wait for the phase returns.
    pub fn copy(
        &mut self,
        group: &Barriers,
        index: i128,
        to: &Shared,
        tile: Tile,
        memory: &mut SharedMemory,
    ) -> Result<(), String> {
        let bytes = (tile.bits.len() * to.elem.bytes()) as u32;
        let (barrier, b) = self.at(group, index)?;
        if bytes > b.bytes {
            return Err(format!("writes {bytes} bytes, but only {} more are expected", b.bytes));
        }
        let phase = b.phase;
        b.bytes -= bytes;
        b.complete();
        memory.clear(to);
        self.copies.push(PendingCopy { barrier, phase, to: to.clone(), tile });
        Ok(())
    }

    /// Whether the phase with this parity is complete; if so, makes the bytes of its copies visible.
    pub fn wait(
        &mut self,
        group: &Barriers,
        index: i128,
        parity: i128,
        memory: &mut SharedMemory,
    ) -> Result<bool, String> {
        if !(0..=1).contains(&parity) {
            return Err(format!("waits for parity {parity}, expected 0 or 1"));
        }
        let (number, b) = self.at(group, index)?;
        let phase = b.phase;
        if phase % 2 == parity as u64 {
            return Ok(false);
        }
        self.copies.retain(|copy| {
            let landed = copy.barrier == number && copy.phase < phase;
            if landed {
                memory.store(&copy.to, &copy.tile);
            }
            !landed
        });
        Ok(true)
    }

    /// Takes the place of the programs whose turns come before that of this one: uses their buffers as the producer
    /// fills them. Returns how many, and whether these were all.
    pub fn use_for_others(
        &mut self,
        at: OpId,
        rings: &[UsedByOthers],
        memory: &mut SharedMemory,
    ) -> Result<(u64, bool), String> {
        let mut used = self.used_by_others.remove(&at).unwrap_or_else(|| vec![0; rings.len()]);
        let mut now = 0;
        for (ring, used) in rings.iter().zip(&mut used) {
            let depth = ring.full.count as i128;
            while *used < ring.count {
                let position = ring.slot + *used;
                let (slot, parity) = (position % depth, ring.parity ^ (position / depth % 2));
                if !self.wait(&ring.full, slot, parity, memory)? {
                    break;
                }
                let arrivals = self.at(&ring.empty, slot)?.1.pending;
                self.arrive(&ring.empty, slot, arrivals)?;
                *used += 1;
                now += 1;
            }
        }
        let done = rings.iter().zip(&used).all(|(ring, &used)| used >= ring.count);
        if !done {
            self.used_by_others.insert(at, used);
        }
        Ok((now, done))
    }

    /// State of an mbarrier, for messages.
    pub fn describe(&mut self, group: &Barriers, index: i128) -> String {
        match self.at(group, index) {
            Ok((_, b)) => format!(
                "in phase {}, {} of {} arrivals and {} expected bytes are pending",
                b.phase, b.pending, b.arrivals, b.bytes
            ),
            Err(e) => e,
        }
    }
}

impl Barrier {
    fn complete(&mut self) {
        if self.pending == 0 && self.bytes == 0 {
            self.pending = self.arrivals;
            self.phase += 1;
        }
    }
}
