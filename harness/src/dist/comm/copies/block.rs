//! What a rank shows to the others: one piece of its GPU's memory, with a place for everything that they write or fetch.

/// Places in the block that every rank allocates, in bytes from its start: flags, cells, then slots. All ranks' blocks are alike.
///
/// Each lane has
/// - an inbox: a slot of `segment` bytes for each other rank, in rank order, one behind the other;
/// - an send_slot of `segment` bytes, which the others fetch;
/// - a flag for each other rank, which counts that rank's signals, and a cell from which this rank's signals to it are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub world: usize,
    pub lanes: usize,
    /// Bytes of a slot.
    pub segment: usize,
}

/// Flags and cells have a line of the cache each, and slots begin at multiples of it.
pub const LINE: usize = 128;

impl Block {
    /// The flag of `lane` that counts what `from` signals to this block's owner: a u32.
    pub fn flag(&self, lane: usize, from: usize) -> usize {
        (lane * self.world + from) * LINE
    }

    /// Bytes of all flags, which begin the block.
    pub fn flags(&self) -> usize {
        self.lanes * self.world * LINE
    }

    /// The cell that holds what this block's owner signals to `to`: a u32.
    pub fn cell(&self, lane: usize, to: usize) -> usize {
        self.flags() + self.flag(lane, to)
    }

    /// Where the slots begin, as one after the other: a lane's inbox, then its send_slot.
    fn slot(&self, lane: usize, slot: usize) -> usize {
        2 * self.flags() + (lane * self.world + slot) * self.segment
    }

    /// The inbox of `lane` in the block of `owner`, where it begins: slots of all other ranks.
    pub fn recv_slots(&self, lane: usize) -> usize {
        self.slot(lane, 0)
    }

    /// The slot for what `from` sends to `owner`.
    pub fn recv_slot(&self, lane: usize, owner: usize, from: usize) -> usize {
        self.slot(lane, if from < owner { from } else { from - 1 })
    }

    /// What the others fetch.
    pub fn send_slot(&self, lane: usize) -> usize {
        self.slot(lane, self.world - 1)
    }

    /// Of the whole block.
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
                    assert_eq!(block.recv_slots(lane), block.recv_slot(lane, owner, first), "the kernel begins there");
                    let slots: Vec<usize> = others().map(|rank| block.recv_slot(lane, owner, rank)).collect();
                    assert!(slots.windows(2).all(|two| two[1] - two[0] == segment), "and goes on in rank order");
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
