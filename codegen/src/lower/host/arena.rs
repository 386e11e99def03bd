//! Allocates tile buffers in the scratch memory of a program instance.
//!
//! A buffer is allocated when its tile is computed, and released after the last use of the tile, so that later tiles
//! reuse memory that is still in the cache.

/// Alignment of buffers in bytes: a cache line, and the widest vector.
const ALIGN: u64 = 64;
/// Unused bytes after each buffer, so that equal positions in tiles of power-of-two size map to different cache sets.
const GAP: u64 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId(usize);

#[derive(Debug)]
struct Buffer {
    offset: u64,
    bytes: u64,
    references: u32,
}

/// First-fit allocator over an arena that grows as needed.
#[derive(Debug, Default)]
pub struct Arena {
    buffers: Vec<Buffer>,
    /// Free (offset, size) ranges below `end`, by offset.
    free: Vec<(u64, u64)>,
    end: u64,
}

impl Arena {
    /// Allocates a buffer with a reference count of one.
    pub fn allocate(&mut self, bytes: u64) -> BufferId {
        let bytes = bytes.next_multiple_of(ALIGN) + GAP;
        let offset = match self.free.iter().position(|&(_, size)| size >= bytes) {
            Some(i) => {
                let (offset, size) = self.free[i];
                if size == bytes {
                    self.free.remove(i);
                } else {
                    self.free[i] = (offset + bytes, size - bytes);
                }
                offset
            }
            None => {
                let offset = self.end;
                self.end += bytes;
                offset
            }
        };
        self.buffers.push(Buffer { offset, bytes, references: 1 });
        BufferId(self.buffers.len() - 1)
    }

    pub fn retain(&mut self, id: BufferId) {
        self.buffers[id.0].references += 1;
    }

    /// Drops one reference. Memory without references is reused.
    pub fn release(&mut self, id: BufferId) {
        let buffer = &mut self.buffers[id.0];
        assert!(buffer.references > 0, "internal compiler error: a tile buffer is released twice; please report this");
        buffer.references -= 1;
        if buffer.references > 0 {
            return;
        }
        let (mut start, mut size) = (buffer.offset, buffer.bytes);
        let at = self.free.partition_point(|&(offset, _)| offset < start);
        if self.free.get(at).is_some_and(|&(offset, _)| offset == start + size) {
            size += self.free.remove(at).1;
        }
        if at > 0 && self.free[at - 1].0 + self.free[at - 1].1 == start {
            let (offset, before) = self.free.remove(at - 1);
            start = offset;
            size += before;
            self.free.insert(at - 1, (start, size));
        } else {
            self.free.insert(at, (start, size));
        }
    }

    pub fn offset(&self, id: BufferId) -> u64 {
        self.buffers[id.0].offset
    }

    /// The reference count of a buffer.
    pub fn references(&self, id: BufferId) -> u32 {
        self.buffers[id.0].references
    }

    /// The size of the arena in bytes; never zero, because masked-off reads use its address.
    pub fn bytes(&self) -> u64 {
        self.end.max(ALIGN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_memory_is_merged_and_reused() {
        let mut a = Arena::default();
        let ids: Vec<BufferId> = (0..4).map(|_| a.allocate(1000)).collect();
        let high = a.bytes();
        a.release(ids[1]);
        a.release(ids[3]);
        a.release(ids[2]);
        let big = a.allocate(3 * 1024);
        assert_eq!(a.offset(big), a.offset(ids[1]));
        assert_eq!(a.bytes(), high);
        assert_eq!(a.offset(big) % ALIGN, 0);
    }

    #[test]
    fn a_retained_buffer_is_not_reused() {
        let mut a = Arena::default();
        let first = a.allocate(64);
        a.retain(first);
        a.release(first);
        let second = a.allocate(64);
        assert_ne!(a.offset(first), a.offset(second));
    }
}
