//! Collectives between ranks.
//!
//! A [`Communicator`] is one rank's end. Every rank calls the same collectives in the same order; each call may be
//! waited for at once (`all_reduce`) or later (`start_all_reduce`, [`Communicator::start`]). Calls are carried by a thread of
//! the communicator's own, so that they go on while the caller computes.
//!
//! | back end | ranks are | made by |
//! |---|---|---|
//! | threads | threads of one process; memory is shared | [`threads::threads`] |
//! | tcp | processes; sockets between every two | [`super::rendezvous`] |
//! | mpi | processes that `mpirun` started (feature `mpi`) | `mpi::connect` |
//! | nccl | processes with a GPU each (feature `nccl`) | `nccl::connect` |
//!
//! What always holds:
//! - Sums are taken in rank order, half floats in f32: threads, tcp and mpi give the same bits on every rank and in every run.
//!   (NCCL chooses its own order, the same for all ranks; sums that copy engines bring together are in rank order again.)
//! - Ranks show each other what they call before any data moves. Where they disagree, all get an error that lists the
//!   calls; nobody hangs.
//! - Nothing waits longer than [`Options::timeout`] for another rank to come, and as long again for its data. A rank that ends is noticed at
//!   once. Where a back end does not come back from a call in time, the [`watchdog`](super::watchdog) ends the process: so no handle is waited for
//!   without end either, and none is said to be done while its memory may still be used.
//! - After an error a communicator only returns that error.
//!
//! In reading order: [`call`] (what is called), [`backend`] (what a back end owes), this page (queue and handles), [`host_reduce`],
//! then the back ends: [`threads`]; [`links`] for those that have messages between two ranks, which are [`tcp`] and `mpi`; [`copies`] is what
//! GPUs queue where copy engines carry collectives in the place of NCCL's kernels.

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

/// How patient ranks are with each other.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long a collective waits for the slowest rank.
    pub timeout: Duration,
    /// How long ranks wait for each other at the start.
    pub start_timeout: Duration,
}

/// Ranks may compile kernels, or read data, while others wait.
pub const TIMEOUT: Duration = Duration::from_secs(300);
/// Ranks are started within moments of each other.
pub const START_TIMEOUT: Duration = Duration::from_secs(60);

impl Default for Options {
    fn default() -> Options {
        Options { timeout: TIMEOUT, start_timeout: START_TIMEOUT }
    }
}

/// One collective that was carried, for traces and benchmarks.
#[derive(Clone, Debug)]
pub struct Record {
    pub seq: u64,
    pub call: Call,
    /// When it was called.
    pub called: Instant,
    /// When its turn came.
    pub started: Instant,
    /// When it was done; with NCCL, when it was queued on its stream.
    pub ended: Instant,
    event: Option<Arc<dyn CompletionEvent>>,
}

impl Record {
    /// Bytes of the buffer.
    pub fn bytes(&self) -> usize {
        self.call.count * self.call.dtype.size()
    }

    /// Seconds that it took: on the device with NCCL, where this waits for it, else from its turn to its end.
    pub fn seconds(&self) -> f64 {
        let host = (self.ended - self.started).as_secs_f64();
        let Some(event) = &self.event else { return host };
        event.synchronize().ok().and_then(|()| event.seconds()).unwrap_or(host)
    }
}

/// One rank's end of all ranks' communication.
pub struct Communicator {
    rank: usize,
    world: usize,
    name: &'static str,
    queue: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    trace: Arc<Mutex<Option<Vec<Record>>>>,
    failed: Arc<OnceLock<CommError>>,
    /// Whether there are inboxes.
    exchanges: Arc<AtomicU64>,
    /// Lives as long as somebody uses the peer_buffer.
    peer_buffer_holder: Mutex<Weak<()>>,
    /// The stream that computes, for back ends on a GPU.
    compute: Option<Box<dyn Compute>>,
    /// Carries collectives of host memory, where this one is for a GPU's.
    host: Option<Box<Communicator>>,
}

/// What is to be from now on of collectives that run beside computing.
enum OverlapSetting {
    MaxCtas(u32),
    CopyEngines(bool),
    /// And where the other rank's is read from; 0 without exchanges.
    PeerBuffer(Option<PeerBuffer>, Arc<AtomicU64>),
}

enum Job {
    Run { call: Call, memory: Memory, overlapped: bool, ready: Option<Ready>, called: Instant, done: Arc<Completion> },
    Configure { setting: OverlapSetting, done: Arc<Completion> },
    Abort(CommError),
}

impl Communicator {
    /// A communicator whose backend is made on the thread that will use it.
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
        // MPI says who we are when it has started.
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

    /// The only rank of a world of one.
    ///
    /// # Errors
    /// The system has no more threads.
    pub fn single() -> Result<Communicator> {
        let mut all = threads::threads(1, Options::default())?;
        all.pop().ok_or_else(|| CommError::Setup("a world needs a rank".into()))
    }

    /// The same with its number, where that is known only after the backend was made.
    #[cfg(feature = "mpi")]
    fn with_rank(mut self, rank: usize, world: usize) -> Communicator {
        (self.rank, self.world) = (rank, world);
        self
    }

    /// The same with another communicator for host memory.
    #[cfg(feature = "nccl")]
    fn with_host(mut self, host: Communicator) -> Communicator {
        self.host = Some(Box::new(host));
        self
    }

    /// What carries host memory: slices and vectors, which all safe methods take.
    pub fn host(&self) -> &Communicator {
        self.host.as_deref().unwrap_or(self)
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn world(&self) -> usize {
        self.world
    }

    /// The back end: `threads`, `tcp`, `mpi` or `nccl`.
    pub fn backend(&self) -> &'static str {
        self.name
    }

    /// `data` becomes the reduction of all ranks' `data`.
    ///
    /// # Errors
    /// [`CommError`]; then `data` holds anything.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], reduce: Reduce) -> Result<()> {
        self.run(Op::AllReduce(reduce), data, None)
    }

    /// [`Communicator::all_reduce`] of f32 that travel as `comm_dtype` (bf16 or f16): half the bytes. The sums are f32.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_reduce_as(&self, data: &mut [f32], reduce: Reduce, comm_dtype: Dtype) -> Result<()> {
        self.run(Op::AllReduce(reduce), data, Some(comm_dtype))
    }

    /// [`Op::ReduceScatter`]: `data` is `world` equal chunks, chunk `rank` becomes the reduction of all ranks' chunks of that place.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; a length that `world` does not divide.
    pub fn reduce_scatter<T: Element>(&self, data: &mut [T], reduce: Reduce) -> Result<()> {
        self.run(Op::ReduceScatter(reduce), data, None)
    }

    /// [`Op::AllGather`]: `data` is `world` equal chunks, chunk `rank` of every rank goes to all.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; a length that `world` does not divide.
    pub fn all_gather<T: Element>(&self, data: &mut [T]) -> Result<()> {
        self.run(Op::AllGather, data, None)
    }

    /// `data` of `root` goes to all ranks.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; a root that does not exist.
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: usize) -> Result<()> {
        self.run(Op::Broadcast { root }, data, None)
    }

    /// Returns when all ranks are here.
    ///
    /// # Errors
    /// [`CommError`].
    pub fn barrier(&self) -> Result<()> {
        self.run::<u8>(Op::Barrier, &mut [], None)
    }

    /// [`Communicator::all_reduce`] that goes on while the caller does something else; the data come back from
    /// [`Pending::wait`].
    ///
    /// # Errors
    /// What can be told at once; the rest comes from `wait`.
    pub fn start_all_reduce<T: Element>(&self, data: Vec<T>, reduce: Reduce) -> Result<Pending<T>> {
        self.start_owned(Op::AllReduce(reduce), data)
    }

    /// [`Communicator::reduce_scatter`] that goes on while the caller does something else.
    ///
    /// # Errors
    /// As [`Communicator::start_all_reduce`].
    pub fn start_reduce_scatter<T: Element>(&self, data: Vec<T>, reduce: Reduce) -> Result<Pending<T>> {
        self.start_owned(Op::ReduceScatter(reduce), data)
    }

    /// [`Communicator::all_gather`] that goes on while the caller does something else.
    ///
    /// # Errors
    /// As [`Communicator::start_all_reduce`].
    pub fn start_all_gather<T: Element>(&self, data: Vec<T>) -> Result<Pending<T>> {
        self.start_owned(Op::AllGather, data)
    }

    /// [`Communicator::broadcast`] that goes on while the caller does something else.
    ///
    /// # Errors
    /// As [`Communicator::start_all_reduce`].
    pub fn start_broadcast<T: Element>(&self, data: Vec<T>, root: usize) -> Result<Pending<T>> {
        self.start_owned(Op::Broadcast { root }, data)
    }

    fn start_owned<T: Element>(&self, op: Op, mut data: Vec<T>) -> Result<Pending<T>> {
        let call = Call { op, dtype: T::DTYPE, count: data.len(), comm_dtype: None };
        // SAFETY: the vector's memory stays where it is, in a `Pending` that waits before it frees it.
        let handle = unsafe { self.host().start(call, data.as_mut_ptr().cast())? };
        Ok(Pending::new(data, handle))
    }

    fn run<T: Element>(&self, op: Op, data: &mut [T], comm_dtype: Option<Dtype>) -> Result<()> {
        let call = Call { op, dtype: T::DTYPE, count: data.len(), comm_dtype };
        // SAFETY: `data` is borrowed until this function returns, which is when the collective is done.
        let handle = unsafe { self.host().start(call, data.as_mut_ptr().cast())? };
        handle.wait()
    }

    /// Starts a collective in `call.count` elements at `address`: host memory, or with NCCL the memory of this rank's GPU.
    ///
    /// # Errors
    /// A call that makes no sense, or an earlier failure.
    ///
    /// # Safety
    /// Until the handle is done, with or without error, the elements at `address` stay allocated, and nobody else reads or writes
    /// them. `address` is aligned for the element type. A handle that is forgotten may never be known to be done.
    pub unsafe fn start(&self, call: Call, address: *mut u8) -> Result<Handle> {
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(call, address, false) }
    }

    /// As [`Communicator::start`], for what goes on while the GPU computes: on at most as many multiprocessors as
    /// [`Communicator::set_overlap_max_ctas`] said.
    ///
    /// # Errors
    /// As [`Communicator::start`].
    ///
    /// # Safety
    /// As [`Communicator::start`].
    pub unsafe fn start_overlapped(&self, call: Call, address: *mut u8) -> Result<Handle> {
        // SAFETY: the caller's promise.
        unsafe { self.enqueue(call, address, true) }
    }

    /// From now on collectives of [`Communicator::start_overlapped`] take at most so many of a GPU's multiprocessors, 0 for as many as the
    /// back end likes: fewer leave more to kernels that compute, and are slower. A collective, for all ranks to call with the
    /// same number. Other back ends than NCCL do nothing.
    ///
    /// # Errors
    /// [`CommError`].
    pub fn set_overlap_max_ctas(&self, max_ctas: u32) -> Result<()> {
        self.configure(OverlapSetting::MaxCtas(max_ctas))
    }

    /// From now on copy engines carry collectives of [`Communicator::start_overlapped`], where they can (sums and averages of f32, bf16 and f16,
    /// all-gathers and exchanges), or no longer. They take no multiprocessors but for short sums; all GPUs are of one host. A collective, for all
    /// ranks to call with the same answer. Other back ends than NCCL do nothing.
    ///
    /// # Errors
    /// [`CommError`]: on all ranks, where the processes may not share memory of their GPUs.
    pub fn set_overlap_copy_engines(&self, on: bool) -> Result<()> {
        self.configure(OverlapSetting::CopyEngines(on))
    }

    /// From now on `peer_buffer` is where the other rank's part of an [`Op::Exchange`] goes, if there is one, or what that rank may read in place behind
    /// one. Gives where the other rank's is read from, if there are exchanges: of two ranks that are threads, or whose GPUs'
    /// [copy engines](Communicator::set_overlap_copy_engines) carry what runs beside computing; in place, if these have NVLink between them. A collective,
    /// for all ranks to call with as many bytes. An peer_buffer is held until the next one or none is set, or the communicator ends; nothing may be
    /// under way in it then.
    ///
    /// # Errors
    /// As [`Communicator::set_overlap_copy_engines`].
    pub(crate) fn set_peer_buffer(&self, peer_buffer: Option<PeerBuffer>) -> Result<Option<u64>> {
        self.configure(OverlapSetting::PeerBuffer(peer_buffer, self.exchanges.clone()))?;
        Ok(Some(self.exchanges.load(Ordering::Acquire)).filter(|&at| at != 0))
    }

    /// Whether an peer_buffer is set.
    pub(crate) fn has_peer_buffer(&self) -> bool {
        self.exchanges.load(Ordering::Acquire) != 0
    }

    /// Whether what [`Communicator::hold_peer_buffer`] gave still lives.
    pub(crate) fn peer_buffer_in_use(&self) -> bool {
        self.peer_buffer_holder.lock().unwrap_or_else(PoisonError::into_inner).strong_count() > 0
    }

    /// For who uses the peer_buffer to hold.
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

    /// [`Communicator::start`] and [`Communicator::start_overlapped`].
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

    /// Whether the communicator's thread is there to take the job.
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
            return misuse("integers have no average; sum them, and divide where you use them".into());
        }
        if matches!(call.op, Op::ReduceScatter(_) | Op::AllGather) && !call.count.is_multiple_of(self.world) {
            return misuse(format!("{} ranks do not divide {} elements; pad the buffer", self.world, call.count));
        }
        if call.op == Op::Exchange && !self.has_peer_buffer() {
            return misuse("nobody has set an peer_buffer for it".into());
        }
        match (call.op, call.comm_dtype) {
            (Op::Broadcast { root }, _) if root >= self.world => {
                misuse(format!("there is no rank {root}, only 0 to {}", self.world - 1))
            }
            (_, None) => Ok(()),
            (Op::AllReduce(_) | Op::ReduceScatter(_), Some(Dtype::Bf16 | Dtype::F16)) if call.dtype == Dtype::F32 => {
                Ok(())
            }
            (_, Some(_)) => misuse("only reductions of f32 travel as another type, which is bf16 or f16".into()),
        }
    }

    /// Tells all ranks that this one cannot go on: their collectives fail with `reason` instead of waiting. For a rank that found an
    /// error outside of collectives; dropping the communicator while panicking does it too.
    pub fn abort(&self, reason: &str) {
        if let Some(host) = &self.host {
            host.abort(reason);
        }
        self.send(Job::Abort(CommError::Setup(reason.to_string())));
    }

    /// The first error, after which nothing works any more. On a GPU what a collective should have filled holds anything from then on,
    /// although its handle may have been fine.
    pub fn failure(&self) -> Option<&CommError> {
        self.failed.get().or_else(|| self.host.as_ref().and_then(|host| host.failure()))
    }

    /// Begins to measure time on the stream that computes, if there is one.
    ///
    /// # Errors
    /// The GPU's.
    pub fn start_timer(&self) -> Result<Option<Box<dyn EventTimer>>> {
        self.compute.as_ref().map(|compute| compute.start_timer()).transpose()
    }

    /// Whether collectives are queued on a GPU's stream: there they are done one after the other, and the host need not wait for that.
    pub fn is_on_device(&self) -> bool {
        self.compute.is_some()
    }

    /// Whether records are kept now.
    pub fn is_tracing(&self) -> bool {
        self.records().is_some()
    }

    /// Keeps a [`Record`] of every collective from now on.
    pub fn start_trace(&self) {
        *self.records() = Some(Vec::new());
    }

    /// The records since [`Communicator::start_trace`] or the last call, oldest first. Collectives that are not done come later.
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
            // A panic of that thread has been reported by its handles.
            let _ = thread.join();
        }
    }
}

/// How often a communicator looks after what is under way while nothing is called.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// How long a back end may take to give up: kernels of a GPU end behind what it still computes.
const ABORT_TIMEOUT: Duration = Duration::from_secs(90);

/// What the communicator's thread keeps.
struct Worker {
    /// This rank, for messages.
    who: Arc<str>,
    options: Options,
    /// How long a call may go on after it should have given up.
    watchdog_margin: Duration,
    trace: Arc<Mutex<Option<Vec<Record>>>>,
    failed: Arc<OnceLock<CommError>>,
    seq: u64,
}

impl Worker {
    /// Carries jobs until the communicator is dropped. Every job ends, if not well then with the first error.
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
                    let guarded = guard(self.watchdog_margin, move || format!("{who}: a look at what is under way"));
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
                    // What is under way comes first.
                    let limit = 2 * timeout + start_timeout + self.watchdog_margin;
                    let guarded = guard(limit, move || format!("{who}: making ready for collectives"));
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
                    // Whatever happens below, whoever waits is woken.
                    let done = handle::Finisher::new(done);
                    if let Some(error) = self.failed.get() {
                        done.finish(Err(error.clone()));
                        continue;
                    }
                    self.seq += 1;
                    let started = Instant::now();
                    let deadline = Deadline::after(self.options.timeout);
                    backend.set_overlapped(overlapped);
                    // For all to come, and for their data.
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

    /// The error is known before the backend gives up: on a GPU that lets go whoever waits for it, who then asks whether all is well.
    fn fail(&self, backend: &mut impl Backend, error: CommError) {
        let _ = self.failed.set(error.clone());
        let (who, text) = (self.who.clone(), error.to_string());
        let _guarded = guard(ABORT_TIMEOUT + self.watchdog_margin, move || format!("{text}\n{who}: giving up for it"));
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

    /// A back end that does not come back.
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

    /// What the test below runs in a process of its own: waits for a collective that never ends.
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
        let line = "error: rank 3: all_reduce(sum) of 0 f32 did not come back within 0.15 s, and cannot be taken back";
        assert!(text.contains(line), "{text}");
    }
}
