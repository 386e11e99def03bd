//! Collectives between ranks.
//!
//! A [`Communicator`] is one rank's end of a communication group. Every rank calls the same collectives in the same
//! order. A call is blocking (`all_reduce`) or asynchronous (`start_all_reduce`, [`Communicator::start`]). The
//! communicator's thread runs the calls, so that they overlap with the caller's computation.
//!
//! | backend | ranks are | created by |
//! |---|---|---|
//! | threads | threads of one process with shared memory | [`threads::threads`] |
//! | tcp | processes with a socket between every two | [`super::rendezvous`] |
//! | mpi | processes that `mpirun` started (feature `mpi`) | `mpi::connect` |
//! | nccl | processes with a GPU each (feature `nccl`) | `nccl::connect` |
//!
//! Guarantees:
//! - Reductions are in rank order, half-precision floats in f32: threads, tcp and mpi give the same bits on every rank
//!   and in every run. (NCCL chooses its order, the same for all ranks; reductions of copy engines are in rank order
//!   again.)
//! - Ranks compare their calls before any data are sent. If the calls differ, all ranks get an error that lists them;
//!   no rank hangs.
//! - A call waits at most [`Options::timeout`] for other ranks to arrive, and as long again for their data. A rank that
//!   ends is noticed immediately. If a backend does not return from a call in time, the [`watchdog`](super::watchdog)
//!   ends the process: no wait on a handle is unbounded, and no handle completes while its memory may still be used.
//! - After an error a communicator only returns that error. (Invalid calls, [`CommError::Misuse`], do not count:
//!   nothing was sent.)
//!
//! Reading order: [`call`] (the description of a collective), [`backend`] (the trait of backends), this page (queue and
//! handles), [`host_reduce`], then the backends: [`threads`]; [`links`] for backends with point-to-point messages,
//! which are [`tcp`] and `mpi`; [`copies`] has the schedules of collectives that copy engines run instead of NCCL's
//! kernels.

pub(crate) mod backend;
pub mod call;
pub mod copies;
pub mod error;
pub mod handle;
mod host_reduce;
pub(crate) mod links;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
mod roll_call;
pub mod tcp;
pub mod threads;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use call::{Call, Dtype, Element, Op, Reduce};
pub use error::{CommError, Result};
pub use handle::{Handle, Pending};

pub use backend::EventTimer;
pub(crate) use backend::PeerBuffer;
use backend::{Backend, CompletionEvent, Compute, Deadline, Memory, Ready};
use handle::Completion;

use super::watchdog::{WATCHDOG_MARGIN, guard};

/// Timeouts of a communicator.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long a collective waits for the slowest rank, without the time of a [`roll_call`].
    pub timeout: Duration,
    /// How long ranks wait for each other at the start.
    pub start_timeout: Duration,
}

/// Default timeout of collectives: other ranks may be compiling kernels or reading data.
pub const TIMEOUT: Duration = Duration::from_secs(300);
/// Default start timeout: ranks are started within moments of each other.
pub const START_TIMEOUT: Duration = Duration::from_secs(60);

impl Default for Options {
    fn default() -> Options {
        Options { timeout: TIMEOUT, start_timeout: START_TIMEOUT }
    }
}

/// A completed collective, for traces and benchmarks.
#[derive(Clone, Debug)]
pub struct Record {
    pub seq: u64,
    pub call: Call,
    /// Time of the call.
    pub called: Instant,
    /// Time at which the communicator's thread started it.
    pub started: Instant,
    /// Time of completion; with NCCL, time at which it was queued on its stream.
    pub ended: Instant,
    event: Option<Arc<dyn CompletionEvent>>,
}

impl Record {
    /// Bytes of the buffer.
    pub fn bytes(&self) -> usize {
        self.call.count * self.call.dtype.size()
    }

    /// Duration in seconds: with NCCL on the device, for which this synchronizes; otherwise from start to end.
    pub fn seconds(&self) -> f64 {
        let host = (self.ended - self.started).as_secs_f64();
        let Some(event) = &self.event else { return host };
        event.synchronize().ok().and_then(|()| event.seconds()).unwrap_or(host)
    }
}

/// One rank's end of a communication group.
pub struct Communicator {
    rank: usize,
    world: usize,
    name: &'static str,
    queue: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    trace: Arc<Mutex<Option<Vec<Record>>>>,
    failed: Arc<OnceLock<CommError>>,
    /// Address from which exchanged data of the peer is read; 0 without exchanges.
    exchanges: Arc<AtomicU64>,
    /// Alive while a caller uses the buffer for the peer.
    peer_buffer_holder: Mutex<Weak<()>>,
    /// The compute stream, for GPU backends.
    compute: Option<Box<dyn Compute>>,
    /// Communicator for host memory, if this one is for GPU memory.
    host: Option<Box<Communicator>>,
}

/// A setting of overlapped collectives.
enum OverlapSetting {
    MaxCtas(u32),
    CopyEngines(bool),
    /// The buffer for the peer, and where to store the address from which the peer's data is read (0 without
    /// exchanges).
    PeerBuffer(Option<PeerBuffer>, Arc<AtomicU64>),
}

enum Job {
    Run { call: Call, memory: Memory, overlapped: bool, ready: Option<Ready>, called: Instant, done: Arc<Completion> },
    Configure { setting: OverlapSetting, done: Arc<Completion> },
    Abort(CommError),
}

impl Communicator {
    /// Creates a communicator. `make` creates the backend on the thread that runs it.
    pub(crate) fn with_backend<C: Backend + 'static>(
        rank: usize,
        world: usize,
        name: &'static str,
        options: Options,
        compute: Option<Box<dyn Compute>>,
        make: impl FnOnce() -> Result<C> + Send + 'static,
    ) -> Result<Communicator> {
        let (queue, jobs) = channel();
        let (started, has_started) = channel();
        let trace = Arc::new(Mutex::new(None));
        let failed = Arc::new(OnceLock::new());
        // With MPI the rank is known only after its start.
        let who: Arc<str> = if world > 1 { format!("rank {rank}").into() } else { "this rank".into() };
        let (trace_too, failed_too) = (trace.clone(), failed.clone());
        let worker = Worker {
            who: who.clone(),
            options,
            watchdog_margin: WATCHDOG_MARGIN,
            trace: trace_too,
            failed: failed_too,
            seq: 0,
        };
        let begins = guard(options.start_timeout + WATCHDOG_MARGIN, move || format!("{who}: the start of {name}"));
        let body = move || match make() {
            Ok(backend) => {
                drop(begins);
                let _ = started.send(Ok(()));
                worker.run_jobs(backend, &jobs);
            }
            Err(error) => drop(started.send(Err(error))),
        };
        let thread = std::thread::Builder::new().name(format!("comm {rank}")).spawn(body);
        let thread = thread.map_err(|error| CommError::Setup(format!("cannot start a thread: {error}")))?;
        let gone = |_| CommError::Setup(handle::PANICKED.into());
        has_started.recv().map_err(gone)??;
        Ok(Communicator {
            rank,
            world,
            name,
            queue: Some(queue),
            thread: Some(thread),
            trace,
            failed,
            exchanges: Arc::default(),
            peer_buffer_holder: Mutex::default(),
            compute,
            host: None,
        })
    }

    /// A communicator with a world size of 1.
    ///
    /// # Errors
    /// The system has no more threads.
    pub fn single() -> Result<Communicator> {
        let mut all = threads::threads(1, Options::default())?;
        all.pop().ok_or_else(|| CommError::Setup("the world size is 0".into()))
    }

    /// Sets rank and world size, for backends that know them only after their start.
    #[cfg(feature = "mpi")]
    fn with_rank(mut self, rank: usize, world: usize) -> Communicator {
        (self.rank, self.world) = (rank, world);
        self
    }

    /// Sets the communicator for host memory.
    #[cfg(feature = "nccl")]
    fn with_host(mut self, host: Communicator) -> Communicator {
        self.host = Some(Box::new(host));
        self
    }

    /// The communicator for host memory (slices and vectors), which all safe methods use.
    pub fn host(&self) -> &Communicator {
        self.host.as_deref().unwrap_or(self)
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// World size.
    pub fn world(&self) -> usize {
        self.world
    }

    /// The backend's name: `threads`, `tcp`, `mpi` or `nccl`.
    pub fn backend(&self) -> &'static str {
        self.name
    }

    /// Replaces `data` by the reduction of all ranks' `data`.
    ///
    /// # Errors
    /// [`CommError`]; `data` is then undefined.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], reduce: Reduce) -> Result<()> {
        self.run(Op::AllReduce(reduce), data, None)
    }

    /// Same as [`Communicator::all_reduce`] of f32, sent as bf16 or f16: half the bytes. Sums are f32.
    ///
    /// # Errors
    /// See [`Communicator::all_reduce`].
    pub fn all_reduce_as(&self, data: &mut [f32], reduce: Reduce, comm_dtype: Dtype) -> Result<()> {
        self.run(Op::AllReduce(reduce), data, Some(comm_dtype))
    }

    /// [`Op::ReduceScatter`]: `data` is `world` equal chunks; chunk `rank` becomes the reduction of all ranks' chunks
    /// `rank`.
    ///
    /// # Errors
    /// See [`Communicator::all_reduce`]; also a length that is not a multiple of `world`.
    pub fn reduce_scatter<T: Element>(&self, data: &mut [T], reduce: Reduce) -> Result<()> {
        self.run(Op::ReduceScatter(reduce), data, None)
    }

    /// [`Op::AllGather`]: `data` is `world` equal chunks; chunk `rank` of every rank is sent to all ranks.
    ///
    /// # Errors
    /// See [`Communicator::all_reduce`]; also a length that is not a multiple of `world`.
    pub fn all_gather<T: Element>(&self, data: &mut [T]) -> Result<()> {
        self.run(Op::AllGather, data, None)
    }

    /// Sends `data` of `root` to all ranks.
    ///
    /// # Errors
    /// See [`Communicator::all_reduce`]; also a root that does not exist.
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        self.run(Op::Broadcast { root }, data, None)
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// [`CommError`].
    pub fn barrier(&self) -> Result<()> {
        self.run::<u8>(Op::Barrier, &mut [], None)
    }

    /// Asynchronous [`Communicator::all_reduce`]; [`Pending::wait`] returns the data.
    ///
    /// # Errors
    /// Invalid calls and earlier failures; `wait` returns the others.
    pub fn start_all_reduce<T: Element>(&self, data: Vec<T>, reduce: Reduce) -> Result<Pending<T>> {
        self.start_owned(Op::AllReduce(reduce), data)
    }

    /// Asynchronous [`Communicator::reduce_scatter`].
    ///
    /// # Errors
    /// See [`Communicator::start_all_reduce`].
    pub fn start_reduce_scatter<T: Element>(&self, data: Vec<T>, reduce: Reduce) -> Result<Pending<T>> {
        self.start_owned(Op::ReduceScatter(reduce), data)
    }

    /// Asynchronous [`Communicator::all_gather`].
    ///
    /// # Errors
    /// See [`Communicator::start_all_reduce`].
    pub fn start_all_gather<T: Element>(&self, data: Vec<T>) -> Result<Pending<T>> {
        self.start_owned(Op::AllGather, data)
    }

    /// Asynchronous [`Communicator::broadcast`].
    ///
    /// # Errors
    /// See [`Communicator::start_all_reduce`].
    pub fn start_broadcast<T: Element>(&self, data: Vec<T>, root: usize) -> Result<Pending<T>> {
        self.start_owned(Op::Broadcast { root }, data)
    }

    fn start_owned<T: Element>(&self, op: Op, mut data: Vec<T>) -> Result<Pending<T>> {
        let call = Call { op, dtype: T::DTYPE, count: data.len(), comm_dtype: None };
        // SAFETY: the vector's memory stays allocated in a `Pending`, which waits before it frees it.
        let handle = unsafe { self.host().start(call, data.as_mut_ptr().cast())? };
        Ok(Pending::new(data, handle))
    }

    fn run<T: Element>(&self, op: Op, data: &mut [T], comm_dtype: Option<Dtype>) -> Result<()> {
        let call = Call { op, dtype: T::DTYPE, count: data.len(), comm_dtype };
        // SAFETY: `data` is borrowed until this function returns, when the collective is complete.
        let handle = unsafe { self.host().start(call, data.as_mut_ptr().cast())? };
        handle.wait()
    }

    /// Starts a collective on `call.count` elements at `address`: host memory, or with NCCL memory of this rank's GPU.
    ///
    /// # Errors
    /// An invalid call, or an earlier failure.
    ///
    /// # Safety
    /// Until the handle is complete, with or without an error, the elements at `address` stay allocated, and no other
    /// code reads or writes them. `address` is aligned for the element type. A leaked handle may never be known to be
    /// complete.
    pub unsafe fn start(&self, call: Call, address: *mut u8) -> Result<Handle> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.enqueue(call, address, false) }
    }

    /// Same as [`Communicator::start`], for a collective that overlaps with kernels of the compute stream: it uses at
    /// most as many CTAs as [`Communicator::set_overlap_max_ctas`] set.
    ///
    /// # Errors
    /// See [`Communicator::start`].
    ///
    /// # Safety
    /// See [`Communicator::start`].
    pub unsafe fn start_overlapped(&self, call: Call, address: *mut u8) -> Result<Handle> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.enqueue(call, address, true) }
    }

    /// Limits collectives of [`Communicator::start_overlapped`] to this number of CTAs (SMs); 0 leaves the number to
    /// the backend. Fewer CTAs leave more SMs to compute kernels, and make collectives slower. A collective, which all
    /// ranks call with the same value. Backends other than NCCL ignore it.
    ///
    /// # Errors
    /// [`CommError`].
    pub fn set_overlap_max_ctas(&self, max_ctas: u32) -> Result<()> {
        self.configure(OverlapSetting::MaxCtas(max_ctas))
    }

    /// Selects whether copy engines run collectives of [`Communicator::start_overlapped`] where they can (sums and
    /// averages of f32, bf16 and f16, all-gathers and exchanges). Copy engines use SMs only for short reductions, and
    /// need all GPUs on one host. A collective, which all ranks call with the same value. Backends other than NCCL
    /// ignore it.
    ///
    /// # Errors
    /// [`CommError`], on all ranks, if the processes cannot share GPU memory.
    pub fn set_overlap_copy_engines(&self, on: bool) -> Result<()> {
        self.configure(OverlapSetting::CopyEngines(on))
    }

    /// Sets the buffer that receives the peer's data of an [`Op::Exchange`], or the memory that the peer may read after
    /// one; `None` removes it. Returns the address from which the peer's data is read, if exchanges are possible:
    /// between two ranks that are threads, or whose GPUs' [copy engines](Communicator::set_overlap_copy_engines) run
    /// overlapped collectives; peer reads need NVLink. A collective, which all ranks call with the same number of
    /// bytes. The buffer is held until the next one is set or removed, or the communicator is dropped; no exchange may
    /// be in flight in it then.
    ///
    /// # Errors
    /// See [`Communicator::set_overlap_copy_engines`].
    pub(crate) fn set_peer_buffer(&self, peer_buffer: Option<PeerBuffer>) -> Result<Option<u64>> {
        self.configure(OverlapSetting::PeerBuffer(peer_buffer, self.exchanges.clone()))?;
        Ok(Some(self.exchanges.load(Ordering::Acquire)).filter(|&at| at != 0))
    }

    /// Whether a buffer for the peer is set.
    pub(crate) fn has_peer_buffer(&self) -> bool {
        self.exchanges.load(Ordering::Acquire) != 0
    }

    /// Whether the value that [`Communicator::hold_peer_buffer`] returned is still alive.
    pub(crate) fn peer_buffer_in_use(&self) -> bool {
        self.peer_buffer_holder.lock().unwrap_or_else(PoisonError::into_inner).strong_count() > 0
    }

    /// Returns a value that marks the buffer for the peer as used while it is alive.
    pub(crate) fn hold_peer_buffer(&self) -> Arc<()> {
        let used = Arc::default();
        *self.peer_buffer_holder.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&used);
        used
    }

    fn configure(&self, setting: OverlapSetting) -> Result<()> {
        let done = Arc::new(Completion::default());
        match self.send(Job::Configure { setting, done: done.clone() }) {
            true => Handle::new(done).wait(),
            false => Err(CommError::Setup(handle::PANICKED.into())),
        }
    }

    /// Implements [`Communicator::start`] and [`Communicator::start_overlapped`].
    unsafe fn enqueue(&self, call: Call, address: *mut u8, overlapped: bool) -> Result<Handle> {
        self.check(&call)?;
        if let Some(error) = self.failed.get() {
            return Err(error.clone());
        }
        let ready = self.compute.as_ref().map(|compute| compute.record()).transpose()?;
        let done = Arc::new(Completion::default());
        let memory = Memory { address, bytes: call.count * call.dtype.size() };
        let job = Job::Run { call, memory, overlapped, ready, called: Instant::now(), done: done.clone() };
        match self.send(job) {
            true => Ok(Handle::new(done)),
            false => Err(CommError::Setup(handle::PANICKED.into())),
        }
    }

    /// Sends a job to the communicator's thread; false if that thread has ended.
    fn send(&self, job: Job) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.send(job).is_ok())
    }

    fn check(&self, call: &Call) -> Result<()> {
        let misuse = |why: String| Err(CommError::Misuse(format!("{call}: {why}")));
        let reduce = match call.op {
            Op::AllReduce(reduce) | Op::ReduceScatter(reduce) => Some(reduce),
            _ => None,
        };
        if reduce == Some(Reduce::Avg) && !call.dtype.is_float() {
            return misuse("integers have no average; use a sum, and divide afterwards".into());
        }
        if matches!(call.op, Op::ReduceScatter(_) | Op::AllGather) && !call.count.is_multiple_of(self.world) {
            return misuse(format!(
                "the world size ({}) does not divide {} elements; pad the buffer",
                self.world, call.count
            ));
        }
        if call.op == Op::Exchange && !self.has_peer_buffer() {
            return misuse("no buffer is set for the exchange".into());
        }
        match (call.op, call.comm_dtype) {
            (Op::Broadcast { root }, _) if root >= self.world => {
                misuse(format!("there is no rank {root}, only 0 to {}", self.world - 1))
            }
            (_, None) => Ok(()),
            (Op::AllReduce(_) | Op::ReduceScatter(_), Some(Dtype::Bf16 | Dtype::F16)) if call.dtype == Dtype::F32 => {
                Ok(())
            }
            (_, Some(_)) => misuse("only reductions of f32 can be sent as another type, which is bf16 or f16".into()),
        }
    }

    /// Aborts all ranks: their collectives fail with `reason` instead of waiting. For errors outside of collectives.
    /// Dropping the communicator during a panic does the same.
    pub fn abort(&self, reason: &str) {
        if let Some(host) = &self.host {
            host.abort(reason);
        }
        self.send(Job::Abort(CommError::Setup(reason.to_string())));
    }

    /// The first error, after which every call fails. On a GPU, results of collectives are undefined from then on, even
    /// if their handles reported success.
    pub fn failure(&self) -> Option<&CommError> {
        self.failed.get().or_else(|| self.host.as_ref().and_then(|host| host.failure()))
    }

    /// Starts a timer on the compute stream, if there is one.
    ///
    /// # Errors
    /// Errors of the GPU.
    pub fn start_timer(&self) -> Result<Option<Box<dyn EventTimer>>> {
        self.compute.as_ref().map(|compute| compute.start_timer()).transpose()
    }

    /// Whether collectives are queued on a GPU's stream, which serializes them without blocking the host.
    pub fn is_on_device(&self) -> bool {
        self.compute.is_some()
    }

    /// Whether records are collected.
    pub fn is_tracing(&self) -> bool {
        self.records().is_some()
    }

    /// Collects a [`Record`] of every collective from now on.
    pub fn start_trace(&self) {
        *self.records() = Some(Vec::new());
    }

    /// Takes the records since [`Communicator::start_trace`] or the last call, oldest first. Collectives in flight are
    /// reported later.
    pub fn take_trace(&self) -> Vec<Record> {
        self.records().as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn records(&self) -> std::sync::MutexGuard<'_, Option<Vec<Record>>> {
        self.trace.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.send(Job::Abort(CommError::Setup("it panicked".into())));
        }
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was reported by its handles.
            let _ = thread.join();
        }
    }
}

/// Interval of checks of collectives in flight while no call arrives.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Timeout of a backend's abort: kernels on a GPU end only after the kernels queued before them.
const ABORT_TIMEOUT: Duration = Duration::from_secs(90);

/// State of the communicator's thread.
struct Worker {
    /// This rank's name in messages.
    who: Arc<str>,
    options: Options,
    /// Extra time of a call before the watchdog ends the process.
    watchdog_margin: Duration,
    trace: Arc<Mutex<Option<Vec<Record>>>>,
    failed: Arc<OnceLock<CommError>>,
    seq: u64,
}

impl Worker {
    /// Runs jobs until the communicator is dropped. Every job completes, with the first error if it fails.
    fn run_jobs(mut self, mut backend: impl Backend, jobs: &Receiver<Job>) {
        loop {
            let job = match jobs.recv_timeout(CHECK_INTERVAL) {
                Ok(job) => job,
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    if self.failed.get().is_some() {
                        continue;
                    }
                    let who = self.who.clone();
                    let guarded =
                        guard(self.watchdog_margin, move || format!("{who}: a check of collectives in flight"));
                    let watched = backend.check_progress();
                    drop(guarded);
                    if let Err(error) = watched {
                        self.fail(&mut backend, error);
                    }
                    continue;
                }
            };
            match job {
                Job::Abort(reason) => self.fail(&mut backend, reason),
                Job::Configure { setting, done } => {
                    let done = handle::Finisher::new(done);
                    if let Some(error) = self.failed.get() {
                        done.finish(Err(error.clone()));
                        continue;
                    }
                    self.seq += 1;
                    let deadline = Deadline::after(self.options.timeout);
                    let (who, Options { timeout, start_timeout }) = (self.who.clone(), self.options);
                    // Collectives in flight complete first.
                    let limit = 2 * timeout + start_timeout + self.watchdog_margin;
                    let guarded = guard(limit, move || format!("{who}: preparing collectives"));
                    let outcome = match setting {
                        OverlapSetting::MaxCtas(max_ctas) => backend.set_max_ctas(self.seq, max_ctas, deadline),
                        OverlapSetting::CopyEngines(on) => backend.set_copy_engines(self.seq, on, deadline),
                        OverlapSetting::PeerBuffer(peer_buffer, exchanges) => backend
                            .set_peer_buffer(self.seq, peer_buffer, deadline)
                            .map(|at| exchanges.store(at.unwrap_or(0), Ordering::Release)),
                    };
                    drop(guarded);
                    if let Err(error) = &outcome {
                        self.fail(&mut backend, error.clone());
                    }
                    done.finish(outcome.map(|()| None));
                }
                Job::Run { call, mut memory, overlapped, ready, called, done } => {
                    // Wakes the waiting caller whatever happens below.
                    let done = handle::Finisher::new(done);
                    if let Some(error) = self.failed.get() {
                        done.finish(Err(error.clone()));
                        continue;
                    }
                    self.seq += 1;
                    let started = Instant::now();
                    let deadline = Deadline::after(self.options.timeout);
                    backend.set_overlapped(overlapped);
                    // Once for all ranks to arrive, once for their data.
                    let (who, limit) = (self.who.clone(), 2 * self.options.timeout + self.watchdog_margin);
                    let guarded = guard(limit, move || format!("{who}: {call}"));
                    let outcome = backend.run(self.seq, &call, &mut memory, ready, deadline);
                    drop(guarded);
                    match &outcome {
                        Ok(event) => {
                            let (ended, event) = (Instant::now(), event.clone());
                            self.push_record(Record { seq: self.seq, call, called, started, ended, event });
                        }
                        Err(error) => self.fail(&mut backend, error.clone()),
                    }
                    done.finish(outcome);
                }
            }
        }
    }

    /// Stores the error, then aborts the backend: on a GPU the abort releases waiting threads, which then read the
    /// error.
    fn fail(&self, backend: &mut impl Backend, error: CommError) {
        let _ = self.failed.set(error.clone());
        let (who, text) = (self.who.clone(), error.to_string());
        let _guarded =
            guard(ABORT_TIMEOUT + self.watchdog_margin, move || format!("{text}\n{who}: aborting after this error"));
        backend.abort(&error);
    }

    fn push_record(&self, record: Record) {
        let mut trace = self.trace.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(records) = trace.as_mut() {
            records.push(record);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A backend that never returns.
    struct HangingBackend;

    impl Backend for HangingBackend {
        fn run(
            &mut self,
            _seq: u64,
            _call: &Call,
            _memory: &mut Memory,
            _ready: Option<Ready>,
            _deadline: Deadline,
        ) -> Result<Option<Arc<dyn CompletionEvent>>> {
            loop {
                std::thread::park();
            }
        }

        fn abort(&mut self, _error: &CommError) {}
    }

    const CHILD: &str = "TILEWRIGHT_TEST_STUCK";

    /// Runs in a subprocess of the test below: waits for a collective that never completes.
    #[test]
    fn child_whose_collective_hangs() {
        if std::env::var_os(CHILD).is_none() {
            return;
        }
        let (queue, jobs) = channel();
        let options = Options { timeout: Duration::from_millis(50), start_timeout: Duration::from_millis(50) };
        let (trace, failed) = (Arc::default(), Arc::default());
        let worker =
            Worker { who: "rank 3".into(), options, watchdog_margin: Duration::from_millis(50), trace, failed, seq: 0 };
        let thread = std::thread::spawn(move || worker.run_jobs(HangingBackend, &jobs));
        let call = Call { op: Op::AllReduce(Reduce::Sum), dtype: Dtype::F32, count: 0, comm_dtype: None };
        let memory = Memory { address: std::ptr::dangling_mut(), bytes: 0 };
        let done = Arc::new(Completion::default());
        let job = Job::Run { call, memory, overlapped: false, ready: None, called: Instant::now(), done: done.clone() };
        assert!(queue.send(job).is_ok());
        let outcome = Handle::new(done).wait();
        drop(thread);
        unreachable!("{outcome:?}");
    }

    #[test]
    fn a_hanging_call_is_named_by_the_watchdog() {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["dist::comm::tests::child_whose_collective_hangs", "--exact", "--nocapture"]);
        let output = command.env(CHILD, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(crate::dist::watchdog::EXIT_CODE), "{text}");
        let line = "error: rank 3: all_reduce(sum) of 0 f32 did not return within 0.15 s and cannot be canceled: ending the process";
        assert!(text.contains(line), "{text}");
    }
}
