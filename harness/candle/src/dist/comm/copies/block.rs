//! Memory layout of the block that a rank shares: space for everything that other ranks write or fetch.

/// Offsets in bytes in the block that every rank allocates: flags, cells, then slots. The layout is the same on all
/// ranks.
///
/// Each lane has
/// - receive slots: one of `segment` bytes for each other rank, contiguous, in rank order;
/// - a send slot of `segment` bytes, which the other ranks fetch;
/// - a flag for each other rank, which counts that rank's signals, and a cell from which this rank's signals to it are
///   copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub world: usize,
    pub lanes: usize,
    /// Bytes of a slot.
    pub segment: usize,
}

/// Bytes of a cache line. Each flag and each cell occupies one, and slots are aligned to it.
pub const LINE: usize = 128;

impl Block {
    /// The flag (u32) of `lane` that counts signals from `from` to the block's owner.
    pub fn flag(&self, lane: usize, from: usize) -> usize {
        (lane * self.world + from) * LINE
    }

    /// Bytes of all flags, which are at the start of the block.
    pub fn flags(&self) -> usize {
        self.lanes * self.world * LINE
    }

    /// The cell (u32) with the last signal from the block's owner to `to`.
    pub fn cell(&self, lane: usize, to: usize) -> usize {
        self.flags() + self.flag(lane, to)
    }

    /// Start of the slots, in order: a lane's receive slots, then its send slot.
    fn slot(&self, lane: usize, slot: usize) -> usize {
        2 * self.flags() + (lane * self.world + slot) * self.segment
    }

    /// Start of the receive slots of `lane`, one for each other rank.
    pub fn recv_slots(&self, lane: usize) -> usize {
        self.slot(lane, 0)
    }

    /// The slot for data from `from` to `owner`.
    pub fn recv_slot(&self, lane: usize, owner: usize, from: usize) -> usize {
        self.slot(lane, if from < owner { from } else { from - 1 })
    }

    /// The slot that other ranks fetch.
    pub fn send_slot(&self, lane: usize) -> usize {
        self.slot(lane, self.world - 1)
    }

    /// Size of the block in bytes.
    pub fn bytes(&self) -> usize {
        self.slot(self.lanes, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_do_not_overlap() {
        for (world, lanes, segment) in [(2, 1, 256), (2, 2, 128), (5, 3, 1024)] {
            let block = Block { world, lanes, segment };
            for owner in 0..world {
                let others = || (0..world).filter(move |&rank| rank != owner);
                let mut places = Vec::new();
                for lane in 0..lanes {
                    places.extend(
                        others().flat_map(|rank| [block.flag(lane, rank), block.cell(lane, rank)]).map(|at| (at, 4)),
                    );
                    places.extend(others().map(|rank| (block.recv_slot(lane, owner, rank), segment)));
                    places.push((block.send_slot(lane), segment));
                    let first = others().next().unwrap();
                    assert_eq!(block.recv_slots(lane), block.recv_slot(lane, owner, first), "the kernel starts there");
                    let slots: Vec<usize> = others().map(|rank| block.recv_slot(lane, owner, rank)).collect();
                    assert!(slots.windows(2).all(|two| two[1] - two[0] == segment), "and continues in rank order");
                }
                places.sort_unstable();
                assert!(places.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0), "{places:?}");
                assert!(places.iter().all(|(at, _)| at % LINE == 0));
                let (last, bytes) = places[places.len() - 1];
                assert_eq!(last + bytes, block.bytes());
            }
        }
    }
}
