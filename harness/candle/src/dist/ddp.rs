//! Data-parallel training (DDP): every rank holds the whole model and a shard of the batch, and gradients are averaged
//! over ranks.
//!
//! ```text
//! let ddp = Ddp::new(&params, comm, DdpOptions::default())?;   // all ranks start with rank 0's parameters
//! for each step {
//!     params.zero_grads()?;
//!     for each micro-batch but the last { ddp.no_sync(|| backward())?; }
//!     backward()?;                                             // gradients are sent while it runs
//!     ddp.finish_gradient_synchronization()?;
//!     optimizer step
//! }
//! ```
//!
//! | mode | collectives | when |
//! |---|---|---|
//! | naive | one for each parameter | after backward, one after the other |
//! | flat | one for all | after backward |
//! | overlap | one for each parameter | during backward, as soon as its gradient is ready |
//! | bucketed | one for each bucket | during backward, as soon as its last gradient is ready |
//!
//! [`Ddp::finish_by_bucket`] replaces `finish_gradient_synchronization` if a bucket is to be used while later buckets
//! are still in flight. With [`Ddp::finish_by_bucket_with_peer`] the caller averages the gradients of two ranks itself.
//!
//! Every rank runs the same collectives in the same order, even if the ranks' batches use different parameters; unused
//! gradients are sent as zeros. A ready gradient or bucket is therefore sent only after its predecessors: in the first
//! step from the last parameter to the first, afterwards in the order of completion on rank 0. (A model may register
//! its norms after all other parameters. Their bucket completes last, and would delay all others.)

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::matmul::reserve_sms;
use crate::memory::{self, Elem, kernel_error};
use candle_core::{DType, Tensor, WithDType};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use tilewright::kernels::FloatElement;
use tilewright::kernels::rank_sum::{self, RankReduction};
use tilewright::{Device as KernelDevice, View, ViewMut};

use super::buckets::{Bucket, buckets};
use super::comm::handle::wait_all;
use super::comm::{Call, CommError, Communicator, Dtype, EventTimer, Handle, Op, PeerBuffer, Reduce};
use super::error::{Error, Result};
use super::flat::{FlatParam, FlatParams, ParamId};

/// When gradients are all-reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GradSync {
    /// One all-reduce for each parameter, after backward
    Naive,
    /// One all-reduce for all parameters, after backward
    Flat,
    /// One all-reduce for each parameter, during backward
    Overlap,
    /// One all-reduce for each bucket, during backward
    Bucketed,
}

impl GradSync {
    /// All forms.
    pub const ALL: [GradSync; 4] = [GradSync::Naive, GradSync::Flat, GradSync::Overlap, GradSync::Bucketed];

    pub fn name(self) -> &'static str {
        match self {
            GradSync::Naive => "naive",
            GradSync::Flat => "flat",
            GradSync::Overlap => "overlap",
            GradSync::Bucketed => "bucketed",
        }
    }
}

/// Which averaged gradients a rank needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Exchange {
    /// The whole averaged gradient.
    AllReduce,
    /// Both ranks' gradients, for an optimizer that averages while it reads ([`Ddp::finish_by_bucket_with_peer`]); two
    /// ranks only. Gradients of four bytes are copied to the peer, which needs no kernels during backward and no more
    /// link bandwidth than an all-reduce. Gradients of two bytes are not copied: the optimizer reads them from peer
    /// memory. AdamW moves 28 bytes of local GPU memory for each parameter, which takes longer than two bytes over
    /// NVLink. Requires two ranks whose gradients copy engines transfer, or two threads if `copy_engines` is set;
    /// otherwise equivalent to [`Exchange::AllReduce`].
    PeerGradients,
    /// This rank's shard of every bucket ([`Bucket::shards`]), for a sharded optimizer (ZeRO-1).
    ReduceScatter,
}

/// Options of [`Ddp`].
#[derive(Clone, Copy, Debug, Serialize)]
pub struct DdpOptions {
    pub form: GradSync,
    /// Maximum bytes of f32 gradients in a bucket, for [`GradSync::Bucketed`] only; `None` means [`bucket_bytes`].
    pub bucket_bytes: Option<usize>,
    /// Type to which f32 gradients are rounded for communication: bf16 or f16. Sums are f32. Gradients that are stored
    /// in bf16 are sent unchanged.
    pub comm_dtype: Option<Dtype>,
    pub exchange: Exchange,
    /// Maximum CTAs (SMs) of NCCL's collectives during backward (overlap and bucketed); 0 leaves the number to NCCL.
    pub nccl_ctas: u32,
    /// Whether copy engines transfer gradients during backward (overlap and bucketed), between GPUs of one host. They
    /// use SMs only for short reductions. Otherwise NCCL transfers them.
    pub copy_engines: bool,
    /// Number of SMs that matmuls of backward leave free while gradients are in flight (overlap and bucketed). `None`
    /// means the number that collectives use: none if `copy_engines` is set.
    pub reserve_sms: Option<u32>,
}

impl DdpOptions {
    /// Number of SMs reserved for collectives while gradients are in flight.
    pub fn reserved_sms(&self) -> u32 {
        // A limit above NCCL's default has no effect.
        let taken = if self.nccl_ctas > 0 { self.nccl_ctas.min(NCCL_DEFAULT_CTAS) } else { NCCL_DEFAULT_CTAS };
        self.reserve_sms.unwrap_or(if self.copy_engines { 0 } else { taken })
    }

    /// Whether gradients are sent during backward.
    pub fn overlaps_backward(&self) -> bool {
        matches!(self.form, GradSync::Overlap | GradSync::Bucketed)
    }

    /// Whether two ranks may exchange gradients of this type.
    fn can_use_peer_gradients(&self, dtype: Dtype, world: usize) -> bool {
        let same_dtype = self.comm_dtype.is_none_or(|comm_dtype| comm_dtype == dtype);
        self.copy_engines
            && self.overlaps_backward()
            && world == 2
            && self.exchange == Exchange::PeerGradients
            && same_dtype
    }
}

/// Minimum of [`bucket_bytes`], and PyTorch's default: large enough to reach the bandwidth, small enough to start
/// early.
pub const BUCKET_BYTES: usize = 25_000_000;

/// Default bucket size for a total of `gradients` bytes of f32 gradients: √(s · o · w) for s bytes, an overhead o and a
/// bandwidth w (`tilewright account ddp`). Between GPUs of one host o · w is about 10 MB: 30 µs at 300 GB/s.
pub fn bucket_bytes(gradients: usize, between_gpus: bool) -> usize {
    const OVERHEAD_BYTES: f64 = 1e7;
    match between_gpus {
        true => ((gradients as f64 * OVERHEAD_BYTES).sqrt() as usize).max(BUCKET_BYTES),
        false => BUCKET_BYTES,
    }
}

/// Default of [`DdpOptions::nccl_ctas`]: NCCL's default between GPUs of one host with NVLink.
pub const NCCL_CTAS: u32 = NCCL_DEFAULT_CTAS;

/// CTAs of NCCL's all-reduce without a limit: the number of channels that it reports between Hopper GPUs of one host.
const NCCL_DEFAULT_CTAS: u32 = 24;

impl Default for DdpOptions {
    fn default() -> DdpOptions {
        DdpOptions {
            form: GradSync::Bucketed,
            bucket_bytes: None,
            comm_dtype: None,
            exchange: Exchange::AllReduce,
            nccl_ctas: NCCL_CTAS,
            copy_engines: false,
            reserve_sms: None,
        }
    }
}

/// Communication statistics of a step.
pub struct SyncStats {
    /// Number of collectives.
    pub calls: usize,
    /// Bytes of gradients as stored in memory.
    pub bytes: usize,
    /// Time for which the caller was blocked.
    pub waited: Duration,
    /// Times for which the compute stream was blocked, while collectives are traced.
    timers: Vec<Box<dyn EventTimer>>,
}

impl SyncStats {
    /// The exposed communication: how long the caller was blocked or, on a GPU, the compute stream; in that case this
    /// synchronizes with it. (Measured on a GPU only while collectives are traced, [`Communicator::start_trace`].)
    pub fn exposed_time(&self) -> Duration {
        let on_device: Option<f64> = self.timers.iter().map(|timer| timer.seconds()).sum();
        on_device.filter(|_| !self.timers.is_empty()).map_or(self.waited, |s| Duration::from_secs_f64(s.max(0.0)))
    }
}

/// Averages the gradients of a model over all ranks.
pub struct Ddp {
    inner: Arc<Inner>,
    _hook: Box<dyn Any + Send + Sync>,
}

struct Inner {
    params: Box<dyn FlatParams>,
    parameters: Vec<FlatParam>,
    comm: Arc<Communicator>,
    options: DdpOptions,
    buckets: Vec<Bucket>,
    /// Bucket of each parameter, by id; `None` for frozen parameters.
    bucket_of: Vec<Option<usize>>,
    grads: FlatGradients,
    /// The peer's gradients, if two ranks exchange them.
    peer_gradients: Option<PeerGradients>,
    step_state: Mutex<StepState>,
}

/// State of the current step.
struct StepState {
    /// Whether this backward completes the step's gradients.
    sync: bool,
    /// Number of incomplete gradients of each bucket.
    missing: Vec<usize>,
    /// Whether each parameter's gradient is complete, by id.
    ready: Vec<bool>,
    /// Buckets in the order in which they are sent, and the index of the next one.
    order: Vec<usize>,
    next: usize,
    /// Order of completion in the first step; `None` afterwards.
    completion_order: Option<Vec<usize>>,
    /// Buckets in flight with their collectives.
    sent: Vec<(usize, Vec<Handle>)>,
}

impl StepState {
    fn new(buckets: &[Bucket], params: usize) -> StepState {
        let order = (0..buckets.len()).collect();
        let (missing, ready) = (missing(buckets), vec![false; params]);
        StepState { sync: true, missing, ready, order, next: 0, completion_order: Some(Vec::new()), sent: Vec::new() }
    }
}

impl Ddp {
    /// Broadcasts rank 0's parameters, and averages gradients from now on.
    ///
    /// # Errors
    /// Ranks with parameters or options other than rank 0's; errors of communication.
    pub fn new<P>(params: &P, comm: Arc<Communicator>, options: DdpOptions) -> Result<Ddp>
    where
        P: FlatParams + Clone + 'static,
    {
        Ddp::of(Box::new(params.clone()), comm, options)
    }

    fn of(params: Box<dyn FlatParams>, comm: Arc<Communicator>, options: DdpOptions) -> Result<Ddp> {
        let parameters = params.parameters();
        check_same(&parameters, params.grads().dtype(), &comm, &options)?;
        if options.overlaps_backward() {
            // Copy engines need no communicator with fewer CTAs.
            comm.set_overlap_max_ctas(if options.copy_engines { 0 } else { options.nccl_ctas })?;
            comm.set_overlap_copy_engines(options.copy_engines)?;
        }
        let (form, world) = (options.form, comm.world());
        let buckets = match form {
            GradSync::Naive | GradSync::Overlap => buckets(&parameters, 0),
            GradSync::Flat => buckets(&parameters, usize::MAX),
            GradSync::Bucketed => {
                let all = params.flat_len() * size_of::<f32>();
                buckets(&parameters, options.bucket_bytes.unwrap_or_else(|| bucket_bytes(all, comm.is_on_device())))
            }
        };
        let mut bucket_of = vec![None; parameters.len()];
        for (index, bucket) in buckets.iter().enumerate() {
            bucket.ids.iter().for_each(|id| bucket_of[id.0] = Some(index));
        }
        broadcast_values(&*params, &comm)?;
        tracing::debug!("{} of {} ranks: {} buckets, {}", comm.rank(), world, buckets.len(), form.name());
        let step_state = StepState::new(&buckets, parameters.len());
        let wanted = options.can_use_peer_gradients(grad_dtype(&*params), world);
        let reads_peer =
            wanted && grad_dtype(&*params).size() == 2 && all_true(&comm, params.make_grads_ipc_shareable()?)?;
        let grads = FlatGradients::of(&*params, &parameters)?;
        let peer_gradients = peer_gradients(&grads, &comm, wanted, reads_peer)?;
        let step_state = Mutex::new(step_state);
        let inner = Arc::new(Inner {
            params,
            parameters,
            comm,
            options,
            buckets,
            bucket_of,
            grads,
            peer_gradients,
            step_state,
        });
        let registered = inner.clone();
        let hook = inner.params.on_grad_ready(Box::new(move |id| registered.on_grad_ready(id).map_err(Into::into)));
        Ok(Ddp { inner, _hook: hook })
    }

    pub fn communicator(&self) -> &Arc<Communicator> {
        &self.inner.comm
    }

    pub fn options(&self) -> &DdpOptions {
        &self.inner.options
    }

    /// The buckets in the order in which they are sent in the first step.
    pub fn buckets(&self) -> &[Bucket] {
        &self.inner.buckets
    }

    /// Runs `backward` without sending its gradients: for all micro-batches of a step but the last.
    pub fn no_sync<R>(&self, backward: impl FnOnce() -> R) -> R {
        struct Restore<'a>(&'a Inner);
        impl Drop for Restore<'_> {
            fn drop(&mut self) {
                self.0.lock().sync = true;
            }
        }
        self.inner.lock().sync = false;
        let _restore = Restore(&self.inner);
        backward()
    }

    /// Sends all remaining gradients and waits until every gradient is the average over all ranks; with
    /// [`Exchange::ReduceScatter`], until this rank's shards are. On a GPU it makes the stream wait instead of the
    /// host.
    ///
    /// # Errors
    /// Errors of communication; the gradients are then undefined.
    pub fn finish_gradient_synchronization(&self) -> Result<SyncStats> {
        if self.has_peer_gradients() {
            return self.finish_by_bucket(|_| Ok(()));
        }
        self.finish(|sent, wait_timer| {
            let handles: Vec<&Handle> = sent.iter().flat_map(|(_, handles)| handles).collect();
            wait_timer.during(|| Ok(wait_all(handles)?))
        })
    }

    /// Same as [`Ddp::finish_gradient_synchronization`], bucket by bucket in the order in which they were sent: calls
    /// `with` for each bucket when its gradients have arrived, while later buckets are in flight.
    ///
    /// # Errors
    /// Errors of communication and the first error of `with`, after which `with` is not called again.
    pub fn finish_by_bucket<E: From<Error>>(
        &self,
        mut with: impl FnMut(&Bucket) -> Result<(), E>,
    ) -> Result<SyncStats, E> {
        self.finish_by_bucket_with_peer(|bucket, peer| {
            if let Some(peer) = peer {
                self.inner.average(&bucket.range, peer)?;
            }
            with(bucket)
        })
    }

    /// Same as [`Ddp::finish_by_bucket`], for a caller that averages the gradients of two ranks itself
    /// ([`Ddp::has_peer_gradients`]): `with` also gets the peer's gradients. The local gradients stay unchanged, and
    /// `with` must not write them. Without an exchange `with` gets `None`, and the gradients are the averages.
    ///
    /// # Errors
    /// See [`Ddp::finish_by_bucket`].
    pub fn finish_by_bucket_with_peer<E: From<Error>>(
        &self,
        mut with: impl FnMut(&Bucket, Option<&PeerGradients>) -> Result<(), E>,
    ) -> Result<SyncStats, E> {
        self.finish(|sent, wait_timer| {
            let outcome = sent.iter().try_for_each(|(bucket, handles)| {
                wait_timer.during(|| Ok(wait_all(handles)?))?;
                with(&self.inner.buckets[*bucket], self.inner.peer_gradients.as_ref())
            });
            let outcome =
                outcome.and_then(|()| self.inner.finish_peer_reads().map_err(|error| Error::from(error).into()));
            // After errors too: no collective may use the gradients after this returns.
            let waited = wait_all(sent.iter().flat_map(|(_, handles)| handles));
            outcome.and(waited.map_err(|error| Error::from(error).into()))
        })
    }

    /// Sends all remaining gradients, and calls `wait` to wait for them.
    fn finish<E: From<Error>>(
        &self,
        wait: impl FnOnce(&[(usize, Vec<Handle>)], &mut WaitTimer<'_>) -> Result<(), E>,
    ) -> Result<SyncStats, E> {
        let inner = &self.inner;
        // Backward is over: release the reserved SMs.
        reserve_sms(0);
        let mut wait_timer = WaitTimer { comm: &inner.comm, timers: Vec::new(), waited: Duration::ZERO };
        let mut step_state = inner.lock();
        let overlapped = inner.overlaps_backward();
        let outcome = wait_timer.during(|| {
            (step_state.next..inner.buckets.len()).try_for_each(|_| {
                inner.send_next(&mut step_state)?;
                // The naive mode waits for each collective; on a GPU the stream serializes them.
                if overlapped || inner.comm.is_on_device() {
                    return Ok(());
                }
                Ok(step_state.sent.last().map_or(Ok(()), |(_, handles)| wait_all(handles))?)
            })
        });
        let sent = std::mem::take(&mut step_state.sent);
        step_state.next = 0;
        step_state.missing = missing(&inner.buckets);
        step_state.ready.fill(false);
        let order = step_state.completion_order.take();
        drop(step_state);
        match outcome {
            Ok(()) => wait(&sent, &mut wait_timer)?,
            Err(error) => {
                // Waits for all collectives before the error makes the gradients available again.
                drop(wait_all(sent.iter().flat_map(|(_, handles)| handles)));
                return Err(error.into());
            }
        }
        if let Some(order) = order.filter(|_| overlapped) {
            inner.adopt_order(order)?;
        }
        let bytes = inner.buckets.iter().map(|bucket| bucket.range.len() * inner.grads.dtype.size()).sum();
        let calls = sent.iter().map(|(_, handles)| handles.len()).sum();
        Ok(SyncStats { calls, bytes, waited: wait_timer.waited, timers: wait_timer.timers })
    }

    /// Whether two ranks exchange their gradients: see [`Exchange::PeerGradients`].
    pub fn has_peer_gradients(&self) -> bool {
        self.inner.peer_gradients.is_some()
    }

    /// Whether the peer's gradients are read from peer memory, so that none are sent.
    pub fn reads_peer_memory(&self) -> bool {
        self.inner.peer_gradients.as_ref().is_some_and(|peer| peer.reads_peer)
    }

    /// Replaces the gradients of a step that ended with [`Ddp::finish_by_bucket_with_peer`] by the averages, for
    /// inspection.
    ///
    /// # Errors
    /// Errors of the launches.
    pub fn average_with_peer(&self) -> Result<()> {
        let Some(peer) = &self.inner.peer_gradients else { return Ok(()) };
        self.inner.buckets.iter().try_for_each(|bucket| self.inner.average(&bucket.range, peer))
    }

    /// Whether gradients are sent during backward, so that some can be used while others are in flight.
    pub fn overlaps_backward(&self) -> bool {
        self.inner.overlaps_backward()
    }
}

/// Measures blocked time.
struct WaitTimer<'a> {
    comm: &'a Communicator,
    timers: Vec<Box<dyn EventTimer>>,
    waited: Duration,
}

impl WaitTimer<'_> {
    /// Runs `wait` and adds its duration.
    fn during(&mut self, wait: impl FnOnce() -> Result<()>) -> Result<()> {
        let began = Instant::now();
        let timer = if self.comm.is_tracing() { self.comm.start_timer()? } else { None };
        let outcome = wait();
        self.waited += began.elapsed();
        if let Some(mut timer) = timer {
            timer.stop()?;
            self.timers.push(timer);
        }
        outcome
    }
}

impl Drop for Ddp {
    fn drop(&mut self) {
        reserve_sms(0);
        // Collectives of a failed step may still use the gradients.
        let sent = std::mem::take(&mut self.inner.lock().sent);
        drop(wait_all(sent.iter().flat_map(|(_, handles)| handles)));
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, StepState> {
        self.step_state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn overlaps_backward(&self) -> bool {
        self.options.overlaps_backward()
    }

    /// Called when a gradient of this backward is complete.
    fn on_grad_ready(&self, id: ParamId) -> Result<()> {
        let mut step_state = self.lock();
        let Some(bucket) =
            self.bucket_of.get(id.0).copied().flatten().filter(|_| step_state.sync && self.overlaps_backward())
        else {
            return Ok(());
        };
        if std::mem::replace(&mut step_state.ready[id.0], true) {
            return Err(Error::Misuse(format!(
                "`{}` got a second gradient in one step\n  help: run all backward passes of a step but the last inside no_sync, and finish_gradient_synchronization after the last",
                self.parameters[id.0].name
            )));
        }
        step_state.missing[bucket] -= 1;
        if step_state.missing[bucket] == 0
            && let Some(order) = &mut step_state.completion_order
        {
            order.push(bucket);
        }
        while step_state.order.get(step_state.next).is_some_and(|&next| step_state.missing[next] == 0) {
            self.send_next(&mut step_state)?;
            // Runs on the thread of backward. A single rank sends nothing.
            if self.comm.world() > 1 {
                reserve_sms(self.options.reserved_sms());
            }
        }
        Ok(())
    }

    /// Sets the order in which buckets are sent to the order of completion on rank 0, unused buckets last.
    fn adopt_order(&self, mut order: Vec<usize>) -> Result<()> {
        order.extend((0..self.buckets.len()).filter(|bucket| !order.contains(bucket)).collect::<Vec<_>>());
        let mut wanted: Vec<u64> = order.iter().map(|&bucket| bucket as u64).collect();
        self.comm.broadcast(&mut wanted, 0)?;
        self.lock().order = wanted.into_iter().map(|bucket| bucket as usize).collect();
        Ok(())
    }

    /// Waits (on a GPU, the compute stream does) until the peer has read this rank's gradients, so that they may be
    /// overwritten. Does nothing without peer reads.
    fn finish_peer_reads(&self) -> Result<(), CommError> {
        match &self.peer_gradients {
            Some(peer) if peer.reads_peer => wait_all(&[self.start(0..self.params.flat_len(), Op::Exchange)?]),
            _ => Ok(()),
        }
    }

    /// Replaces the gradients in `range` by the average with the peer's. With peer reads, both ranks call it for the
    /// same ranges.
    fn average(&self, range: &Range<usize>, peer: &PeerGradients) -> Result<()> {
        match self.grads.dtype {
            _ if peer.reads_peer => Ok(wait_all(&[self.start(range.clone(), Op::AllReduce(Reduce::Avg))?])?),
            Dtype::Bf16 => self.average_of::<bf16>(range, peer),
            _ => self.average_of::<f32>(range, peer),
        }
    }

    fn average_of<G: Elem + FloatElement>(&self, range: &Range<usize>, peer: &PeerGradients) -> Result<()> {
        let device = memory::kernel_device(self.params.device())?;
        let peer_view = peer.view::<G>(device, range);
        // SAFETY: as for a collective: the gradients live as long as `params`, and the caller does not use them until
        // this returns.
        let own = unsafe {
            let begin = self.grads.address + (range.start * size_of::<G>()) as u64;
            ViewMut::<G>::from_address(device, begin, range.len())
        };
        let ranks = RankReduction { rank: self.comm.rank(), world: 2, average: true };
        let reduced = rank_sum::reduce(device, own, (peer_view, range.len()), None, ranks, None);
        Ok(reduced.map_err(kernel_error)?)
    }

    /// Starts the next bucket's collectives.
    fn send_next(&self, step_state: &mut StepState) -> Result<(), CommError> {
        let index = step_state.order[step_state.next];
        step_state.next += 1;
        let mut handles = Vec::new();
        let bucket = &self.buckets[index];
        let outcome = match self.options.exchange {
            Exchange::PeerGradients if self.peer_gradients.is_some() => {
                self.start(bucket.range.clone(), Op::Exchange).map(|handle| handles.push(handle))
            }
            Exchange::AllReduce | Exchange::PeerGradients => {
                self.start(bucket.range.clone(), Op::AllReduce(Reduce::Avg)).map(|handle| handles.push(handle))
            }
            Exchange::ReduceScatter => {
                let shards = bucket.shards(self.comm.world());
                let parts =
                    [(shards.sharded, Op::ReduceScatter(Reduce::Avg)), (shards.remainder, Op::AllReduce(Reduce::Avg))];
                let mut parts = parts.into_iter().filter(|(range, _)| !range.is_empty());
                parts.try_for_each(|(range, op)| self.start(range, op).map(|handle| handles.push(handle)))
            }
        };
        // After an error too: collectives that were started have to be waited for.
        step_state.sent.push((index, handles));
        outcome
    }

    /// Starts a collective on gradients. The caller waits for the handle before it uses the gradients, and before
    /// `self` is dropped.
    fn start(&self, range: Range<usize>, op: Op) -> Result<Handle, CommError> {
        // Gradients that are stored in the communication dtype are not rounded again.
        let FlatGradients { dtype, address, .. } = self.grads;
        let comm_dtype = self.options.comm_dtype.filter(|comm_dtype| *comm_dtype != dtype);
        let call = Call { op, dtype, count: range.len(), comm_dtype };
        let address = address + (range.start * dtype.size()) as u64;
        // SAFETY: `self` holds the gradients, the ranges of parameters are inside of them, and all handles are waited for before
        // `self` is dropped. Backward no longer writes these elements, and no caller reads them before
        // `finish_gradient_synchronization`.
        unsafe {
            match self.overlaps_backward() {
                true => self.comm.start_overlapped(call, address as *mut u8),
                false => self.comm.start(call, address as *mut u8),
            }
        }
    }
}

fn missing(buckets: &[Bucket]) -> Vec<usize> {
    buckets.iter().map(|bucket| bucket.ids.len()).collect()
}

/// The peer's gradients in the layout of the flat gradient: a local receive buffer, or peer memory.
pub struct PeerGradients {
    address: u64,
    reads_peer: bool,
    /// Memory that the peer uses, in the layout of the flat gradient: the receive buffer, or this rank's gradients.
    tensor: Arc<Tensor>,
    /// Marks the communicator's buffer for the peer as used.
    _use: Arc<()>,
}

impl PeerGradients {
    /// The elements in `range`, of the gradients' dtype, for kernels on this rank's `device`.
    ///
    /// # Panics
    /// A range that is not in the flat gradient, or another dtype.
    pub fn view<'a, G: Elem + FloatElement>(&'a self, device: &'a KernelDevice, range: &Range<usize>) -> View<'a, G> {
        let (len, dtype) = (self.tensor.elem_count(), self.tensor.dtype());
        let found = <G as WithDType>::DTYPE;
        assert!(range.end <= len && found == dtype, "elements {range:?} of {found:?}, of {len} gradients of {dtype:?}");
        let begin = self.address + (range.start * size_of::<G>()) as u64;
        // SAFETY: the memory is as long as the flat gradient and mapped in this process while `self` lives, which the
        // view borrows. The peer writes the memory only until the exchange of these elements is complete and, with peer
        // reads, after the exchange at the end of the step.
        unsafe { View::from_address(device, begin, range.len()) }
    }
}

/// The dtype in which gradients are stored.
fn grad_dtype(params: &dyn FlatParams) -> Dtype {
    match params.grads().dtype() {
        DType::BF16 => Dtype::Bf16,
        _ => Dtype::F32,
    }
}

/// Whether `yes` is true on all ranks.
fn all_true(comm: &Communicator, yes: bool) -> Result<bool> {
    let mut all = vec![0_u64; comm.world()];
    all[comm.rank()] = u64::from(yes);
    comm.all_gather(&mut all)?;
    Ok(all.iter().all(|&yes| yes == 1))
}

/// The flat gradient of a model, with the address of its first element.
struct FlatGradients {
    tensor: Tensor,
    address: u64,
    dtype: Dtype,
}

impl FlatGradients {
    /// # Errors
    /// Gradients that [`FlatParams`] does not describe.
    fn of(params: &dyn FlatParams, parameters: &[FlatParam]) -> Result<FlatGradients> {
        let tensor = params.grads();
        let (dtype, address) = match tensor.dtype() {
            DType::F32 => (Dtype::F32, address::<f32>(&tensor)?),
            DType::BF16 => (Dtype::Bf16, address::<bf16>(&tensor)?),
            other => {
                let found = other.as_str();
                return Err(Error::Misuse(format!("expected flat gradients of f32 or bf16, found {found}")));
            }
        };
        let (len, expected) = (tensor.elem_count(), params.flat_len());
        let outside = parameters.iter().find(|param| param.range.start > param.range.end || param.range.end > len);
        match outside {
            _ if len != expected => {
                Err(Error::Misuse(format!("expected {expected} elements of the flat gradient, found {len}")))
            }
            Some(FlatParam { name, range, .. }) => Err(Error::Misuse(format!(
                "the gradient of `{name}`, elements {range:?}, is not in the flat gradient of {len} elements"
            ))),
            None => Ok(FlatGradients { tensor, address, dtype }),
        }
    }
}

/// The peer's gradients, if they are `wanted` and the communicator exchanges them; read from peer memory if
/// `reads_peer` is true and that is possible. The communicator has a single buffer for the peer: while another `Ddp`
/// uses it, this one gets `None`.
fn peer_gradients(
    flat: &FlatGradients,
    comm: &Communicator,
    wanted: bool,
    reads_peer: bool,
) -> Result<Option<PeerGradients>> {
    if comm.peer_buffer_in_use() {
        return Ok(None);
    }
    if comm.has_peer_buffer() {
        // Free the previous buffer first. After a failed step, kernels may still read the peer's gradients.
        flat.tensor.device().synchronize()?;
        comm.set_peer_buffer(None)?;
    }
    if !wanted {
        return Ok(None);
    }
    let bytes = flat.tensor.elem_count() * flat.dtype.size();
    let set = |dest: u64, tensor: Arc<Tensor>| -> Result<Option<PeerGradients>> {
        let peer_buffer = PeerBuffer { source: flat.address, dest, bytes, owner: tensor.clone() };
        let address = comm.set_peer_buffer(Some(peer_buffer))?;
        let peer_gradients = |address| PeerGradients {
            address,
            reads_peer: dest == flat.address,
            tensor,
            _use: comm.hold_peer_buffer(),
        };
        Ok(address.map(peer_gradients))
    };
    if reads_peer && let Some(peer) = set(flat.address, Arc::new(flat.tensor.clone()))? {
        return Ok(Some(peer));
    }
    let (tensor, dest) = match flat.dtype {
        Dtype::Bf16 => ipc_shareable::<bf16>(&flat.tensor)?,
        _ => ipc_shareable::<f32>(&flat.tensor)?,
    };
    set(dest, tensor)
}

/// Allocates a zeroed tensor of the length of `flat` that other processes can map; returns it with its address.
fn ipc_shareable<G: Elem>(flat: &Tensor) -> Result<(Arc<Tensor>, u64)> {
    let tensor = memory::ipc_shareable_zeros::<G>(flat.device(), flat.elem_count())?;
    // The zeroing must not overwrite received data.
    flat.device().synchronize()?;
    let dest = address::<G>(&tensor)?;
    Ok((Arc::new(tensor), dest))
}

/// Address of a flat tensor's first element, on the host or on the GPU.
pub fn address<T: memory::Elem>(flat: &candle_core::Tensor) -> Result<u64> {
    Ok(memory::write::<T, _>(flat, |_, elements| Ok(elements.address()))?)
}

/// Fails on all ranks unless all have the same parameters (names, shapes, frozen or not) and options.
fn check_same(params: &[FlatParam], grads: DType, comm: &Communicator, options: &DdpOptions) -> Result<()> {
    let mut hash = blake3::Hasher::new();
    hash.update(format!("{options:?} {grads:?}\n").as_bytes());
    for param in params {
        hash.update(format!("{} {:?} {}\n", param.name, param.shape, param.requires_grad).as_bytes());
    }
    let own = u64::from_le_bytes(hash.finalize().as_bytes()[..8].try_into().unwrap_or_default());
    let mut all = vec![0_u64; comm.world()];
    all[comm.rank()] = own;
    comm.all_gather(&mut all)?;
    let others: Vec<usize> = (0..all.len()).filter(|&rank| all[rank] != all[0]).collect();
    match others.is_empty() {
        true => Ok(()),
        false => Err(Error::Misuse(format!(
            "{}: the model or the options differ from rank 0's (parameter names, shapes, frozen parameters, options)\n  help: start all ranks with the same arguments",
            super::comm::error::ranks(&others)
        ))),
    }
}

/// Broadcasts rank 0's parameter values.
///
/// # Errors
/// Errors of communication.
pub fn broadcast_values(params: &dyn FlatParams, comm: &Communicator) -> Result<()> {
    for tensor in params.values() {
        let (dtype, address) = match tensor.dtype() {
            DType::BF16 => (Dtype::Bf16, address::<bf16>(&tensor)?),
            DType::F16 => (Dtype::F16, address::<f16>(&tensor)?),
            _ => (Dtype::F32, address::<f32>(&tensor)?),
        };
        let call = Call { op: Op::Broadcast { root: 0 }, dtype, count: tensor.elem_count(), comm_dtype: None };
        // SAFETY: the tensor is alive, and the handle is waited for.
        let handle = unsafe { comm.start(call, address as *mut u8)? };
        handle.wait()?;
    }
    Ok(params.values_changed()?)
}
