//! Happens-before by vector clocks.
//!
//! Every thread has a clock that ticks whenever it releases what it has done (at a barrier, at an arrive, at a proxy fence). An event is
//! known to a thread if a chain of releases and acquires leads from the one to the other. Besides threads there are sources without code:
//! barriers in shared memory, whose clock is the number of their complete phases, and which stand for the copies that they count.
//!
//! A second vector is about proxies: which writes of each thread a proxy fence follows. `fence.proxy.async` makes the writes that the
//! fencing thread knows of visible to TMA and `wgmma`, whoever wrote them; who learns of the fence (by a barrier) learns of that too. So a
//! fence by the writer before it arrives counts, and so does one by the reader after it has waited, and a fence by the writer after it has
//! arrived does not (PTX ISA, "Memory Consistency Model", proxies).

/// For each source, the last of its events.
pub type Snapshot = Vec<u32>;

/// What somebody knows.
#[derive(Clone, Debug, Default)]
pub struct Knowledge {
    pub events: Snapshot,
    /// Of each thread's events, the last one that is visible to the asynchronous proxy.
    proxied: Snapshot,
}

impl Knowledge {
    pub fn join(&mut self, other: &Knowledge) {
        join(&mut self.events, &other.events);
        join(&mut self.proxied, &other.proxied);
    }
}

#[derive(Debug)]
pub struct Clocks {
    known: Vec<Knowledge>,
    threads: usize,
}

impl Clocks {
    pub fn new(threads: u32) -> Clocks {
        let n = threads as usize;
        let known = (0..n)
            .map(|t| {
                let mut own = vec![0; n];
                own[t] = 1;
                Knowledge { events: own, proxied: Snapshot::new() }
            })
            .collect();
        Clocks { known, threads: n }
    }

    /// The thread's time: what it does now happens then.
    pub fn now(&self, t: u32) -> u32 {
        self.known[t as usize].events[t as usize]
    }

    /// Whether the source's event at that time happened before what thread `t` does now.
    pub fn knows(&self, t: u32, source: u32, when: u32) -> bool {
        source == t || self.known[t as usize].events.get(source as usize).is_some_and(|&last| last >= when)
    }

    /// Whether what `writer` wrote at that time is visible to asynchronous reads that thread `t` asks for now.
    pub fn proxy_knows(&self, t: u32, writer: u32, when: u32) -> bool {
        self.known[t as usize].proxied.get(writer as usize).is_some_and(|&last| last >= when)
    }

    /// Whether a source is a thread.
    pub fn is_thread(&self, source: u32) -> bool {
        (source as usize) < self.threads
    }

    /// What thread `t` releases; what it does later is not part of it.
    pub fn release(&mut self, t: u32) -> Knowledge {
        let known = &mut self.known[t as usize];
        let released = known.clone();
        known.events[t as usize] += 1;
        released
    }

    pub fn acquire(&mut self, t: u32, from: &Knowledge) {
        self.known[t as usize].join(from);
    }

    /// `fence.proxy.async` by thread `t`.
    pub fn fence(&mut self, t: u32) {
        let known = &mut self.known[t as usize];
        join(&mut known.proxied, &known.events[..self.threads]);
        known.events[t as usize] += 1;
    }

    /// All of these threads wait for each other.
    pub fn meet(&mut self, members: &[usize]) {
        let mut all = Knowledge::default();
        for &t in members {
            let one = self.release(t as u32);
            all.join(&one);
        }
        for &t in members {
            self.acquire(t as u32, &all);
        }
    }
}

/// The later of both, source by source.
pub fn join(into: &mut Snapshot, from: &[u32]) {
    if into.len() < from.len() {
        into.resize(from.len(), 0);
    }
    for (a, &b) in into.iter_mut().zip(from) {
        *a = (*a).max(b);
    }
}
