//! Backend for ranks that are threads of one process and read each other's memory.
//!
//! All ranks post their call and address in the shared state. When the last rank has posted, each rank checks that the
//! calls agree and processes its chunk in all ranks' memory. When all have finished, the posts are cleared for the next
//! collective. Between these two synchronization points only the communicators' threads run, which do not block, so
//! that a timeout can only occur before memory is shared.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::backend::{Backend, CompletionEvent, Deadline, Memory, PeerBuffer, Ready, check_same_calls};
use super::call::{Call, Dtype, Op};
use super::error::{CommError, Result};
use super::host_reduce::{Accumulator, SEGMENT, chunk};
use super::{Communicator, Options};
use crate::dist::rank::MAX_WORLD;

/// Returns communicators of `world` ranks in this process, by rank; each is to be used on its own thread.
///
/// # Errors
/// A world size of 0; the system has no more threads.
pub fn threads(world: usize, options: Options) -> Result<Vec<Communicator>> {
    if world == 0 {
        return Err(CommError::Setup("the world size has to be at least 1".into()));
    }
    if world > MAX_WORLD {
        return Err(CommError::Setup(format!("the world size is {world}: expected a number up to {MAX_WORLD}")));
    }
    let shared =
        Arc::new(SharedState { world, state: Mutex::new(CollectiveState::new(world)), changed: Condvar::new() });
    let make = |rank| {
        let shared = shared.clone();
        let backend = move || Ok(Threads { rank, shared, accumulator: Accumulator::default(), peer_buffer: None });
        Communicator::with_backend(rank, world, "threads", options, None, backend)
    };
    (0..world).map(make).collect()
}

struct SharedState {
    world: usize,
    state: Mutex<CollectiveState>,
    changed: Condvar,
}

struct CollectiveState {
    posts: Vec<Option<Post>>,
    /// Ranks that have processed their chunk.
    finished: usize,
    /// Number of completed collectives.
    completed: u64,
    /// Ranks that aborted (with the reason) or were dropped (empty).
    departed: Vec<Option<String>>,
    /// Keeps the memory of peer reads alive: after an error a rank may be dropped while its peer still reads.
    peer_read_owners: Vec<Option<Arc<dyn Any + Send + Sync>>>,
}

#[derive(Clone, Copy)]
struct Post {
    seq: u64,
    call: Call,
    address: *mut u8,
}

// SAFETY: an address is only used between the two synchronization points, while its rank waits.
unsafe impl Send for Post {}

impl CollectiveState {
    fn new(world: usize) -> CollectiveState {
        CollectiveState {
            posts: vec![None; world],
            finished: 0,
            completed: 0,
            departed: vec![None; world],
            peer_read_owners: vec![None; world],
        }
    }
}

impl SharedState {
    fn lock(&self) -> MutexGuard<'_, CollectiveState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Threads {
    rank: usize,
    shared: Arc<SharedState>,
    accumulator: Accumulator,
    peer_buffer: Option<PeerBuffer>,
}

impl Backend for Threads {
    fn run(
        &mut self,
        seq: u64,
        call: &Call,
        memory: &mut Memory,
        _ready: Option<Ready>,
        deadline: Deadline,
    ) -> Result<Option<Arc<dyn CompletionEvent>>> {
        let posts = self.post_and_wait(seq, call, memory, deadline)?;
        let calls: Vec<(u64, Call)> = posts.iter().map(|post| (post.seq, post.call)).collect();
        let dest = self.peer_buffer.as_ref().and_then(|peer_buffer| {
            Some((peer_buffer.dest_address(memory.address as u64, memory.bytes)?, peer_buffer))
        });
        let dest = dest.map(|(at, peer_buffer)| (at, peer_buffer.is_peer_read()));
        let agreed = check_same_calls(&calls).and_then(|()| match (call.op, dest) {
            (Op::Exchange, None) => Err(CommError::Misuse(format!("{call}: no buffer is set for the exchange"))),
            // Peer reads need only the synchronization.
            (_, dest) => Ok(dest.filter(|(_, peer_read)| !peer_read).map(|(at, _)| at)),
        });
        if let Ok(dest) = agreed {
            self.execute(call, &posts, dest);
        }
        self.wait_until_all_done();
        agreed.map(|_| None)
    }

    fn set_peer_buffer(
        &mut self,
        seq: u64,
        peer_buffer: Option<PeerBuffer>,
        deadline: Deadline,
    ) -> Result<Option<u64>> {
        self.peer_buffer = peer_buffer.filter(|_| self.shared.world == 2);
        let Some(peer_buffer) = &self.peer_buffer else { return Ok(None) };
        if !peer_buffer.is_peer_read() {
            return Ok(Some(peer_buffer.dest));
        }
        let call = Call { op: Op::Exchange, dtype: Dtype::U8, count: peer_buffer.bytes, comm_dtype: None };
        let own = Memory { address: peer_buffer.dest as *mut u8, bytes: peer_buffer.bytes };
        let owner = peer_buffer.owner.clone();
        let posts = self.post_and_wait(seq, &call, &own, deadline)?;
        let calls: Vec<(u64, Call)> = posts.iter().map(|post| (post.seq, post.call)).collect();
        self.shared.lock().peer_read_owners[self.rank] = Some(owner);
        self.wait_until_all_done();
        check_same_calls(&calls).map(|()| Some(posts[1 - self.rank].address as u64))
    }

    fn abort(&mut self, error: &CommError) {
        self.shared.lock().departed[self.rank].get_or_insert(error.to_string());
        self.shared.changed.notify_all();
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.lock().departed[self.rank].get_or_insert_default();
        self.shared.changed.notify_all();
    }
}

impl Threads {
    /// Posts this rank's call, and waits for the posts of all others.
    fn post_and_wait(&self, seq: u64, call: &Call, memory: &Memory, deadline: Deadline) -> Result<Vec<Post>> {
        let rank = self.rank;
        let mut state = self.shared.lock();
        state.posts[rank] = Some(Post { seq, call: *call, address: memory.address });
        if state.posts.iter().all(Option::is_some) {
            self.shared.changed.notify_all();
        }
        loop {
            if state.posts.iter().all(Option::is_some) {
                return Ok(state.posts.iter().flatten().copied().collect());
            }
            let missing: Vec<usize> = (0..self.shared.world).filter(|&r| state.posts[r].is_none()).collect();
            let departed = missing.iter().find_map(|&r| state.departed[r].clone().map(|why| (r, why)));
            let error = match departed {
                Some((peer, why)) if why.is_empty() => {
                    let why = "it dropped its communicator".into();
                    Some(CommError::Lost { rank, peer, call: call.to_string(), why })
                }
                Some((by, reason)) => Some(CommError::Aborted { rank, by, call: call.to_string(), reason }),
                None if deadline.is_over() => {
                    Some(CommError::TimedOut { rank, call: call.to_string(), missing, after: deadline.timeout })
                }
                None => None,
            };
            if let Some(error) = error {
                // From now on no rank may use this rank's memory.
                state.posts[rank] = None;
                state.departed[rank].get_or_insert(error.to_string());
                self.shared.changed.notify_all();
                return Err(error);
            }
            let waited = self.shared.changed.wait_timeout(state, deadline.left());
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until all ranks have finished with all memory.
    fn wait_until_all_done(&self) {
        let mut state = self.shared.lock();
        let completed = state.completed;
        state.finished += 1;
        if state.finished == self.shared.world {
            state.finished = 0;
            state.posts.fill(None);
            state.completed += 1;
            self.shared.changed.notify_all();
            return;
        }
        let done = self.shared.changed.wait_while(state, |state| state.completed == completed);
        drop(done.unwrap_or_else(PoisonError::into_inner));
    }

    /// Processes this rank's chunk of a collective on which all ranks agree. The peer's data of an exchange is written
    /// to the address `dest`.
    fn execute(&mut self, call: &Call, posts: &[Post], dest: Option<u64>) {
        let (world, size, rank) = (posts.len(), call.dtype.size(), self.rank);
        let mine = chunk(call.count, world, rank);
        match call.op {
            Op::Barrier => {}
            Op::AllReduce(_) | Op::ReduceScatter(_) => {
                let (reduce, everywhere) = match call.op {
                    Op::AllReduce(reduce) => (reduce, true),
                    Op::ReduceScatter(reduce) => (reduce, false),
                    _ => return,
                };
                for start in mine.clone().step_by(SEGMENT) {
                    let range = start * size..mine.end.min(start + SEGMENT) * size;
                    // SAFETY: only this rank uses this range of all buffers until all ranks have finished; the borrows
                    // of `part` end before the result is written.
                    let part = |rank: usize| unsafe { read(&posts[rank], &range) };
                    let result = self.accumulator.reduce(call.dtype, reduce, call.comm_dtype, world, part);
                    for post in posts.iter().enumerate().filter(|(r, _)| everywhere || *r == rank).map(|(_, post)| post)
                    {
                        // SAFETY: as above.
                        unsafe { write(post, range.start, result) };
                    }
                }
            }
            Op::AllGather => {
                for (other, post) in posts.iter().enumerate().filter(|(other, _)| *other != rank) {
                    let range = chunk(call.count, world, other);
                    let range = range.start * size..range.end * size;
                    // SAFETY: no rank writes chunk `other` of rank `other`, and only this rank accesses it in its
                    // buffer.
                    unsafe { write(&posts[rank], range.start, read(post, &range)) };
                }
            }
            Op::Broadcast { root } if root != rank => {
                // SAFETY: all ranks only read the root's buffer, and each writes its own.
                unsafe { write(&posts[rank], 0, read(&posts[root], &(0..call.count * size))) };
            }
            Op::Broadcast { .. } => {}
            Op::Exchange => {
                let bytes = call.count * size;
                if let Some(at) = dest {
                    let here = Post { address: at as *mut u8, ..posts[rank] };
                    // SAFETY: both ranks only read the exchanged buffers, and each writes its receive buffer, which has
                    // this many bytes from that address on.
                    unsafe { write(&here, 0, read(&posts[1 - rank], &(0..bytes))) };
                }
            }
        }
    }
}

/// Borrows the bytes in `range` of the post's memory.
///
/// # Safety
/// The post's memory has these bytes, and no rank writes them while the slice lives.
unsafe fn read<'a>(post: &Post, range: &std::ops::Range<usize>) -> &'a [u8] {
    match range.len() {
        0 => &[],
        // SAFETY: guaranteed by the caller.
        n => unsafe { std::slice::from_raw_parts(post.address.add(range.start), n) },
    }
}

/// Copies `bytes` to offset `at` of the post's memory.
///
/// # Safety
/// The post's memory has `bytes.len()` bytes at `at`, `bytes` does not overlap them, and no other rank uses them.
unsafe fn write(post: &Post, at: usize, bytes: &[u8]) {
    if !bytes.is_empty() {
        // SAFETY: guaranteed by the caller.
        unsafe { post.address.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}
