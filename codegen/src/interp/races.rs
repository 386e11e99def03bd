//! Data-race detection between programs, by vector clocks (happens-before).
//!
//! Two accesses to a byte by different programs conflict if one of them writes and not both are atomic. They race
//! unless one happens before the other. Only `atomic_cas` orders programs: it releases the accesses of its program, and
//! acquires those that other programs have released by an `atomic_cas` on the same address. Accesses of one program are
//! in program order.
//!
//! Of the programs that have read a byte since its last write, only the first and the latest other one are recorded, so
//! a race with a third reader can be missed.

use std::collections::HashMap;
use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum AccessKind {
    Plain,
    Atomic,
}

/// An access: the program, and the time on its clock.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Event {
    program: u32,
    time: u32,
}

const NO_EVENT: Event = Event { program: u32::MAX, time: 0 };

#[derive(Clone, Copy, Debug, PartialEq)]
struct ShadowByte {
    writer: Event,
    kind: AccessKind,
    readers: [Event; 2],
}

const NO_ACCESS: ShadowByte = ShadowByte { writer: NO_EVENT, kind: AccessKind::Plain, readers: [NO_EVENT; 2] };

/// State of the detector for one launch.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct RaceDetector {
    /// Number of changes of elements so far, by all programs, for the detection of spin waits.
    pub changes: u64,
    /// The running program.
    pub program: u32,
    /// Vector clock of each program. Empty if there is only one program.
    clocks: Vec<Vec<u32>>,
    released_clocks: HashMap<u64, Vec<u32>>,
    shadow: Vec<Vec<ShadowByte>>,
}

impl RaceDetector {
    pub fn new(programs: usize, buffers: usize) -> RaceDetector {
        let clocks = if programs > 1 { vec![Vec::new(); programs] } else { Vec::new() };
        RaceDetector { clocks, shadow: vec![Vec::new(); buffers], ..RaceDetector::default() }
    }

    /// Time of the running program: its number of releases so far, plus 1.
    fn time(&self) -> u32 {
        self.clocks[self.program as usize].get(self.program as usize).map_or(1, |&time| time.max(1))
    }

    fn happens_before(&self, event: Event) -> bool {
        event == NO_EVENT
            || event.program == self.program
            || self.clocks[self.program as usize].get(event.program as usize).is_some_and(|&last| last >= event.time)
    }

    pub fn acquire_release(&mut self, address: u64) {
        if self.clocks.is_empty() {
            return;
        }
        let (own, time) = (self.program as usize, self.time());
        let clock = &mut self.clocks[own];
        let released = self.released_clocks.entry(address).or_default();
        let len = clock.len().max(released.len()).max(own + 1);
        clock.resize(len, 0);
        released.resize(len, 0);
        clock[own] = time;
        for (a, b) in clock.iter_mut().zip(released) {
            *a = (*a).max(*b);
            *b = *a;
        }
        clock[own] += 1;
    }

    pub fn record_access(
        &mut self,
        buffer: usize,
        size: usize,
        bytes: Range<usize>,
        kind: AccessKind,
        writes: bool,
    ) -> Result<(), String> {
        if self.clocks.is_empty() {
            return Ok(());
        }
        if self.shadow[buffer].is_empty() {
            self.shadow[buffer] = vec![NO_ACCESS; size];
        }
        let now = Event { program: self.program, time: self.time() };
        for i in bytes {
            let t = self.shadow[buffer][i];
            let both_atomic = kind == AccessKind::Atomic && t.kind == AccessKind::Atomic;
            let conflict = match () {
                () if !both_atomic && !self.happens_before(t.writer) => Some((t.writer, "wrote")),
                () if writes => t.readers.into_iter().find(|&r| !self.happens_before(r)).map(|r| (r, "read")),
                () => None,
            };
            if let Some((other, did)) = conflict {
                let does = if writes { "writes" } else { "reads" };
                return Err(format!(
                    "data race: program {} {does} byte {i} of buffer {buffer}, which program {} {did}: \
                     nothing orders the two (only `atomic_cas` does)",
                    self.program, other.program
                ));
            }
            let t = &mut self.shadow[buffer][i];
            if writes {
                *t = ShadowByte { writer: now, kind, readers: [NO_EVENT; 2] };
            } else {
                let slot = usize::from(t.readers[0] != NO_EVENT && t.readers[0].program != now.program);
                t.readers[slot] = now;
            }
        }
        Ok(())
    }
}
