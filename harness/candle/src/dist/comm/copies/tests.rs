//! Simulates all ranks' plans on host memory, in any order in which GPUs may run them.
//!
//! A queue runs its steps in order; the queue that runs next is chosen at random. Copies and reductions take time: from
//! begin to end their destination holds invalid data, and at the end nothing else may have written their sources or
//! destinations. A receive slot is invalid again after it is read, and so is a buffer as soon as its rank has completed
//! the collective and verified the result: it may then be reused.

use std::collections::VecDeque;
use std::ops::Range;

use half::bf16;
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::plan::{RELEASE, is_reached};
use super::{Addresses, Block, Command, Kind, Plan, Step};
use crate::dist::comm::host_reduce::{Accumulator, chunk};
use crate::dist::comm::{Dtype, Reduce};

/// A collective on its own range of every rank's memory.
#[derive(Clone, Copy, Debug)]
struct Collective {
    kind: Kind,
    reduce: Reduce,
    dtype: Dtype,
    count: usize,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    world: usize,
    lanes: usize,
    segment: usize,
    /// Whether a rank's lanes share one queue.
    merged: bool,
    /// Number of segments before the first collective.
    after: u32,
    seed: u64,
}

/// Memory of a rank: buffers, which are private, a block, and for each buffer a receive buffer for the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    Buffers = 0,
    Block = 1,
    PeerBuffer = 2,
}

/// A byte range of a rank's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Region {
    rank: usize,
    memory: Memory,
    range: Range<usize>,
}

/// A byte of rank `owner`'s memory, at offset `at`, as seen by rank `viewer`.
struct ViewedAddress {
    viewer: usize,
    owner: usize,
    memory: Memory,
    at: usize,
}

/// Encodes an address that only its viewer may use.
const fn address(ViewedAddress { viewer, owner, memory, at }: ViewedAddress) -> u64 {
    ((viewer as u64 + 1) << 56) | ((owner as u64) << 48) | ((memory as u64) << 40) | at as u64
}

/// Decodes an address that `viewer` uses.
fn region(viewer: usize, address: u64, bytes: usize) -> Region {
    assert_eq!(address >> 56, viewer as u64 + 1, "rank {viewer} uses another rank's address");
    let owner = (address >> 48 & 0xff) as usize;
    let memory = [Memory::Buffers, Memory::Block, Memory::PeerBuffer][(address >> 40 & 0xff) as usize];
    assert!(memory != Memory::Buffers || owner == viewer, "buffers are private");
    let at = (address & 0xff_ffff_ffff) as usize;
    Region { rank: owner, memory, range: at..at + bytes }
}

#[derive(Clone, Copy)]
struct Task {
    command: Command,
    /// Index of the collective.
    of: usize,
}

/// A copy or a reduction in progress: its sources with their contents, and its destinations with the result.
struct Begun {
    reads: Vec<(Region, Vec<u8>)>,
    writes: Vec<(Region, Vec<u8>)>,
    /// Sources that are free afterwards.
    spent: Vec<Region>,
}

struct Queue {
    rank: usize,
    tasks: VecDeque<Task>,
    begun: Option<Begun>,
    /// Probability weight of being chosen.
    weight: u32,
}

struct Gpus {
    block: Block,
    collectives: Vec<Collective>,
    /// Start of each collective's buffer.
    starts: Vec<usize>,
    buffers: Vec<Vec<u8>>,
    blocks: Vec<Vec<u8>>,
    peer_buffers: Vec<Vec<u8>>,
    queues: Vec<Queue>,
    /// Contents of each rank's buffers when a collective starts on it; invalid before.
    values: Vec<Vec<u8>>,
    /// Whether each collective has started, by rank.
    begun: Vec<Vec<bool>>,
    /// Remaining tasks of each rank and collective.
    left: Vec<Vec<usize>>,
    /// Expected results of each collective, by rank.
    expected: Vec<Vec<(Range<usize>, Vec<u8>)>>,
    random: StdRng,
}

const INVALID: u8 = 0xa5;
/// Marks a buffer that is reused after its collective.
const REUSED: u8 = 0x5a;

impl Gpus {
    /// All ranks with their queued tasks; `change` may modify a rank's steps of a collective.
    fn new(case: Case, collectives: &[Collective], change: impl Fn(usize, usize, &mut Vec<(usize, Step)>)) -> Gpus {
        let Case { world, lanes, segment, merged, after, seed } = case;
        let mut random = StdRng::seed_from_u64(seed);
        let mut starts = vec![0];
        starts.extend(collectives.iter().scan(0, |end, c| {
            *end += c.count * c.dtype.size();
            Some(*end)
        }));
        let values: Vec<Vec<u8>> =
            (0..world).map(|_| collectives.iter().flat_map(|c| random_values(c, &mut random)).collect()).collect();
        let expected = collectives.iter().enumerate().map(|(of, c)| {
            let buffers: Vec<&[u8]> = values.iter().map(|values| &values[starts[of]..starts[of + 1]]).collect();
            expected(c, &buffers)
        });
        let expected = expected.collect();
        let buffers = values.iter().map(|values| vec![INVALID; values.len()]).collect();
        let peer_buffers = values.iter().map(|values| vec![REUSED; values.len()]).collect();
        let begun = vec![vec![false; collectives.len()]; world];
        let block = Plan::new(0, world, lanes, segment).block();
        let mut blocks = vec![vec![INVALID; block.bytes()]; world];
        let mut queues = Vec::new();
        let mut left = vec![vec![0; collectives.len()]; world];
        for rank in 0..world {
            for (lane, from) in (0..lanes).flat_map(|lane| (0..world).map(move |from| (lane, from))) {
                let flag = block.flag(lane, from);
                blocks[rank][flag..flag + 4].copy_from_slice(&after.wrapping_mul(2).to_le_bytes());
            }
            let mut plan = Plan::new(rank, world, lanes, segment).after(after);
            let viewed = |owner, memory, at| address(ViewedAddress { viewer: rank, owner, memory, at });
            let blocks_here = (0..world).map(|owner| viewed(owner, Memory::Block, 0)).collect();
            let addresses = Addresses { rank, block, blocks: blocks_here };
            let mut own: Vec<VecDeque<Task>> = (0..lanes).map(|_| VecDeque::new()).collect();
            for (of, c) in collectives.iter().enumerate() {
                let mut steps = plan.steps(c.kind, c.count, c.dtype.size());
                change(rank, of, &mut steps);
                let buffer = viewed(rank, Memory::Buffers, starts[of]);
                let peer_address = viewed((rank + 1) % world, Memory::PeerBuffer, starts[of]);
                for (lane, step) in steps {
                    let commands: Vec<Command> = addresses.commands(lane, &step, buffer, peer_address).collect();
                    left[rank][of] += commands.len();
                    own[if merged { 0 } else { lane }].extend(commands.into_iter().map(|command| Task { command, of }));
                }
            }
            for tasks in own {
                // Some queues rarely run while others can.
                let weight = [1, 1, 20, 400][random.random_range(0..4)];
                queues.push(Queue { rank, tasks, begun: None, weight });
            }
        }
        Gpus {
            block,
            collectives: collectives.to_vec(),
            starts,
            buffers,
            blocks,
            peer_buffers,
            queues,
            values,
            begun,
            left,
            expected,
            random,
        }
    }

    fn bytes(&mut self, Region { rank, memory, range }: &Region) -> &mut [u8] {
        let memory = match memory {
            Memory::Buffers => &mut self.buffers,
            Memory::Block => &mut self.blocks,
            Memory::PeerBuffer => &mut self.peer_buffers,
        };
        &mut memory[*rank][range.clone()]
    }

    fn word(&self, Region { rank, range, .. }: &Region) -> u32 {
        u32::from_le_bytes(self.blocks[*rank][range.clone()].try_into().unwrap())
    }

    fn set_flag(&mut self, rank: usize, lane: usize, from: usize, value: u32) {
        let at = self.block.flag(lane, from);
        self.blocks[rank][at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    fn can_advance(&self, queue: usize) -> bool {
        let Queue { rank, tasks, .. } = &self.queues[queue];
        match tasks.front() {
            None => false,
            Some(Task { command: Command::Wait { at, value }, .. }) => {
                is_reached(self.word(&region(*rank, *at, 4)), *value)
            }
            Some(_) => true,
        }
    }

    /// Sources and destinations of a copy or a reduction. Single words are written immediately.
    fn begin(&mut self, rank: usize, command: Command, of: usize) -> Option<Begun> {
        let mut spent = Vec::new();
        let (reads, writes) = match command {
            Command::Write { at, value } => {
                self.bytes(&region(rank, at, 4)).copy_from_slice(&value.to_le_bytes());
                return None;
            }
            Command::Copy { to, from, bytes: 4 } if to >> 40 & from >> 40 & 1 == 1 => {
                let word = self.word(&region(rank, from, 4));
                self.bytes(&region(rank, to, 4)).copy_from_slice(&word.to_le_bytes());
                return None;
            }
            Command::Wait { .. } => return None,
            Command::Copy { to, from, bytes } => (vec![region(rank, from, bytes)], vec![region(rank, to, bytes)]),
            Command::Reduce { own, recv, stride, send, bytes } => {
                let slots = (0..self.block.world - 1).map(|slot| region(rank, recv + (slot * stride) as u64, bytes));
                spent.extend(slots);
                let mut reads = spent.clone();
                reads.insert(rank, region(rank, own, bytes));
                let writes = [Some(own), send].into_iter().flatten().map(|at| region(rank, at, bytes));
                (reads, writes.collect())
            }
        };
        let reads: Vec<(Region, Vec<u8>)> =
            reads.into_iter().map(|region| (region.clone(), self.bytes(&region).to_vec())).collect();
        let result = match command {
            Command::Reduce { .. } => {
                let parts: Vec<&[u8]> = reads.iter().map(|(_, bytes)| bytes.as_slice()).collect();
                reduced(&self.collectives[of], &parts)
            }
            _ => reads[0].1.clone(),
        };
        for region in &writes {
            let bytes = self.bytes(region);
            // A destination that is still in use stays unchanged, and is detected at the end.
            if !bytes.iter().all(|&byte| byte == REUSED) {
                bytes.fill(INVALID);
            }
        }
        // A destination is no longer compared with its old contents.
        let reads = reads.into_iter().filter(|(read, _)| !writes.contains(read));
        Some(Begun { reads: reads.collect(), writes: writes.into_iter().map(|w| (w, result.clone())).collect(), spent })
    }

    fn end(&mut self, begun: Begun) -> Result<(), String> {
        for (region, was) in &begun.reads {
            if self.bytes(region) != was {
                return Err(format!("{region:?} changed while it was read"));
            }
        }
        for (region, becomes) in &begun.writes {
            if self.bytes(region).iter().any(|&byte| byte != INVALID) {
                return Err(format!("{region:?} was written twice"));
            }
            self.bytes(region).copy_from_slice(becomes);
        }
        for region in &begun.spent {
            self.bytes(region).fill(INVALID);
        }
        Ok(())
    }

    /// Advances a queue that can run by half a step.
    fn advance(&mut self, queue: usize) -> Result<(), String> {
        let rank = self.queues[queue].rank;
        let Task { command, of } = *self.queues[queue].tasks.front().unwrap();
        if !std::mem::replace(&mut self.begun[rank][of], true) {
            let range = self.starts[of]..self.starts[of + 1];
            self.buffers[rank][range.clone()].copy_from_slice(&self.values[rank][range.clone()]);
            self.peer_buffers[rank][range].fill(INVALID);
        }
        let ended = match self.queues[queue].begun.take() {
            Some(begun) => self.end(begun),
            None => {
                self.queues[queue].begun = self.begin(rank, command, of);
                if self.queues[queue].begun.is_some() {
                    return Ok(());
                }
                Ok(())
            }
        };
        self.queues[queue].tasks.pop_front();
        self.left[rank][of] -= 1;
        ended?;
        if self.left[rank][of] > 0 { Ok(()) } else { self.done(rank, of) }
    }

    /// A rank has completed a collective: its buffer holds the result, and is then reused.
    fn done(&mut self, rank: usize, of: usize) -> Result<(), String> {
        let (range, (region, expected)) = (self.starts[of]..self.starts[of + 1], &self.expected[of][rank]);
        let buffer = &mut self.buffers[rank][range.clone()];
        if buffer[region.clone()] != *expected {
            return Err(format!("rank {rank} has a wrong result after {:?}", self.collectives[of]));
        }
        buffer.fill(REUSED);
        let peer_buffer = &mut self.peer_buffers[rank][range.clone()];
        if self.collectives[of].kind == Kind::Exchange && *peer_buffer != self.values[1 - rank][range] {
            return Err(format!("rank {rank} has wrong data from its peer"));
        }
        peer_buffer.fill(REUSED);
        if self.collectives[of].kind == Kind::PeerRead && !self.begun[1 - rank][of] {
            return Err(format!("rank {rank} did not wait for its peer"));
        }
        Ok(())
    }

    /// Runs until all tasks are done or, with a limit, for this number of half steps.
    fn run(&mut self, most: Option<usize>) -> Result<(), String> {
        for _ in 0..most.unwrap_or(usize::MAX) {
            let able: Vec<usize> = (0..self.queues.len()).filter(|&queue| self.can_advance(queue)).collect();
            let all: u32 = able.iter().map(|&queue| self.queues[queue].weight).sum();
            if able.is_empty() {
                let left: Vec<usize> = self.queues.iter().map(|queue| queue.tasks.len()).collect();
                return if left.iter().all(|&left| left == 0) {
                    Ok(())
                } else {
                    Err(format!("deadlock: {left:?} remain"))
                };
            }
            let mut drawn = self.random.random_range(0..all);
            let chosen = able.into_iter().find(|&queue| {
                let weight = self.queues[queue].weight;
                let hit = drawn < weight;
                drawn = drawn.saturating_sub(weight);
                hit
            });
            self.advance(chosen.unwrap())?;
        }
        Ok(())
    }
}

/// Bytes of one rank's buffer.
fn random_values(c: &Collective, random: &mut StdRng) -> Vec<u8> {
    let one = |random: &mut StdRng| -> Vec<u8> {
        let value: f32 = random.random_range(-2.0..2.0);
        match c.dtype {
            Dtype::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
            _ => value.to_le_bytes().to_vec(),
        }
    };
    (0..c.count).flat_map(|_| one(random)).collect()
}

/// The sum or average of `parts`, in order: the reference of the kernel.
fn reduced(c: &Collective, parts: &[&[u8]]) -> Vec<u8> {
    let size = c.dtype.size();
    let value = |bytes: &[u8]| match c.dtype {
        Dtype::Bf16 => bf16::from_le_bytes(bytes.try_into().unwrap()).to_f32(),
        _ => f32::from_le_bytes(bytes.try_into().unwrap()),
    };
    let one = |i: usize| -> Vec<u8> {
        let sum = parts.iter().map(|part| value(&part[i * size..][..size])).reduce(|a, b| a + b).unwrap();
        let result = if c.reduce == Reduce::Avg { sum / parts.len() as f32 } else { sum };
        match c.dtype {
            Dtype::Bf16 => bf16::from_f32(result).to_le_bytes().to_vec(),
            _ => result.to_le_bytes().to_vec(),
        }
    };
    (0..parts[0].len() / size).flat_map(one).collect()
}

/// Expected results of a collective, by rank: byte ranges with their contents.
fn expected(c: &Collective, buffers: &[&[u8]]) -> Vec<(Range<usize>, Vec<u8>)> {
    let (world, size) = (buffers.len(), c.dtype.size());
    // Same order as in the host backends, one element at a time, aligned for any type.
    let element = |i: usize| -> Vec<u8> {
        let mut words = vec![0_u64; world];
        let parts = bytemuck::cast_slice_mut::<u64, u8>(&mut words).chunks_exact_mut(8).zip(buffers);
        parts.for_each(|(word, buffer)| word[..size].copy_from_slice(&buffer[i * size..][..size]));
        let part = |r: usize| &bytemuck::bytes_of(&words[r])[..size];
        Accumulator::default().reduce(c.dtype, c.reduce, None, world, part).to_vec()
    };
    let reduced = |range: Range<usize>| -> Vec<u8> { range.flat_map(element).collect() };
    let bytes = |range: &Range<usize>| range.start * size..range.end * size;
    match c.kind {
        Kind::AllReduce => vec![(0..c.count * size, reduced(0..c.count)); world],
        Kind::ReduceScatter => {
            let own = (0..world).map(|rank| chunk(c.count, world, rank));
            own.map(|range| (bytes(&range), reduced(range))).collect()
        }
        Kind::Exchange | Kind::PeerRead => buffers.iter().map(|buffer| (0..c.count * size, buffer.to_vec())).collect(),
        Kind::AllGather => {
            let chunks = buffers.iter().enumerate().map(|(rank, buffer)| &buffer[bytes(&chunk(c.count, world, rank))]);
            let all: Vec<u8> = chunks.flatten().copied().collect();
            vec![(0..c.count * size, all); world]
        }
    }
}

/// Runs the simulation; an error if any rank has a wrong result.
fn outcome(
    case: Case,
    collectives: &[Collective],
    change: impl Fn(usize, usize, &mut Vec<(usize, Step)>),
) -> Result<(), String> {
    Gpus::new(case, collectives, change).run(None)
}

fn collective(world: usize) -> impl Strategy<Value = Collective> {
    let mut kinds = vec![Kind::AllReduce, Kind::ReduceScatter, Kind::AllGather];
    kinds.extend([Kind::Exchange, Kind::PeerRead].into_iter().filter(|_| world == 2));
    let kinds = prop::sample::select(kinds);
    let lengths = prop_oneof![0_usize..6, 0_usize..40, 0_usize..400];
    let types = prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16)];
    let reductions = prop_oneof![Just(Reduce::Sum), Just(Reduce::Avg)];
    (kinds, lengths, types, reductions).prop_map(move |(kind, n, dtype, reduce)| {
        // All kinds but an all_reduce need a multiple.
        let count = if kind == Kind::AllReduce { n } else { n.div_ceil(world) * world };
        Collective { kind, reduce, dtype, count }
    })
}

fn case() -> impl Strategy<Value = (Case, Vec<Collective>)> {
    let shapes = (1_usize..5, 1_usize..4, prop_oneof![Just(1_usize), Just(256), Just(1024)], any::<bool>());
    let starts = prop_oneof![Just(0_u32), Just(u32::MAX), Just(u32::MAX / 2), Just(u32::MAX / 4)];
    (shapes, starts, any::<u64>()).prop_flat_map(|((world, lanes, segment, merged), after, seed)| {
        let case = Case { world, lanes, segment, merged, after, seed };
        (Just(case), prop::collection::vec(collective(world), 1..7))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_schedule_reduces_in_rank_order((case, collectives) in case()) {
        prop_assert_eq!(outcome(case, &collectives, |_, _, _| {}), Ok(()));
    }

    /// A rank stops at any point. The flags that others wait for are set far ahead, repeatedly, since late signals set
    /// them back.
    #[test]
    fn waits_for_a_lost_rank_are_released((case, collectives) in case(), most in 0_usize..400, gone in 0_usize..4) {
        let mut gpus = Gpus::new(case, &collectives, |_, _, _| {});
        if gpus.run(Some(most)).is_err() {
            return Err(TestCaseError::fail("the unchanged plan fails"));
        }
        gpus.queues.iter_mut().filter(|queue| queue.rank == gone).for_each(|queue| { queue.tasks.clear(); queue.begun = None; });
        let mut rounds = 0;
        while gpus.queues.iter().any(|queue| !queue.tasks.is_empty()) {
            let mut plan = Plan::new(0, case.world, case.lanes, case.segment).after(case.after);
            for c in &collectives {
                plan.steps(c.kind, c.count, c.dtype.size());
            }
            for (rank, lane) in (0..case.world).flat_map(|rank| (0..case.lanes).map(move |lane| (rank, lane))) {
                for from in 0..case.world {
                    gpus.set_flag(rank, lane, from, plan.last_signal(lane).wrapping_add(RELEASE));
                }
            }
            // The errors are conflicting memory uses, which are allowed now, or a deadlock.
            while gpus.run(Some(1)).is_ok() && gpus.queues.iter().any(|queue| !queue.tasks.is_empty()) {}
            rounds += 1;
            prop_assert!(rounds < 10_000, "no wait is released");
        }
    }
}

/// Whether some order of these collectives detects the change that `change` makes.
fn is_detected(
    world: usize,
    collectives: &[Collective],
    change: impl Fn(usize, usize, &mut Vec<(usize, Step)>),
) -> bool {
    (0..4000).any(|seed| {
        let case = Case { world, lanes: 1, segment: 256, merged: false, after: 0, seed };
        outcome(case, collectives, &change).is_err()
    })
}

fn of(kind: Kind, count: usize) -> Collective {
    Collective { kind, reduce: Reduce::Sum, dtype: Dtype::F32, count }
}

/// Removes any single wait of a rank's second collective, after any first collective.
#[test]
fn every_wait_is_needed() {
    use Kind::{AllGather, AllReduce, Exchange, PeerRead, ReduceScatter};
    for world in [2, 3] {
        for kinds in [
            [AllReduce, AllReduce],
            [ReduceScatter, ReduceScatter],
            [AllGather, AllGather],
            [ReduceScatter, AllReduce],
            [AllReduce, AllGather],
            [Exchange, Exchange],
            [AllReduce, Exchange],
            [ReduceScatter, Exchange],
            [PeerRead, PeerRead],
            [Exchange, PeerRead],
            [PeerRead, Exchange],
            [ReduceScatter, PeerRead],
        ] {
            if world != 2 && (kinds.contains(&Exchange) || kinds.contains(&PeerRead)) {
                continue;
            }
            let collectives = kinds.map(|kind| of(kind, 32 * world));
            let is_wait = |(_, step): &(usize, Step)| matches!(step, Step::Await { .. });
            let mut plan = Plan::new(0, world, 1, 256);
            let [_, second] = collectives.map(|c| plan.steps(c.kind, c.count, c.dtype.size()));
            let waits: Vec<usize> = (0..second.len()).filter(|&at| is_wait(&second[at])).collect();
            // Waits that the first collective leaves over, and waits of the second one: one or two.
            let awaits = |kind| if matches!(kind, ReduceScatter | PeerRead) { 1 } else { 2 };
            let owed = usize::from(kinds[0] == ReduceScatter && matches!(kinds[1], AllReduce | ReduceScatter));
            assert_eq!(waits.len(), (owed + awaits(kinds[1])) * (world - 1), "{kinds:?} {second:?}");
            for at in waits {
                let drop_one = |rank: usize, of: usize, steps: &mut Vec<(usize, Step)>| {
                    if (rank, of) == (0, 1) {
                        assert!(is_wait(&steps.remove(at)));
                    }
                };
                assert!(
                    is_detected(world, &collectives, drop_one),
                    "{kinds:?}: removing {:?} is not detected",
                    second[at]
                );
            }
        }
    }
}

/// Moves a signal before the copy or the reduction that it reports.
#[test]
fn an_early_signal_is_detected() {
    for kind in [Kind::AllReduce, Kind::ReduceScatter, Kind::AllGather, Kind::Exchange] {
        let collectives = [of(kind, 64), of(kind, 64)];
        let steps = Plan::new(0, 2, 1, 256).steps(kind, 64, 4);
        let signals: Vec<usize> = (1..steps.len()).filter(|&at| matches!(steps[at].1, Step::Signal { .. })).collect();
        assert_eq!(signals.len(), if matches!(kind, Kind::AllGather | Kind::Exchange) { 1 } else { 2 });
        for at in signals {
            let hurry = |rank: usize, of: usize, steps: &mut Vec<(usize, Step)>| {
                if (rank, of) == (0, 0) {
                    steps.swap(at - 1, at);
                }
            };
            assert!(is_detected(2, &collectives, hurry), "{kind:?}: moving {:?} is not detected", steps[at]);
        }
    }
}

#[test]
fn segments_are_even_and_dealt_round_robin() {
    let mut plan = Plan::new(0, 2, 2, 1024);
    // 300 f32 of each chunk: two segments of 160 and 140, not one of 256 and a remainder.
    let steps = plan.steps(Kind::AllReduce, 600, 4);
    let reduced: Vec<(usize, usize)> = steps
        .iter()
        .filter_map(|(lane, step)| match step {
            Step::Reduce { of, stage: true } => Some((*lane, of.len() / 4)),
            _ => None,
        })
        .collect();
    assert_eq!(reduced, [(0, 160), (1, 160)]);
    // The next collective continues with the next lane, so that small ones run concurrently.
    let lanes: Vec<usize> = (0..3).map(|_| plan.steps(Kind::AllReduce, 10, 4)[0].0).collect();
    assert_eq!(lanes, [0, 1, 0]);
    assert!(Plan::new(0, 1, 2, 1024).steps(Kind::AllReduce, 600, 4).is_empty(), "a single rank");
    // All boundaries but the end of the buffer are multiples of 16 bytes.
    let mut plan = Plan::new(1, 3, 2, 4096);
    for (_, step) in plan.steps(Kind::AllReduce, 100_001, 2) {
        if let Step::Push { from: range, .. } | Step::Pull { into: range, .. } | Step::Reduce { of: range, .. } = step {
            assert!(range.start % 128 == 0 && (range.end % 128 == 0 || range.end == 200_002), "{range:?}");
            assert!(range.len() <= 4096);
        }
    }
}
