//! Signals that ask a run to stop: SIGINT (Ctrl-C), SIGTERM, SIGHUP (the terminal closed) and SIGUSR1 (Slurm's usual
//! warning).
//!
//! The first signal asks to stop. Another one, at least [`DEBOUNCE`] later, ends the process immediately. Signals in
//! between count as one with the first: `timeout`, systemd, Slurm and a launcher may send several signals to a process
//! for one event.
//!
//! A signal that was ignored when the process started stays ignored, as expected with `nohup` and for background jobs
//! of a shell.

use std::io;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

/// The signals that ask a run to stop.
pub const STOP_SIGNALS: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1];

/// Signals within this time after the first are ignored.
pub const DEBOUNCE: Duration = Duration::from_millis(500);

/// Meaning of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopSignal {
    /// The first signal: stop regularly.
    Stop(i32),
    /// A later signal: end immediately.
    End(i32),
}

/// Starts a thread that calls the callback for signals of [`STOP_SIGNALS`] from now on. May be called several times;
/// every callback gets all signals.
///
/// # Errors
/// The system has no more threads or descriptors.
pub fn listen(mut on_signal: impl FnMut(StopSignal) + Send + 'static) -> io::Result<()> {
    let mut signals = Signals::new(STOP_SIGNALS.into_iter().filter(|signal| !is_ignored(*signal)))?;
    let mut order = SignalOrder::default();
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            if let Some(meaning) = order.classify(signal, Instant::now()) {
                on_signal(meaning);
            }
        }
    })?;
    Ok(())
}

/// Whether the parent process set a signal to be ignored.
fn is_ignored(signal: i32) -> bool {
    let mut found = std::mem::MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: only queries the action; the struct is read only if the call initialized it.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), found.as_mut_ptr()) == 0
            && found.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

/// Distinguishes the first signal from later ones.
#[derive(Default)]
struct SignalOrder {
    first: Option<Instant>,
}

impl SignalOrder {
    fn classify(&mut self, signal: i32, now: Instant) -> Option<StopSignal> {
        match self.first {
            None => {
                self.first = Some(now);
                Some(StopSignal::Stop(signal))
            }
            Some(first) if now.saturating_duration_since(first) < DEBOUNCE => None,
            Some(_) => Some(StopSignal::End(signal)),
        }
    }
}

/// Ends the process with the default action of the signal, so that its parent sees the signal; shells report 128 + its
/// number.
pub fn exit_by_signal(signal: i32) -> ! {
    let _ = low_level::emulate_default_handler(signal);
    // Skips destructors and exit handlers: other threads may use what they free.
    low_level::exit(128 + signal)
}

/// The signal's name, `SIGTERM`; `signal 40` if it has none.
pub fn name(signal: i32) -> String {
    low_level::signal_name(signal).map_or_else(|| format!("signal {signal}"), str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_debounced_and_a_later_one_ends() {
        let mut order = SignalOrder::default();
        let began = Instant::now();
        let at = |millis| began + Duration::from_millis(millis);
        assert_eq!(order.classify(SIGTERM, at(0)), Some(StopSignal::Stop(SIGTERM)));
        assert_eq!(order.classify(SIGTERM, at(1)), None);
        assert_eq!(order.classify(SIGINT, at(499)), None);
        assert_eq!(order.classify(SIGINT, at(500)), Some(StopSignal::End(SIGINT)));
        assert_eq!(order.classify(SIGHUP, at(501)), Some(StopSignal::End(SIGHUP)));
    }

    #[test]
    fn names() {
        assert_eq!(
            (name(SIGUSR1), name(SIGTERM), name(9), name(99)),
            ("SIGUSR1".into(), "SIGTERM".into(), "SIGKILL".into(), "signal 99".into())
        );
    }
}
