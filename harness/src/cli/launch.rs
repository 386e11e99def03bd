//! `tilewright launch`: starts the ranks of this host, forwards signals to them, and terminates all of them when one
//! fails.

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use tilewright::terminal;

use super::value_parsers::non_negative_seconds;
use super::{CliError, Result};
use crate::dist::launch::{self, End, Plan, Timeouts};
use crate::dist::rank::{self, PORT};
use crate::dist::secret::{Access, Secret};
use crate::signals::{self, StopSignal};

#[derive(Args)]
pub struct Arguments {
    /// Number of ranks to start on this host
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    nproc: u16,
    /// Number of hosts, each with --nproc ranks; run the same command on every host
    #[arg(long, value_name = "HOSTS", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    hosts: u16,
    /// Index of this host, from 0; rank 0 is on host 0
    #[arg(long, value_name = "HOST", default_value_t = 0)]
    host: u16,
    /// Address of host 0, for the rendezvous
    #[arg(long, value_name = "ADDRESS", env = "MASTER_ADDR", default_value = "127.0.0.1")]
    master_addr: String,
    /// Port of the rendezvous. Default: a free port, or 29500 with several hosts
    #[arg(long, value_name = "PORT", env = "MASTER_PORT", value_parser = port)]
    master_port: Option<Port>,
    /// Job identifier, the same on all hosts: ranks of another job are rejected
    #[arg(long, value_name = "WORD", env = "TILEWRIGHT_JOB")]
    job: Option<String>,
    /// File (mode 0600) with the job's secret. Default: TILEWRIGHT_SECRET or TILEWRIGHT_SECRET_FILE, else a new secret
    /// on a single host
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// Run without a secret: any process that reaches the port can join. Only for networks that are private to the
    /// job's hosts
    #[arg(long)]
    unauthenticated: bool,
    /// Seconds that ranks have to exit after one of them failed, and again between SIGTERM and SIGKILL; at most 10⁹
    #[arg(long, value_name = "SECONDS", default_value = "5", value_parser = non_negative_seconds)]
    grace: Duration,
    /// Seconds that ranks have to stop after a forwarded SIGINT, SIGTERM, SIGHUP or SIGUSR1; at most 10⁹
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = non_negative_seconds)]
    stop_timeout: Duration,
    /// Seconds that ranks have to stop while one of them reports that it is saving its state; at most 10⁹
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = non_negative_seconds)]
    save_timeout: Duration,
    /// Program of every rank, with its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// A value of `--master-port`: a port, or `None` for an empty environment variable.
#[derive(Clone, Copy, Debug)]
struct Port(Option<u16>);

/// Parses a port number.
fn port(word: &str) -> Result<Port, String> {
    match (word.is_empty(), word.parse::<u16>()) {
        (true, _) => Ok(Port(None)),
        (false, Ok(port)) if port > 0 => Ok(Port(Some(port))),
        _ => Err("expected a port from 1 to 65535".into()),
    }
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let plan = plan(arguments)?;
    let (sender, signals) = mpsc::channel();
    super::on_signals(move |signal| {
        let _ = sender.send(signal);
    })?;
    // The ranks' lines bypass the output buffer of this process: flush it first.
    out.flush()?;
    let name = plan.program.to_string_lossy().into_owned();
    let failed = Arc::new(OnceLock::new());
    let mut forwarded = Signals::default();
    let ends = launch::run(
        &plan,
        &signals,
        |signal| forwarded.on_signal(signal, &plan),
        Terminal::Out(failed.clone()),
        Terminal::Err,
    )
    .map_err(|error| match error.kind() {
        io::ErrorKind::TimedOut => CliError::Failure(error.to_string()),
        _ => CliError::Failure(format!("cannot start {name}: {error}")),
    })?;
    for (rank, group) in ends.iter().filter_map(|end| Some((end.rank, end.remaining_group?))) {
        terminal::print_stderr(format_args!(
            "rank {rank} left processes in its group {group} that SIGKILL did not terminate"
        ));
    }
    forwarded.outcome(&ends)?;
    // The ranks continued after standard output failed. A closed pipe is not an error.
    match failed.get() {
        Some(kind) if *kind != io::ErrorKind::BrokenPipe => Err(io::Error::from(*kind).into()),
        _ => Ok(()),
    }
}

/// The signals that this process has forwarded.
#[derive(Default)]
struct Signals {
    forwarded: Vec<i32>,
    /// The second signal, which terminates the ranks immediately.
    second: Option<i32>,
}

impl Signals {
    fn on_signal(&mut self, request: StopSignal, plan: &Plan) {
        let (StopSignal::Stop(signal) | StopSignal::End(signal)) = request;
        self.forwarded.push(signal);
        let name = signals::name(signal);
        match request {
            StopSignal::Stop(_) => {
                let Timeouts { stop, save, .. } = plan.timeouts;
                let (stop, save) = (stop.as_secs_f64(), save.max(stop).as_secs_f64());
                terminal::print_stderr(format_args!(
                    "{name} forwarded to all ranks: they have {stop} s to stop, or {save} s while they save; a second \
                     signal terminates them immediately"
                ));
            }
            StopSignal::End(signal) => {
                self.second = Some(signal);
                terminal::print_stderr(format_args!("{name} forwarded to all ranks"));
            }
        }
    }

    /// Reports how the ranks exited. If a signal terminated them, terminates this process by the same signal.
    fn outcome(&self, ends: &[End]) -> Result<()> {
        let all = || launch::per_rank_lines(&ends.iter().collect::<Vec<_>>());
        if let Some(signal) = self.second {
            terminal::print_stderr(format_args!("terminated by {}\n{}", signals::name(signal), all()));
            signals::exit_by_signal(signal);
        }
        if let Some(report) = launch::report(ends, &self.forwarded) {
            return Err(CliError::Failure(report));
        }
        match self.forwarded.first() {
            Some(signal) if !ends.iter().all(|end| end.status.success() || end.has_saved()) => {
                terminal::print_stderr(format_args!(
                    "stopped by {}, but not all ranks saved their state\n{}",
                    signals::name(*signal),
                    all()
                ));
                signals::exit_by_signal(*signal)
            }
            _ if ends.iter().any(End::has_saved) => {
                Err(CliError::Stopped("all ranks stopped and saved their state".into()))
            }
            _ => Ok(()),
        }
    }
}

fn plan(arguments: &Arguments) -> Result<Plan> {
    if arguments.host >= arguments.hosts {
        let message = format!("--host is {}, but there are {} hosts", arguments.host, arguments.hosts);
        return Err(CliError::usage(message, "hosts are numbered from 0"));
    }
    let several = arguments.hosts > 1;
    let port = match arguments.master_port.and_then(|port| port.0) {
        Some(port) => port,
        None if several => PORT,
        None => launch::free_port().map_err(|error| CliError::Failure(format!("no free port: {error}")))?,
    };
    // Ranks of another launch on this host may connect to the same port.
    let own = || {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        format!("{}-{}", std::process::id(), since.as_nanos())
    };
    // An empty environment variable counts as unset, as in the ranks.
    let address = Some(arguments.master_addr.clone()).filter(|address| !address.is_empty());
    let job = arguments.job.clone().filter(|job| !job.is_empty());
    let job = job.unwrap_or_else(|| if several { String::new() } else { own() });
    let mut command = arguments.command.iter().cloned();
    let program = command.next().ok_or_else(|| CliError::usage("no command was given", "give the program after --"))?;
    // `tilewright` denotes this very executable, wherever it is installed.
    let own = std::env::current_exe().ok().filter(|_| program == "tilewright");
    let program = own.map_or(program, Into::into);
    Ok(Plan {
        program,
        arguments: command.collect(),
        processes: arguments.nproc.into(),
        hosts: arguments.hosts.into(),
        host: arguments.host.into(),
        master: (address.unwrap_or_else(|| "127.0.0.1".into()), port),
        job,
        access: access(arguments)?,
        timeouts: Timeouts { grace: arguments.grace, stop: arguments.stop_timeout, save: arguments.save_timeout },
    })
}

/// Determines which processes may join. The result must be the same on all hosts.
fn access(arguments: &Arguments) -> Result<Access> {
    if arguments.unauthenticated {
        return Ok(Access::Unauthenticated);
    }
    if let Some(path) = &arguments.secret_file {
        return Secret::from_file(path).map(Access::Secret).map_err(CliError::Failure);
    }
    match rank::process_access().map_err(|error| CliError::Failure(error.to_string()))? {
        Access::Loopback if arguments.hosts > 1 => Err(CliError::usage(
            "ranks on several hosts need a secret to authenticate each other",
            "create one with `(umask 077; head -c 32 /dev/urandom | base64 > FILE)`, and pass --secret-file FILE, or \
             its text in TILEWRIGHT_SECRET, on all hosts; --unauthenticated runs without a secret",
        )),
        Access::Loopback => match Secret::generate() {
            Ok(secret) => Ok(Access::Secret(secret)),
            Err(error) => Err(CliError::Failure(format!("cannot create a secret for the ranks: {error}"))),
        },
        access => Ok(access),
    }
}

/// Standard output or standard error of this process, written by any thread.
#[derive(Clone)]
enum Terminal {
    /// Holds the kind of the first write error.
    Out(Arc<OnceLock<io::ErrorKind>>),
    Err,
}

impl Write for Terminal {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            // Not through `Output`, which the thread of the command holds.
            Terminal::Out(failed) => write_raw(1, bytes).inspect_err(|error| {
                failed.get_or_init(|| error.kind());
            }),
            Terminal::Err => write_raw(2, bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes to a file descriptor, which must stay open until the process exits.
fn write_raw(descriptor: i32, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: the bytes are valid during the call.
    let written = unsafe { libc::write(descriptor, bytes.as_ptr().cast(), bytes.len()) };
    usize::try_from(written).map_err(|_| io::Error::last_os_error())
}
