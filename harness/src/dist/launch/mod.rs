//! Starts the ranks of one host, looks after them, and leaves nothing of them behind.
//!
//! Each rank is a process group. Signals that ask to stop are passed on to all of it, and whoever does not end in time is asked (SIGTERM)
//! and ended (SIGKILL): [`Patience`] has the times. If this process is killed, the [`guard`] ends the groups, the ranks see their
//! [`lifeline`](super::lifeline) close, and Linux sends them a parent-death signal. Programs other than ours that leave their group are nobody's.

pub mod guard;
mod process;
mod report;

use std::ffi::OsString;
use std::io::{self, Write};
use std::net::TcpListener;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use self::guard::Guard;
use self::process::Rank;
pub use self::report::{End, each, report};
use super::secret::Access;
use crate::signals::Heard;

/// What to start, and how.
#[derive(Clone, Debug)]
pub struct Plan {
    pub program: OsString,
    pub arguments: Vec<OsString>,
    /// Ranks on this host.
    pub processes: usize,
    /// Hosts, each with as many ranks.
    pub hosts: usize,
    /// This host's number.
    pub host: usize,
    /// Where rank 0 is; with several hosts the same on all of them.
    pub master: (String, u16),
    /// Ranks with another word do not belong to us.
    pub job: String,
    /// Who may take part: ranks get it through their environment.
    pub access: Access,
    pub patience: Patience,
}

/// How long ranks have to end by themselves. Who is there still gets SIGTERM, and SIGKILL a [`Patience::grace`] later.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// After one has failed: the others have to find out, say so, and save nothing by halves. Also after a second signal.
    pub grace: Duration,
    /// After a signal that asks to stop, or when a rank has stopped by itself: a step, and what belongs to it.
    pub stop: Duration,
    /// The same where ranks say that they save their state; at least as long as the others.
    pub save: Duration,
}

/// Lines that are kept of each rank for the report.
pub const LAST_LINES: usize = 8;

/// How long what was sent SIGKILL has at least to be gone.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// How often is looked who has ended: short, so that the order of the ends is seen.
const PAUSE: Duration = Duration::from_millis(1);

/// A port that is free now.
///
/// # Errors
/// The system has none.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Starts all ranks and waits until nothing is left of them. Their lines go to `out` and `err` with the rank before them. The ends come in
/// the order in which they happened. `hear` is told each signal that comes out of `signals`, when it has been passed on.
///
/// # Errors
/// A rank cannot be started; those that were are ended. A rank that SIGKILL does not end ([`io::ErrorKind::TimedOut`]).
pub fn run(
    plan: &Plan,
    signals: &Receiver<Heard>,
    mut hear: impl FnMut(Heard),
    out: impl Write + Send + Clone + 'static,
    err: impl Write + Send + Clone + 'static,
) -> io::Result<Vec<End>> {
    let began = Instant::now();
    let mut guard = Guard::start()?;
    let mut ranks: Vec<Rank> = Vec::new();
    for local in 0..plan.processes {
        match Rank::start(plan, local, &guard, out.clone(), err.clone()) {
            Ok(rank) => ranks.push(rank),
            Err(error) => {
                ranks.iter_mut().for_each(Rank::kill);
                return Err(error);
            }
        }
    }
    let mut order = Vec::new();
    let mut clock = Clock::new(plan.patience);
    while ranks.iter().any(|rank| !rank.is_gone()) {
        let now = Instant::now();
        for rank in ranks.iter_mut().filter(|rank| !rank.is_gone()) {
            let Some(status) = rank.look(began, &mut guard)? else { continue };
            order.push(rank.number);
            match status.code() == Some(crate::cli::STOPPED.into()) {
                true => clock.stop(now),
                false if !status.success() => clock.fail(now),
                false => {}
            }
        }
        if ranks.iter().all(Rank::has_ended) {
            clock.all_have_ended(now);
        }
        while let Ok(heard) = signals.try_recv() {
            let (Heard::Stop(signal) | Heard::End(signal)) = heard;
            for rank in &ranks {
                rank.signal(signal);
            }
            match heard {
                Heard::Stop(_) => clock.stop(now),
                Heard::End(_) => clock.end(now),
            }
            hear(heard);
        }
        // All are asked, so that none has more to say than there is room for.
        let mut saving = false;
        for rank in ranks.iter_mut().filter(|rank| !rank.is_gone()) {
            saving |= rank.is_saving();
        }
        if clock.is_in_vain(now) {
            break;
        }
        if let Some(signal) = clock.due(now, saving) {
            for rank in ranks.iter_mut().filter(|rank| !rank.is_gone()) {
                rank.signal(signal);
                rank.stopped |= !rank.has_ended();
            }
        }
        std::thread::sleep(PAUSE);
    }
    if let Some(rank) = ranks.iter().find(|rank| !rank.has_ended()) {
        let (number, process) = (rank.number, rank.leader());
        let message = format!("rank {number} (process {process}) does not end, even by SIGKILL");
        return Err(io::Error::new(io::ErrorKind::TimedOut, message));
    }
    let mut all: Vec<End> = ranks.into_iter().filter_map(Rank::end).collect();
    all.sort_by_key(|end| order.iter().position(|rank| *rank == end.rank));
    Ok(all)
}

/// When ranks that do not end by themselves are ended.
struct Clock {
    patience: Patience,
    /// Since when they are to end, and how long they have.
    ending: Option<(Instant, Duration)>,
    /// Whether a rank that saves has longer.
    waits_for_saving: bool,
    /// A signal asked them to: a failure then is no news.
    asked: bool,
    /// When SIGTERM was sent.
    terminated: Option<Instant>,
    /// When SIGKILL was sent.
    killed: Option<Instant>,
}

impl Clock {
    fn new(patience: Patience) -> Clock {
        Clock { patience, ending: None, waits_for_saving: true, asked: false, terminated: None, killed: None }
    }

    fn within(&mut self, now: Instant, time: Duration) {
        let sooner = self.ending.is_none_or(|(since, allowed)| now + time < since + allowed);
        if sooner {
            self.ending = Some((now, time));
        }
    }

    /// A signal asked to stop, or a rank has.
    fn stop(&mut self, now: Instant) {
        self.asked = true;
        self.within(now, self.patience.stop);
    }

    /// A rank failed.
    fn fail(&mut self, now: Instant) {
        if !self.asked {
            self.within(now, self.patience.grace);
        }
    }

    /// A second signal: nothing is waited for any more.
    fn end(&mut self, now: Instant) {
        self.waits_for_saving = false;
        self.within(now, self.patience.grace);
    }

    /// What is left was left behind by ranks that have ended. After a signal it may be what they were wrappers of.
    fn all_have_ended(&mut self, now: Instant) {
        if !self.asked {
            self.within(now, Duration::ZERO);
        }
    }

    /// The signal to send now.
    fn due(&mut self, now: Instant, saving: bool) -> Option<i32> {
        let (since, allowed) = self.ending?;
        let saving = saving && self.waits_for_saving;
        let allowed = if saving { allowed.max(self.patience.save) } else { allowed };
        match self.terminated {
            None if now >= since + allowed => {
                self.terminated = Some(now);
                Some(libc::SIGTERM)
            }
            // Some save because of the SIGTERM.
            Some(at)
                if self.killed.is_none() && now >= at + self.patience.grace && !(saving && now < since + allowed) =>
            {
                self.killed = Some(now);
                Some(libc::SIGKILL)
            }
            _ => None,
        }
    }

    /// Whether SIGKILL has not ended what is left: a process that waits for a device, or one that has ended and nobody waits for.
    fn is_in_vain(&self, now: Instant) -> bool {
        self.killed.is_some_and(|at| now >= at + self.patience.grace.max(LAST_WAIT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn clock() -> (Clock, impl Fn(u32) -> Instant) {
        let began = Instant::now();
        let patience = Patience { grace: 5 * SECOND, stop: 60 * SECOND, save: 600 * SECOND };
        (Clock::new(patience), move |seconds| began + seconds * SECOND)
    }

    #[test]
    fn a_failure_leaves_the_others_a_while() {
        let (mut clock, at) = clock();
        assert_eq!(clock.due(at(1000), false), None);
        clock.fail(at(1000));
        clock.fail(at(1004));
        assert_eq!(clock.due(at(1004), false), None);
        assert_eq!(clock.due(at(1005), true), None, "a checkpoint is finished");
        assert_eq!(clock.due(at(1005), false), Some(libc::SIGTERM));
        assert_eq!(clock.due(at(1009), false), None);
        assert_eq!(clock.due(at(1010), true), None, "what SIGTERM made it save is finished");
        assert_eq!(clock.due(at(1011), false), Some(libc::SIGKILL));
        assert_eq!(clock.due(at(1012), true), None);
    }

    #[test]
    fn a_signal_leaves_time_to_save_up_to_a_limit() {
        let (mut clock, at) = clock();
        clock.stop(at(0));
        clock.fail(at(1));
        clock.all_have_ended(at(1));
        assert_eq!(clock.due(at(59), false), None);
        assert_eq!(clock.due(at(599), true), None);
        assert_eq!(clock.due(at(600), true), Some(libc::SIGTERM));
        assert_eq!(clock.due(at(605), true), Some(libc::SIGKILL));
    }

    #[test]
    fn a_second_signal_waits_for_nothing() {
        let (mut clock, at) = clock();
        clock.stop(at(0));
        clock.end(at(2));
        assert_eq!(clock.due(at(6), true), None);
        assert_eq!(clock.due(at(7), true), Some(libc::SIGTERM));
        assert_eq!(clock.due(at(12), true), Some(libc::SIGKILL));
    }

    #[test]
    fn what_ranks_leave_behind_is_ended_at_once() {
        let (mut clock, at) = clock();
        clock.all_have_ended(at(3));
        assert_eq!(clock.due(at(3), false), Some(libc::SIGTERM));
        assert_eq!(clock.due(at(8), false), Some(libc::SIGKILL));
        assert!(!clock.is_in_vain(at(12)));
        assert!(clock.is_in_vain(at(13)), "nothing is waited for without end");
    }
}
