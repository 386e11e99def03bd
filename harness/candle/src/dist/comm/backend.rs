//! The trait of communication backends. A backend runs one collective at a time, on the communicator's thread.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::call::Call;
use super::error::{CommError, Result};

/// The memory of a collective. On a GPU the address is a device address.
pub(crate) struct Memory {
    pub address: *mut u8,
    pub bytes: usize,
}

// SAFETY: the caller of a collective hands the memory over until its handle is complete (`Communicator::start`).
unsafe impl Send for Memory {}

impl Memory {
    /// The bytes, for backends of host memory.
    ///
    /// # Safety
    /// `address` is host memory, and no other code accesses it while the slice lives.
    pub unsafe fn host(&mut self) -> &mut [u8] {
        // SAFETY: guaranteed by the caller. The address comes from a slice or vector, so it is aligned and not null,
        // even if there are no bytes.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }
}

/// Memory for an exchange with the peer: a buffer that receives the peer's data, or, for peer reads, the exchanged
/// memory itself.
pub(crate) struct PeerBuffer {
    /// Address of the memory that is exchanged.
    pub source: u64,
    /// Address that receives the peer's data, or `source` for peer reads. On a GPU it is the start of an allocation
    /// that other processes can map.
    pub dest: u64,
    pub bytes: usize,
    /// Keeps the memory allocated.
    pub owner: Arc<dyn std::any::Any + Send + Sync>,
}

impl PeerBuffer {
    /// Whether the peer reads the exchanged memory directly: an exchange then only synchronizes the two ranks and sends
    /// nothing.
    pub fn is_peer_read(&self) -> bool {
        self.dest == self.source
    }

    /// Offset of these bytes in the exchanged memory; `None` if they are outside of it.
    pub fn offset(&self, address: u64, bytes: usize) -> Option<u64> {
        let offset = address.checked_sub(self.source)?;
        (offset + bytes as u64 <= self.bytes as u64).then_some(offset)
    }

    /// Address that receives the peer's data for these bytes.
    pub fn dest_address(&self, address: u64, bytes: usize) -> Option<u64> {
        Some(self.dest + self.offset(address, bytes)?)
    }
}

/// A point in time, with the timeout from which it was computed.
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

/// Completion of a collective that is queued on a stream of the device, and may still run.
pub trait CompletionEvent: Send + Sync {
    /// Makes the compute stream wait for the collective. Does not block the host.
    fn join(&self) -> Result<()>;
    /// Blocks the host until the collective has run.
    fn synchronize(&self) -> Result<()>;
    /// Duration on the device in seconds; `None` before the collective has run.
    fn seconds(&self) -> Option<f64>;
}

impl fmt::Debug for dyn CompletionEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} s on the device", self.seconds())
    }
}

/// A point on the compute stream after which a collective may read its memory; the type is the backend's.
pub(crate) type Ready = Box<dyn std::any::Any + Send>;

/// A GPU's compute stream, for the thread that calls collectives.
pub(crate) trait Compute: Send + Sync {
    /// Records the current point of the stream.
    fn record(&self) -> Result<Ready>;
    /// Starts a timer on the stream.
    fn start_timer(&self) -> Result<Box<dyn EventTimer>>;
}

/// Measures the time between two points of a GPU's compute stream.
pub trait EventTimer: Send + Sync {
    /// Records the second point.
    ///
    /// # Errors
    /// Errors of the GPU.
    fn stop(&mut self) -> Result<()>;
    /// Seconds between the points; blocks until the GPU has reached the second one. `None` before [`EventTimer::stop`],
    /// and after a failure of the GPU.
    fn seconds(&self) -> Option<f64>;
}

/// Runs collectives. Calls arrive in sequence order from one thread.
pub(crate) trait Backend {
    /// Runs a call that is already validated: lengths are multiples of the world size where they have to be, the root
    /// exists. After an error only [`Backend::abort`] is called.
    fn run(
        &mut self,
        seq: u64,
        call: &Call,
        memory: &mut Memory,
        ready: Option<Ready>,
        deadline: Deadline,
    ) -> Result<Option<Arc<dyn CompletionEvent>>>;

    /// Selects whether the next collectives of [`Backend::run`] overlap with computation; these use at most as many
    /// CTAs as the last [`Backend::set_max_ctas`] set. Only GPU backends use it.
    fn set_overlapped(&mut self, _overlapped: bool) {}

    /// Limits the CTAs of overlapped collectives ([`Backend::set_overlapped`]). Every rank calls it with the same
    /// value; 0 means no limit.
    fn set_max_ctas(&mut self, _seq: u64, _max_ctas: u32, _deadline: Deadline) -> Result<()> {
        Ok(())
    }

    /// Selects whether copy engines run overlapped collectives. Every rank calls it with the same value.
    fn set_copy_engines(&mut self, _seq: u64, _on: bool, _deadline: Deadline) -> Result<()> {
        Ok(())
    }

    /// Sets the memory for an [`Exchange`](super::Op::Exchange) with the peer; `None` removes it. Returns the address
    /// from which the peer's data is read, if this backend supports exchanges. Every rank calls it with the same number
    /// of bytes. No exchange is in flight in the previous memory.
    fn set_peer_buffer(
        &mut self,
        _seq: u64,
        _peer_buffer: Option<PeerBuffer>,
        _deadline: Deadline,
    ) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Checks the collectives in flight; called periodically while no call arrives. Does not abort:
    /// [`Backend::abort`] follows an error.
    ///
    /// # Errors
    /// A collective did not complete in time, or never will.
    fn check_progress(&mut self) -> Result<()> {
        Ok(())
    }

    /// Tells the other ranks that this rank aborts, and why. May be called more than once.
    fn abort(&mut self, error: &CommError);
}

/// Fails unless all ranks called the same collective.
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
