//! Happens-before by vector clocks.
//!
//! Every thread has a clock that ticks at each release (a barrier, an arrive, a proxy fence). An event is known to a
//! thread if a chain of releases and acquires leads from the event to the thread. Mbarriers are sources of events, too:
//! their clock is the number of their complete phases, and it stands for the copies that they track.
//!
//! A second vector clock tracks proxies: the events of each thread that are visible to the asynchronous proxy.
//! `fence.proxy.async` makes all writes that are known to the fencing thread visible to TMA and `wgmma`, whichever
//! thread wrote them; a thread that acquires the fence (at a barrier) acquires this visibility. A fence by the writer
//! before its arrive counts, and so does a fence by the reader after its wait; a fence by the writer after its arrive
//! does not (PTX ISA, "Memory Consistency Model", proxies).
//!
//! A third one tracks the fences of each thread itself: its reads are over for the asynchronous proxy only after one of
//! these. On an H200, a copy overtakes loads in flight although an arrival follows them.

/// A vector clock: for each source, the last known event.
pub type VectorClock = Vec<u32>;

/// The vector clocks that a release passes to an acquire.
#[derive(Clone, Debug, Default)]
pub struct SyncClocks {
    pub events: VectorClock,
    /// For each thread, the last event that is visible to the asynchronous proxy.
    async_visible: VectorClock,
    /// For each thread, its last event before a proxy fence of its own.
    fenced: VectorClock,
}

impl SyncClocks {
    pub fn join(&mut self, other: &SyncClocks) {
        join(&mut self.events, &other.events);
        join(&mut self.async_visible, &other.async_visible);
        join(&mut self.fenced, &other.fenced);
    }
}

#[derive(Debug)]
pub struct Clocks {
    known: Vec<SyncClocks>,
    threads: usize,
}

impl Clocks {
    pub fn new(threads: u32) -> Clocks {
        let n = threads as usize;
        let known = (0..n)
            .map(|t| {
                let mut own = vec![0; n];
                own[t] = 1;
                SyncClocks { events: own, ..SyncClocks::default() }
            })
            .collect();
        Clocks { known, threads: n }
    }

    /// The current time of a thread: the time stamp of its next action.
    pub fn now(&self, t: u32) -> u32 {
        self.known[t as usize].events[t as usize]
    }

    /// Whether the event of `source` at time `when` happens before the next action of thread `t`.
    pub fn happens_before(&self, t: u32, source: u32, when: u32) -> bool {
        source == t || self.known[t as usize].events.get(source as usize).is_some_and(|&last| last >= when)
    }

    /// Whether what `writer` wrote at time `when` is visible to asynchronous reads that thread `t` issues now.
    pub fn visible_to_async_proxy(&self, t: u32, writer: u32, when: u32) -> bool {
        self.known[t as usize].async_visible.get(writer as usize).is_some_and(|&last| last >= when)
    }

    /// Whether thread `t` knows of a proxy fence of `reader` after what it read at time `when`.
    pub fn read_is_fenced(&self, t: u32, reader: u32, when: u32) -> bool {
        self.known[t as usize].fenced.get(reader as usize).is_some_and(|&last| last >= when)
    }

    /// Whether a source is a thread, not an mbarrier.
    pub fn is_thread(&self, source: u32) -> bool {
        (source as usize) < self.threads
    }

    /// Releases all events known to thread `t`; its later events are not included.
    pub fn release(&mut self, t: u32) -> SyncClocks {
        let known = &mut self.known[t as usize];
        let released = known.clone();
        known.events[t as usize] += 1;
        released
    }

    /// The phases of mbarriers that thread `t` knows to be complete, and nothing else.
    pub fn phases(&self, t: u32) -> SyncClocks {
        let mut events = self.known[t as usize].events.clone();
        events.iter_mut().take(self.threads).for_each(|event| *event = 0);
        SyncClocks { events, ..SyncClocks::default() }
    }

    pub fn acquire(&mut self, t: u32, from: &SyncClocks) {
        self.known[t as usize].join(from);
    }

    /// Executes `fence.proxy.async` for thread `t`.
    pub fn fence(&mut self, t: u32) {
        let known = &mut self.known[t as usize];
        join(&mut known.async_visible, &known.events[..self.threads]);
        let own = t as usize;
        if known.fenced.len() <= own {
            known.fenced.resize(own + 1, 0);
        }
        known.fenced[own] = known.events[own];
        known.events[own] += 1;
    }

    /// Executes a barrier: every member acquires the events of all members.
    pub fn barrier(&mut self, members: &[usize]) {
        let mut all = SyncClocks::default();
        for &t in members {
            let one = self.release(t as u32);
            all.join(&one);
        }
        for &t in members {
            self.acquire(t as u32, &all);
        }
    }
}

/// The element-wise maximum of two vector clocks.
pub fn join(into: &mut VectorClock, from: &[u32]) {
    if into.len() < from.len() {
        into.resize(from.len(), 0);
    }
    for (a, &b) in into.iter_mut().zip(from) {
        *a = (*a).max(b);
    }
}
