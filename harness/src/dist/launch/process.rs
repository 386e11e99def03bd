//! The processes of one rank: a process group whose leader is the launched program.

use std::collections::VecDeque;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::guard::{self, Guard};
use super::{End, LAST_LINES, POLL_INTERVAL, Plan};
use crate::dist::lifeline::{self, LauncherEnd};
use crate::dist::secret::Access;

/// A rank that runs or has ended.
pub struct Rank {
    pub number: usize,
    leader: Child,
    group: libc::pid_t,
    lifeline: LauncherEnd,
    last: Arc<Mutex<VecDeque<String>>>,
    readers: Vec<JoinHandle<()>>,
    /// Exit status of the leader, and seconds since the start.
    ended: Option<(ExitStatus, f64)>,
    /// Whether the process group is empty.
    empty: bool,
    /// Whether the launcher sent it SIGTERM or SIGKILL because it did not end in time.
    pub terminated_by_launcher: bool,
}

impl Rank {
    /// Starts a rank. Output lines are forwarded to `out` and `err`, prefixed with the rank.
    ///
    /// # Errors
    /// The program does not exist, or the system has no more processes, threads or descriptors; no process is left
    /// then.
    pub fn start(
        plan: &Plan,
        local: usize,
        guard: &Guard,
        out: impl Write + Send + 'static,
        err: impl Write + Send + 'static,
    ) -> io::Result<Rank> {
        let number = plan.host * plan.processes + local;
        let (lifeline, rank_end, name) = lifeline::pair()?;
        let mut command = Command::new(&plan.program);
        command.args(&plan.arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let variables = [
            ("RANK", number.to_string()),
            ("WORLD_SIZE", (plan.processes * plan.hosts).to_string()),
            ("LOCAL_RANK", local.to_string()),
            ("LOCAL_WORLD_SIZE", plan.processes.to_string()),
            ("MASTER_ADDR", plan.master.0.clone()),
            ("MASTER_PORT", plan.master.1.to_string()),
            ("TILEWRIGHT_JOB", plan.job.clone()),
            (lifeline::VARIABLE, name),
        ];
        command.envs(variables);
        give_access(&mut command, &plan.access);
        // Ctrl-C of a terminal reaches the launcher only, which forwards signals.
        command.process_group(0);
        let (launcher, pipe, line) = (std::process::id() as libc::pid_t, guard.descriptor(), rank_end.as_raw_fd());
        // SAFETY: only calls that are safe between fork and exec.
        unsafe { command.pre_exec(move || prepare(launcher, pipe, line)) };
        let leader = command.spawn()?;
        drop(rank_end);
        let group = leader.id() as libc::pid_t;
        let last = Arc::new(Mutex::new(VecDeque::new()));
        let (ended, empty, terminated_by_launcher, readers) = (None, false, false, Vec::new());
        let mut rank = Rank { number, leader, group, lifeline, last, readers, ended, empty, terminated_by_launcher };
        let read = rank.read(out, err);
        if let Err(error) = read {
            rank.kill();
            return Err(error);
        }
        Ok(rank)
    }

    fn read(&mut self, out: impl Write + Send + 'static, err: impl Write + Send + 'static) -> io::Result<()> {
        if let Some(stream) = self.leader.stdout.take() {
            self.readers.push(forward(self.number, stream, out, self.last.clone())?);
        }
        if let Some(stream) = self.leader.stderr.take() {
            self.readers.push(forward(self.number, stream, err, self.last.clone())?);
        }
        Ok(())
    }

    /// Returns the exit status of the leader once, when it has ended. Also checks whether the process group is empty.
    ///
    /// # Errors
    /// The process cannot be waited for.
    pub fn poll(&mut self, began: Instant, guard: &mut Guard) -> io::Result<Option<ExitStatus>> {
        let mut news = None;
        if self.ended.is_none() {
            news = self.leader.try_wait()?;
            self.ended = news.map(|status| (status, began.elapsed().as_secs_f64()));
        }
        if self.ended.is_some() && !self.empty {
            self.reap();
            if !self.signal(0) {
                self.empty = true;
                guard.unregister_group(self.group);
            }
        }
        Ok(news)
    }

    /// Reaps processes of the group that are children of this process: orphans, if this process is the init process of
    /// a container or a subreaper. The leader is already reaped.
    fn reap(&self) {
        // SAFETY: the only pointer is null; waits only for children of this process in this group.
        while unsafe { libc::waitpid(-self.group, std::ptr::null_mut(), libc::WNOHANG) } > 0 {}
    }

    /// Whether the leader has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Process id of the leader.
    pub fn leader(&self) -> u32 {
        self.leader.id()
    }

    /// Whether the leader has ended and the group is empty.
    pub fn is_gone(&self) -> bool {
        self.ended.is_some() && self.empty
    }

    pub fn is_saving(&mut self) -> bool {
        self.lifeline.is_saving()
    }

    /// Sends a signal to the process group; returns whether the group has processes.
    pub fn signal(&self, signal: i32) -> bool {
        if self.empty {
            return false;
        }
        // SAFETY: the group belongs to our child. It has members, or its leader is not reaped, or was reaped a moment
        // ago, so that its number is not reused.
        unsafe { libc::kill(-self.group, signal) == 0 }
    }

    /// Sends SIGKILL to the process group, and waits for the leader.
    pub fn kill(&mut self) {
        self.signal(libc::SIGKILL);
        let _ = self.leader.wait();
    }

    /// Returns how the rank ended, after at most 1 s of waiting for its last lines: a process that left the group may
    /// keep the output open.
    pub fn end(self) -> Option<End> {
        let deadline = Instant::now() + Duration::from_secs(1);
        while self.readers.iter().any(|reader| !reader.is_finished()) && Instant::now() < deadline {
            std::thread::sleep(POLL_INTERVAL);
        }
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect();
        let (status, after) = self.ended?;
        let remaining_group = (!self.empty).then_some(self.group);
        Some(End {
            rank: self.number,
            status,
            after,
            last,
            terminated_by_launcher: self.terminated_by_launcher,
            remaining_group,
        })
    }
}

/// Sets the variables that control access; only processes of this user can read them.
fn give_access(command: &mut Command, access: &Access) {
    for name in ["TILEWRIGHT_SECRET", "TILEWRIGHT_SECRET_FILE", "TILEWRIGHT_UNAUTHENTICATED"] {
        command.env_remove(name);
    }
    match access {
        Access::Secret(secret) => drop(command.env("TILEWRIGHT_SECRET", secret.text())),
        Access::Unauthenticated => drop(command.env("TILEWRIGHT_UNAUTHENTICATED", "1")),
        Access::Loopback => {}
    }
}

/// Prepares the child process as a rank, between fork and exec.
#[cfg_attr(not(target_os = "linux"), expect(unused_variables, reason = "only Linux has parent-death signals"))]
fn prepare(launcher: libc::pid_t, guard: i32, line: i32) -> io::Result<()> {
    // SAFETY: calls that are safe between fork and exec.
    unsafe {
        #[cfg(target_os = "linux")]
        {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            if libc::getppid() != launcher {
                libc::_exit(1);
            }
        }
        guard::register_group(guard);
        // The launcher ignores this signal; the rank's program gets the default action.
        libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
        // Keeps the rank's end of the lifeline open across exec.
        match libc::fcntl(line, libc::F_SETFD, 0) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Maximum bytes of a line; longer lines are split.
const MAX_LINE_BYTES: u64 = 64 << 10;

/// Forwards lines, prefixed with the rank.
fn forward(
    rank: usize,
    stream: impl Read + Send + 'static,
    mut to: impl Write + Send + 'static,
    last: Arc<Mutex<VecDeque<String>>>,
) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().spawn(move || {
        let mut stream = BufReader::new(stream);
        let mut line = Vec::new();
        while (&mut stream).take(MAX_LINE_BYTES).read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            let text = String::from_utf8_lossy(&line).trim_end().to_string();
            line.clear();
            // A closed output does not end the ranks.
            let _ = to.write_all(format!("[rank {rank}] {text}\n").as_bytes()).and_then(|()| to.flush());
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            if last.len() == LAST_LINES {
                last.pop_front();
            }
            last.push_back(text);
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Shared buffer of written bytes.
    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn long_lines_are_split() {
        let (to, last) = (Shared::default(), Arc::default());
        let text = [vec![b'x'; 1_000_000], b"\nend\n".to_vec()].concat();
        forward(3, io::Cursor::new(text), to.clone(), Arc::clone(&last)).unwrap().join().unwrap();
        let said = String::from_utf8(to.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<&str> = said.lines().map(|line| line.strip_prefix("[rank 3] ").unwrap()).collect();
        assert!(lines.iter().all(|line| line.len() as u64 <= MAX_LINE_BYTES));
        assert_eq!(lines.concat(), "x".repeat(1_000_000) + "end");
        assert_eq!(lines.last(), Some(&"end"));
        assert_eq!(last.lock().unwrap().len(), LAST_LINES);
    }
}
