//! Collectives over point-to-point messages, for all backends that provide them.
//!
//! First every rank sends its call to every other rank. Then the data are sent: with `n` bytes and W ranks, each rank
//! sends and receives (W − 1)/W · n bytes for a reduce-scatter or an all-gather, and twice that for an all-reduce,
//! which is a reduce-scatter followed by an all-gather. This is the lower bound of any algorithm. Rank r reduces chunk
//! r of all ranks in rank order, so that all ranks get the same bits.

use std::sync::Arc;

use half::{bf16, f16};

use super::backend::{Backend, CompletionEvent, Deadline, Memory, Ready, check_same_calls};
use super::call::{Call, Dtype, HEADER_BYTES, Op, Reduce, decode, encode};
use super::error::{CommError, Result};
use super::host_reduce::{Accumulator, SEGMENT, chunk};

/// Why a link failed. Callers add this rank's number and the operation.
pub(crate) enum LinkError {
    /// These ranks did not arrive in time. They may be waiting themselves: [`Links::roll_call`] finds the cause.
    TimedOut(Vec<usize>),
    /// Same as `TimedOut`, when another rank's timeout expired first.
    PeerTimedOut(Vec<usize>),
    /// A rank has ended.
    Gone(usize, String),
    /// A rank aborted, with its reason.
    Aborted(usize, String),
    /// An error that is not the peer's.
    Other(String),
}

/// Messages between this rank and all others. Messages between two ranks arrive in order.
pub(crate) trait Links {
    fn rank(&self) -> usize;
    fn world(&self) -> usize;

    /// Sends `mine` to every other rank, and returns all headers by rank (`mine` at this rank's index).
    fn exchange_headers(
        &mut self,
        mine: &[u8; HEADER_BYTES],
        deadline: Deadline,
    ) -> Result<Vec<[u8; HEADER_BYTES]>, LinkError>;

    /// Sends and receives concurrently; either may be `None`. Both sides know the lengths.
    fn exchange(
        &mut self,
        send: Option<(usize, &[u8])>,
        receive: Option<(usize, &mut [u8])>,
        deadline: Deadline,
    ) -> Result<(), LinkError>;

    /// Finds the cause of a timeout, after the ranks in `late` did not arrive: the ranks that do not wait for others
    /// themselves (`TimedOut`), or the abort notice of a rank that timed out earlier (`Aborted`), if the timeout is not
    /// this rank's.
    fn roll_call(&mut self, late: Vec<usize>, _own_timeout: bool) -> LinkError {
        LinkError::TimedOut(late)
    }

    /// Sends an abort notice to every rank that can receive it, with a short timeout.
    fn abort(&mut self, reason: &str);
}

/// A backend over links.
pub(crate) struct OverLinks<L> {
    links: L,
    accumulator: Accumulator,
    /// Contributions to one segment, by rank; words of 8 bytes, so that every element type is aligned.
    received: Vec<Vec<u64>>,
    rounded: Vec<u64>,
}

impl<L: Links> OverLinks<L> {
    pub fn new(links: L) -> OverLinks<L> {
        let received = vec![Vec::new(); links.world()];
        OverLinks { links, accumulator: Accumulator::default(), received, rounded: Vec::new() }
    }

    /// The links.
    #[cfg(feature = "nccl")]
    pub fn links(&mut self) -> &mut L {
        &mut self.links
    }

    /// Fails unless all ranks call the same collective.
    pub fn check_agreement(&mut self, seq: u64, call: &Call, deadline: Deadline) -> Result<()> {
        let headers = self.links.exchange_headers(&encode(seq, call), deadline);
        let headers = headers.map_err(|error| self.explain(call, deadline, error))?;
        let unreadable = |rank: usize| CommError::Backend {
            rank: self.links.rank(),
            call: call.to_string(),
            message: format!(
                "rank {rank} sent an invalid header: it runs another program or another version of Tilewright"
            ),
        };
        let calls = headers.iter().enumerate().map(|(rank, bytes)| decode(bytes).ok_or_else(|| unreadable(rank)));
        check_same_calls(&calls.collect::<Result<Vec<_>>>()?)
    }

    /// Adds the operation to a link's error.
    pub fn explain(&mut self, call: &Call, deadline: Deadline, error: LinkError) -> CommError {
        let (rank, call) = (self.links.rank(), call.to_string());
        let error = match error {
            LinkError::TimedOut(late) => self.links.roll_call(late, true),
            LinkError::PeerTimedOut(late) => self.links.roll_call(late, false),
            other => other,
        };
        match error {
            LinkError::TimedOut(missing) | LinkError::PeerTimedOut(missing) => {
                CommError::TimedOut { rank, call, missing, after: deadline.timeout }
            }
            LinkError::Gone(peer, why) => CommError::Lost { rank, peer, call, why },
            LinkError::Aborted(by, reason) => CommError::Aborted { rank, by, call, reason },
            LinkError::Other(message) => CommError::Backend { rank, call, message },
        }
    }

    /// Runs a call on which all ranks agree, in host memory.
    pub fn execute(&mut self, call: &Call, data: &mut [u8], deadline: Deadline) -> Result<(), LinkError> {
        if self.links.world() == 1 && call.comm_dtype.is_none() {
            return Ok(());
        }
        match call.op {
            // This backend supports no exchanges.
            Op::Barrier | Op::Exchange => Ok(()),
            Op::AllReduce(reduce) => {
                self.reduce_scatter(call, reduce, data, deadline)?;
                match call.comm_dtype {
                    Some(comm_dtype) => self.gather_rounded(call, comm_dtype, data, deadline),
                    None => self.gather(call, data, deadline),
                }
            }
            Op::ReduceScatter(reduce) => self.reduce_scatter(call, reduce, data, deadline),
            Op::AllGather => self.gather(call, data, deadline),
            Op::Broadcast { root } => self.broadcast(call, root, data, deadline),
        }
    }

    /// Replaces chunk `rank` of `data` by the reduction.
    fn reduce_scatter(
        &mut self,
        call: &Call,
        reduce: Reduce,
        data: &mut [u8],
        deadline: Deadline,
    ) -> Result<(), LinkError> {
        let (rank, world, size) = (self.links.rank(), self.links.world(), call.dtype.size());
        let comm_dtype = call.comm_dtype.unwrap_or(call.dtype);
        let bytes = |range: &std::ops::Range<usize>| range.start * size..range.end * size;
        for step in 0..segments(call, world) {
            let segment = |of| segment(call, world, of, step);
            let mine = segment(rank);
            for (to, from) in peers(rank, world) {
                let send = &data[bytes(&segment(to))];
                let send = match call.comm_dtype {
                    Some(comm_dtype) => round(comm_dtype, bytemuck::cast_slice(send), &mut self.rounded),
                    None => send,
                };
                let buffer = scratch_bytes(&mut self.received[from], mine.len() * comm_dtype.size());
                self.links.exchange(Some((to, send)), Some((from, buffer)), deadline)?;
            }
            if let Some(comm_dtype) = call.comm_dtype {
                let own = bytemuck::cast_slice(&data[bytes(&mine)]);
                round(comm_dtype, own, &mut self.received[rank]);
            }
            let own = &data[bytes(&mine)];
            let (received, is_rounded) = (&self.received, call.comm_dtype.is_some());
            let part = |r: usize| match r == rank && !is_rounded {
                true => own,
                false => &bytemuck::cast_slice(&received[r])[..mine.len() * comm_dtype.size()],
            };
            let result = self.accumulator.reduce(comm_dtype, reduce, None, world, part);
            match call.comm_dtype {
                Some(comm_dtype) => widen(comm_dtype, result, bytemuck::cast_slice_mut(&mut data[bytes(&mine)])),
                None => data[bytes(&mine)].copy_from_slice(result),
            }
        }
        Ok(())
    }

    /// Sends every rank's chunk to all ranks.
    fn gather(&mut self, call: &Call, data: &mut [u8], deadline: Deadline) -> Result<(), LinkError> {
        let (rank, world, size) = (self.links.rank(), self.links.world(), call.dtype.size());
        let bytes = |of: usize| {
            let chunk = chunk(call.count, world, of);
            chunk.start * size..chunk.end * size
        };
        for (to, from) in peers(rank, world) {
            let (send, receive) = split_disjoint(data, bytes(rank), bytes(from));
            self.links.exchange(Some((to, send)), Some((from, receive)), deadline)?;
        }
        Ok(())
    }

    /// Same as [`OverLinks::gather`], for f32 that are already values of the communication dtype, or (with one rank)
    /// are rounded here.
    fn gather_rounded(
        &mut self,
        call: &Call,
        comm_dtype: Dtype,
        data: &mut [u8],
        deadline: Deadline,
    ) -> Result<(), LinkError> {
        let (rank, world) = (self.links.rank(), self.links.world());
        let data: &mut [f32] = bytemuck::cast_slice_mut(data);
        for step in 0..segments(call, world) {
            let segment = |of| segment(call, world, of, step);
            let send = round(comm_dtype, &data[segment(rank)], &mut self.rounded);
            for (to, from) in peers(rank, world) {
                let receive = scratch_bytes(&mut self.received[from], segment(from).len() * comm_dtype.size());
                self.links.exchange(Some((to, send)), Some((from, &mut *receive)), deadline)?;
                widen(comm_dtype, receive, &mut data[segment(from)]);
            }
        }
        Ok(())
    }

    /// The root sends to one rank after the other: parameters are broadcast only once, so that the root's load does not
    /// matter.
    fn broadcast(&mut self, call: &Call, root: usize, data: &mut [u8], deadline: Deadline) -> Result<(), LinkError> {
        let (rank, world) = (self.links.rank(), self.links.world());
        debug_assert_eq!(data.len(), call.count * call.dtype.size());
        if rank != root {
            return self.links.exchange(None, Some((root, data)), deadline);
        }
        peers(rank, world).try_for_each(|(to, _)| self.links.exchange(Some((to, data)), None, deadline))
    }
}

impl<L: Links> Backend for OverLinks<L> {
    fn run(
        &mut self,
        seq: u64,
        call: &Call,
        memory: &mut Memory,
        _ready: Option<Ready>,
        deadline: Deadline,
    ) -> Result<Option<Arc<dyn CompletionEvent>>> {
        self.check_agreement(seq, call, deadline)?;
        // SAFETY: links are used for host memory only, which the communicator owns until the call completes.
        let data = unsafe { memory.host() };
        // All ranks have arrived. Their deadlines now coincide, however long each has waited before.
        let deadline = Deadline::after(deadline.timeout);
        self.execute(call, data, deadline).map_err(|error| self.explain(call, deadline, error))?;
        Ok(None)
    }

    fn abort(&mut self, error: &CommError) {
        self.links.abort(&error.to_string());
    }
}

/// The ranks that `rank` sends to and receives from, in an order in which no rank gets messages of two at a time.
fn peers(rank: usize, world: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..world).map(move |distance| ((rank + distance) % world, (rank + world - distance) % world))
}

/// The elements of segment `step` of a rank's chunk.
fn segment(call: &Call, world: usize, of: usize, step: usize) -> std::ops::Range<usize> {
    let chunk = chunk(call.count, world, of);
    let start = (chunk.start + step * SEGMENT).min(chunk.end);
    start..chunk.end.min(start + SEGMENT)
}

/// The number of segments of the largest chunk.
fn segments(call: &Call, world: usize) -> usize {
    call.count.div_ceil(world).div_ceil(SEGMENT)
}

/// Scratch memory of `bytes` bytes, aligned for every element type.
fn scratch_bytes(words: &mut Vec<u64>, bytes: usize) -> &mut [u8] {
    words.resize(words.len().max(bytes.div_ceil(8)), 0);
    &mut bytemuck::cast_slice_mut(words)[..bytes]
}

/// Splits `data` into one slice to read and one to write; the ranges do not overlap.
fn split_disjoint(data: &mut [u8], read: std::ops::Range<usize>, write: std::ops::Range<usize>) -> (&[u8], &mut [u8]) {
    if read.end <= write.start {
        let (low, high) = data.split_at_mut(write.start);
        (&low[read], &mut high[..write.end - write.start])
    } else {
        let (low, high) = data.split_at_mut(read.start);
        (&high[..read.end - read.start], &mut low[write])
    }
}

/// Rounds `values` to bf16 or f16.
fn round<'a>(comm_dtype: Dtype, values: &[f32], scratch: &'a mut Vec<u64>) -> &'a [u8] {
    let bytes = scratch_bytes(scratch, values.len() * 2);
    match comm_dtype {
        Dtype::F16 => bytemuck::cast_slice_mut(bytes).iter_mut().zip(values).for_each(|(r, &v)| *r = f16::from_f32(v)),
        _ => bytemuck::cast_slice_mut(bytes).iter_mut().zip(values).for_each(|(r, &v)| *r = bf16::from_f32(v)),
    }
    bytes
}

/// Converts bf16 or f16 to f32.
fn widen(comm_dtype: Dtype, rounded: &[u8], values: &mut [f32]) {
    match comm_dtype {
        Dtype::F16 => {
            values.iter_mut().zip(bytemuck::cast_slice(rounded)).for_each(|(v, r): (_, &f16)| *v = r.to_f32())
        }
        _ => values.iter_mut().zip(bytemuck::cast_slice(rounded)).for_each(|(v, r): (_, &bf16)| *v = r.to_f32()),
    }
}
