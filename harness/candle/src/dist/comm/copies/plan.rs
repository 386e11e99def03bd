//! Steps that each rank queues for a collective.
//!
//! A collective works on `world` chunks of the buffer. Chunks are divided into segments, and segment k is the k-th part
//! of *every* chunk: rank r reduces that of chunk r. Segments are dealt to lanes round-robin, over all collectives. A
//! lane is a queue of each rank, with receive slots, a send slot and flags ([`Block`]); it runs its steps in order, and
//! lanes run concurrently, so that one lane's copies overlap with the other's reduction.
//!
//! For segment n of a lane, rank r queues these steps, with every other rank p:
//!
//! | all_reduce | reduce_scatter | all_gather |
//! |---|---|---|
//! | await p's second signal of n − 1, unless already awaited | the same | |
//! | push r's data of chunk p into p's receive slot, signal p: first of n | the same | signal p: first of n |
//! | await p's first of n | the same | the same |
//! | reduce chunk r from the buffer and r's receive slots, in rank order, also into r's send slot | the same, without the send slot | copy chunk r to r's send slot |
//! | signal p: second of n | the same | the same |
//! | await p's second of n, pull chunk p from p's send slot | | the same |
//!
//! Pulled chunks are copied directly to their destination: nothing is copied twice, and other ranks' chunks need no
//! temporary memory.
//!
//! An exchange of two ranks is one segment, of the whole buffer: signal (first of n), await p's, send the buffer to p's
//! receive buffer, signal (second), await p's. The first signal says that the receive buffer is free, the second one
//! that it is full.
//!
//! A peer read of two ranks, each of which then reads the other's buffer, is: signal (first of n), await p's, signal
//! (second). The first signal says that the buffer is complete; it may be overwritten after the next peer read.
//!
//! Each segment, whatever its kind, signals every other rank exactly twice, and flags count the signals: 2 n + 1 and 2
//! n + 2. Because a lane runs in order, p's first signal of n means that p has *completed all segments before n* (and
//! that p's data is in r's receive slot, if p pushes), and p's second of n that p has *read its receive slots of n*
//! (and filled its send slot, if it has one to fill). The following properties depend on nothing else:
//!
//! - **No receive slot is overwritten before it is read.** Rank r writes p's slot in its push of n. The slot's previous
//!   content came from r's push of some m < n, and p read it in its reduction of m, before its second signal of m.
//!   Before it pushes, r has awaited p's second of n − 1 or a later one; an all_gather and an all_reduce await it
//!   themselves, a reduce_scatter leaves it to the next push of the lane (`unacknowledged`). A peer read reads no slot,
//!   and its first signal comes after all reads before it.
//! - **No send slot is overwritten before it is fetched.** Rank r writes its send slot in the reduction, or the copy,
//!   of n. The others fetched its previous content in a segment m < n, which they have completed when they send their
//!   first signal of n; r has awaited all of these.
//! - **No receive buffer of an exchange is overwritten before it is read.** A lane starts an exchange when the compute
//!   stream has reached the point of its call, after all reads of the buffer; only then does it send the first signal
//!   that the peer awaits.
//! - **Nothing is read too early.** Reductions come after the first signals of the same segment, which follow the
//!   pushes; pulls come after the second ones, which follow the writes to send slots.
//! - **Local memory** of chunk p is read by the push of n before the pull of n overwrites it, on the same lane;
//!   segments do not overlap.
//! - **No deadlock.** All ranks queue the same segments in the same order. Of all awaits that never end, take the one
//!   with the least (segment, first or second): the rank that has to signal has completed all steps that it queued
//!   before, so it signals. The argument also holds if the lanes of a rank run as one queue, in the order of
//!   [`Plan::steps`], as they do if the driver gives them one channel.

use std::ops::Range;

use super::block::{Block, LINE};

/// Number of lanes: one copies while the other one reduces.
pub const LANES: usize = 2;

/// Bytes of a segment, of each chunk. Between GPUs with NVLink it takes about 40 µs, some ten times as long as the
/// signals.
pub const SEGMENT: usize = 16 << 20;

/// Kind of collective; see [`Op`](crate::dist::comm::Op).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    /// Between two ranks.
    Exchange,
    /// Between two ranks.
    PeerRead,
}

/// A step on a lane. Ranges are bytes of the collective's buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Copies to the start of this rank's receive slot at `to`.
    Push { to: usize, from: Range<usize> },
    /// Copies to the same offset of the peer's receive buffer.
    Send { from: Range<usize> },
    /// Copies from the start of the send slot of `from`.
    Pull { from: usize, into: Range<usize> },
    /// Copies to the start of the local send slot.
    Stage { from: Range<usize> },
    /// Replaces the range by the reduction, in rank order, of it and the local receive slots; with `stage` also writes
    /// the send slot.
    Reduce { of: Range<usize>, stage: bool },
    /// Sets this rank's flag at `to`.
    Signal { to: usize, value: u32 },
    /// Waits until the flag of `from` has reached `value`: [`is_reached`].
    Await { from: usize, value: u32 },
}

/// Whether a flag has reached `value`. Counters wrap around: the later of two is less than 2³¹ ahead.
pub fn is_reached(flag: u32, value: u32) -> bool {
    flag.wrapping_sub(value) as i32 >= 0
}

/// How far a flag is set ahead to release all waits for it: beyond everything that may be queued, and less than 2³¹
/// ahead of completed segments.
pub const RELEASE: u32 = 1 << 30;

#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    /// Number of segments queued so far, modulo 2³².
    segments: u32,
    /// Whether the second signals of the last segment are not awaited yet.
    unacknowledged: bool,
}

/// State of one rank's schedule over all collectives.
#[derive(Clone, Debug)]
pub struct Plan {
    rank: usize,
    block: Block,
    lanes: Vec<Lane>,
    /// Index of the lane of the next segment.
    next: usize,
}

impl Plan {
    /// The plan of `rank` before its first collective. `segment` is rounded up to whole lines of [`LINE`] bytes.
    pub fn new(rank: usize, world: usize, lanes: usize, segment: usize) -> Plan {
        let block = Block { world, lanes, segment: segment.max(1).next_multiple_of(LINE) };
        Plan { rank, block, lanes: vec![Lane::default(); lanes], next: 0 }
    }

    /// The same plan after this number of segments on each lane.
    #[cfg(test)]
    pub(super) fn after(mut self, segments: u32) -> Plan {
        self.lanes.iter_mut().for_each(|lane| lane.segments = segments);
        self
    }

    /// Memory layout of the block.
    pub fn block(&self) -> Block {
        self.block
    }

    /// The last signal that `lane` sends or waits for.
    pub fn last_signal(&self, lane: usize) -> u32 {
        self.lanes[lane].segments.wrapping_mul(2)
    }

    /// The steps of a collective on `count` elements of `size` bytes, with the lane of each, in a valid order of
    /// submission. For a reduce_scatter and an all_gather `count` has to be a multiple of `world`. With a world size of
    /// 1, or without elements, there are none.
    pub fn steps(&mut self, kind: Kind, count: usize, size: usize) -> Vec<(usize, Step)> {
        let (world, alignment) = (self.block.world, (LINE / size).max(1));
        if world == 1 || count == 0 {
            return Vec::new();
        }
        // An all_reduce can choose its chunks, and aligns them for vector loads.
        let chunk_len = match kind {
            Kind::AllReduce => count.div_ceil(world).next_multiple_of(alignment),
            Kind::ReduceScatter | Kind::AllGather => count / world,
            Kind::Exchange => return self.exchange(count * size),
            Kind::PeerRead => return self.peer_read(),
        };
        let max_segment_len = (self.block.segment / size).max(1);
        let segment_len =
            chunk_len.div_ceil(chunk_len.div_ceil(max_segment_len)).next_multiple_of(alignment).min(max_segment_len);
        let mut steps = Vec::new();
        for start in (0..chunk_len).step_by(segment_len) {
            let part = |chunk: usize| {
                let (from, to) = (chunk * chunk_len + start, chunk * chunk_len + chunk_len.min(start + segment_len));
                from.min(count) * size..to.min(count) * size
            };
            let lane = self.next_lane();
            let begin = steps.len();
            self.segment(kind, lane, part, |step| steps.push((lane, step)));
            debug_assert!(steps.len() > begin);
        }
        steps
    }

    /// The steps of an exchange of `bytes` bytes.
    fn exchange(&mut self, bytes: usize) -> Vec<(usize, Step)> {
        let (lane, other, [first, second]) = self.two_rank_segment();
        let steps = [
            Step::Signal { to: other, value: first },
            Step::Await { from: other, value: first },
            Step::Send { from: 0..bytes },
            Step::Signal { to: other, value: second },
            Step::Await { from: other, value: second },
        ];
        steps.map(|step| (lane, step)).into()
    }

    /// The steps of a peer read.
    fn peer_read(&mut self) -> Vec<(usize, Step)> {
        let (lane, other, [first, second]) = self.two_rank_segment();
        let steps = [
            Step::Signal { to: other, value: first },
            Step::Await { from: other, value: first },
            Step::Signal { to: other, value: second },
        ];
        steps.map(|step| (lane, step)).into()
    }

    /// Starts a segment between two ranks: its lane, the peer, and its signals.
    fn two_rank_segment(&mut self) -> (usize, usize, [u32; 2]) {
        assert_eq!(self.block.world, 2, "an exchange needs two ranks");
        let lane = self.next_lane();
        let signals = [1, 2].map(|nth| self.lanes[lane].segments.wrapping_mul(2).wrapping_add(nth));
        self.lanes[lane] = Lane { segments: self.lanes[lane].segments.wrapping_add(1), unacknowledged: false };
        (lane, 1 - self.rank, signals)
    }

    /// Returns the lane of the next segment, round-robin.
    fn next_lane(&mut self) -> usize {
        let lane = self.next;
        self.next = (self.next + 1) % self.lanes.len();
        lane
    }

    /// Queues one segment; `part` is its range of each chunk.
    fn segment(&mut self, kind: Kind, lane: usize, part: impl Fn(usize) -> Range<usize>, mut queue: impl FnMut(Step)) {
        let (rank, world) = (self.rank, self.block.world);
        // Each rank starts with the next one, so that not all ranks access the same one first.
        let others = || (1..world).map(move |distance| (rank + distance) % world);
        let Lane { segments, unacknowledged } = self.lanes[lane];
        let before = segments.wrapping_mul(2);
        let (first, second) = (before.wrapping_add(1), before.wrapping_add(2));
        if unacknowledged && kind != Kind::AllGather {
            others().for_each(|from| queue(Step::Await { from, value: before }));
        }
        for to in others() {
            if kind != Kind::AllGather && !part(to).is_empty() {
                queue(Step::Push { to, from: part(to) });
            }
            queue(Step::Signal { to, value: first });
        }
        others().for_each(|from| queue(Step::Await { from, value: first }));
        if !part(rank).is_empty() {
            queue(match kind {
                Kind::AllGather => Step::Stage { from: part(rank) },
                _ => Step::Reduce { of: part(rank), stage: kind == Kind::AllReduce },
            });
        }
        others().for_each(|to| queue(Step::Signal { to, value: second }));
        if kind != Kind::ReduceScatter {
            for from in others() {
                queue(Step::Await { from, value: second });
                if !part(from).is_empty() {
                    queue(Step::Pull { from, into: part(from) });
                }
            }
        }
        self.lanes[lane] = Lane { segments: segments.wrapping_add(1), unacknowledged: kind == Kind::ReduceScatter };
    }
}
