//! Ends the process where a call does not come back.
//!
//! Ranks wait for each other with limits, and give up in order when time is over. What is below them may not come back all the same: a
//! library that connects to a peer that stalls, a driver, a name server. Nothing in this process can take such a call back, and the other
//! ranks, a launcher and whoever pays for the GPUs would wait for it without end. So whoever makes such a call is [`guard`]ed: a thread that
//! does nothing else, and never waits for anything that a call may hold, says which call it was and ends the process with [`EXIT_CODE`].
//!
//! Limits here are a last resort: they lie above those at which the call should have given up by itself. Time in which the whole process was
//! stopped, or the machine slept, does not count.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// The exit code of a process that was ended by its watchdog: `EX_SOFTWARE` of `sysexits.h`.
pub const EXIT_CODE: i32 = 70;

/// How long a call may go on after it should have given up.
pub const WATCHDOG_MARGIN: Duration = Duration::from_secs(30);

/// The longest time between two looks.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

struct Call {
    /// On the clock of [`Calls`].
    until: Duration,
    limit: Duration,
    /// Made when it is said: most calls come back.
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
    /// Time in which this process could run, up to now: a longer time between two looks than there should be is one in which it could not.
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
    /// Nobody waits for anything while it is held.
    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call that is watched until this is dropped.
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
    /// The call was left behind on a thread of its own: the process has to end until then.
    pub fn disarm_on_exit(self) {
        std::mem::forget(self);
    }
}

/// Ends the process if what is returned still lives after `limit`. `what` names the call, as in `rank 1: the start of NCCL`.
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

/// The watch of this process; none where the system has no thread for it.
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
                "error: {what} did not come back within {limit}, and cannot be taken back: the process ends\n  help: see the other ranks' messages; the state of the last checkpoint is what it was\n"
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

/// Says why, if somebody reads it, and ends the process without its destructors, which may wait for the call.
fn end(why: &str) -> ! {
    let mut wait = libc::pollfd { fd: 2, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one descriptor and a slice, which live through the calls. A pipe that is ready has room for so few bytes.
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
