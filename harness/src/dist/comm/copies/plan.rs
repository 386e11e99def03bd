//! Which steps each rank queues for a collective.
//!
//! A collective works on `world` chunks of the buffer. Chunks are cut into segments, and segment k is the k-th cut of *every* chunk: rank r
//! reduces chunk r's. Segments are dealt to lanes in turn, over all collectives. A lane is a queue of each rank, with an inbox, an outbox and
//! flags of its own ([`Block`]); it runs its steps in order, and lanes run side by side, so that one lane's copies run under the
//! other's reduction.
//!
//! For segment n of a lane, rank r queues there, with every other rank p:
//!
//! | all_reduce | reduce_scatter | all_gather |
//! |---|---|---|
//! | await p's second signal of n − 1, unless it has been | the same | |
//! | push my part of chunk p into p's inbox, signal p: first of n | the same | signal p: first of n |
//! | await p's first of n | the same | the same |
//! | reduce my chunk from here and my inbox, in rank order, also to my outbox | the same, without the outbox | copy my chunk to my outbox |
//! | signal p: second of n | the same | the same |
//! | await p's second of n, pull chunk p from p's outbox | | the same |
//!
//! Chunks that are pulled land where they belong: nothing is copied twice, and no chunk of the others has to be kept.
//!
//! An exchange of two ranks is one segment, of the whole buffer: signal (first of n), await p's, send the buffer to p's inbox of the caller's,
//! signal (second), await p's. The first signal says that the place there is free, the second one that it is full.
//!
//! A meeting of two ranks, who then read each other's buffer in place, is: signal (first of n), await p's, signal (second). The buffer is whole
//! when the first signal says so, and may be written again behind the next meeting.
//!
//! So each segment, whatever it is of, signals every other rank exactly twice, which flags count: 2 n + 1 and 2 n + 2. Because a lane runs in
//! order, p's first signal of n says that p has *ended all before n* (and that p's part is in my inbox, if it sends one), and p's second of n
//! that p has *read its inbox of n* (and filled its outbox, if it has what to show). That is all that is needed:
//!
//! - **No inbox is overwritten before it was read.** Rank r writes p's inbox in its push of n. What was there came from r's push of some
//!   m < n, and p read it in its reduction of m, before its second signal of m. Before it pushes, r has awaited p's second of n − 1 or a later one;
//!   an all_gather and an all_reduce await it themselves, a reduce_scatter leaves it to the next push of the lane (`unacknowledged`). A meeting has
//!   nothing read, and its first signal stands behind all that was.
//! - **No outbox is overwritten before it was fetched.** Rank r writes its outbox in the reduction, or the copy, of n. The others fetched what
//!   was there in a segment m < n, which they have ended when they give their first signal of n; r has awaited all of these.
//! - **No inbox of the caller's is overwritten before it was read.** A lane begins an exchange when the stream that computes has come to where
//!   the exchange was asked for, behind all that reads the inbox; only then does it give the first signal that the other rank awaits.
//! - **Nothing is read too early.** Reductions come after the first signals of the same segment, which follow the pushes; pulls after the
//!   second ones, which follow what fills outboxes.
//! - **Own memory** of chunk p is read by the push of n before the pull of n overwrites it, on the same lane; segments do not overlap.
//! - **Nobody waits for ever.** All ranks queue the same segments in the same order. Take the await, of all that never end, with the least
//!   (segment, first or second): the rank that owes the signal has ended all that it queued before, so it gives it. The argument also holds if
//!   the lanes of a rank run as one queue, in the order of [`Plan::steps`], as they do if the driver gives them one channel.

use std::ops::Range;

use super::block::{Block, LINE};

/// Lanes of a rank: while one adds up, the other one copies.
pub const LANES: usize = 2;

/// Bytes of a segment, of each chunk. Between GPUs with NVLink it takes about 40 µs, some ten times what signals take.
pub const SEGMENT: usize = 16 << 20;

/// Which collective, as [`Op`](crate::dist::comm::Op) says what each is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    AllReduce,
    ReduceScatter,
    AllGather,
    /// Of two ranks.
    Exchange,
    /// Of two ranks.
    PeerRead,
}

/// What a rank queues on a lane. Ranges are bytes of the buffer that the collective works in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Copies to the start of this rank's slot in the inbox of `to`.
    Push { to: usize, from: Range<usize> },
    /// Copies to the same place of what the other rank has set aside for this one's buffer.
    Send { from: Range<usize> },
    /// Copies from the start of the outbox of `from`.
    Pull { from: usize, into: Range<usize> },
    /// Copies to the start of the own outbox.
    Stage { from: Range<usize> },
    /// What is there becomes the reduction, in rank order, of it and the slots of the own inbox; with `stage` the outbox too.
    Reduce { of: Range<usize>, stage: bool },
    /// Sets this rank's flag at `to`.
    Signal { to: usize, value: u32 },
    /// Waits until the flag of `from` is at `value` or later: [`is_reached`].
    Await { from: usize, value: u32 },
}

/// Whether a flag is at `value` or later. Counters go around: of two, the one is later that is less than 2³¹ ahead.
pub fn is_reached(flag: u32, value: u32) -> bool {
    flag.wrapping_sub(value) as i32 >= 0
}

/// How far a flag is set ahead to let go all that waits for it: as far ahead as anything may be queued, and less than 2³¹ ahead of what ended.
pub const RELEASE: u32 = 1 << 30;

#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    /// Segments so far, around 2³².
    segments: u32,
    /// Whether the last segment's second signals have not been awaited.
    unacknowledged: bool,
}

/// What one rank queues, collective after collective.
#[derive(Clone, Debug)]
pub struct Plan {
    rank: usize,
    block: Block,
    lanes: Vec<Lane>,
    /// The lane of the next segment.
    next: usize,
}

impl Plan {
    /// Of rank `rank`, before its first collective. `segment` is rounded up to whole lines of [`LINE`] bytes.
    pub fn new(rank: usize, world: usize, lanes: usize, segment: usize) -> Plan {
        let block = Block { world, lanes, segment: segment.max(1).next_multiple_of(LINE) };
        Plan { rank, block, lanes: vec![Lane::default(); lanes], next: 0 }
    }

    /// The same after so many segments on each lane.
    #[cfg(test)]
    pub(super) fn after(mut self, segments: u32) -> Plan {
        self.lanes.iter_mut().for_each(|lane| lane.segments = segments);
        self
    }

    /// Where things lie that steps speak of.
    pub fn block(&self) -> Block {
        self.block
    }

    /// The last signal that `lane` sends, or waits for.
    pub fn last_signal(&self, lane: usize) -> u32 {
        self.lanes[lane].segments.wrapping_mul(2)
    }

    /// The steps of a collective in `count` elements of `size` bytes, with the lane of each, in an order in which they may be queued.
    /// A reduce_scatter and an all_gather want a count that `world` divides. A rank alone has nothing to do.
    pub fn steps(&mut self, kind: Kind, count: usize, size: usize) -> Vec<(usize, Step)> {
        let (world, grain) = (self.block.world, (LINE / size).max(1));
        if world == 1 || count == 0 {
            return Vec::new();
        }
        // An all_reduce may choose its chunks, and takes such as vectors fit in.
        let each = match kind {
            Kind::AllReduce => count.div_ceil(world).next_multiple_of(grain),
            Kind::ReduceScatter | Kind::AllGather => count / world,
            Kind::Exchange => return self.exchange(count * size),
            Kind::PeerRead => return self.peer_read(),
        };
        let most = (self.block.segment / size).max(1);
        let cut = each.div_ceil(each.div_ceil(most)).next_multiple_of(grain).min(most);
        let mut steps = Vec::new();
        for start in (0..each).step_by(cut) {
            let part = |chunk: usize| {
                let (from, to) = (chunk * each + start, chunk * each + each.min(start + cut));
                from.min(count) * size..to.min(count) * size
            };
            let lane = self.next_lane();
            let begin = steps.len();
            self.segment(kind, lane, part, |step| steps.push((lane, step)));
            debug_assert!(steps.len() > begin);
        }
        steps
    }

    /// The steps of an exchange of so many bytes.
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

    /// The steps of a meeting.
    fn peer_read(&mut self) -> Vec<(usize, Step)> {
        let (lane, other, [first, second]) = self.two_rank_segment();
        let steps = [
            Step::Signal { to: other, value: first },
            Step::Await { from: other, value: first },
            Step::Signal { to: other, value: second },
        ];
        steps.map(|step| (lane, step)).into()
    }

    /// The lane of one more segment between two ranks, the other rank, and the segment's signals.
    fn two_rank_segment(&mut self) -> (usize, usize, [u32; 2]) {
        assert_eq!(self.block.world, 2, "an exchange is of two ranks");
        let lane = self.next_lane();
        let signals = [1, 2].map(|nth| self.lanes[lane].segments.wrapping_mul(2).wrapping_add(nth));
        self.lanes[lane] = Lane { segments: self.lanes[lane].segments.wrapping_add(1), unacknowledged: false };
        (lane, 1 - self.rank, signals)
    }

    /// The lane whose turn it is.
    fn next_lane(&mut self) -> usize {
        let lane = self.next;
        self.next = (self.next + 1) % self.lanes.len();
        lane
    }

    /// One segment; `part` is its range of each chunk.
    fn segment(&mut self, kind: Kind, lane: usize, part: impl Fn(usize) -> Range<usize>, mut queue: impl FnMut(Step)) {
        let (rank, world) = (self.rank, self.block.world);
        // Each rank begins with the next one, so that not all turn to one at once.
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
