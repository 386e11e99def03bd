//! Shared memory of one block, or of those of a cluster, with shadow state that records which thread accessed each byte.

use super::clock::Clocks;
use super::parse::SMEM_BASE;
use std::collections::HashMap;

/// Shadow state of one byte: its last write, and the reads since.
#[derive(Clone, Copy, Debug, Default)]
struct Shadow {
    /// Source and time of the write.
    writer: Option<(u32, u32)>,
    /// One more than the thread whose `cp.async` may write the byte at any time; 0 if there is none.
    copying: u32,
    /// Reads since the last write: index of the latest in `Shared::readers`.
    readers: u32,
    defined: bool,
}

/// A read, linked to the previous one.
#[derive(Clone, Copy, Debug)]
struct Reader {
    before: u32,
    thread: u32,
    when: u32,
    /// Whether it is a read by the async proxy (`wgmma`, a bulk reduction).
    by_async_proxy: bool,
}

/// The lists of reads that one read extended.
struct ReaderCache {
    /// Thread, time and proxy of the read.
    reader: (u32, u32, bool),
    /// By list: the list that it became by adding the read.
    lists: HashMap<u32, u32>,
    /// The last of them: neighboring bytes mostly have the same readers.
    last: (u32, u32),
}

impl ReaderCache {
    fn new(reader: (u32, u32, bool)) -> ReaderCache {
        ReaderCache { reader, lists: HashMap::new(), last: (u32::MAX, 0) }
    }
}

/// Distance of the shared memories of the blocks of a cluster in its window of addresses, which follows the window of the
/// own block.
const WINDOW: u64 = 1 << 18;

/// The address in the window of the cluster of an address of the own block, in the block of that rank (`mapa`).
pub fn in_cluster(address: u64, rank: u64) -> u64 {
    address + (rank + 1) * WINDOW
}

/// Shared memory of the blocks of a cluster, one after the other; mostly one.
pub struct Shared {
    /// Of one block.
    bytes_per_block: usize,
    threads_per_block: u32,
    bytes: Vec<u8>,
    shadow: Vec<Shadow>,
    /// Per byte: number of asynchronous reads in flight.
    async_readers: Vec<u16>,
    pub clocks: Clocks,
    /// Linked lists of reads; index 0 is the end of a list.
    readers: Vec<Reader>,
    /// For the last read.
    added: ReaderCache,
}

impl Shared {
    pub fn new(bytes: u32, threads: u32, blocks: u32) -> Shared {
        let all = (bytes * blocks) as usize;
        Shared {
            bytes_per_block: bytes as usize,
            threads_per_block: threads,
            bytes: vec![0xAA; all],
            shadow: vec![Shadow::default(); all],
            async_readers: vec![0; all],
            clocks: Clocks::new(threads * blocks),
            readers: vec![Reader { before: 0, thread: 0, when: 0, by_async_proxy: false }],
            added: ReaderCache::new((u32::MAX, 0, false)),
        }
    }

    /// The rank of the block that an address of a thread is in, and the address in its own window.
    pub fn block_of(&self, address: u64, thread: u32) -> (u64, u64) {
        match address / WINDOW {
            0 => (u64::from(thread / self.threads_per_block), address),
            window => (window - 1, address % WINDOW),
        }
    }

    fn locate(&self, address: u64, len: usize, thread: u32) -> Result<usize, String> {
        let (rank, own) = self.block_of(address, thread);
        let start = rank as usize * self.bytes_per_block;
        match own.checked_sub(SMEM_BASE) {
            Some(at)
                if at as usize + len <= self.bytes_per_block
                    && start < self.bytes.len()
                    && own.is_multiple_of(len.min(16) as u64) =>
            {
                Ok(start + at as usize)
            }
            _ => Err(format!(
                "out-of-bounds or misaligned shared access of {len} bytes at {address}: the block has bytes {SMEM_BASE} to {}",
                SMEM_BASE as usize + self.bytes_per_block
            )),
        }
    }

    /// Reads these bytes as `thread`; reports a race with an earlier write or copy.
    pub fn read(&mut self, address: u64, len: usize, thread: u32) -> Result<Vec<u8>, String> {
        self.read_by(address, len, thread, false)
    }

    fn read_by(&mut self, address: u64, len: usize, thread: u32, by_async_proxy: bool) -> Result<Vec<u8>, String> {
        let at = self.locate(address, len, thread)?;
        let now = self.clocks.now(thread);
        if self.added.reader != (thread, now, by_async_proxy) {
            self.added = ReaderCache::new((thread, now, by_async_proxy));
        }
        for i in at..at + len {
            let t = &mut self.shadow[i];
            if t.copying > 0 {
                return Err(format!(
                    "race: thread {thread} reads shared byte {i}, which a copy by thread {} may still write",
                    t.copying - 1
                ));
            }
            if !t.defined {
                return Err(format!("read of shared byte {i}, which is uninitialized"));
            }
            if let Some((writer, when)) = t.writer
                && !self.clocks.happens_before(thread, writer, when)
            {
                return Err(if self.clocks.is_thread(writer) {
                    format!(
                        "race: thread {thread} reads shared byte {i}, which thread {writer} wrote after the last barrier"
                    )
                } else {
                    format!("thread {thread} reads shared byte {i}, whose bulk copy it has not waited for")
                });
            }
            let last = self.readers[t.readers as usize];
            if t.readers != 0 && (last.thread, last.when, last.by_async_proxy) == self.added.reader {
                continue;
            }
            let (added, readers) = (&mut self.added, &mut self.readers);
            if added.last.0 != t.readers {
                let list = added.lists.entry(t.readers).or_insert_with(|| {
                    readers.push(Reader { before: t.readers, thread, when: now, by_async_proxy });
                    readers.len() as u32 - 1
                });
                added.last = (t.readers, *list);
            }
            t.readers = added.last.1;
        }
        Ok(self.bytes[at..at + len].to_vec())
    }

    /// A thread with a read of the byte after its last write for which `is_missed` holds.
    fn reader(&self, byte: usize, is_missed: impl Fn(&Reader) -> bool) -> Option<u32> {
        let mut at = self.shadow[byte].readers;
        while at != 0 {
            let r = self.readers[at as usize];
            if is_missed(&r) {
                return Some(r.thread);
            }
            at = r.before;
        }
        None
    }

    /// A thread whose read of the byte does not happen before the next action of `thread`.
    fn unordered_reader(&self, byte: usize, thread: u32) -> Option<u32> {
        self.reader(byte, |r| !self.clocks.happens_before(thread, r.thread, r.when))
    }

    pub fn write(&mut self, address: u64, bytes: &[u8], thread: u32) -> Result<(), String> {
        let at = self.locate(address, bytes.len(), thread)?;
        self.check_no_async_access(at, bytes.len())?;
        let now = self.clocks.now(thread);
        for (i, &b) in (at..).zip(bytes) {
            let t = &self.shadow[i];
            // Races of equal values count as well: only one of the threads that hold a replicated value may write it.
            if let Some((writer, when)) = t.writer
                && !self.clocks.happens_before(thread, writer, when)
            {
                return Err(format!("race: threads {writer} and {thread} both write shared byte {i}"));
            }
            if self.unordered_reader(i, thread).is_some() {
                return Err(format!(
                    "race: thread {thread} writes shared byte {i}, which another thread read after the last barrier"
                ));
            }
            // What was read before is over: the write follows it in the same proxy, and needs a fence before a copy itself.
            self.shadow[i] = Shadow { writer: Some((thread, now)), copying: 0, readers: 0, defined: true };
            self.bytes[i] = b;
        }
        Ok(())
    }

    /// Writes these bytes for a TMA load that `thread` issued. Its completion is the event of source `by` at time
    /// `when`.
    pub fn write_bulk(&mut self, address: u64, bytes: &[u8], thread: u32, by: u32, when: u32) -> Result<(), String> {
        let at = self.locate(address, bytes.len(), thread)?;
        self.check_no_async_access(at, bytes.len())?;
        for (i, &b) in (at..).zip(bytes) {
            if let Some((writer, time)) = self.shadow[i].writer {
                if !self.clocks.happens_before(thread, writer, time) {
                    return Err(format!(
                        "race: a bulk copy overwrites shared byte {i}, whose last write is not ordered before it"
                    ));
                }
                if self.clocks.is_thread(writer) && !self.clocks.visible_to_async_proxy(thread, writer, time) {
                    return Err(format!(
                        "a bulk copy overwrites shared byte {i}, which thread {writer} wrote without a proxy fence in between"
                    ));
                }
            }
            if let Some(reader) = self.unordered_reader(i, thread) {
                return Err(format!(
                    "race: a bulk copy overwrites shared byte {i}, which thread {reader} may still be reading"
                ));
            }
            let unfenced = |r: &Reader| !r.by_async_proxy && !self.clocks.read_is_fenced(thread, r.thread, r.when);
            if let Some(reader) = self.reader(i, unfenced) {
                return Err(format!(
                    "a bulk copy overwrites shared byte {i}, which thread {reader} read without a proxy fence of its own in between"
                ));
            }
            self.shadow[i] = Shadow { writer: Some((by, when)), copying: 0, readers: 0, defined: true };
            self.bytes[i] = b;
        }
        Ok(())
    }

    /// Reads these bytes for a wgmma or bulk reduction that `thread` issued.
    pub fn read_async(&mut self, address: u64, len: usize, thread: u32) -> Result<Vec<u8>, String> {
        let at = self.locate(address, len, thread)?;
        for i in at..at + len {
            if let Some((writer, when)) = self.shadow[i].writer
                && self.clocks.is_thread(writer)
                // `read` checks whether a barrier lies in between.
                && self.clocks.happens_before(thread, writer, when)
                && !self.clocks.visible_to_async_proxy(thread, writer, when)
            {
                return Err(format!(
                    "the asynchronous proxy reads shared byte {i}, which thread {writer} wrote without a proxy fence in between"
                ));
            }
        }
        self.read_by(address, len, thread, true)
    }

    /// Starts an asynchronous read of these bytes.
    pub fn begin_async_read(&mut self, address: u64, len: usize, thread: u32) -> Result<(), String> {
        let at = self.locate(address, len, thread)?;
        self.async_readers[at..at + len].iter_mut().for_each(|n| *n += 1);
        Ok(())
    }

    /// Completes an asynchronous read that these threads have waited for. The completion happens before later actions
    /// of these threads only.
    pub fn end_async_read(&mut self, address: u64, len: usize, threads: &[u32]) -> Result<(), String> {
        let at = self.locate(address, len, threads[0])?;
        self.async_readers[at..at + len].iter_mut().for_each(|n| *n -= 1);
        for &thread in threads {
            self.read_by(address, len, thread, true)?;
        }
        Ok(())
    }

    /// Checks that no asynchronous read or copy of these bytes is in flight.
    fn check_no_async_access(&self, at: usize, len: usize) -> Result<(), String> {
        for i in at..at + len {
            if self.async_readers[i] > 0 {
                return Err(format!("shared byte {i} is overwritten while an asynchronous read of it is in flight"));
            }
            if self.shadow[i].copying > 0 {
                return Err(format!(
                    "race: shared byte {i} is overwritten while a copy by thread {} may still write it",
                    self.shadow[i].copying - 1
                ));
            }
        }
        Ok(())
    }

    /// Starts a `cp.async` by `thread` to these bytes, which may arrive at any time until the thread has waited for it.
    pub fn start_copy(&mut self, address: u64, len: usize, thread: u32) -> Result<(), String> {
        let at = self.locate(address, len, thread)?;
        self.check_no_async_access(at, len)?;
        for i in at..at + len {
            if self.unordered_reader(i, thread).is_some() {
                return Err(format!(
                    "race: thread {thread} copies to shared byte {i}, which another thread read after the last barrier"
                ));
            }
            if let Some((writer, when)) = self.shadow[i].writer
                && !self.clocks.happens_before(thread, writer, when)
            {
                return Err(format!(
                    "race: thread {thread} copies to shared byte {i}, which another thread wrote after the last barrier"
                ));
            }
        }
        self.shadow[at..at + len].iter_mut().for_each(|t| t.copying = thread + 1);
        Ok(())
    }

    /// Completes the copy: the issuing thread has waited for it.
    pub fn end_copy(&mut self, address: u64, bytes: &[u8], thread: u32) -> Result<(), String> {
        let at = self.locate(address, bytes.len(), thread)?;
        self.shadow[at..at + bytes.len()].iter_mut().for_each(|t| t.copying = 0);
        self.write(address, bytes, thread)
    }
}
