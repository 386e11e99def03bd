//! Ends the process when a call does not return in time.
//!
//! Ranks wait for each other with timeouts, and abort when one expires. Calls into libraries and the system may still
//! hang: a library that connects to a stalled peer, a driver, a name server. The process cannot cancel such a call, and
//! the other ranks and the launcher would wait for it forever. Such calls are therefore [`guard`]ed: a dedicated
//! thread, which never takes a lock that a call may hold, reports the call that hangs and ends the process with
//! [`EXIT_CODE`].
//!
//! The limits here are larger than the timeouts at which a call should fail by itself. Time in which the process was
//! stopped, or the machine was suspended, does not count.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Exit code of a process that its watchdog ended: `EX_SOFTWARE` of `sysexits.h`.
pub const EXIT_CODE: i32 = 70;

/// Time that a call gets in addition to its own timeout.
pub const WATCHDOG_MARGIN: Duration = Duration::from_secs(30);

/// Longest time between two checks.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

struct Call {
    /// Deadline on the clock of [`Calls`].
    until: Duration,
    limit: Duration,
    /// Formats the call's name; evaluated only when it is reported, since most calls return in time.
    what: Box<dyn Fn() -> String + Send>,
}

struct Calls {
    next: u64,
    open: BTreeMap<u64, Call>,
    /// Time in which this process could run, up to `seen`.
    clock: Duration,
    seen: Instant,
}

impl Calls {
    /// Time in which this process could run, up to now. An interval between two checks that is too long is time in
    /// which the process could not run.
    fn now(&mut self) -> Duration {
        let now = Instant::now();
        self.clock += (now - self.seen).min(2 * POLL_INTERVAL);
        self.seen = now;
        self.clock
    }
}

struct Watch {
    calls: Mutex<Calls>,
    changed: Condvar,
}

impl Watch {
    /// Locks the watched calls. The holder of the lock never blocks.
    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Watches a call until it is dropped.
#[must_use = "the call is watched as long as this lives"]
pub struct Guarded(u64);

impl Drop for Guarded {
    fn drop(&mut self) {
        if let Some(watch) = watch() {
            watch.lock().open.remove(&self.0);
        }
    }
}

impl Guarded {
    /// Keeps the watch for the rest of the process: the call was abandoned on its thread, and the process has to end
    /// before the limit.
    pub fn keep_watching(self) {
        std::mem::forget(self);
    }
}

/// Ends the process if the returned value is still alive after `limit`. `what` names the call, for example `rank 1: the
/// start of NCCL`.
pub fn guard<W: Display>(limit: Duration, what: impl Fn() -> W + Send + 'static) -> Guarded {
    let Some(watch) = watch() else { return Guarded(u64::MAX) };
    let mut calls = watch.lock();
    let (id, until) = (calls.next, calls.now().saturating_add(limit));
    calls.next += 1;
    calls.open.insert(id, Call { until, limit, what: Box::new(move || what().to_string()) });
    if calls.open.len() == 1 {
        watch.changed.notify_all();
    }
    Guarded(id)
}

/// The watchdog of this process; `None` where its thread cannot be started.
fn watch() -> Option<&'static Watch> {
    static WATCH: OnceLock<Watch> = OnceLock::new();
    static STARTED: OnceLock<bool> = OnceLock::new();
    let calls = || Calls { next: 0, open: BTreeMap::new(), clock: Duration::ZERO, seen: Instant::now() };
    let watch = WATCH.get_or_init(|| Watch { calls: Mutex::new(calls()), changed: Condvar::new() });
    let thread = || std::thread::Builder::new().name("watchdog".into()).spawn(move || monitor(watch));
    STARTED.get_or_init(|| thread().is_ok()).then_some(watch)
}

fn monitor(watch: &Watch) {
    let mut calls = watch.lock();
    loop {
        let now = calls.now();
        if let Some(late) = calls.open.values().find(|call| call.until <= now) {
            let (what, limit) = ((late.what)(), super::comm::error::seconds(&late.limit));
            end(&format!(
                "error: {what} did not return within {limit} and cannot be canceled: ending the process\n  help: see the other ranks' messages; the last checkpoint is unchanged\n"
            ));
        }
        let next = calls.open.values().map(|call| call.until.saturating_sub(now)).min();
        calls = match next {
            None => watch.changed.wait(calls).unwrap_or_else(PoisonError::into_inner),
            Some(left) => {
                let waited = watch.changed.wait_timeout(calls, left.min(POLL_INTERVAL));
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
    }
}

/// Writes the reason to stderr, if it is writable, and exits without destructors, which could wait for the call.
fn end(why: &str) -> ! {
    let mut wait = libc::pollfd { fd: 2, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one descriptor and a slice, which live through the calls. A pipe that polls as writable has space for
    // these bytes.
    unsafe {
        if libc::poll(&raw mut wait, 1, 100) == 1 {
            libc::write(2, why.as_ptr().cast(), why.len().min(4096));
        }
        libc::_exit(EXIT_CODE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_return_are_disarmed() {
        drop(guard(Duration::from_millis(1), || "a call that is over"));
        let long = guard(Duration::MAX, || "a call without a limit");
        std::thread::sleep(Duration::from_millis(20));
        drop(long);
    }
}
