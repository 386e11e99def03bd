//! One block's shared memory with a record of who touched which byte.

use super::clock::Clocks;
use super::parse::SMEM_BASE;
use std::collections::HashMap;

/// Who wrote a byte last, and who has read it since.
#[derive(Clone, Copy, Debug, Default)]
struct Trace {
    /// The source of the write, and its time.
    writer: Option<(u32, u32)>,
    /// One more than the thread whose `cp.async` may write the byte at any time; 0 where there is none.
    copying: u32,
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
    /// Per byte: products under way that read it.
    reading: Vec<u16>,
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
            reading: vec![0; bytes as usize],
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
            if t.copying > 0 {
                return Err(format!(
                    "race: thread {thread} reads shared byte {i}, which a copy by thread {} may still write",
                    t.copying - 1
                ));
            }
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
        self.not_busy(at, bytes.len())?;
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
            self.trace[i] = Trace { writer: Some((thread, now)), copying: 0, readers: 0, defined: true };
            self.bytes[i] = b;
        }
        Ok(())
    }

    /// A write by the bulk copy engine that `thread` asked for. It is known by the source `by` at the time `when`.
    pub fn write_bulk(&mut self, address: u64, bytes: &[u8], thread: u32, by: u32, when: u32) -> Result<(), String> {
        let at = self.locate(address, bytes.len())?;
        self.not_busy(at, bytes.len())?;
        for (i, &b) in (at..).zip(bytes) {
            if let Some((writer, time)) = self.trace[i].writer {
                if !self.clocks.knows(thread, writer, time) {
                    return Err(format!("race: a bulk copy overwrites shared byte {i} while its last writer is at it"));
                }
                if self.clocks.is_thread(writer) && !self.clocks.proxy_knows(thread, writer, time) {
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
            self.trace[i] = Trace { writer: Some((by, when)), copying: 0, readers: 0, defined: true };
            self.bytes[i] = b;
        }
        Ok(())
    }

    /// A read by the tensor cores or the bulk copy engine on behalf of `thread`.
    pub fn read_async(&mut self, address: u64, len: usize, thread: u32) -> Result<Vec<u8>, String> {
        let at = self.locate(address, len)?;
        for i in at..at + len {
            if let Some((writer, when)) = self.trace[i].writer
                && self.clocks.is_thread(writer)
                // Whether a barrier lies in between says `read`.
                && self.clocks.knows(thread, writer, when)
                && !self.clocks.proxy_knows(thread, writer, when)
            {
                return Err(format!(
                    "the asynchronous proxy reads shared byte {i}, which thread {writer} wrote without a proxy fence since"
                ));
            }
        }
        self.read(address, len, thread)
    }

    /// A product under way reads these bytes from now on.
    pub fn begin_product(&mut self, address: u64, len: usize) -> Result<(), String> {
        let at = self.locate(address, len)?;
        self.reading[at..at + len].iter_mut().for_each(|n| *n += 1);
        Ok(())
    }

    /// The product that these threads waited for has read these bytes. Each knows of it, and nobody else.
    pub fn end_product(&mut self, address: u64, len: usize, threads: &[u32]) -> Result<(), String> {
        let at = self.locate(address, len)?;
        self.reading[at..at + len].iter_mut().for_each(|n| *n -= 1);
        for &thread in threads {
            self.read(address, len, thread)?;
        }
        Ok(())
    }

    /// Neither does a product under way read these bytes, nor may a copy still write them.
    fn not_busy(&self, at: usize, len: usize) -> Result<(), String> {
        for i in at..at + len {
            if self.reading[i] > 0 {
                return Err(format!("shared byte {i} was overwritten while a product under way was reading it"));
            }
            if self.trace[i].copying > 0 {
                return Err(format!(
                    "race: shared byte {i} is overwritten, which a copy by thread {} may still write",
                    self.trace[i].copying - 1
                ));
            }
        }
        Ok(())
    }

    /// `thread` starts a copy to these bytes, which may arrive at any time until it has waited for it.
    pub fn start_copy(&mut self, address: u64, len: usize, thread: u32) -> Result<(), String> {
        let at = self.locate(address, len)?;
        self.not_busy(at, len)?;
        for i in at..at + len {
            if self.open_reader(i, thread).is_some() {
                return Err(format!(
                    "race: thread {thread} copies to shared byte {i}, which another thread read after the last barrier"
                ));
            }
            if let Some((writer, when)) = self.trace[i].writer
                && !self.clocks.knows(thread, writer, when)
            {
                return Err(format!(
                    "race: thread {thread} copies to shared byte {i}, which another thread wrote after the last barrier"
                ));
            }
        }
        self.trace[at..at + len].iter_mut().for_each(|t| t.copying = thread + 1);
        Ok(())
    }

    /// The thread that started it has waited for the copy.
    pub fn end_copy(&mut self, address: u64, bytes: &[u8], thread: u32) -> Result<(), String> {
        let at = self.locate(address, bytes.len())?;
        self.trace[at..at + bytes.len()].iter_mut().for_each(|t| t.copying = 0);
        self.write(address, bytes, thread)
    }
}
