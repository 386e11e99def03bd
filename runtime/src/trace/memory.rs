//! Records allocations on the CPU, and rejects those that exceed the available memory.
//!
//! A program that wants its allocations recorded makes [`CountingAllocator`] its global allocator. Without a recording
//! it adds one load of an atomic to each call of the system's allocator. Large allocations are compared with the
//! available memory; a program that exceeds it ends with a message and exit code 1, unless the caller reports the
//! failure as an error.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::time::Instant;

use super::NodeId;
use crate::device::{check_allocation, exit_out_of_memory};

/// One allocation or release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryEvent {
    /// Nanoseconds since the recording started.
    pub time_ns: u64,
    pub address: u64,
    pub bytes: u64,
    pub allocated: bool,
    /// The span that requested it.
    pub node: NodeId,
}

/// The system's allocator, with recording.
pub struct CountingAllocator;

static ON: AtomicBool = AtomicBool::new(false);
/// Smaller blocks are counted, but have no event.
static MIN_EVENT_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Bytes in use now: allocated minus released since the start.
static LIVE: AtomicI64 = AtomicI64::new(0);
static PEAK: AtomicI64 = AtomicI64::new(0);
static LOG: Mutex<Option<Log>> = Mutex::new(None);

struct Log {
    started: Instant,
    events: Vec<MemoryEvent>,
}

thread_local! {
    /// Allocations of the recording itself do not count.
    static UNTRACKED: Cell<bool> = const { Cell::new(false) };
}

/// Guard: while it lives, this thread's allocations do not count.
pub(super) struct Untracked(bool);

pub(super) fn untracked() -> Untracked {
    Untracked(UNTRACKED.replace(true))
}

impl Drop for Untracked {
    fn drop(&mut self) {
        UNTRACKED.set(self.0);
    }
}

pub(super) fn start(from_bytes: usize) {
    let _untracked = untracked();
    MIN_EVENT_BYTES.store(from_bytes, Ordering::Relaxed);
    LIVE.store(0, Ordering::Relaxed);
    PEAK.store(0, Ordering::Relaxed);
    *log() = Some(Log { started: Instant::now(), events: Vec::with_capacity(1 << 16) });
    ON.store(true, Ordering::SeqCst);
}

/// The events, and the peak number of bytes in use.
pub(super) fn finish() -> (Vec<MemoryEvent>, u64) {
    ON.store(false, Ordering::SeqCst);
    let events = log().take().map(|log| log.events).unwrap_or_default();
    (events, u64::try_from(PEAK.load(Ordering::SeqCst)).unwrap_or(0))
}

fn log() -> std::sync::MutexGuard<'static, Option<Log>> {
    LOG.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

#[cold]
fn record_event(address: usize, bytes: usize, allocated: bool) {
    if UNTRACKED.try_with(Cell::get).unwrap_or(true) {
        return;
    }
    let signed = bytes as i64;
    let live = LIVE.fetch_add(if allocated { signed } else { -signed }, Ordering::Relaxed);
    if allocated {
        PEAK.fetch_max(live + signed, Ordering::Relaxed);
    }
    if bytes < MIN_EVENT_BYTES.load(Ordering::Relaxed) {
        return;
    }
    let _untracked = untracked();
    let node = super::current_node();
    if let Some(log) = log().as_mut() {
        let time_ns = u64::try_from(log.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let event = MemoryEvent { time_ns, address: address as u64, bytes: bytes as u64, allocated, node };
        log.events.push(event);
    }
}

// SAFETY: every call is forwarded to the system's allocator with the same arguments and returns its result, or returns
// null, which means that there is no memory; recording an event does not touch the memory. Recording allocates only
// while UNTRACKED is set, which ends the recursion, and reading the limits makes small allocations only, which are not
// checked.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !check_allocation(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        let pointer = unsafe { System.alloc(layout) };
        if pointer.is_null() {
            exit_out_of_memory(layout.size(), None);
        }
        if ON.load(Ordering::Relaxed) && !pointer.is_null() {
            record_event(pointer.addr(), layout.size(), true);
        }
        pointer
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !check_allocation(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        let pointer = unsafe { System.alloc_zeroed(layout) };
        if pointer.is_null() {
            exit_out_of_memory(layout.size(), None);
        }
        if ON.load(Ordering::Relaxed) && !pointer.is_null() {
            record_event(pointer.addr(), layout.size(), true);
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // Before it is freed, so that an allocation of another thread at this address is not recorded first.
        if ON.load(Ordering::Relaxed) {
            record_event(pointer.addr(), layout.size(), false);
        }
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) };
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if !check_allocation(new_size.saturating_sub(layout.size())) {
            return std::ptr::null_mut();
        }
        let on = ON.load(Ordering::Relaxed);
        if on {
            record_event(pointer.addr(), layout.size(), false);
        }
        // SAFETY: the caller's promise.
        let moved = unsafe { System.realloc(pointer, layout, new_size) };
        if moved.is_null() {
            exit_out_of_memory(new_size, None);
        }
        if on {
            match moved.is_null() {
                // The block is unchanged.
                true => record_event(pointer.addr(), layout.size(), true),
                false => record_event(moved.addr(), new_size, true),
            }
        }
        moved
    }
}
