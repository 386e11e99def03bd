//! Data-race detection between programs, by vector clocks (happens-before).
//!
//! Two accesses to a byte by different programs conflict unless both are reads or both are atomic. They race unless one
//! happens before the other. Only `atomic_cas` orders programs: it releases the accesses of its program, and acquires
//! those that other programs have released by an `atomic_cas` on the same address. Accesses of one program are in
//! program order.
//!
//! For each byte, shadow memory has the last write, and the reads and the atomics since (as in FastTrack, Flanagan and
//! Freund 2009, which treats atomics as synchronization). Of these, an access is dropped that happens before a later
//! one of its kind: whatever is ordered after the later one is ordered after it too. Besides the latest one, at most
//! one access of each kind and program remains, usually none, and all of them are compared with a conflicting access.
//! So every race of an execution is reported, up to the first one.

use std::collections::HashMap;
use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum AccessKind {
    Read,
    /// An atomic, which reads and writes.
    Atomic,
    Write,
}

/// An access: the program, and the time on its clock.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Event {
    program: u32,
    time: u32,
}

/// Before all others.
const NO_EVENT: Event = Event { program: 0, time: 0 };

/// The present of the running program: its next access, and the last times of other programs that happen before it.
struct Now<'a> {
    event: Event,
    known: &'a [u32],
}

impl Now<'_> {
    fn is_after(&self, event: Event) -> bool {
        event.time == 0
            || event.program == self.event.program
            || self.known.get(event.program as usize).is_some_and(|&last| last >= event.time)
    }
}

/// The accesses of a byte that later ones may race with.
#[derive(Clone, Debug, PartialEq)]
struct ShadowByte {
    writer: Event,
    /// The latest read and the latest atomic since the last write.
    latest: [Event; 2],
    /// Earlier reads and atomics that did not happen before the next one of their kind: by program, the time, or 0.
    earlier: Option<Box<[Vec<u32>; 2]>>,
}

const NO_ACCESS: ShadowByte = ShadowByte { writer: NO_EVENT, latest: [NO_EVENT; 2], earlier: None };
const READ: usize = AccessKind::Read as usize;
const ATOMIC: usize = AccessKind::Atomic as usize;

impl ShadowByte {
    /// Records an access; returns an earlier one that races with it, and what that one did.
    fn record(&mut self, kind: AccessKind, now: &Now) -> Option<(Event, &'static str)> {
        let conflict = match kind {
            _ if !now.is_after(self.writer) => Some((self.writer, "wrote")),
            AccessKind::Read => self.unordered(ATOMIC, now),
            AccessKind::Atomic => self.unordered(READ, now),
            AccessKind::Write => self.unordered(READ, now).or_else(|| self.unordered(ATOMIC, now)),
        };
        if kind == AccessKind::Write {
            *self = ShadowByte { writer: now.event, ..NO_ACCESS };
            return conflict;
        }
        let last = std::mem::replace(&mut self.latest[kind as usize], now.event);
        if !now.is_after(last) {
            let times = &mut self.earlier.get_or_insert_default()[kind as usize];
            let program = last.program as usize;
            times.resize(times.len().max(program + 1), 0);
            times[program] = last.time;
        }
        conflict
    }

    /// An access of this kind since the last write, [`READ`] or [`ATOMIC`], that is not ordered before the present.
    fn unordered(&self, kind: usize, now: &Now) -> Option<(Event, &'static str)> {
        let did = if kind == READ { "read" } else { "atomically changed" };
        if !now.is_after(self.latest[kind]) {
            return Some((self.latest[kind], did));
        }
        let times = self.earlier.as_ref()?[kind].iter().zip(0..);
        let mut earlier = times.map(|(&time, program)| Event { program, time });
        earlier.find(|&event| !now.is_after(event)).map(|event| (event, did))
    }
}

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

    pub fn synchronize(&mut self, address: u64, order: crate::ir::MemSem) {
        if self.clocks.is_empty() || order == crate::ir::MemSem::Relaxed {
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
            if order.acquires() {
                *a = (*a).max(*b);
            }
            if order.releases() {
                *b = (*b).max(*a);
            }
        }
        clock[own] += 1;
    }

    pub fn record_access(
        &mut self,
        buffer: usize,
        size: usize,
        bytes: Range<usize>,
        kind: AccessKind,
    ) -> Result<(), String> {
        if self.clocks.is_empty() {
            return Ok(());
        }
        let own = self.program as usize;
        let now = Now { event: Event { program: self.program, time: self.time() }, known: &self.clocks[own] };
        let shadow = &mut self.shadow[buffer];
        if shadow.is_empty() {
            *shadow = vec![NO_ACCESS; size];
        }
        for i in bytes {
            if let Some((other, did)) = shadow[i].record(kind, &now) {
                let does = match kind {
                    AccessKind::Read => "reads",
                    AccessKind::Atomic => "atomically changes",
                    AccessKind::Write => "writes",
                };
                return Err(format!(
                    "data race: program {} {does} byte {i} of buffer {buffer}, which program {} {did}: \
                     nothing orders the two (relaxed atomics do not: give them `sem = acq_rel`)",
                    self.program, other.program
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WRITER: u32 = 3;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Access(AccessKind),
        /// An `atomic_cas` at this address, which orders programs.
        Synchronize(u64),
    }

    /// Applies steps of programs on one byte; returns the index of the first that races, and the message.
    fn first_race(steps: &[(u32, Step)]) -> Option<(usize, String)> {
        let mut detector = RaceDetector::new(WRITER as usize + 1, 1);
        steps.iter().enumerate().find_map(|(i, &(program, step))| {
            detector.program = program;
            match step {
                Step::Access(kind) => detector.record_access(0, 1, 0..1, kind).err().map(|message| (i, message)),
                Step::Synchronize(address) => {
                    detector.synchronize(address, crate::ir::MemSem::AcqRel);
                    None
                }
            }
        })
    }

    /// Same as [`first_race`], from all pairs of accesses: a step happens before another one if it reaches it by steps
    /// from one to a later one of the same program, or to a later one that synchronizes at the same address.
    fn expected(steps: &[(u32, Step)]) -> Option<usize> {
        let mut before = vec![Vec::new(); steps.len()];
        for (b, &(program, step)) in steps.iter().enumerate() {
            let mut reached = vec![false; b];
            for (a, &(earlier, other)) in steps[..b].iter().enumerate() {
                let at = |step| if let Step::Synchronize(address) = step { Some(address) } else { None };
                if earlier == program || (at(step).is_some() && at(step) == at(other)) {
                    reached[a] = true;
                    before[a].iter().zip(&mut reached).for_each(|(&via, to)| *to |= via);
                }
            }
            let conflict = |a: usize| match (steps[a].1, step) {
                (Step::Access(a), Step::Access(b)) => a != b || a == AccessKind::Write,
                _ => false,
            };
            if (0..b).any(|a| conflict(a) && !reached[a]) {
                return Some(b);
            }
            before[b] = reached;
        }
        None
    }

    /// Of three reads, or atomics, the write is ordered after the first and the last.
    #[test]
    fn the_middle_one_of_three_accesses_races_with_a_write() {
        for (kind, did) in [(AccessKind::Read, "read"), (AccessKind::Atomic, "atomically changed")] {
            for ordered in [[0, 2], [0, 1], [1, 2]] {
                let mut steps: Vec<_> = [0, 1, 2].map(|program| (program, Step::Access(kind))).into();
                steps.extend(ordered.map(|program| (program, Step::Synchronize(8))));
                steps.extend([(WRITER, Step::Synchronize(8)), (WRITER, Step::Access(AccessKind::Write))]);
                let (at, message) = first_race(&steps).expect("a race");
                let other = 3 - ordered.iter().sum::<u32>();
                let expected = format!("program 3 writes byte 0 of buffer 0, which program {other} {did}: ");
                assert!(at == 6 && message.contains(&expected), "{at}: {message}");
                steps.insert(3, (other, Step::Synchronize(8)));
                assert_eq!(first_race(&steps), None);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn exactly_the_unordered_conflicts_are_races(
            steps in prop::collection::vec((0..=WRITER, prop_oneof![
                3 => Just(Step::Access(AccessKind::Read)),
                2 => Just(Step::Access(AccessKind::Atomic)),
                1 => Just(Step::Access(AccessKind::Write)),
                6 => (0..2_u64).prop_map(Step::Synchronize),
            ]), 0..24),
        ) {
            prop_assert_eq!(first_race(&steps).map(|(at, _)| at), expected(&steps));
        }
    }
}
