//! Who knows of whose doings: vector clocks.
//!
//! Every thread has a clock that it moves on whenever it tells others what it has done (at a barrier). An event is known
//! to a thread if a chain of barriers leads from the one to the other. Besides threads there are sources without code:
//! barriers in shared memory, whose clock is the number of their complete phases, and which stand for the copies that they
//! count.

/// What somebody knows: for each source, the last of its events.
pub type Snapshot = Vec<u32>;

#[derive(Debug)]
pub struct Clocks {
    known: Vec<Snapshot>,
    threads: usize,
}

impl Clocks {
    pub fn new(threads: u32) -> Clocks {
        let n = threads as usize;
        let known = (0..n)
            .map(|t| {
                let mut own = vec![0; n];
                own[t] = 1;
                own
            })
            .collect();
        Clocks { known, threads: n }
    }

    /// The thread's time: what it does now happens then.
    pub fn now(&self, t: u32) -> u32 {
        self.known[t as usize][t as usize]
    }

    /// Whether the source's event at that time happened before what thread `t` does now.
    pub fn knows(&self, t: u32, source: u32, when: u32) -> bool {
        source == t || self.known[t as usize].get(source as usize).is_some_and(|&last| last >= when)
    }

    /// Whether a source is a thread.
    pub fn is_thread(&self, source: u32) -> bool {
        (source as usize) < self.threads
    }

    /// What thread `t` tells others; what it does later is not part of it.
    pub fn release(&mut self, t: u32) -> Snapshot {
        let snapshot = self.known[t as usize].clone();
        self.known[t as usize][t as usize] += 1;
        snapshot
    }

    pub fn acquire(&mut self, t: u32, from: &[u32]) {
        join(&mut self.known[t as usize], from);
    }

    /// All of these threads wait for each other.
    pub fn meet(&mut self, members: &[usize]) {
        let mut all = Snapshot::new();
        for &t in members {
            let one = self.release(t as u32);
            join(&mut all, &one);
        }
        for &t in members {
            self.acquire(t as u32, &all);
        }
    }
}

/// What either knows.
pub fn join(into: &mut Snapshot, from: &[u32]) {
    if into.len() < from.len() {
        into.resize(from.len(), 0);
    }
    for (a, &b) in into.iter_mut().zip(from) {
        *a = (*a).max(b);
    }
}
