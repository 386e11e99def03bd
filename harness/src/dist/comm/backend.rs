//! What a back end owes: it carries one collective at a time, on the communicator's own thread.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::call::Call;
use super::error::{CommError, Result};

/// The memory that a collective works in. On a GPU the address is the device's.
pub(crate) struct Memory {
    pub address: *mut u8,
    pub bytes: usize,
}

// SAFETY: whoever starts a collective gives the memory away until its handle is done (`Communicator::start`).
unsafe impl Send for Memory {}

impl Memory {
    /// The bytes, for back ends whose memory is the host's.
    ///
    /// # Safety
    /// `address` is host memory, and nobody else touches it while the slice lives.
    pub unsafe fn host(&mut self) -> &mut [u8] {
        // SAFETY: the caller's promise. The address comes from a slice or vector, so it is aligned and not null without bytes too.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }
}

/// A place of this rank's for what the other one of two exchanges; or the memory itself that is exchanged, where the other rank reads it in
/// place.
pub(crate) struct PeerBuffer {
    /// Where the memory that is exchanged begins.
    pub source: u64,
    /// Where the other rank's goes, or `of`. On a GPU it is memory that other processes may open, and begins there.
    pub dest: u64,
    pub bytes: usize,
    /// Whose memory it is. It stays while this is held.
    pub owner: Arc<dyn std::any::Any + Send + Sync>,
}

impl PeerBuffer {
    /// Whether the other rank reads what is exchanged where it lies: nothing is sent then, and an exchange is a meeting.
    pub fn is_peer_read(&self) -> bool {
        self.dest == self.source
    }

    /// How far from its begin the place for these bytes is, if they are exchanged memory.
    pub fn offset(&self, address: u64, bytes: usize) -> Option<u64> {
        let offset = address.checked_sub(self.source)?;
        (offset + bytes as u64 <= self.bytes as u64).then_some(offset)
    }

    /// The place for these bytes.
    pub fn dest_address(&self, address: u64, bytes: usize) -> Option<u64> {
        Some(self.dest + self.offset(address, bytes)?)
    }
}

/// When timeout ends.
#[derive(Clone, Copy)]
pub(crate) struct Deadline {
    at: Instant,
    pub timeout: Duration,
}

impl Deadline {
    pub fn after(timeout: Duration) -> Deadline {
        Deadline { at: Instant::now() + timeout, timeout }
    }

    pub fn left(&self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    pub fn is_over(&self) -> bool {
        self.left().is_zero()
    }
}

/// What device work a finished collective leaves behind: it has been queued on a stream, and may still run there.
pub trait CompletionEvent: Send + Sync {
    /// Makes the stream that computes wait for it; returns at once.
    fn join(&self) -> Result<()>;
    /// Waits on the host until it has run.
    fn synchronize(&self) -> Result<()>;
    /// Seconds that it took on the device, once it has run.
    fn seconds(&self) -> Option<f64>;
}

impl fmt::Debug for dyn CompletionEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} s on the device", self.seconds())
    }
}

/// The place in the stream that computes after which the memory of a collective may be read: a back end's own type.
pub(crate) type Ready = Box<dyn std::any::Any + Send>;

/// A GPU's stream that computes, for the thread that calls collectives.
pub(crate) trait Compute: Send + Sync {
    /// Where the stream is now.
    fn record(&self) -> Result<Ready>;
    /// Begins to measure time on the stream.
    fn start_timer(&self) -> Result<Box<dyn EventTimer>>;
}

/// Time between two places of a GPU's stream that computes.
pub trait EventTimer: Send + Sync {
    /// The second place is where the stream is now.
    ///
    /// # Errors
    /// The GPU's.
    fn stop(&mut self) -> Result<()>;
    /// Seconds between the places; waits until the GPU has come to the second one. `None` before [`EventTimer::stop`], and where the GPU failed.
    fn seconds(&self) -> Option<f64>;
}

/// Carries collectives. The calls come in the order of the sequence, from one thread.
pub(crate) trait Backend {
    /// Runs a call that has been checked: counts divide where they have to, the root exists.
    /// After an error it is not called again, but for [`Backend::abort`].
    fn run(
        &mut self,
        seq: u64,
        call: &Call,
        memory: &mut Memory,
        ready: Option<Ready>,
        deadline: Deadline,
    ) -> Result<Option<Arc<dyn CompletionEvent>>>;

    /// The collectives that [`Backend::run`] gets while `overlapped` is set run beside computing, on at most as many multiprocessors as the
    /// last [`Backend::set_max_ctas`] said. Only a GPU's back end has a use for it.
    fn set_overlapped(&mut self, _overlapped: bool) {}

    /// Makes what [`Backend::set_overlapped`] needs: every rank calls it, with the same number. 0 is no limit.
    fn set_max_ctas(&mut self, _seq: u64, _max_ctas: u32, _deadline: Deadline) -> Result<()> {
        Ok(())
    }

    /// From now on copy engines carry what runs beside computing, or no longer: every rank calls it, with the same answer.
    fn set_copy_engines(&mut self, _seq: u64, _on: bool, _deadline: Deadline) -> Result<()> {
        Ok(())
    }

    /// From now on `peer_buffer` is where the other rank's part of an [`Exchange`](super::Op::Exchange) goes, or may be read in place, if there is
    /// one and this back end exchanges: then it says where that rank's memory is read from. Every rank calls it, with as many bytes.
    /// Nothing is under way in the one before.
    fn set_peer_buffer(
        &mut self,
        _seq: u64,
        _peer_buffer: Option<PeerBuffer>,
        _deadline: Deadline,
    ) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Looks after what is still under way; called now and then while nothing is called. It gives nothing up itself:
    /// [`Backend::abort`] comes after an error.
    ///
    /// # Errors
    /// Something did not end in time, or never will.
    fn check_progress(&mut self) -> Result<()> {
        Ok(())
    }

    /// Tells the other ranks that this one does not go on, and why. May be called more than once.
    fn abort(&mut self, error: &CommError);
}

/// Compares what all ranks called.
pub(crate) fn check_same_calls(calls: &[(u64, Call)]) -> Result<()> {
    let (seq, _) = calls[0];
    if calls.iter().all(|call| *call == calls[0]) {
        return Ok(());
    }
    let same_place = calls.iter().all(|(other, _)| *other == seq);
    let say = |(place, call): &(u64, Call)| match same_place {
        true => call.to_string(),
        false => format!("{call} (its collective {place})"),
    };
    Err(CommError::Disagree { seq, calls: calls.iter().map(say).collect() })
}
