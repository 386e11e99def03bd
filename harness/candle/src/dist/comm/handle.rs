//! Handles of asynchronous collectives.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::backend::CompletionEvent;
use super::error::{CommError, Result};

pub(super) const PANICKED: &str = "internal error: the thread of a communicator panicked; please report this";

/// Name of the trace span in which a rank waits for others.
pub const WAIT: &str = "waiting for ranks";

type Outcome = Result<Option<Arc<dyn CompletionEvent>>>;

/// Receives the outcome from the communicator's thread.
#[derive(Default)]
pub(super) struct Completion {
    outcome: Mutex<Option<Outcome>>,
    changed: Condvar,
}

impl Completion {
    fn lock(&self) -> MutexGuard<'_, Option<Outcome>> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Stores the outcome; an error if it is dropped without one, so that a panic of the communicator's thread leaves no
/// caller waiting.
pub(super) struct Finisher(Arc<Completion>);

impl Finisher {
    pub fn new(completion: Arc<Completion>) -> Finisher {
        Finisher(completion)
    }

    pub fn finish(self, outcome: Outcome) {
        *self.0.lock() = Some(outcome);
    }
}

impl Drop for Finisher {
    fn drop(&mut self) {
        let mut outcome = self.0.lock();
        if outcome.is_none() {
            *outcome = Some(Err(CommError::Setup(PANICKED.into())));
        }
        drop(outcome);
        self.0.changed.notify_all();
    }
}

/// A collective in flight.
#[must_use = "a collective is complete only when its handle says so"]
pub struct Handle(Arc<Completion>);

impl Handle {
    pub(super) fn new(completion: Arc<Completion>) -> Handle {
        Handle(completion)
    }

    fn wait_outcome(&self) -> MutexGuard<'_, Option<Outcome>> {
        let done = self.0.changed.wait_while(self.0.lock(), |outcome| outcome.is_none());
        done.unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the memory may be used again: by the host, or with NCCL by work that is queued next on the compute
    /// stream.
    ///
    /// # Errors
    /// The error of the collective.
    pub fn wait(&self) -> Result<()> {
        let _span = tilewright::trace::span(WAIT);
        match &*self.wait_outcome() {
            Some(Ok(Some(event))) => event.join(),
            Some(Err(error)) => Err(error.clone()),
            Some(Ok(None)) | None => Ok(()),
        }
    }

    /// Same as [`Handle::wait`]; with NCCL also blocks the host until the GPU has completed the collective.
    ///
    /// # Errors
    /// See [`Handle::wait`].
    pub fn synchronize(&self) -> Result<()> {
        self.wait()?;
        match &*self.wait_outcome() {
            Some(Ok(Some(event))) => event.synchronize(),
            _ => Ok(()),
        }
    }

    /// The outcome of the collective, if it is known; with NCCL that of queuing it on its stream. Does not block.
    pub fn test(&self) -> Option<Result<()>> {
        self.0.lock().as_ref().map(|outcome| outcome.as_ref().map(|_| ()).map_err(Clone::clone))
    }

    /// Duration on the GPU in seconds, with NCCL, once the collective has run.
    pub fn device_seconds(&self) -> Option<f64> {
        match &*self.0.lock() {
            Some(Ok(Some(event))) => event.seconds(),
            _ => None,
        }
    }
}

/// Waits for all handles, which belong to one communicator, even after an error: afterwards none of their memory is in
/// use.
///
/// # Errors
/// The first error.
pub fn wait_all<'h>(handles: impl IntoIterator<Item = &'h Handle>) -> Result<()> {
    let _span = tilewright::trace::span(WAIT);
    let mut outcome = Ok(());
    let mut last = None;
    for handle in handles {
        match &*handle.wait_outcome() {
            Some(Ok(Some(event))) => last = Some(event.clone()),
            Some(Err(error)) => outcome = outcome.and_then(|()| Err(error.clone())),
            Some(Ok(None)) | None => {}
        }
    }
    // A stream completes collectives in order.
    let joined = last.map_or(Ok(()), |last| last.join());
    outcome.and(joined)
}

/// A collective in flight on a vector that it owns.
#[must_use = "`wait` returns the data"]
pub struct Pending<T> {
    data: ManuallyDrop<Vec<T>>,
    handle: Handle,
}

impl<T> Pending<T> {
    pub(super) fn new(data: Vec<T>, handle: Handle) -> Pending<T> {
        Pending { data: ManuallyDrop::new(data), handle }
    }

    /// Waits and returns the data.
    ///
    /// # Errors
    /// The error of the collective; the data are then dropped.
    pub fn wait(mut self) -> Result<Vec<T>> {
        self.handle.wait()?;
        let data = std::mem::take(&mut *self.data);
        Ok(data)
    }

    /// Whether [`Pending::wait`] would return immediately.
    pub fn is_done(&self) -> bool {
        self.handle.test().is_some()
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        drop(self.handle.wait_outcome());
        // SAFETY: dropped only here, and the collective is complete.
        unsafe { ManuallyDrop::drop(&mut self.data) };
    }
}
