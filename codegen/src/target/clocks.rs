//! Records of clocks, an intra-kernel profile: when the warpgroups of one block reached the ops of a kernel at which
//! warps wait, or at which they start matrix products and copies.
//!
//! Code that was compiled with [`CompileOptions::clocks`](super::CompileOptions::clocks) takes the address of its record
//! as an argument of its own ([`ArgType::Clocks`](super::ArgType::Clocks)), which the launch passes. The first warp of
//! each warpgroup records the low 32 bits of its SM's clock, which all warps of a block share.
//!
//! The record has events of two 32-bit words, a tag and a clock: first those with the number 0 of all warpgroups, then
//! those with the number 1. Tags of events that were not recorded are 0.

use std::hash::{DefaultHasher, Hash, Hasher};

use serde::{Deserialize, Serialize};

use super::CompileOptions;
use crate::ir::Func;
use crate::text;

/// Warpgroups with events: a block has up to 32 warps and four of a producer.
pub const WARPGROUPS: usize = 16;

/// Bytes of an event.
pub const EVENT: usize = 8;

/// Events of a warpgroup: what follows them is not recorded.
pub const EVENTS: usize = 8192;

/// Bytes of a record.
pub const BYTES: usize = EVENT * WARPGROUPS * EVENTS;

/// What a warpgroup does at an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// Begins the op, or an iteration of the loop.
    Begin,
    /// Ends the op, or leaves the loop.
    End,
    /// Arrives at the barrier that the lowering inserted before the op.
    Barrier,
    /// Leaves that barrier.
    BarrierEnd,
}

const MOMENTS: [Moment; 4] = [Moment::Begin, Moment::End, Moment::Barrier, Moment::BarrierEnd];

/// An event of a warpgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Index of the op in the lowered function.
    pub op: u32,
    pub moment: Moment,
    /// Cycles since the first event of the first warpgroup.
    pub clock: i64,
}

/// The code whose clocks are recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subject {
    /// [`hash`] of the function after the last pass.
    pub lowered: u64,
    /// Whether it was compiled for launches that check assumptions about ranges.
    pub assume_ranges: bool,
}

/// Whether a warpgroup had more events than a record has room for, so that later ones may be missing.
pub fn is_full(events: &[Vec<Event>]) -> bool {
    events.iter().any(|events| events.len() >= EVENTS)
}

/// A hash of a function after the last pass, the ids of its ops, which events have, the options and the compiler. The
/// same in all programs of one version of the compiler.
pub fn hash(lowered: &Func, options: &CompileOptions) -> u64 {
    let options = CompileOptions { clocks: None, ..options.clone() };
    let ids: Vec<u32> = lowered.walk().into_iter().map(|id| id.0).collect();
    let mut hasher = DefaultHasher::new();
    (crate::compiler_id(), options, ids, text::print(lowered)).hash(&mut hasher);
    hasher.finish()
}

/// The tag of an event: never 0.
pub fn tag(op: u32, moment: Moment) -> u32 {
    (op << 2 | moment as u32) + 1
}

/// The events of each warpgroup in the bytes of a record, in their order; those of the last warpgroups may be empty.
pub fn decode(record: &[u8]) -> Vec<Vec<Event>> {
    let word = |at: usize| record.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes);
    let first = word(4);
    let of_group = |group: usize| {
        let mut before: Option<(u32, i64)> = None;
        let events = (group * EVENT..record.len()).step_by(WARPGROUPS * EVENT).map(|at| [word(at), word(at + 4)]);
        let events = events.take_while(|[tag, _]| *tag != 0).map(|[tag, now]| {
            // The low bits wrap around. A warpgroup may begin before the first one, but its own clock only advances.
            let clock = match before {
                None => i64::from(now.wrapping_sub(first) as i32),
                Some((low, clock)) => clock + i64::from(now.wrapping_sub(low)),
            };
            before = Some((now, clock));
            Event { op: (tag - 1) >> 2, moment: MOMENTS[(tag as usize - 1) % MOMENTS.len()], clock }
        });
        events.collect::<Vec<Event>>()
    };
    let mut groups: Vec<Vec<Event>> = (0..WARPGROUPS).map(of_group).collect();
    while groups.last().is_some_and(Vec::is_empty) {
        groups.pop();
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_wrap_around_and_may_be_before_the_first() {
        let mut record = vec![0; BYTES];
        let mut put = |group: usize, number: usize, tag: u32, clock: u32| {
            let at = EVENT * (number * WARPGROUPS + group);
            record[at..at + 4].copy_from_slice(&tag.to_le_bytes());
            record[at + 4..at + 8].copy_from_slice(&clock.to_le_bytes());
        };
        put(0, 0, tag(0, Moment::Begin), u32::MAX - 9);
        put(0, 1, tag(7, Moment::BarrierEnd), 20);
        put(0, 2, tag(7, Moment::Begin), 10);
        put(2, 0, tag(1 << 20, Moment::End), u32::MAX - 29);
        let event = |op, moment, clock| Event { op, moment, clock };
        let late = event(7, Moment::Begin, 20 + (1 << 32));
        let first = vec![event(0, Moment::Begin, 0), event(7, Moment::BarrierEnd, 30), late];
        assert_eq!(decode(&record), [first, vec![], vec![event(1 << 20, Moment::End, -20)]]);
        assert_eq!(decode(&[]), Vec::<Vec<Event>>::new());
    }
}
