//! Data-race detection between programs, by vector clocks (happens-before).
//!
//! Two accesses to a byte by different programs conflict if one of them writes and not both are atomic. They race
//! unless one happens before the other. Only `atomic_cas` orders programs: it releases the accesses of its program, and
//! acquires those that other programs have released by an `atomic_cas` on the same address. Accesses of one program are
//! in program order.
//!
//! Of the programs that have read a byte since its last write, only the latest two are recorded.

use std::collections::HashMap;
use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    Plain,
    Atomic,
}

/// An access: the program, and the time on its clock.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Event {
    program: u32,
    time: u32,
}

const NOBODY: Event = Event { program: u32::MAX, time: 0 };

#[derive(Clone, Copy, Debug, PartialEq)]
struct Trace {
    writer: Event,
    kind: Kind,
    readers: [Event; 2],
}

const UNTOUCHED: Trace = Trace { writer: NOBODY, kind: Kind::Plain, readers: [NOBODY; 2] };

/// State of the detector for one launch.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Races {
    pub changes: u64,
    /// The running program.
    pub program: u32,
    /// Vector clock of each program. Empty if there is only one program.
    known: Vec<Vec<u32>>,
    released: HashMap<u64, Vec<u32>>,
    traces: Vec<Vec<Trace>>,
}

impl Races {
    pub fn new(programs: usize, buffers: usize) -> Races {
        let known = if programs > 1 { vec![Vec::new(); programs] } else { Vec::new() };
        Races { known, traces: vec![Vec::new(); buffers], ..Races::default() }
    }

    /// Time of the running program: its number of releases so far, plus 1.
    fn time(&self) -> u32 {
        self.known[self.program as usize].get(self.program as usize).map_or(1, |&time| time.max(1))
    }

    fn before(&self, event: Event) -> bool {
        event == NOBODY
            || event.program == self.program
            || self.known[self.program as usize].get(event.program as usize).is_some_and(|&last| last >= event.time)
    }

    pub fn synchronize(&mut self, address: u64) {
        if self.known.is_empty() {
            return;
        }
        let (own, time) = (self.program as usize, self.time());
        let known = &mut self.known[own];
        let there = self.released.entry(address).or_default();
        let len = known.len().max(there.len()).max(own + 1);
        known.resize(len, 0);
        there.resize(len, 0);
        known[own] = time;
        for (a, b) in known.iter_mut().zip(there) {
            *a = (*a).max(*b);
            *b = *a;
        }
        known[own] += 1;
    }

    pub fn touch(
        &mut self,
        buffer: usize,
        size: usize,
        bytes: Range<usize>,
        kind: Kind,
        writes: bool,
    ) -> Result<(), String> {
        if self.known.is_empty() {
            return Ok(());
        }
        if self.traces[buffer].is_empty() {
            self.traces[buffer] = vec![UNTOUCHED; size];
        }
        let now = Event { program: self.program, time: self.time() };
        for i in bytes {
            let t = self.traces[buffer][i];
            let both_atomic = kind == Kind::Atomic && t.kind == Kind::Atomic;
            let conflict = match () {
                () if !both_atomic && !self.before(t.writer) => Some((t.writer, "wrote")),
                () if writes => t.readers.into_iter().find(|&r| !self.before(r)).map(|r| (r, "read")),
                () => None,
            };
            if let Some((other, did)) = conflict {
                let does = if writes { "writes" } else { "reads" };
                return Err(format!(
                    "data race: {does} byte {i} of buffer {buffer}, which program {} {did}: nothing orders the two (only `atomic_cas` does)",
                    other.program
                ));
            }
            let t = &mut self.traces[buffer][i];
            if writes {
                *t = Trace { writer: now, kind, readers: [NOBODY; 2] };
            } else {
                let slot = usize::from(t.readers[0] != NOBODY && t.readers[0].program != now.program);
                t.readers[slot] = now;
            }
        }
        Ok(())
    }
}
