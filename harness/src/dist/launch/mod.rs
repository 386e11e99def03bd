//! Starts the ranks of one host, monitors them, and ends all of their processes.
//!
//! Each rank is a process group. Stop signals are forwarded to the whole group. Groups that do not end in time get
//! SIGTERM, then SIGKILL; [`Timeouts`] has the timeouts. If this process is killed, the [`guard`] kills the groups, the
//! ranks see their [`lifeline`](super::lifeline) close, and Linux sends them a parent-death signal. A process that
//! leaves its group and does not use the lifeline is not ended.

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

/// What to launch.
#[derive(Clone, Debug)]
pub struct Plan {
    pub program: OsString,
    pub arguments: Vec<OsString>,
    /// Number of ranks on this host.
    pub processes: usize,
    /// Number of hosts; all have the same number of ranks.
    pub hosts: usize,
    /// Index of this host.
    pub host: usize,
    /// Address of rank 0; the same on all hosts.
    pub master: (String, u16),
    /// Name of the job; ranks of other jobs are refused.
    pub job: String,
    /// Which peers may take part; passed to ranks through their environment.
    pub access: Access,
    pub timeouts: Timeouts,
}

/// How long ranks may take to end. After that they get SIGTERM, and after another [`Timeouts::grace`] SIGKILL.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    /// Time after the failure of a rank: the others have to notice it, report it, and finish a save. Also the time
    /// after a second signal.
    pub grace: Duration,
    /// Time after a stop signal, or after a rank has stopped by itself: for the rest of a step.
    pub stop: Duration,
    /// Same as `stop`, while ranks report that they save their state; at least as long as the other limits.
    pub save: Duration,
}

/// Number of a rank's last output lines that are kept for the report.
pub const LAST_LINES: usize = 8;

/// Minimum time for processes to end after SIGKILL.
const MIN_KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// Polling interval: short, to see the order in which ranks end.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Returns a port that is currently free.
///
/// # Errors
/// The system has none.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// Starts all ranks and waits until all of their processes have ended. Output lines are forwarded to `out` and `err`,
/// prefixed with the rank. Returns how the ranks ended, in the order in which they did. The callback is called for each
/// signal received from `signals`, after it was forwarded.
///
/// # Errors
/// A rank cannot be started; the started ones are ended. SIGKILL does not end a rank ([`io::ErrorKind::TimedOut`]).
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
        // All are polled, so that no socket's buffer fills up.
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
                rank.terminated_by_launcher |= !rank.has_ended();
            }
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    if let Some(rank) = ranks.iter().find(|rank| !rank.has_ended()) {
        let (number, process) = (rank.number, rank.leader());
        let message = format!("rank {number} (process {process}) does not end, even after SIGKILL");
        return Err(io::Error::new(io::ErrorKind::TimedOut, message));
    }
    let mut all: Vec<End> = ranks.into_iter().filter_map(Rank::end).collect();
    all.sort_by_key(|end| order.iter().position(|rank| *rank == end.rank));
    Ok(all)
}

/// Decides when ranks are terminated.
struct ShutdownSchedule {
    timeouts: Timeouts,
    /// Start and length of the time that ranks have to end.
    ending: Option<(Instant, Duration)>,
    /// Whether ranks that save get more time.
    waits_for_saving: bool,
    /// Whether a stop signal was received: failures after it do not shorten the time.
    stop_requested: bool,
    /// Time at which SIGTERM was sent.
    terminated: Option<Instant>,
    /// Time at which SIGKILL was sent.
    killed: Option<Instant>,
}

impl ShutdownSchedule {
    fn new(timeouts: Timeouts) -> ShutdownSchedule {
        ShutdownSchedule {
            timeouts,
            ending: None,
            waits_for_saving: true,
            stop_requested: false,
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

    /// Called after a stop signal, or after a rank has stopped.
    fn stop(&mut self, now: Instant) {
        self.stop_requested = true;
        self.end_within(now, self.timeouts.stop);
    }

    /// Called after a rank has failed.
    fn fail(&mut self, now: Instant) {
        if !self.stop_requested {
            self.end_within(now, self.timeouts.grace);
        }
    }

    /// Called after a second signal: saves are no longer waited for.
    fn end(&mut self, now: Instant) {
        self.waits_for_saving = false;
        self.end_within(now, self.timeouts.grace);
    }

    /// Called when all ranks have ended: terminates their remaining processes. After a signal the remaining processes
    /// keep the time that is left, since ranks may have been wrappers of them.
    fn all_have_ended(&mut self, now: Instant) {
        if !self.stop_requested {
            self.end_within(now, Duration::ZERO);
        }
    }

    /// Returns the signal to send now, if there is one.
    fn due(&mut self, now: Instant, saving: bool) -> Option<i32> {
        let (since, allowed) = self.ending?;
        let saving = saving && self.waits_for_saving;
        let allowed = if saving { allowed.max(self.timeouts.save) } else { allowed };
        match self.terminated {
            None if now >= since + allowed => {
                self.terminated = Some(now);
                Some(libc::SIGTERM)
            }
            // Ranks may save in response to SIGTERM.
            Some(at)
                if self.killed.is_none() && now >= at + self.timeouts.grace && !(saving && now < since + allowed) =>
            {
                self.killed = Some(now);
                Some(libc::SIGKILL)
            }
            _ => None,
        }
    }

    /// Whether SIGKILL did not end all processes in time: one may wait for a device, or be a zombie that is not reaped.
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
        assert_eq!(schedule.due(at(1005), true), None, "a save is finished");
        assert_eq!(schedule.due(at(1005), false), Some(libc::SIGTERM));
        assert_eq!(schedule.due(at(1009), false), None);
        assert_eq!(schedule.due(at(1010), true), None, "a save in response to SIGTERM is finished");
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
        assert!(schedule.is_unkillable(at(13)), "the wait is bounded");
    }
}
