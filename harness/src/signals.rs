//! Signals that ask a run to stop: SIGINT (Ctrl-C), SIGTERM, SIGHUP (the terminal closed) and SIGUSR1 (Slurm's usual
//! warning).
//!
//! The first signal asks to stop. Another one, at least [`TOGETHER`] later, ends the process immediately. Signals in
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
pub const STOPS: [i32; 4] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1];

/// Signals within this time after the first are ignored.
pub const TOGETHER: Duration = Duration::from_millis(500);

/// Meaning of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// The first signal: stop regularly.
    Stop(i32),
    /// A later signal: end immediately.
    End(i32),
}

/// Starts a thread that calls the callback for signals of [`STOPS`] from now on. May be called several times; every
/// callback gets all signals.
///
/// # Errors
/// The system has no more threads or descriptors.
pub fn listen(mut heard: impl FnMut(Heard) + Send + 'static) -> io::Result<()> {
    let mut signals = Signals::new(STOPS.into_iter().filter(|signal| !is_ignored(*signal)))?;
    let mut order = Order::default();
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        for signal in signals.forever() {
            if let Some(meaning) = order.hear(signal, Instant::now()) {
                heard(meaning);
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
struct Order {
    first: Option<Instant>,
}

impl Order {
    fn hear(&mut self, signal: i32, now: Instant) -> Option<Heard> {
        match self.first {
            None => {
                self.first = Some(now);
                Some(Heard::Stop(signal))
            }
            Some(first) if now.saturating_duration_since(first) < TOGETHER => None,
            Some(_) => Some(Heard::End(signal)),
        }
    }
}

/// Ends the process with the default action of the signal, so that its parent sees the signal; shells report 128 + its
/// number.
pub fn end_by(signal: i32) -> ! {
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
    fn what_comes_together_is_one_signal_and_a_later_one_ends() {
        let mut order = Order::default();
        let began = Instant::now();
        let at = |millis| began + Duration::from_millis(millis);
        assert_eq!(order.hear(SIGTERM, at(0)), Some(Heard::Stop(SIGTERM)));
        assert_eq!(order.hear(SIGTERM, at(1)), None);
        assert_eq!(order.hear(SIGINT, at(499)), None);
        assert_eq!(order.hear(SIGINT, at(500)), Some(Heard::End(SIGINT)));
        assert_eq!(order.hear(SIGHUP, at(501)), Some(Heard::End(SIGHUP)));
    }

    #[test]
    fn names() {
        assert_eq!(
            (name(SIGUSR1), name(SIGTERM), name(9), name(99)),
            ("SIGUSR1".into(), "SIGTERM".into(), "SIGKILL".into(), "signal 99".into())
        );
    }
}
