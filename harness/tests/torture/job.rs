//! Training jobs: start, wait, and find remaining processes.

use std::fs::{self, File};
use std::io::{self, PipeReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::inject;
use crate::plan::{Form, SAVE_EVERY, STEPS};

/// Environment variable with the run's folder, in all processes of a run; it also makes this program act as
/// `tilewright`.
pub const MARK: &str = "TORTURE_MARK";
/// Timeout of a job, far longer than it takes.
pub const LIMIT: Duration = Duration::from_secs(150);

/// Folders of a run.
pub struct Place {
    pub folder: PathBuf,
    /// Kernel cache of all runs.
    pub cache: PathBuf,
}

/// The point at which a rank injects its fault.
pub struct InjectionPoint {
    pub rank: usize,
    pub words: String,
}

/// Processes of one training.
pub struct Job {
    pub children: Vec<Child>,
    /// Rendezvous port.
    pub port: u16,
    /// Read ends of output pipes that are never read.
    pub readers: Vec<PipeReader>,
    log: PathBuf,
}

impl Place {
    /// The run's folder.
    pub fn run(&self) -> PathBuf {
        self.folder.join("run")
    }

    /// Starts a training, or resumes if there is a checkpoint.
    pub fn start(&self, form: Form, point: Option<&InjectionPoint>, piped: bool, more: &str) -> io::Result<Job> {
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let resume = if self.run().join("checkpoint.safetensors").exists() { "--resume" } else { "" };
        let shard = form.shard.map(|mode| format!("--shard {mode}")).unwrap_or_default();
        let train = format!(
            "train --data {} --out run --layers 1 --d-model 32 --d-ff 64 --heads 2 --context 32 --vocab-size 300 --batch 12 --lr 0.003 \
             --steps {STEPS} --save-every {SAVE_EVERY} --evaluate-every 8 --evaluate-sequences 6 {shard} {resume} {more}",
            self.cache.join("text").display()
        );
        let own = std::env::current_exe()?;
        let log = self.folder.join("output");
        let mut job = Job { children: Vec::new(), port, readers: Vec::new(), log };
        let mut start = |words: String, variables: &[(&str, String)]| -> io::Result<()> {
            let mut command = self.command(&own, &words);
            command.envs(variables.iter().map(|(name, value)| (*name, value)));
            if let Some(InjectionPoint { rank, words }) = point {
                command.env(inject::MOMENT, words).env(inject::RANK, rank.to_string());
            }
            if piped {
                let (reader, writer) = io::pipe()?;
                command.stdout(writer.try_clone()?).stderr(writer);
                job.readers.push(reader);
            } else {
                let file = File::options().create(true).append(true).open(&job.log)?;
                command.stdout(file.try_clone()?).stderr(file);
            }
            job.children.push(command.spawn()?);
            Ok(())
        };
        let ranks = form.ranks;
        match form.launch {
            true => start(format!("launch --nproc {ranks} --master-port {port} -- {} {train}", own.display()), &[])?,
            false if ranks == 1 => start(train, &[])?,
            false => {
                for rank in 0..ranks {
                    let numbers =
                        [("RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", ranks)];
                    let mut variables: Vec<(&str, String)> =
                        numbers.iter().map(|(name, number)| (*name, number.to_string())).collect();
                    variables.extend([("MASTER_ADDR", "127.0.0.1".into()), ("MASTER_PORT", port.to_string())]);
                    start(train.clone(), &variables)?;
                }
            }
        }
        Ok(job)
    }

    fn command(&self, own: &Path, words: &str) -> Command {
        let mut command = Command::new(own);
        command.args(words.split_whitespace()).current_dir(&self.folder).stdin(Stdio::null());
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            let of_ranks = ["RANK", "WORLD", "LOCAL_", "MASTER_", "TILEWRIGHT_", "OMPI_", "PMI_", "SLURM_", "TORTURE_"];
            if of_ranks.iter().any(|begin| name.starts_with(begin)) {
                command.env_remove(name);
            }
        }
        command.env("TILEWRIGHT_DEVICE", "cpu").env("TILEWRIGHT_CACHE", &self.cache).env(MARK, &self.folder);
        command
            .env("TILEWRIGHT_COMM_TIMEOUT", "60")
            .env("TILEWRIGHT_START_TIMEOUT", "30")
            .env("RAYON_NUM_THREADS", "2");
        // SAFETY: signal is safe to call between fork and exec. The parent of this program may ignore some of them.
        unsafe {
            command.pre_exec(|| {
                for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGUSR1] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                Ok(())
            });
        }
        command
    }

    /// Processes of this run.
    pub fn processes(&self) -> Vec<i32> {
        let mark = format!("{MARK}={}", self.folder.display());
        let is_marked = |pid: &str| {
            let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
            environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes()).then(|| pid.parse().ok())?
        };
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        entries.filter_map(|entry| is_marked(entry.file_name().to_str()?)).collect()
    }

    /// Kills remaining processes of a failed run.
    pub fn clear(&self) {
        for pid in self.processes() {
            send(pid, libc::SIGKILL);
        }
    }

    /// Waits until the fault's phase is reached; returns the stopped process.
    pub fn wait_for_hit(&self, job: &mut Job, stops: bool) -> Result<i32, String> {
        let place = self.folder.join(inject::INJECTED);
        let began = Instant::now();
        loop {
            if let Some(pid) = fs::read_to_string(&place).ok().and_then(|text| text.parse().ok()) {
                let state = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
                let state = state.rsplit(')').next().unwrap_or_default().trim_start().chars().next();
                if !stops || state == Some('T') {
                    return Ok(pid);
                }
            } else if job.has_ended() {
                return Err(format!("it ended before the fault was injected\n{}", job.output()));
            }
            if began.elapsed() > LIMIT {
                return Err(format!("the phase of the fault was not reached\n{}", job.output()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Fails if processes remain.
    pub fn expect_no_processes(&self) -> Result<(), String> {
        let began = Instant::now();
        while !self.processes().is_empty() {
            if began.elapsed() > Duration::from_secs(20) {
                return Err(format!("processes remain: {:?}", self.processes()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }
}

impl Job {
    fn has_ended(&mut self) -> bool {
        self.children.iter_mut().all(|child| matches!(child.try_wait(), Ok(Some(_))))
    }

    /// Waits for all processes; returns their exit statuses.
    pub fn wait(&mut self) -> Result<Vec<ExitStatus>, String> {
        let began = Instant::now();
        while !self.has_ended() {
            if began.elapsed() > LIMIT {
                return Err(format!("it did not end within {LIMIT:?}\n{}", self.output()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(self.children.iter_mut().filter_map(|child| child.wait().ok()).collect())
    }

    /// Output of this job and earlier ones so far.
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }
}

/// Formats an exit status: `0`, `SIGKILL`.
pub fn how(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => tilewright_harness::signals::name(signal),
        None => status.code().unwrap_or(-1).to_string(),
    }
}

pub fn send(pid: i32, signal: i32) {
    // SAFETY: a process with the marker of one of our runs.
    unsafe { libc::kill(pid, signal) };
}
