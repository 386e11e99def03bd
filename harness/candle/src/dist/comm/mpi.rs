//! Links over MPI point-to-point messages, for processes that `mpirun` or `srun` started.
//!
//! MPI's collectives cannot be aborted when a rank hangs, and their order of reduction is unspecified; only messages
//! are therefore used. All calls come from the communicator's thread, which initializes and finalizes MPI.

use std::mem::ManuallyDrop;
use std::time::Duration;

use mpi::environment::Universe;
use mpi::ffi;
use mpi::topology::Communicator as _;

use super::backend::Deadline;
use super::call::HEADER_BYTES;
use super::links::{LinkError, Links, OverLinks};
use super::{CommError, Communicator, Options, Result};
use tilewright::escape::printable_lines;

const CALL: i32 = 1;
const DATA: i32 = 2;
const ABORT: i32 = 3;
const SHUTDOWN: i32 = 4;
/// Maximum bytes of one message: MPI's counts have 32 bits.
const MAX_MESSAGE: usize = 1 << 30;
const MAX_REASON_BYTES: usize = 64 * 1024;
/// Timeout for sending an abort notice.
const ABORT_NOTICE_TIMEOUT: Duration = Duration::from_millis(500);
/// Polls before the thread sleeps.
const SPINS: usize = 200;
const SLEEP: Duration = Duration::from_micros(50);

/// The communicator of all ranks of MPI_COMM_WORLD.
///
/// # Errors
/// MPI cannot be initialized, or was initialized before in this process.
pub fn connect(options: Options) -> Result<Communicator> {
    // Rank and size are known only on the thread that initializes MPI.
    let (sender, receiver) = std::sync::mpsc::channel();
    let make = move || {
        let links = Mpi::start()?;
        let _ = sender.send((links.rank, links.world));
        Ok(OverLinks::new(links))
    };
    let communicator = Communicator::with_backend(0, 1, "mpi", options, None, make)?;
    let (rank, world) = receiver.recv().map_err(|_| CommError::Setup("MPI did not start".into()))?;
    Ok(communicator.with_rank(rank, world))
}

struct Mpi {
    universe: ManuallyDrop<Universe>,
    rank: usize,
    world: usize,
    /// Whether an operation failed. MPI may then still reference memory that the caller gets back: MPI is neither
    /// called again nor finalized.
    failed: bool,
    /// Whether an abort notice was sent.
    abort_sent: bool,
    /// Sequence number of the current collective.
    seq: u64,
    /// Last collective of each rank that shut down regularly.
    shut_down: Vec<Option<u64>>,
}

/// A message in flight.
struct Pending {
    request: ffi::MPI_Request,
    peer: usize,
    receives: bool,
    done: bool,
}

impl Mpi {
    fn start() -> Result<Mpi> {
        let started = mpi::initialize_with_threading(mpi::Threading::Serialized);
        let Some((universe, threading)) = started else {
            return Err(CommError::Setup("MPI is already initialized in this process: connect only once".into()));
        };
        if threading < mpi::Threading::Funneled {
            return Err(CommError::Setup(
                "this MPI does not support threads: install one that does (MPI_THREAD_FUNNELED)".into(),
            ));
        }
        let all = universe.world();
        let (rank, world) = (all.rank() as usize, all.size() as usize);
        Ok(Mpi {
            universe: ManuallyDrop::new(universe),
            rank,
            world,
            failed: false,
            abort_sent: false,
            seq: 0,
            shut_down: vec![None; world],
        })
    }

    /// Starts to send `bytes` to rank `to`.
    ///
    /// # Safety
    /// The bytes stay allocated and unchanged until the message is complete.
    unsafe fn send(&self, to: usize, tag: i32, bytes: &[u8]) -> Pending {
        // SAFETY: the call initializes the request; the caller keeps the bytes.
        unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            ffi::MPI_Isend(
                bytes.as_ptr().cast(),
                bytes.len() as i32,
                ffi::RSMPI_UINT8_T,
                to as i32,
                tag,
                ffi::RSMPI_COMM_WORLD,
                &mut request,
            );
            Pending { request, peer: to, receives: false, done: false }
        }
    }

    /// Starts to receive `bytes` from rank `from`.
    ///
    /// # Safety
    /// See [`Mpi::send`]; also no other code accesses the bytes.
    unsafe fn receive(&self, from: usize, tag: i32, bytes: &mut [u8]) -> Pending {
        // SAFETY: as above.
        unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            ffi::MPI_Irecv(
                bytes.as_mut_ptr().cast(),
                bytes.len() as i32,
                ffi::RSMPI_UINT8_T,
                from as i32,
                tag,
                ffi::RSMPI_COMM_WORLD,
                &mut request,
            );
            Pending { request, peer: from, receives: true, done: false }
        }
    }

    /// Waits for messages until a rank aborts or the deadline passes; pending receives are then canceled.
    fn wait(&mut self, pending: &mut [Pending], deadline: Deadline) -> Result<(), LinkError> {
        let outcome = self.watch(pending, deadline);
        if outcome.is_err() {
            self.failed = true;
            for message in pending.iter_mut().filter(|message| !message.done && message.receives) {
                // SAFETY: the request is active. A canceled receive completes immediately and does not write.
                unsafe {
                    ffi::MPI_Cancel(&mut message.request);
                    ffi::MPI_Wait(&mut message.request, ffi::RSMPI_STATUS_IGNORE);
                }
            }
        }
        outcome
    }

    fn watch(&mut self, pending: &mut [Pending], deadline: Deadline) -> Result<(), LinkError> {
        for round in 0_usize.. {
            for message in pending.iter_mut().filter(|message| !message.done) {
                let mut done = 0;
                // SAFETY: the request is active, and the caller keeps its memory.
                unsafe { ffi::MPI_Test(&mut message.request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
                message.done = done != 0;
            }
            let mut missing: Vec<usize> = pending.iter().filter(|m| !m.done).map(|m| m.peer).collect();
            if missing.is_empty() {
                return Ok(());
            }
            if round % 16 == 0 {
                self.receive_notices(deadline)?;
                if let Some(&peer) =
                    missing.iter().find(|&&peer| self.shut_down[peer].is_some_and(|seq| seq < self.seq))
                {
                    return Err(LinkError::Gone(peer, "it dropped its communicator".into()));
                }
                if deadline.is_over() {
                    missing.sort_unstable();
                    missing.dedup();
                    return Err(LinkError::TimedOut(missing));
                }
            }
            match round < SPINS {
                true => std::thread::yield_now(),
                false => std::thread::sleep(SLEEP),
            }
        }
        Ok(())
    }

    /// Reads notices of ranks that abort or shut down.
    fn receive_notices(&mut self, deadline: Deadline) -> Result<(), LinkError> {
        if let Some((from, bytes)) = self.probe(ABORT) {
            return Err(LinkError::Aborted(from, printable_lines(&bytes)));
        }
        while let Some((from, bytes)) = self.probe(SHUTDOWN).filter(|_| !deadline.is_over()) {
            let seq = bytes.as_slice().try_into().map_or(0, u64::from_le_bytes);
            self.shut_down[from] = Some(seq);
        }
        Ok(())
    }

    /// Receives a message with this tag from any rank, if one has arrived.
    fn probe(&self, tag: i32) -> Option<(usize, Vec<u8>)> {
        // SAFETY: a status consists of integers, which the calls fill in. The received message is the probed one, since
        // all calls come from this thread.
        unsafe {
            let (mut found, mut count) = (0, 0);
            let mut status: ffi::MPI_Status = std::mem::zeroed();
            ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, tag, ffi::RSMPI_COMM_WORLD, &mut found, &mut status);
            if found == 0 {
                return None;
            }
            ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count);
            let mut bytes = vec![0_u8; usize::try_from(count).unwrap_or(0)];
            ffi::MPI_Recv(
                bytes.as_mut_ptr().cast(),
                count,
                ffi::RSMPI_UINT8_T,
                status.MPI_SOURCE,
                tag,
                ffi::RSMPI_COMM_WORLD,
                ffi::RSMPI_STATUS_IGNORE,
            );
            Some((status.MPI_SOURCE as usize, bytes))
        }
    }

    /// Sends a message to all ranks, and waits briefly until it is sent.
    fn send_to_all(&self, tag: i32, bytes: &[u8]) {
        // The bytes of messages that are not sent in time are leaked.
        let bytes: &'static [u8] = Vec::leak(bytes.to_vec());
        let others = (0..self.world).filter(|&peer| peer != self.rank);
        // SAFETY: the bytes are never freed.
        let mut pending: Vec<Pending> = others.map(|to| unsafe { self.send(to, tag, bytes) }).collect();
        let deadline = Deadline::after(ABORT_NOTICE_TIMEOUT);
        while pending.iter().any(|message| !message.done) && !deadline.is_over() {
            for message in pending.iter_mut().filter(|message| !message.done) {
                let mut done = 0;
                // SAFETY: the request is active.
                unsafe { ffi::MPI_Test(&mut message.request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
                message.done = done != 0;
            }
            std::thread::yield_now();
        }
    }
}

impl Links for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn exchange_headers(
        &mut self,
        mine: &[u8; HEADER_BYTES],
        deadline: Deadline,
    ) -> Result<Vec<[u8; HEADER_BYTES]>, LinkError> {
        self.seq = mine[..8].try_into().map_or(0, u64::from_le_bytes);
        // A failed send is never canceled: its bytes are leaked.
        let sent: &'static [u8; HEADER_BYTES] = Box::leak(Box::new(*mine));
        let mut headers = vec![*mine; self.world];
        let mut pending = Vec::with_capacity(2 * self.world);
        for (peer, header) in headers.iter_mut().enumerate().filter(|(peer, _)| *peer != self.rank) {
            // SAFETY: `wait` returns when all messages are complete; if it fails, receives are canceled and `sent` is
            // leaked.
            unsafe {
                pending.push(self.receive(peer, CALL, header));
                pending.push(self.send(peer, CALL, sent));
            }
        }
        self.wait(&mut pending, deadline)?;
        // SAFETY: all sends are complete, so that nothing else references it.
        drop(unsafe { Box::from_raw(std::ptr::from_ref(sent).cast_mut()) });
        Ok(headers)
    }

    fn exchange(
        &mut self,
        send: Option<(usize, &[u8])>,
        receive: Option<(usize, &mut [u8])>,
        deadline: Deadline,
    ) -> Result<(), LinkError> {
        let mut pending = Vec::new();
        // SAFETY: `wait` returns when all messages are complete. If it fails, receives are canceled. Sends may stay
        // active, but MPI reads their bytes only inside its calls, the last of which return before the collective does.
        unsafe {
            if let Some((from, bytes)) = receive {
                pending.extend(bytes.chunks_mut(MAX_MESSAGE).map(|piece| self.receive(from, DATA, piece)));
            }
            if let Some((to, bytes)) = send {
                pending.extend(bytes.chunks(MAX_MESSAGE).map(|piece| self.send(to, DATA, piece)));
            }
        }
        self.wait(&mut pending, deadline)
    }

    fn abort(&mut self, reason: &str) {
        self.failed = true;
        if !std::mem::replace(&mut self.abort_sent, true) {
            self.send_to_all(ABORT, &reason.as_bytes()[..reason.len().min(MAX_REASON_BYTES)]);
        }
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        if !self.failed {
            self.send_to_all(SHUTDOWN, &self.seq.to_le_bytes());
            // SAFETY: dropped once, here; no message is in flight.
            unsafe { ManuallyDrop::drop(&mut self.universe) };
        }
    }
}
