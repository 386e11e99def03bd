//! Starts the ranks of one host, and looks after them.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::comm::error::{awaited, blamed};
use super::secret::Access;

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
    /// How long ranks may go on after one has failed: they have to find out, say so, and save nothing by halves.
    pub grace: Duration,
    /// Ends all ranks when it becomes true.
    pub stop: Arc<AtomicBool>,
}

/// How one rank ended.
#[derive(Clone, Debug)]
pub struct End {
    pub rank: usize,
    pub status: ExitStatus,
    /// Seconds since the start.
    pub after: f64,
    /// What it said last, at most [`LAST_LINES`] lines.
    pub last: Vec<String>,
    /// Whether it was we who ended it.
    pub stopped: bool,
}

/// Lines that are kept of each rank for the report.
pub const LAST_LINES: usize = 8;

/// How often is looked who has ended: short, so that the order of the ends is seen.
const PAUSE: Duration = Duration::from_millis(1);
/// Failures within this time belong together.
const TOGETHER: f64 = 1.0;

/// A port that is free now.
///
/// # Errors
/// The system has none.
pub fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

struct Rank {
    number: usize,
    child: Child,
    last: Arc<Mutex<VecDeque<String>>>,
    readers: Vec<JoinHandle<()>>,
    end: Option<End>,
    stopped: bool,
}

/// Starts all ranks and waits for them. Their lines go to `out` and `err` with the rank before them. When one fails, the others have
/// [`Plan::grace`] to end by themselves, then are asked to (SIGTERM), then are ended (SIGKILL). The ends come in the order in which they
/// happened.
///
/// # Errors
/// A rank cannot be started; those that were are ended.
pub fn run(
    plan: &Plan,
    out: impl Write + Send + Clone + 'static,
    err: impl Write + Send + Clone + 'static,
) -> std::io::Result<Vec<End>> {
    let began = Instant::now();
    let mut ranks: Vec<Rank> = Vec::new();
    for local in 0..plan.processes {
        match start(plan, local, out.clone(), err.clone()) {
            Ok(rank) => ranks.push(rank),
            Err(error) => {
                for rank in &mut ranks {
                    let _ = rank.child.kill();
                    let _ = rank.child.wait();
                }
                return Err(error);
            }
        }
    }
    let mut ends = Vec::new();
    let mut failed_at: Option<Instant> = None;
    while ranks.iter().any(|rank| rank.end.is_none()) {
        for rank in ranks.iter_mut().filter(|rank| rank.end.is_none()) {
            let Some(status) = rank.child.try_wait()? else { continue };
            rank.end = Some(End {
                rank: rank.number,
                status,
                after: began.elapsed().as_secs_f64(),
                last: Vec::new(),
                stopped: rank.stopped,
            });
            ends.push(rank.number);
            if !status.success() {
                failed_at.get_or_insert_with(Instant::now);
            }
        }
        if plan.stop.load(Ordering::Relaxed) && failed_at.is_none() {
            failed_at = Instant::now().checked_sub(plan.grace).or(Some(began));
        }
        if let Some(at) = failed_at {
            let signal = match at.elapsed() {
                over if over > 2 * plan.grace + PAUSE => Some(libc::SIGKILL),
                over if over > plan.grace => Some(libc::SIGTERM),
                _ => None,
            };
            for rank in ranks.iter_mut().filter(|rank| rank.end.is_none()) {
                if let Some(signal) = signal.filter(|signal| *signal == libc::SIGKILL || !rank.stopped) {
                    rank.stopped = true;
                    // SAFETY: the process is our child, and has not been waited for, so its number is still its own.
                    unsafe { libc::kill(rank.child.id() as libc::pid_t, signal) };
                }
            }
        }
        std::thread::sleep(PAUSE);
    }
    let mut all: Vec<End> = Vec::new();
    for mut rank in ranks {
        // Its own children may hold its output open: what they say later is not waited for.
        let patience = Instant::now() + Duration::from_secs(1);
        while rank.readers.iter().any(|reader| !reader.is_finished()) && Instant::now() < patience {
            std::thread::sleep(PAUSE);
        }
        let last = rank.last.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect();
        all.extend(rank.end.take().map(|end| End { last, ..end }));
    }
    all.sort_by_key(|end| ends.iter().position(|rank| *rank == end.rank));
    Ok(all)
}

/// Says who may take part, in variables that only processes of our user can read.
fn give_access(command: &mut Command, access: &Access) {
    for name in ["TILEWRIGHT_SECRET", "TILEWRIGHT_SECRET_FILE", "TILEWRIGHT_UNAUTHENTICATED"] {
        command.env_remove(name);
    }
    match access {
        Access::Secret(secret) => drop(command.env("TILEWRIGHT_SECRET", secret.text())),
        Access::Anybody => drop(command.env("TILEWRIGHT_UNAUTHENTICATED", "1")),
        Access::Loopback => {}
    }
}

fn start(
    plan: &Plan,
    local: usize,
    out: impl Write + Send + 'static,
    err: impl Write + Send + 'static,
) -> std::io::Result<Rank> {
    let number = plan.host * plan.processes + local;
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
    ];
    command.envs(variables);
    give_access(&mut command, &plan.access);
    #[cfg(target_os = "linux")]
    // SAFETY: prctl and signal are safe to call between fork and exec.
    unsafe {
        command.pre_exec(|| {
            // Ranks must not outlive us, however we end.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            // We ignore it ourselves; their program decides for itself.
            libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
            Ok(())
        });
    }
    let mut child = command.spawn()?;
    let last = Arc::new(Mutex::new(VecDeque::new()));
    let out = child.stdout.take().map(|stream| forward(number, stream, out, last.clone())).transpose();
    let err = child.stderr.take().map(|stream| forward(number, stream, err, last.clone())).transpose();
    match (out, err) {
        (Ok(out), Ok(err)) => {
            let readers = out.into_iter().chain(err).collect();
            Ok(Rank { number, child, last, readers, end: None, stopped: false })
        }
        (Err(error), _) | (_, Err(error)) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(error)
        }
    }
}

/// Copies lines with the rank before them.
fn forward(
    rank: usize,
    stream: impl Read + Send + 'static,
    mut to: impl Write + Send + 'static,
    last: Arc<Mutex<VecDeque<String>>>,
) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().spawn(move || {
        let mut stream = BufReader::new(stream);
        let mut line = Vec::new();
        while stream.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            let text = String::from_utf8_lossy(&line).trim_end().to_string();
            line.clear();
            // Nobody reads us any more: the ranks go on all the same.
            let _ = to.write_all(format!("[rank {rank}] {text}\n").as_bytes()).and_then(|()| to.flush());
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            if last.len() == LAST_LINES {
                last.pop_front();
            }
            last.push_back(text);
        }
    })
}

impl End {
    /// `exit code 1`, `signal 9 (SIGKILL)`.
    pub fn how(&self) -> String {
        match (self.status.code(), self.status.signal()) {
            (Some(0), _) => "in order".into(),
            (Some(code), _) => format!("with exit code {code}"),
            (None, Some(signal)) => match signal_name(signal) {
                Some(name) => format!("by signal {signal} ({name})"),
                None => format!("by signal {signal}"),
            },
            (None, None) => "in an unknown way".into(),
        }
    }

    /// The exit code that a shell would show.
    pub fn code(&self) -> u8 {
        let code = self.status.code().or(self.status.signal().map(|signal| 128 + signal));
        code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1)
    }
}

fn signal_name(signal: i32) -> Option<&'static str> {
    let names = [
        (libc::SIGABRT, "SIGABRT"),
        (libc::SIGBUS, "SIGBUS"),
        (libc::SIGFPE, "SIGFPE"),
        (libc::SIGHUP, "SIGHUP"),
        (libc::SIGILL, "SIGILL"),
        (libc::SIGINT, "SIGINT"),
        (libc::SIGKILL, "SIGKILL"),
        (libc::SIGPIPE, "SIGPIPE"),
        (libc::SIGSEGV, "SIGSEGV"),
        (libc::SIGTERM, "SIGTERM"),
    ];
    names.iter().find(|(number, _)| *number == signal).map(|(_, name)| *name)
}

/// The rank that hung until we ended it, with a line of a rank that waited for it in vain.
fn hung(ends: &[End]) -> Option<(&End, &String)> {
    ends.iter().filter(|end| end.stopped).find_map(|end| {
        let others = ends.iter().filter(|other| other.rank != end.rank);
        others.flat_map(|other| &other.last).find(|line| awaited(line).contains(&end.rank)).map(|line| (end, line))
    })
}

/// What to tell about ranks of which one failed; `None` when all ended in order.
pub fn report(ends: &[End]) -> Option<String> {
    let failures: Vec<&End> = ends.iter().filter(|end| !end.status.success() && !end.stopped).collect();
    let seen = failures.first()?;
    let together = || failures.iter().filter(|end| end.after < seen.after + TOGETHER);
    // Whoever was killed did not end because of another rank, even if that one was seen first; nor did who names no other that failed.
    let killed = together().find(|end| end.status.signal().is_some());
    let names = |end: &End, other: &End| end.last.iter().any(|line| blamed(line) == Some(other.rank));
    let alone = together().find(|end| !failures.iter().any(|other| other.rank != end.rank && names(end, other)));
    let hung = hung(ends).filter(|_| killed.is_none());
    let first = hung.map(|(end, _)| end).or(killed.or(alone).copied()).unwrap_or(seen);
    let mut text = match hung {
        Some((_, line)) => format!(
            "rank {} hung, and ended {}, which the launcher sent after {:.1} s; another rank said: {}",
            first.rank,
            first.how(),
            first.after,
            line.strip_prefix("error: ").unwrap_or(line)
        ),
        None => format!("rank {} failed first: it ended {} after {:.1} s", first.rank, first.how(), first.after),
    };
    match first.last.is_empty() {
        true if hung.is_some() => text += "; it said nothing",
        true => text += ", and said nothing",
        false => {
            text += "; its last lines:";
            for line in &first.last {
                text += &format!("\n  | {line}");
            }
        }
    }
    for end in ends.iter().filter(|end| end.rank != first.rank) {
        let cause = if end.stopped { ", which the launcher sent" } else { "" };
        text += &format!("\nrank {} ended {}{cause} after {:.1} s", end.rank, end.how(), end.after);
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(rank: usize, code: i32, after: f64, last: &str) -> End {
        let status = std::process::ExitStatus::from_raw(if code > 0 { code << 8 } else { -code });
        End { rank, status, after, last: vec!["working".into(), last.to_string()], stopped: false }
    }

    fn first(ends: &[End]) -> String {
        let text = report(ends).unwrap();
        text.split(" failed first").next().unwrap().to_string()
    }

    #[test]
    fn the_rank_that_failed_first_is_the_one_that_others_name() {
        let lost = "rank 2 has ended, seen by rank 0 at barrier: its connection is closed";
        // A process closes its connections a moment before it is seen to have ended.
        assert_eq!(first(&[end(0, 3, 1.0, lost), end(2, 7, 1.01, "the disk is full")]), "rank 2");
        let told = "rank 0 gave up: rank 2 has ended, seen by rank 0 at barrier: its connection is closed";
        assert_eq!(first(&[end(1, 3, 1.0, told), end(0, 3, 1.0, lost), end(2, 7, 1.01, "the disk is full")]), "rank 2");
        // Killed, whatever it said last; and long before the others.
        assert_eq!(first(&[end(0, 3, 1.0, "no"), end(2, -9, 1.01, lost)]), "rank 2");
        assert_eq!(first(&[end(0, 3, 1.0, lost), end(2, 7, 9.0, "the disk is full")]), "rank 0");
        // Each names the other: who was seen first.
        let other = "rank 0 has ended, seen by rank 2 at barrier: its connection is closed";
        assert_eq!(first(&[end(0, 3, 1.0, lost), end(2, 3, 1.0, other)]), "rank 0");
        assert!(report(&[end(0, 0, 1.0, "done")]).is_none());
        // A rank that hangs fails last, when it is ended.
        let waited = "error: rank 0 waited 300 s for rank 2 at barrier";
        let hung = End { stopped: true, ..end(2, -9, 9.0, "step 7") };
        let text = report(&[end(0, 1, 1.0, waited), end(1, 1, 1.0, &format!("error: rank 0 gave up: {waited}")), hung])
            .unwrap();
        assert!(text.starts_with("rank 2 hung, and ended by signal 9 (SIGKILL)"), "{text}");
        assert!(
            text.contains("another rank said: rank 0 waited 300 s for rank 2") && text.contains("| step 7"),
            "{text}"
        );
    }
}
