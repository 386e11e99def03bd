//! Waiting for a collective that goes on elsewhere.

use std::mem::ManuallyDrop;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::backend::CompletionEvent;
use super::error::{CommError, Result};

pub(super) const PANICKED: &str = "internal compiler error: the thread of a communicator panicked, please report";

/// The span in which a rank waits for others.
pub const WAIT: &str = "waiting for ranks";

type Outcome = Result<Option<Arc<dyn CompletionEvent>>>;

/// Where the communicator's thread leaves the outcome.
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

/// Leaves an outcome, an error if nobody gives one: a panic of the communicator's thread must not leave anyone waiting.
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

/// A collective under way.
#[must_use = "a collective is done when its handle says so"]
pub struct Handle(Arc<Completion>);

impl Handle {
    pub(super) fn new(completion: Arc<Completion>) -> Handle {
        Handle(completion)
    }

    fn wait_outcome(&self) -> MutexGuard<'_, Option<Outcome>> {
        let done = self.0.changed.wait_while(self.0.lock(), |outcome| outcome.is_none());
        done.unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the memory may be used again: by the host, or with NCCL by what is queued next on the stream that computes.
    ///
    /// # Errors
    /// What became of the collective.
    pub fn wait(&self) -> Result<()> {
        let _span = tilewright::trace::span(WAIT);
        match &*self.wait_outcome() {
            Some(Ok(Some(event))) => event.join(),
            Some(Err(error)) => Err(error.clone()),
            Some(Ok(None)) | None => Ok(()),
        }
    }

    /// [`Handle::wait`], and with NCCL until the GPU has done it.
    ///
    /// # Errors
    /// As [`Handle::wait`].
    pub fn synchronize(&self) -> Result<()> {
        self.wait()?;
        match &*self.wait_outcome() {
            Some(Ok(Some(event))) => event.synchronize(),
            _ => Ok(()),
        }
    }

    /// What became of the collective, if it is known already. Does not wait.
    pub fn test(&self) -> Option<Result<()>> {
        self.0.lock().as_ref().map(|outcome| outcome.as_ref().map(|_| ()).map_err(Clone::clone))
    }

    /// Seconds on the GPU, with NCCL, once it has run.
    pub fn device_seconds(&self) -> Option<f64> {
        match &*self.0.lock() {
            Some(Ok(Some(event))) => event.seconds(),
            _ => None,
        }
    }
}

/// Waits for all of them, collectives of one communicator, also behind one that failed: then nothing uses their memory any more.
///
/// # Errors
/// The first.
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
    // A stream ends collectives in their order.
    let joined = last.map_or(Ok(()), |last| last.join());
    outcome.and(joined)
}

/// A collective under way in a vector of its own.
#[must_use = "the data come back from `wait`"]
pub struct Pending<T> {
    data: ManuallyDrop<Vec<T>>,
    handle: Handle,
}

impl<T> Pending<T> {
    pub(super) fn new(data: Vec<T>, handle: Handle) -> Pending<T> {
        Pending { data: ManuallyDrop::new(data), handle }
    }

    /// Waits, and gives the data back.
    ///
    /// # Errors
    /// What became of the collective; the data are dropped then.
    pub fn wait(mut self) -> Result<Vec<T>> {
        self.handle.wait()?;
        let data = std::mem::take(&mut *self.data);
        Ok(data)
    }

    /// Whether [`Pending::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        self.handle.test().is_some()
    }
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        drop(self.handle.wait_outcome());
        // SAFETY: dropped here only, and the collective is done with it.
        unsafe { ManuallyDrop::drop(&mut self.data) };
    }
}
