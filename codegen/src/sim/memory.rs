//! Global memory in buffers, and one block's shared memory with a record of who touched which byte.

use super::clock::Clocks;
use super::parse::SMEM_BASE;
use std::collections::HashMap;

/// Buffers at made-up addresses, far enough apart that no access runs from one into the next.
#[derive(Clone, Debug, Default)]
pub struct Global {
    buffers: Vec<Vec<u8>>,
}

const SPACING: u64 = 1 << 40;

impl Global {
    /// Adds a buffer; gives its address.
    pub fn add(&mut self, bytes: Vec<u8>) -> u64 {
        self.buffers.push(bytes);
        self.buffers.len() as u64 * SPACING
    }

    /// Contents of the buffer at an address that [`Global::add`] gave.
    pub fn bytes(&self, address: u64) -> &[u8] {
        &self.buffers[(address / SPACING - 1) as usize]
    }

    fn locate(&self, address: u64, len: usize) -> Result<(usize, usize), String> {
        let index = (address / SPACING) as usize;
        let offset = (address % SPACING) as usize;
        match index.checked_sub(1).and_then(|i| self.buffers.get(i)) {
            Some(b) if offset + len <= b.len() && (offset as u64).is_multiple_of(len.min(16) as u64) => {
                Ok((index - 1, offset))
            }
            Some(b) => Err(format!(
                "global access of {len} bytes at offset {offset} of buffer {}, which has {} bytes, or misaligned",
                index - 1,
                b.len()
            )),
            None => Err(format!("global access of {len} bytes at {address:#x}, where no buffer is")),
        }
    }

    pub(super) fn read(&self, address: u64, len: usize) -> Result<Vec<u8>, String> {
        let (b, at) = self.locate(address, len)?;
        Ok(self.buffers[b][at..at + len].to_vec())
    }

    pub(super) fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), String> {
        let (b, at) = self.locate(address, bytes.len())?;
        self.buffers[b][at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

/// Who wrote a byte last, and who has read it since.
#[derive(Clone, Copy, Debug, Default)]
struct Trace {
    /// The source of the write, and its time.
    writer: Option<(u32, u32)>,
    /// The number of the write, for fences.
    sequence: u64,
    /// Readers since the last write: the last one's number in the list of all.
    readers: u32,
    defined: bool,
}

/// A reader, and those before it.
#[derive(Clone, Copy, Debug)]
struct Reader {
    before: u32,
    thread: u32,
    when: u32,
}

/// Shared memory of one block.
pub struct Shared {
    bytes: Vec<u8>,
    trace: Vec<Trace>,
    sequence: u64,
    /// Per byte: products under way that read it.
    reading: Vec<u16>,
    /// Per thread: writes up to here are fenced for the asynchronous proxy.
    fenced: Vec<u64>,
    pub clocks: Clocks,
    /// Lists of readers, each linked to the one before; number 0 is nobody.
    readers: Vec<Reader>,
    /// What the reader of the last access added to which list.
    added: ((u32, u32), HashMap<u32, u32>),
}

impl Shared {
    pub fn new(bytes: u32, threads: u32) -> Shared {
        Shared {
            bytes: vec![0xAA; bytes as usize],
            trace: vec![Trace::default(); bytes as usize],
            sequence: 0,
            reading: vec![0; bytes as usize],
            fenced: vec![0; threads as usize],
            clocks: Clocks::new(threads),
            readers: vec![Reader { before: 0, thread: 0, when: 0 }],
            added: ((u32::MAX, 0), HashMap::new()),
        }
    }

    fn locate(&self, address: u64, len: usize) -> Result<usize, String> {
        match address.checked_sub(SMEM_BASE) {
            Some(at) if at as usize + len <= self.bytes.len() && address.is_multiple_of(len.min(16) as u64) => {
                Ok(at as usize)
            }
            _ => Err(format!(
                "shared access of {len} bytes at {address}: the block has bytes {SMEM_BASE} to {}, or misaligned",
                SMEM_BASE as usize + self.bytes.len()
            )),
        }
    }

    /// A read by `thread`.
    pub fn read(&mut self, address: u64, len: usize, thread: u32) -> Result<Vec<u8>, String> {
        let at = self.locate(address, len)?;
        let now = self.clocks.now(thread);
        if self.added.0 != (thread, now) {
            self.added = ((thread, now), HashMap::new());
        }
        for i in at..at + len {
            let t = &mut self.trace[i];
            if !t.defined {
                return Err(format!("read of shared byte {i}, which nothing wrote"));
            }
            if let Some((writer, when)) = t.writer
                && !self.clocks.knows(thread, writer, when)
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
            if t.readers != 0 && (last.thread, last.when) == (thread, now) {
                continue;
            }
            let (list, readers) = (&mut self.added.1, &mut self.readers);
            t.readers = *list.entry(t.readers).or_insert_with(|| {
                readers.push(Reader { before: t.readers, thread, when: now });
                readers.len() as u32 - 1
            });
        }
        Ok(self.bytes[at..at + len].to_vec())
    }

    /// A reader of a byte of whom `thread` does not know that it is done.
    fn open_reader(&self, byte: usize, thread: u32) -> Option<u32> {
        let mut at = self.trace[byte].readers;
        while at != 0 {
            let r = self.readers[at as usize];
            if !self.clocks.knows(thread, r.thread, r.when) {
                return Some(r.thread);
            }
            at = r.before;
        }
        None
    }

    pub fn write(&mut self, address: u64, bytes: &[u8], thread: u32) -> Result<(), String> {
        let at = self.locate(address, bytes.len())?;
        self.not_being_read(at, bytes.len())?;
        self.sequence += 1;
        let now = self.clocks.now(thread);
        for (i, &b) in (at..).zip(bytes) {
            let t = &self.trace[i];
            // Even of equal values: of a copy that several threads hold, one is to be written.
            if let Some((writer, when)) = t.writer
                && !self.clocks.knows(thread, writer, when)
            {
                return Err(format!("race: threads {writer} and {thread} both write shared byte {i}"));
            }
            if self.open_reader(i, thread).is_some() {
                return Err(format!(
                    "race: thread {thread} writes shared byte {i}, which another thread read after the last barrier"
                ));
            }
            self.trace[i] = Trace { writer: Some((thread, now)), sequence: self.sequence, readers: 0, defined: true };
            self.bytes[i] = b;
        }
        Ok(())
    }

    /// A write by the bulk copy engine that `thread` asked for. It is known by the source `by` at the time `when`.
    pub fn write_bulk(&mut self, address: u64, bytes: &[u8], thread: u32, by: u32, when: u32) -> Result<(), String> {
        let at = self.locate(address, bytes.len())?;
        self.not_being_read(at, bytes.len())?;
        self.sequence += 1;
        for (i, &b) in (at..).zip(bytes) {
            if let Some((writer, time)) = self.trace[i].writer {
                if !self.clocks.knows(thread, writer, time) {
                    return Err(format!("race: a bulk copy overwrites shared byte {i} while its last writer is at it"));
                }
                if self.clocks.is_thread(writer) && self.fenced[writer as usize] < self.trace[i].sequence {
                    return Err(format!(
                        "a bulk copy overwrites shared byte {i}, which thread {writer} wrote without a proxy fence since"
                    ));
                }
            }
            if let Some(reader) = self.open_reader(i, thread) {
                return Err(format!(
                    "race: a bulk copy overwrites shared byte {i}, which thread {reader} may still be reading"
                ));
            }
            self.trace[i] = Trace { writer: Some((by, when)), sequence: self.sequence, readers: 0, defined: true };
            self.bytes[i] = b;
        }
        Ok(())
    }

    /// A read by the tensor cores or the bulk copy engine on behalf of `thread`.
    pub fn read_async(&mut self, address: u64, len: usize, thread: u32) -> Result<Vec<u8>, String> {
        let at = self.locate(address, len)?;
        for i in at..at + len {
            if let Some((writer, _)) = self.trace[i].writer
                && self.clocks.is_thread(writer)
                && self.fenced[writer as usize] < self.trace[i].sequence
            {
                return Err(format!(
                    "the asynchronous proxy reads shared byte {i}, which thread {writer} wrote without a proxy fence since"
                ));
            }
        }
        self.read(address, len, thread)
    }

    /// `fence.proxy.async`: what the thread has written becomes visible to the tensor cores.
    pub fn fence(&mut self, thread: u32) {
        self.fenced[thread as usize] = self.sequence;
    }

    /// A product under way reads these bytes from now on.
    pub fn begin_product(&mut self, address: u64, len: usize) -> Result<(), String> {
        let at = self.locate(address, len)?;
        self.reading[at..at + len].iter_mut().for_each(|n| *n += 1);
        Ok(())
    }

    /// The product that `thread` waited for has read these bytes.
    pub fn end_product(&mut self, address: u64, len: usize, thread: u32) -> Result<(), String> {
        let at = self.locate(address, len)?;
        self.reading[at..at + len].iter_mut().for_each(|n| *n -= 1);
        self.read(address, len, thread).map(drop)
    }

    fn not_being_read(&self, at: usize, len: usize) -> Result<(), String> {
        match (at..at + len).find(|&i| self.reading[i] > 0) {
            Some(i) => Err(format!("shared byte {i} was overwritten while a product under way was reading it")),
            None => Ok(()),
        }
    }

    /// `thread` starts a copy to these bytes, which may arrive at any time.
    pub fn start_copy(&self, address: u64, len: usize, thread: u32) -> Result<(), String> {
        let at = self.locate(address, len)?;
        self.not_being_read(at, len)?;
        match (at..at + len).find(|&i| self.open_reader(i, thread).is_some()) {
            Some(i) => Err(format!(
                "race: thread {thread} copies to shared byte {i}, which another thread read after the last barrier"
            )),
            None => Ok(()),
        }
    }
}
