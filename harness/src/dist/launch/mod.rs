//! Starts the ranks of one host, looks after them, and leaves nothing of them behind.
//!
//! Each rank is a process group. Signals that ask to stop are passed on to all of it, and whoever does not end in time is asked (SIGTERM)
//! and ended (SIGKILL): [`Timeouts`] has the times. If this process is killed, the [`guard`] ends the groups, the ranks see their
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
pub use self::report::{End, per_rank_lines, report};
use super::secret::Access;
use crate::signals::StopSignal;

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
    pub timeouts: Timeouts,
}

/// How long ranks have to end by themselves. Who is there still gets SIGTERM, and SIGKILL a [`Timeouts::grace`] later.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
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
const MIN_KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// How often is looked who has ended: short, so that the order of the ends is seen.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A port that is free now.
///
/// # Errors
/// The system has none.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Starts all ranks and waits until nothing is left of them. Their lines go to `out` and `err` with the rank before them. The ends come in
/// the order in which they happened. `on_signal` is told each signal that comes out of `signals`, when it has been passed on.
///
/// # Errors
/// A rank cannot be started; those that were are ended. A rank that SIGKILL does not end ([`io::ErrorKind::TimedOut`]).
pub fn run(
    plan: &Plan,
    signals: &Receiver<StopSignal>,
    mut on_signal: impl FnMut(StopSignal),
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
    let mut schedule = ShutdownSchedule::new(plan.timeouts);
    while ranks.iter().any(|rank| !rank.is_gone()) {
        let now = Instant::now();
        for rank in ranks.iter_mut().filter(|rank| !rank.is_gone()) {
            let Some(status) = rank.poll(began, &mut guard)? else { continue };
            order.push(rank.number);
            match status.code() == Some(crate::cli::STOPPED.into()) {
                true => schedule.stop(now),
                false if !status.success() => schedule.fail(now),
                false => {}
            }
        }
        if ranks.iter().all(Rank::has_ended) {
            schedule.all_have_ended(now);
        }
        while let Ok(stop_signal) = signals.try_recv() {
            let (StopSignal::Stop(signal) | StopSignal::End(signal)) = stop_signal;
            for rank in &ranks {
                rank.signal(signal);
            }
            match stop_signal {
                StopSignal::Stop(_) => schedule.stop(now),
                StopSignal::End(_) => schedule.end(now),
            }
            on_signal(stop_signal);
        }
        // All are asked, so that none has more to say than there is room for.
        let mut saving = false;
        for rank in ranks.iter_mut().filter(|rank| !rank.is_gone()) {
            saving |= rank.is_saving();
        }
        if schedule.is_unkillable(now) {
            break;
        }
        if let Some(signal) = schedule.due(now, saving) {
            for rank in ranks.iter_mut().filter(|rank| !rank.is_gone()) {
                rank.signal(signal);
                rank.stopped |= !rank.has_ended();
            }
        }
        std::thread::sleep(POLL_INTERVAL);
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
struct ShutdownSchedule {
    timeouts: Timeouts,
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

impl ShutdownSchedule {
    fn new(timeouts: Timeouts) -> ShutdownSchedule {
        ShutdownSchedule {
            timeouts,
            ending: None,
            waits_for_saving: true,
            asked: false,
            terminated: None,
            killed: None,
        }
    }

    fn end_within(&mut self, now: Instant, time: Duration) {
        let sooner = self.ending.is_none_or(|(since, allowed)| now + time < since + allowed);
        if sooner {
            self.ending = Some((now, time));
        }
    }

    /// A signal asked to stop, or a rank has.
    fn stop(&mut self, now: Instant) {
        self.asked = true;
        self.end_within(now, self.timeouts.stop);
    }

    /// A rank failed.
    fn fail(&mut self, now: Instant) {
        if !self.asked {
            self.end_within(now, self.timeouts.grace);
        }
    }

    /// A second signal: nothing is waited for any more.
    fn end(&mut self, now: Instant) {
        self.waits_for_saving = false;
        self.end_within(now, self.timeouts.grace);
    }

    /// What is left was left behind by ranks that have ended. After a signal it may be what they were wrappers of.
    fn all_have_ended(&mut self, now: Instant) {
        if !self.asked {
            self.end_within(now, Duration::ZERO);
        }
    }

    /// The signal to send now.
    fn due(&mut self, now: Instant, saving: bool) -> Option<i32> {
        let (since, allowed) = self.ending?;
        let saving = saving && self.waits_for_saving;
        let allowed = if saving { allowed.max(self.timeouts.save) } else { allowed };
        match self.terminated {
            None if now >= since + allowed => {
                self.terminated = Some(now);
                Some(libc::SIGTERM)
            }
            // Some save because of the SIGTERM.
            Some(at)
                if self.killed.is_none() && now >= at + self.timeouts.grace && !(saving && now < since + allowed) =>
            {
                self.killed = Some(now);
                Some(libc::SIGKILL)
            }
            _ => None,
        }
    }

    /// Whether SIGKILL has not ended what is left: a process that waits for a device, or one that has ended and nobody waits for.
    fn is_unkillable(&self, now: Instant) -> bool {
        self.killed.is_some_and(|at| now >= at + self.timeouts.grace.max(MIN_KILL_TIMEOUT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn schedule() -> (ShutdownSchedule, impl Fn(u32) -> Instant) {
        let began = Instant::now();
        let timeouts = Timeouts { grace: 5 * SECOND, stop: 60 * SECOND, save: 600 * SECOND };
        (ShutdownSchedule::new(timeouts), move |seconds| began + seconds * SECOND)
    }

    #[test]
    fn after_a_failure_other_ranks_get_the_grace_period() {
        let (mut schedule, at) = schedule();
        assert_eq!(schedule.due(at(1000), false), None);
        schedule.fail(at(1000));
        schedule.fail(at(1004));
        assert_eq!(schedule.due(at(1004), false), None);
        assert_eq!(schedule.due(at(1005), true), None, "a checkpoint is finished");
        assert_eq!(schedule.due(at(1005), false), Some(libc::SIGTERM));
        assert_eq!(schedule.due(at(1009), false), None);
        assert_eq!(schedule.due(at(1010), true), None, "what SIGTERM made it save is finished");
        assert_eq!(schedule.due(at(1011), false), Some(libc::SIGKILL));
        assert_eq!(schedule.due(at(1012), true), None);
    }

    #[test]
    fn after_a_signal_ranks_may_save_until_a_limit() {
        let (mut schedule, at) = schedule();
        schedule.stop(at(0));
        schedule.fail(at(1));
        schedule.all_have_ended(at(1));
        assert_eq!(schedule.due(at(59), false), None);
        assert_eq!(schedule.due(at(599), true), None);
        assert_eq!(schedule.due(at(600), true), Some(libc::SIGTERM));
        assert_eq!(schedule.due(at(605), true), Some(libc::SIGKILL));
    }

    #[test]
    fn a_second_signal_does_not_wait_for_saves() {
        let (mut schedule, at) = schedule();
        schedule.stop(at(0));
        schedule.end(at(2));
        assert_eq!(schedule.due(at(6), true), None);
        assert_eq!(schedule.due(at(7), true), Some(libc::SIGTERM));
        assert_eq!(schedule.due(at(12), true), Some(libc::SIGKILL));
    }

    #[test]
    fn leftover_processes_are_terminated_immediately() {
        let (mut schedule, at) = schedule();
        schedule.all_have_ended(at(3));
        assert_eq!(schedule.due(at(3), false), Some(libc::SIGTERM));
        assert_eq!(schedule.due(at(8), false), Some(libc::SIGKILL));
        assert!(!schedule.is_unkillable(at(12)));
        assert!(schedule.is_unkillable(at(13)), "nothing is waited for without end");
    }
}
