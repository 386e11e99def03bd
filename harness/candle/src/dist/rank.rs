//! Reads rank and world size of this process from the variables that its launcher set.
//!
//! | started by | rank and world | on this host | rendezvous address |
//! |---|---|---|---|
//! | `tilewright launch`, torchrun | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `MASTER_ADDR`, `MASTER_PORT` |
//! | Open MPI's mpirun | `OMPI_COMM_WORLD_RANK`, `…_SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `…_LOCAL_SIZE` | as above, else this host |
//! | MPICH's, Intel's mpirun | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` | as above, else this host |
//! | Slurm's srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` | as above, else the step's first host (127.0.0.1 if it is the only one) and a port derived from the job's number |
//!
//! The first row whose variables are set applies. If torchrun's agent listens at `MASTER_PORT`
//! (`TORCHELASTIC_USE_AGENT_STORE=True`), ranks take the port after it. Variables of Tilewright:
//!
//! | variable | values | meaning |
//! |---|---|---|
//! | `TILEWRIGHT_COMM` | `tcp`, `mpi`, `nccl` | the backend of host memory; default `mpi` under mpirun where it is built in, else `tcp`. GPU memory always uses NCCL; `nccl` also requires a GPU |
//! | `TILEWRIGHT_COMM_TIMEOUT` | seconds | how long a collective waits for the slowest rank: 300. Over sockets, ranks take up to 3 s more to find out which rank hangs |
//! | `TILEWRIGHT_START_TIMEOUT` | seconds | how long ranks wait for each other at the start: 60 |
//! | `TILEWRIGHT_JOB` | a word | ranks of different jobs refuse each other; `tilewright launch` sets it |
//! | `TILEWRIGHT_LIFELINE` | a descriptor and its inode | the socket to `tilewright launch`, which sets it and whose ranks read it |
//! | `TILEWRIGHT_SECRET` | at least 16 random bytes | the secret by which ranks authenticate each other; `tilewright launch` generates one |
//! | `TILEWRIGHT_SECRET_FILE` | a file of this user, mode 0600 | holds the secret, if `TILEWRIGHT_SECRET` is unset |
//! | `TILEWRIGHT_UNAUTHENTICATED` | `1` | without a secret, ranks connect on any network, and not on the loopback interface alone |
//!
//! An empty value counts as unset.

use std::ffi::OsString;
use std::time::Duration;

use super::comm::{CommError, Options, Result};
use super::rendezvous::Job;
use super::secret::{Access, Secret};

/// Default rendezvous port; the same as torchrun's.
pub const PORT: u16 = 29500;

/// Upper bound of the world size: every rank allocates lists with an entry per rank.
pub(crate) const MAX_WORLD: usize = 1 << 20;

/// Rank and world size of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankInfo {
    pub rank: usize,
    pub world: usize,
    /// Rank among those of this host; the index of its GPU.
    pub local_rank: usize,
    /// Number of ranks on this host.
    pub local_world: usize,
    /// Host and port where rank 0 listens.
    pub master: (String, u16),
    /// The launcher whose variables were read: `torchrun` (also under `tilewright launch`), `mpirun` or `srun`;
    /// `none` for [`RankInfo::single`].
    pub started_by: &'static str,
}

impl RankInfo {
    /// The only rank of a world of size 1.
    pub fn single() -> RankInfo {
        let master = ("127.0.0.1".into(), PORT);
        RankInfo { rank: 0, world: 1, local_rank: 0, local_world: 1, master, started_by: "none" }
    }
}

/// Backend of collectives between processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendKind {
    Tcp,
    Mpi,
    Nccl,
}

/// Settings from environment variables.
#[derive(Clone, Debug)]
pub struct Environment {
    /// `None` without a launcher: the world size is 1.
    pub rank_info: Option<RankInfo>,
    pub backend: Option<BackendKind>,
    pub options: Options,
    pub job: Job,
}

impl Environment {
    /// Reads the environment of this process.
    ///
    /// # Errors
    /// States the variable with an invalid value, and the expected values.
    pub fn get() -> Result<Environment> {
        expect_text(|name| std::env::var_os(name))?;
        Environment::read(|name| std::env::var(name).ok())
    }

    /// Reads the variables through `lookup`.
    pub(super) fn read(lookup: impl Fn(&str) -> Option<String>) -> Result<Environment> {
        let lookup = |name: &str| lookup(name).filter(|value| !value.is_empty());
        let (backend, options) = communication(&lookup)?;
        let job = Job { name: lookup("TILEWRIGHT_JOB").unwrap_or_default(), access: access(&lookup)? };
        Ok(Environment { rank_info: find_rank_info(&lookup)?, backend, options, job })
    }
}

/// Checks Tilewright's variables of this process, whether or not it is a rank. Secrets are checked only when they are
/// needed.
///
/// # Errors
/// States the variable with an invalid value, and the expected values.
pub fn check_environment() -> Result<()> {
    expect_text(|name| std::env::var_os(name))?;
    let lookup = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    communication(&lookup)?;
    unauthenticated(&lookup)?;
    Ok(())
}

/// Reads the backend and the timeouts.
fn communication(lookup: &impl Fn(&str) -> Option<String>) -> Result<(Option<BackendKind>, Options)> {
    let default = Options::default();
    let backend = match lookup("TILEWRIGHT_COMM").as_deref() {
        None => None,
        Some("tcp") => Some(BackendKind::Tcp),
        Some("mpi") => Some(BackendKind::Mpi),
        Some("nccl") => Some(BackendKind::Nccl),
        Some(other) => return invalid_value("TILEWRIGHT_COMM", other, "tcp, mpi or nccl"),
    };
    let options = Options {
        timeout: duration(lookup, "TILEWRIGHT_COMM_TIMEOUT")?.unwrap_or(default.timeout),
        start_timeout: duration(lookup, "TILEWRIGHT_START_TIMEOUT")?.unwrap_or(default.start_timeout),
    };
    Ok((backend, options))
}

fn invalid_value<T>(name: &str, value: &str, expected: &str) -> Result<T> {
    Err(CommError::Setup(format!("{name} is `{value}`, expected {expected}")))
}

/// Reads which peers may take part in the job.
///
/// # Errors
/// States the variable and the reason; never shows the secret.
fn access(lookup: &impl Fn(&str) -> Option<String>) -> Result<Access> {
    let wrong = |why| CommError::Setup(format!("TILEWRIGHT_SECRET: {why}"));
    if let Some(text) = lookup("TILEWRIGHT_SECRET") {
        return Ok(Access::Secret(Secret::new(&text).map_err(wrong)?));
    }
    if let Some(path) = lookup("TILEWRIGHT_SECRET_FILE") {
        return Ok(Access::Secret(Secret::from_file(path.as_ref()).map_err(CommError::Setup)?));
    }
    unauthenticated(lookup)
}

/// Reads which peers are accepted without a secret.
fn unauthenticated(lookup: &impl Fn(&str) -> Option<String>) -> Result<Access> {
    match lookup("TILEWRIGHT_UNAUTHENTICATED").as_deref() {
        None | Some("0") => Ok(Access::Loopback),
        Some("1") => Ok(Access::Unauthenticated),
        Some(other) => invalid_value("TILEWRIGHT_UNAUTHENTICATED", other, "1, or nothing"),
    }
}

/// Same as [`access`], for this process.
///
/// # Errors
/// See [`access`].
pub fn process_access() -> Result<Access> {
    expect_text(|name| std::env::var_os(name))?;
    access(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
}

/// Tilewright's variables. The values of the last two are never shown.
const VARIABLES: [&str; 8] = [
    "TILEWRIGHT_COMM",
    "TILEWRIGHT_COMM_TIMEOUT",
    "TILEWRIGHT_START_TIMEOUT",
    "TILEWRIGHT_JOB",
    "TILEWRIGHT_LIFELINE",
    "TILEWRIGHT_UNAUTHENTICATED",
    "TILEWRIGHT_SECRET",
    "TILEWRIGHT_SECRET_FILE",
];

/// Fails for a value that is not UTF-8. Such a value would count as unset, and a job without a secret does not
/// authenticate its peers.
fn expect_text(lookup: impl Fn(&str) -> Option<OsString>) -> Result<()> {
    let Some(name) = VARIABLES.iter().find(|name| lookup(name).is_some_and(|value| value.to_str().is_none())) else {
        return Ok(());
    };
    let help = match name.starts_with("TILEWRIGHT_SECRET") {
        true => "\n  help: `head -c 32 /dev/urandom | base64` prints a valid secret",
        false => "",
    };
    Err(CommError::Setup(format!("{name} is not valid UTF-8{help}")))
}

fn number(lookup: &impl Fn(&str) -> Option<String>, name: &str) -> Result<Option<usize>> {
    match lookup(name) {
        None => Ok(None),
        Some(value) => match value.trim().parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => invalid_value(name, &value, "a number from 0"),
        },
    }
}

fn duration(lookup: &impl Fn(&str) -> Option<String>, name: &str) -> Result<Option<Duration>> {
    let Some(value) = lookup(name) else { return Ok(None) };
    match value.trim().parse().ok().filter(|seconds: &f64| *seconds > 0.0 && *seconds < 1e9) {
        Some(seconds) => Ok(Some(Duration::from_secs_f64(seconds))),
        None => invalid_value(name, &value, "a number of seconds above 0, below 10⁹"),
    }
}

/// Variable names of one launcher.
struct LauncherVariables {
    launcher: &'static str,
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
    local_world: &'static str,
}

const LAUNCHERS: [LauncherVariables; 4] = [
    LauncherVariables {
        launcher: "torchrun",
        rank: "RANK",
        world: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_world: "LOCAL_WORLD_SIZE",
    },
    LauncherVariables {
        launcher: "mpirun",
        rank: "OMPI_COMM_WORLD_RANK",
        world: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_world: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    LauncherVariables {
        launcher: "mpirun",
        rank: "PMI_RANK",
        world: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_world: "MPI_LOCALNRANKS",
    },
    // A batch script outside of srun has a SLURM_PROCID too, but no step: the world size of such a process is 1.
    LauncherVariables {
        launcher: "srun",
        rank: "SLURM_PROCID",
        world: "SLURM_STEP_NUM_TASKS",
        local_rank: "SLURM_LOCALID",
        local_world: "SLURM_STEP_TASKS_PER_NODE",
    },
];

fn find_rank_info(lookup: &impl Fn(&str) -> Option<String>) -> Result<Option<RankInfo>> {
    for names in &LAUNCHERS {
        let (Some(rank), Some(world)) = (number(lookup, names.rank)?, number(lookup, names.world)?) else { continue };
        if world > MAX_WORLD {
            return invalid_value(names.world, &world.to_string(), &format!("a number up to {MAX_WORLD}"));
        }
        if rank >= world {
            return invalid_value(names.rank, &rank.to_string(), &format!("a number below {} = {world}", names.world));
        }
        let local_world = match names.launcher {
            "srun" => lookup(names.local_world).and_then(|text| tasks_of_first_node(&text)),
            _ => number(lookup, names.local_world)?,
        };
        let local_rank = number(lookup, names.local_rank)?.unwrap_or(rank);
        if local_rank >= MAX_WORLD {
            return invalid_value(names.local_rank, &local_rank.to_string(), &format!("a number below {MAX_WORLD}"));
        }
        let local_world = local_world.unwrap_or(world).max(local_rank + 1);
        return Ok(Some(RankInfo {
            rank,
            world,
            local_rank,
            local_world,
            master: master(lookup, names.launcher, local_world < world)?,
            started_by: names.launcher,
        }));
    }
    // A process with only one of the two variables would silently train with a world size of 1. Outside of steps, srun
    // sets only one.
    for LauncherVariables { rank, world, .. } in LAUNCHERS.iter().filter(|names| names.launcher != "srun") {
        let set = |name: &str| lookup(name).is_some();
        if set(rank) != set(world) {
            let (there, missing) = if set(rank) { (rank, world) } else { (world, rank) };
            return Err(CommError::Setup(format!(
                "{there} is set and {missing} is not: a rank needs both, a single process neither"
            )));
        }
    }
    Ok(None)
}

/// The address where rank 0 listens. Ranks on the same host use the loopback interface, unless an address is set.
fn master(lookup: &impl Fn(&str) -> Option<String>, by: &str, several: bool) -> Result<(String, u16)> {
    let from_slurm = || {
        let hosts = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
        let first = hosts.iter().find_map(|name| lookup(name)).map(|list| first_host(&list));
        first.filter(|_| by == "srun" && several)
    };
    let host = lookup("MASTER_ADDR").or_else(from_slurm).unwrap_or_else(|| "127.0.0.1".into());
    let port = match number(lookup, "MASTER_PORT")? {
        Some(port) => match u16::try_from(port).ok().filter(|port| *port > 0) {
            Some(port) => port,
            None => return invalid_value("MASTER_PORT", &port.to_string(), "a port from 1 to 65535"),
        },
        // Two jobs on one host need different ports, below the range of ephemeral ports.
        None => match number(lookup, "SLURM_JOB_ID")?.filter(|_| by == "srun") {
            Some(job) => 20000 + (job % 10000) as u16,
            None => PORT,
        },
    };
    // The agent of torchrun listens at its port itself.
    let agent = by == "torchrun" && lookup("TORCHELASTIC_USE_AGENT_STORE").as_deref() == Some("True");
    Ok((host, if agent { port.checked_add(1).unwrap_or(port - 1) } else { port }))
}

/// Returns `node003` for `node[003-006,010],other`.
fn first_host(list: &str) -> String {
    let end = list.find(['[', ',']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    match rest.strip_prefix('[') {
        None => name.to_string(),
        Some(rest) => {
            let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
            let suffix = rest.split_once(']').map_or("", |(_, after)| after.split(',').next().unwrap_or_default());
            format!("{name}{number}{suffix}")
        }
    }
}

/// Returns `4` for `4(x2),1`.
fn tasks_of_first_node(text: &str) -> Option<usize> {
    text.split(['(', ',']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(variables: &[(&str, &str)]) -> Result<Environment> {
        Environment::read(|name| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    fn place(variables: &[(&str, &str)]) -> RankInfo {
        environment(variables).unwrap().rank_info.unwrap()
    }

    #[test]
    fn variables_of_every_launcher_are_read() {
        let torchrun = [
            ("RANK", "5"),
            ("WORLD_SIZE", "8"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "4"),
            ("MASTER_ADDR", "head"),
            ("MASTER_PORT", "1234"),
        ];
        let seen = place(&torchrun);
        assert_eq!((seen.rank, seen.world, seen.local_rank, seen.local_world), (5, 8, 1, 4));
        assert_eq!((seen.master, seen.started_by), (("head".into(), 1234), "torchrun"));
        let agent = [torchrun.as_slice(), &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(place(&agent).master, ("head".into(), 1235));
        let mpirun = [
            ("OMPI_COMM_WORLD_RANK", "2"),
            ("OMPI_COMM_WORLD_SIZE", "3"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "0"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
        ];
        let seen = place(&mpirun);
        assert_eq!((seen.rank, seen.world, seen.local_rank, seen.local_world), (2, 3, 0, 1));
        assert_eq!((seen.master, seen.started_by), (("127.0.0.1".into(), PORT), "mpirun"));
        let seen = place(&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]);
        assert_eq!((seen.rank, seen.world, seen.local_rank, seen.local_world), (1, 2, 1, 2));
        let slurm = [
            ("SLURM_PROCID", "6"),
            ("SLURM_STEP_NUM_TASKS", "8"),
            ("SLURM_LOCALID", "2"),
            ("SLURM_STEP_TASKS_PER_NODE", "4(x2)"),
            ("SLURM_STEP_NODELIST", "gpu[007-008]"),
            ("SLURM_JOB_ID", "123456"),
        ];
        let seen = place(&slurm);
        assert_eq!((seen.rank, seen.world, seen.local_rank, seen.local_world), (6, 8, 2, 4));
        assert_eq!((seen.master, seen.started_by), (("gpu007".into(), 23456), "srun"));
        let one_host = slurm.map(|(name, value)| match name {
            "SLURM_STEP_TASKS_PER_NODE" => (name, "8"),
            "SLURM_STEP_NODELIST" => (name, "gpu007"),
            _ => (name, value),
        });
        assert_eq!(place(&one_host).master, ("127.0.0.1".into(), 23456));
    }

    #[test]
    fn a_process_without_rank_variables_is_single() {
        assert_eq!(environment(&[]).unwrap().rank_info, None);
        // A batch script outside of srun.
        assert_eq!(environment(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]).unwrap().rank_info, None);
        assert_eq!(environment(&[("RANK", ""), ("WORLD_SIZE", "")]).unwrap().rank_info, None);
    }

    #[test]
    fn rank_without_world_is_an_error() {
        let error = |variables: &[_]| environment(variables).unwrap_err().to_string();
        assert!(error(&[("RANK", "1")]).starts_with("RANK is set and WORLD_SIZE is not"));
        assert!(error(&[("WORLD_SIZE", "2"), ("RANK", "")]).starts_with("WORLD_SIZE is set and RANK is not"));
        assert!(error(&[("PMI_SIZE", "2")]).starts_with("PMI_SIZE is set and PMI_RANK is not"));
        // Variables of an outer launcher are ignored.
        let inside = [("WORLD_SIZE", "8"), ("OMPI_COMM_WORLD_RANK", "1"), ("OMPI_COMM_WORLD_SIZE", "2")];
        assert_eq!(environment(&inside).unwrap().rank_info.unwrap().world, 2);
    }

    #[test]
    fn invalid_values_are_named() {
        let error = |variables: &[_]| environment(variables).unwrap_err().to_string();
        assert_eq!(error(&[("RANK", "x"), ("WORLD_SIZE", "2")]), "RANK is `x`, expected a number from 0");
        assert_eq!(error(&[("RANK", "2"), ("WORLD_SIZE", "2")]), "RANK is `2`, expected a number below WORLD_SIZE = 2");
        let world = error(&[("RANK", "0"), ("WORLD_SIZE", "18446744073709551615")]);
        assert_eq!(world, "WORLD_SIZE is `18446744073709551615`, expected a number up to 1048576");
        let local = error(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "18446744073709551615")]);
        assert_eq!(local, "LOCAL_RANK is `18446744073709551615`, expected a number below 1048576");
        let port = error(&[("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_PORT", "70000")]);
        assert_eq!(port, "MASTER_PORT is `70000`, expected a port from 1 to 65535");
        assert_eq!(error(&[("TILEWRIGHT_COMM", "gloo")]), "TILEWRIGHT_COMM is `gloo`, expected tcp, mpi or nccl");
        assert!(error(&[("TILEWRIGHT_COMM_TIMEOUT", "-1")]).contains("seconds above 0"));
        let short = error(&[("TILEWRIGHT_SECRET", "hunter2")]);
        assert!(short.starts_with("TILEWRIGHT_SECRET: ") && !short.contains("hunter2"), "{short}");
        assert!(error(&[("TILEWRIGHT_SECRET_FILE", "/no/such/file")]).contains("/no/such/file"));
        let word = error(&[("TILEWRIGHT_UNAUTHENTICATED", "yes")]);
        assert_eq!(word, "TILEWRIGHT_UNAUTHENTICATED is `yes`, expected 1, or nothing");
    }

    #[test]
    fn secret_sources_have_a_precedence() {
        let access = |variables: &[_]| environment(variables).unwrap().job.access;
        let secret = |text| Access::Secret(Secret::new(text).unwrap());
        let (text, open) = (("TILEWRIGHT_SECRET", "0123456789abcdef"), ("TILEWRIGHT_UNAUTHENTICATED", "1"));
        assert_eq!(access(&[open, ("TILEWRIGHT_SECRET_FILE", "/no/such/file"), text]), secret("0123456789abcdef"));
        assert_eq!(access(&[open, ("TILEWRIGHT_SECRET", "")]), Access::Unauthenticated);
        assert_eq!(access(&[("TILEWRIGHT_UNAUTHENTICATED", "0")]), Access::Loopback);
        assert_eq!(access(&[]), Access::Loopback);
    }

    #[test]
    fn a_non_utf8_secret_is_an_error() {
        use std::os::unix::ffi::OsStringExt;

        for variable in VARIABLES {
            let bytes = |name: &str| (name == variable).then(|| OsString::from_vec(vec![0xff; 32]));
            let message = expect_text(bytes).unwrap_err().to_string();
            assert!(message.starts_with(&format!("{variable} is not valid UTF-8")), "{message}");
        }
        expect_text(|_| Some("0123456789abcdef".into())).unwrap();
    }

    /// Checks every variable in the table of the module page.
    #[test]
    fn every_own_variable_refuses_nonsense() {
        let refused = [
            ("TILEWRIGHT_COMM", "x", "tcp, mpi or nccl"),
            ("TILEWRIGHT_COMM_TIMEOUT", "soon", "a number of seconds"),
            ("TILEWRIGHT_START_TIMEOUT", "0", "a number of seconds"),
            ("TILEWRIGHT_UNAUTHENTICATED", "yes", "expected 1, or nothing"),
            ("TILEWRIGHT_SECRET", "short", "16"),
            ("TILEWRIGHT_SECRET_FILE", "/no/such/file", "/no/such/file"),
        ];
        // Accepts any word; the other one is tested where the harness reads it.
        let others = ["TILEWRIGHT_JOB", "TILEWRIGHT_LIFELINE"];
        let rows: Vec<&str> = include_str!("rank.rs")
            .lines()
            .filter_map(|line| line.strip_prefix("//! | `TILEWRIGHT")?.split('`').next())
            .collect();
        assert_eq!(rows.len(), VARIABLES.len(), "{rows:?}");
        for name in VARIABLES {
            assert!(rows.iter().any(|row| name.ends_with(row)), "{name} is not in the table");
            assert!(
                others.contains(&name) || refused.iter().any(|(other, ..)| *other == name),
                "what does {name} refuse?"
            );
        }
        for (name, value, expected) in refused {
            let message = environment(&[(name, value)]).unwrap_err().to_string();
            assert!(message.contains(name) || name == "TILEWRIGHT_SECRET_FILE", "{message}");
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn host_lists_of_slurm() {
        let hosts = ["a", "a,b", "n[3-4]", "n[003,007-9],x", "rack[1-2]-ib,y"];
        assert_eq!(hosts.map(first_host), ["a", "a", "n3", "n003", "rack1-ib"]);
    }
}
