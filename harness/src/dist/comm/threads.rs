//! Backend for ranks that are threads of one process and read each other's memory.
//!
//! All ranks post their call and address in the shared state. When the last rank has posted, each rank checks that the
//! calls agree and processes its chunk in all ranks' memory. When all have finished, the posts are cleared for the next
//! collective. Between these two synchronization points only the communicators' threads run, which do not block, so
//! that a timeout can only occur before memory is shared.

use std::any::Any;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::call::{Call, Dtype, Op};
use super::carrier::{Carrier, Deadline, Fence, Inbox, Memory, Ready, compare};
use super::error::{CommError, Result};
use super::sum::{Accumulator, SEGMENT, chunk};
use super::{Communicator, Options};

/// Returns communicators of `world` ranks in this process, by rank; each is to be used on its own thread.
///
/// # Errors
/// A world size of 0; the system has no more threads.
pub fn threads(world: usize, options: Options) -> Result<Vec<Communicator>> {
    if world == 0 {
        return Err(CommError::Setup("the world size has to be at least 1".into()));
    }
    let hall = Arc::new(Hall { world, board: Mutex::new(Board::new(world)), changed: Condvar::new() });
    let make = |rank| {
        let hall = hall.clone();
        let carrier = move || Ok(Threads { rank, hall, accumulator: Accumulator::default(), inbox: None });
        Communicator::with_carrier(rank, world, "threads", options, None, carrier)
    };
    (0..world).map(make).collect()
}

struct Hall {
    world: usize,
    board: Mutex<Board>,
    changed: Condvar,
}

struct Board {
    posts: Vec<Option<Post>>,
    /// Ranks that have processed their chunk.
    finished: usize,
    /// Number of completed collectives.
    over: u64,
    /// Ranks that aborted (with the reason) or were dropped (empty).
    gone: Vec<Option<String>>,
    /// Keeps the memory of peer reads alive: after an error a rank may be dropped while its peer still reads.
    read_in_place: Vec<Option<Arc<dyn Any + Send + Sync>>>,
}

#[derive(Clone, Copy)]
struct Post {
    seq: u64,
    call: Call,
    address: *mut u8,
}

// SAFETY: an address is only used between the two synchronization points, while its rank waits.
unsafe impl Send for Post {}

impl Board {
    fn new(world: usize) -> Board {
        Board {
            posts: vec![None; world],
            finished: 0,
            over: 0,
            gone: vec![None; world],
            read_in_place: vec![None; world],
        }
    }
}

impl Hall {
    fn lock(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Threads {
    rank: usize,
    hall: Arc<Hall>,
    accumulator: Accumulator,
    inbox: Option<Inbox>,
}

impl Carrier for Threads {
    fn run(
        &mut self,
        seq: u64,
        call: &Call,
        memory: &mut Memory,
        _ready: Option<Ready>,
        deadline: Deadline,
    ) -> Result<Option<Arc<dyn Fence>>> {
        let posts = self.meet(seq, call, memory, deadline)?;
        let calls: Vec<(u64, Call)> = posts.iter().map(|post| (post.seq, post.call)).collect();
        let place =
            self.inbox.as_ref().and_then(|inbox| Some((inbox.place(memory.address as u64, memory.bytes)?, inbox)));
        let place = place.map(|(at, inbox)| (at, inbox.is_in_place()));
        let agreed = compare(&calls).and_then(|()| match (call.op, place) {
            (Op::Exchange, None) => Err(CommError::Misuse(format!("{call}: no buffer is set for the exchange"))),
            // Peer reads need only the synchronization.
            (_, place) => Ok(place.filter(|(_, in_place)| !in_place).map(|(at, _)| at)),
        });
        if let Ok(place) = agreed {
            self.share(call, &posts, place);
        }
        self.part();
        agreed.map(|_| None)
    }

    fn inbox(&mut self, seq: u64, inbox: Option<Inbox>, deadline: Deadline) -> Result<Option<u64>> {
        self.inbox = inbox.filter(|_| self.hall.world == 2);
        let Some(inbox) = &self.inbox else { return Ok(None) };
        if !inbox.is_in_place() {
            return Ok(Some(inbox.at));
        }
        let call = Call { op: Op::Exchange, dtype: Dtype::U8, count: inbox.bytes, wire: None };
        let own = Memory { address: inbox.at as *mut u8, bytes: inbox.bytes };
        let owner = inbox.owner.clone();
        let posts = self.meet(seq, &call, &own, deadline)?;
        let calls: Vec<(u64, Call)> = posts.iter().map(|post| (post.seq, post.call)).collect();
        self.hall.lock().read_in_place[self.rank] = Some(owner);
        self.part();
        compare(&calls).map(|()| Some(posts[1 - self.rank].address as u64))
    }

    fn give_up(&mut self, error: &CommError) {
        self.hall.lock().gone[self.rank].get_or_insert(error.to_string());
        self.hall.changed.notify_all();
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.hall.lock().gone[self.rank].get_or_insert_default();
        self.hall.changed.notify_all();
    }
}

impl Threads {
    /// Posts this rank's call, and waits for the posts of all others.
    fn meet(&self, seq: u64, call: &Call, memory: &Memory, deadline: Deadline) -> Result<Vec<Post>> {
        let rank = self.rank;
        let mut board = self.hall.lock();
        board.posts[rank] = Some(Post { seq, call: *call, address: memory.address });
        if board.posts.iter().all(Option::is_some) {
            self.hall.changed.notify_all();
        }
        loop {
            if board.posts.iter().all(Option::is_some) {
                return Ok(board.posts.iter().flatten().copied().collect());
            }
            let missing: Vec<usize> = (0..self.hall.world).filter(|&r| board.posts[r].is_none()).collect();
            let gone = missing.iter().find_map(|&r| board.gone[r].clone().map(|why| (r, why)));
            let error = match gone {
                Some((peer, why)) if why.is_empty() => {
                    let why = "it dropped its communicator".into();
                    Some(CommError::Lost { rank, peer, call: call.to_string(), why })
                }
                Some((by, reason)) => Some(CommError::Aborted { rank, by, call: call.to_string(), reason }),
                None if deadline.is_over() => {
                    Some(CommError::TimedOut { rank, call: call.to_string(), missing, after: deadline.patience })
                }
                None => None,
            };
            if let Some(error) = error {
                // From now on no rank may use this rank's memory.
                board.posts[rank] = None;
                board.gone[rank].get_or_insert(error.to_string());
                self.hall.changed.notify_all();
                return Err(error);
            }
            let waited = self.hall.changed.wait_timeout(board, deadline.left());
            board = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Waits until all ranks have finished with all memory.
    fn part(&self) {
        let mut board = self.hall.lock();
        let over = board.over;
        board.finished += 1;
        if board.finished == self.hall.world {
            board.finished = 0;
            board.posts.fill(None);
            board.over += 1;
            self.hall.changed.notify_all();
            return;
        }
        let done = self.hall.changed.wait_while(board, |board| board.over == over);
        drop(done.unwrap_or_else(PoisonError::into_inner));
    }

    /// Processes this rank's chunk of a collective on which all ranks agree. The peer's data of an exchange is written
    /// to the last argument.
    fn share(&mut self, call: &Call, posts: &[Post], place: Option<u64>) {
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
                    let result = self.accumulator.reduce(call.dtype, reduce, call.wire, world, part);
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
                if let Some(at) = place {
                    let here = Post { address: at as *mut u8, ..posts[rank] };
                    // SAFETY: both ranks only read the exchanged buffers, and each writes its receive buffer, which has
                    // this many bytes from there on.
                    unsafe { write(&here, 0, read(&posts[1 - rank], &(0..bytes))) };
                }
            }
        }
    }
}

/// # Safety
/// The post's memory has these bytes, and no rank writes them while the slice lives.
unsafe fn read<'a>(post: &Post, range: &std::ops::Range<usize>) -> &'a [u8] {
    match range.len() {
        0 => &[],
        // SAFETY: the caller's promise.
        n => unsafe { std::slice::from_raw_parts(post.address.add(range.start), n) },
    }
}

/// # Safety
/// The post's memory has `bytes.len()` bytes at `at`, `bytes` does not overlap them, and no other rank uses them.
unsafe fn write(post: &Post, at: usize, bytes: &[u8]) {
    if !bytes.is_empty() {
        // SAFETY: the caller's promise.
        unsafe { post.address.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}
