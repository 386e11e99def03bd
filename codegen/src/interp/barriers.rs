//! Barriers in shared memory: phases, arrivals, announced bytes, and the copies that they count.

use super::shared::SharedMemory;
use super::value::{Barriers, Shared, Tile};

/// One barrier.
#[derive(Clone, Copy, Debug)]
struct Barrier {
    /// Arrivals of a phase, and those that are missing in this one.
    arrivals: u32,
    missing: u32,
    /// Bytes announced and not yet written.
    bytes: u32,
    /// Number of complete phases.
    phase: u64,
    freed: bool,
}

/// A copy whose bytes nobody has waited for.
struct Copy {
    barrier: usize,
    phase: u64,
    to: Shared,
    tile: Tile,
}

/// The barriers of one program instance.
#[derive(Default)]
pub(super) struct BarrierTable {
    barriers: Vec<Barrier>,
    copies: Vec<Copy>,
}

impl BarrierTable {
    pub fn alloc(&mut self, count: usize, arrivals: u32) -> Barriers {
        let first = self.barriers.len();
        let new = Barrier { arrivals, missing: arrivals, bytes: 0, phase: 0, freed: false };
        self.barriers.resize(first + count, new);
        Barriers { first, count }
    }

    pub fn free(&mut self, group: &Barriers) -> Result<(), String> {
        for i in group.first..group.first + group.count {
            let b = &mut self.barriers[i];
            if b.missing != b.arrivals || b.bytes != 0 {
                return Err(format!(
                    "barrier {} ends in the middle of a phase: {} arrivals and {} bytes are missing",
                    i - group.first,
                    b.missing,
                    b.bytes
                ));
            }
            b.freed = true;
        }
        Ok(())
    }

    fn at(&mut self, group: &Barriers, index: i128) -> Result<(usize, &mut Barrier), String> {
        let Some(i) = usize::try_from(index).ok().filter(|&i| i < group.count) else {
            return Err(format!("takes barrier {index} of {}", group.count));
        };
        let number = group.first + i;
        let b = &mut self.barriers[number];
        if b.freed { Err("uses a barrier after its end".into()) } else { Ok((number, b)) }
    }

    pub fn arrive(&mut self, group: &Barriers, index: i128, count: u32) -> Result<(), String> {
        let (_, b) = self.at(group, index)?;
        if count > b.missing {
            return Err(format!("{count} arrive, but the phase misses only {} of {}", b.missing, b.arrivals));
        }
        b.missing -= count;
        b.complete();
        Ok(())
    }

    pub fn expect(&mut self, group: &Barriers, index: i128, bytes: u32) -> Result<(), String> {
        self.at(group, index)?.1.bytes += bytes;
        self.arrive(group, index, 1)
    }

    /// A copy that the barrier counts; its bytes are there for who waits.
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
            return Err(format!("writes {bytes} bytes, but only {} more are announced", b.bytes));
        }
        let phase = b.phase;
        b.bytes -= bytes;
        b.complete();
        memory.clear(to);
        self.copies.push(Copy { barrier, phase, to: to.clone(), tile });
        Ok(())
    }

    /// Whether the phase of that parity is complete; then what its copies wrote is there.
    pub fn wait(
        &mut self,
        group: &Barriers,
        index: i128,
        parity: i128,
        memory: &mut SharedMemory,
    ) -> Result<bool, String> {
        if !(0..=1).contains(&parity) {
            return Err(format!("waits for parity {parity}: it is 0 or 1"));
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

    /// What a barrier waits for, for messages.
    pub fn describe(&mut self, group: &Barriers, index: i128) -> String {
        match self.at(group, index) {
            Ok((_, b)) => format!(
                "phase {} misses {} of {} arrivals and {} announced bytes",
                b.phase, b.missing, b.arrivals, b.bytes
            ),
            Err(e) => e,
        }
    }
}

impl Barrier {
    fn complete(&mut self) {
        if self.missing == 0 && self.bytes == 0 {
            self.missing = self.arrivals;
            self.phase += 1;
        }
    }
}
