//! One run: fault injection, resume, and comparison.

use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use libc::{SIGCONT, SIGKILL};

use crate::job::{InjectionPoint, Job, Place, how, send};
use crate::plan::{Fault, Form, Phase, PlannedRun, STEPS};
use crate::state::{self, State};

/// Relative tolerance of losses with another world size, which changes the order of sums.
const TOLERANCE: f64 = 1e-4;
/// Time for a launcher to forward a signal.
const FORWARD_TIMEOUT: Duration = Duration::from_secs(20);
/// Exit code after a stop signal, with the state saved.
const STOPPED: i32 = 75;

/// An undisturbed run.
#[derive(Clone)]
struct Reference {
    state: State,
    losses: Vec<f64>,
}

pub struct Runner {
    folder: tempfile::TempDir,
    /// By number of ranks and shard mode.
    references: HashMap<(usize, Option<&'static str>), Reference>,
    exact: usize,
    close: usize,
    loaded: usize,
    refused: usize,
}

type Outcome<T> = Result<T, String>;

fn failed(error: std::io::Error) -> String {
    error.to_string()
}

impl Runner {
    pub fn new() -> Runner {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = folder.path().join("cache");
        fs::create_dir(&cache).expect("a folder");
        let text = "one fish two fish red fish blue fish. black fish blue fish old fish new fish. ".repeat(300);
        fs::write(cache.join("text"), text).expect("a text");
        Runner { folder, references: HashMap::new(), exact: 0, close: 0, loaded: 0, refused: 0 }
    }

    /// Formats what was compared.
    pub fn summary(&self) -> String {
        format!(
            "the same bits at the end: {}; losses within {TOLERANCE:e} with another world size: {}; the same state loaded by one rank: {}; flipped \
             bits refused: {}",
            self.exact, self.close, self.loaded, self.refused
        )
    }

    fn place(&self, name: &str) -> Outcome<Place> {
        let folder = self.folder.path().join(name);
        fs::create_dir(&folder).map_err(failed)?;
        Ok(Place { folder, cache: self.folder.path().join("cache") })
    }

    fn reference(&mut self, form: Form) -> Outcome<Reference> {
        let Form { ranks, shard, .. } = form;
        if let Some(known) = self.references.get(&(ranks, shard)) {
            return Ok(known.clone());
        }
        let place = self.place(&format!("reference-{ranks}-{}", shard.unwrap_or("whole")))?;
        finish(&place, Form { launch: false, ..form }, "")?;
        let run = place.run();
        state::expect_files(&run)?;
        let reference = Reference { state: state::last(&run)?, losses: state::losses(&run)? };
        self.references.insert((ranks, shard), reference.clone());
        Ok(reference)
    }

    /// Runs one plan; returns how the run ended after the fault.
    pub fn run(&mut self, drawn: &PlannedRun) -> Outcome<String> {
        let reference = self.reference(drawn.form)?;
        let place = self.place(&format!("run-{}", drawn.number))?;
        let outcome = self.run_with_fault(drawn, &place, &reference);
        place.clear();
        match &outcome {
            Ok(_) => fs::remove_dir_all(&place.folder).map_err(failed)?,
            Err(_) => drop(place.expect_no_processes()),
        }
        outcome
    }

    fn run_with_fault(&mut self, drawn: &PlannedRun, place: &Place, reference: &Reference) -> Outcome<String> {
        let ended = hit(drawn, place)?;
        place.expect_no_processes()?;
        let run = place.run();
        if drawn.fault == Fault::FlippedBit {
            self.refused += usize::from(flipped(place, &run, drawn.more)?);
        }
        let then = if drawn.fault.is_survived() { drawn.form } else { drawn.then };
        if !drawn.fault.is_survived() {
            self.loaded += usize::from(loaded(place, drawn.form, then)?);
            finish(place, then, "")?;
            place.expect_no_processes()?;
        }
        state::expect_files(&run)?;
        let losses = state::losses(&run)?;
        if then.ranks == drawn.form.ranks {
            if losses != reference.losses {
                return Err("losses differ from those of the undisturbed run".into());
            }
            let found = state::last(&run)?;
            if found != reference.state {
                let names = found.iter().filter(|(name, hash)| reference.state.get(*name) != Some(hash));
                let names: Vec<&String> = names.map(|(name, _)| name).collect();
                return Err(format!("bits differ from those of the undisturbed run: {names:?}"));
            }
            self.exact += 1;
        } else {
            let apart =
                losses.iter().zip(&reference.losses).map(|(found, expected)| (found - expected).abs() / expected);
            let most = apart.fold(0.0, f64::max);
            if !(most <= TOLERANCE) {
                return Err(format!("with {then}, losses differ by {most:e}"));
            }
            self.close += 1;
        }
        Ok(ended.join(", "))
    }
}

/// Trains to the end, from the current state.
fn finish(place: &Place, form: Form, more: &str) -> Outcome<()> {
    let mut job = place.start(form, None, false, more).map_err(failed)?;
    let ended = job.wait()?;
    match ended.iter().all(ExitStatus::success) {
        true => Ok(()),
        false => Err(format!("it does not resume with {form}:\n{}", job.output())),
    }
}

/// Starts a run and injects the fault; returns how its processes ended.
fn hit(drawn: &PlannedRun, place: &Place) -> Outcome<Vec<String>> {
    let PlannedRun { form, fault, phase, count, rank, .. } = *drawn;
    let full = fault == Fault::FullDisk;
    let words = format!("{} {count} {} {}", phase.name(), if full { "full" } else { "stop" }, place.run().display());
    let piped = fault == Fault::ClosedPipe;
    let mut job = place.start(form, Some(&InjectionPoint { rank, words }), piped, "").map_err(failed)?;
    let pid = place.wait_for_hit(&mut job, !full)?;
    let made = state::steps(&place.run());
    apply_fault(drawn, place, &mut job, pid)?;
    let ended = job.wait()?;
    let output = job.output();
    let hows: Vec<String> = ended.iter().map(|status| how(*status)).collect();
    let expect = |good: bool, what: &str| match good {
        true => Ok(()),
        false => Err(format!("{what}, but it ended with {hows:?}:\n{output}")),
    };
    expect(!output.contains("panicked") && !hows.iter().any(|how| how == "SIGABRT" || how == "SIGSEGV"), "no panic")?;
    let all = |codes: &[i32]| ended.iter().all(|status| status.code().is_some_and(|code| codes.contains(&code)));
    if fault.is_survived() {
        expect(all(&[0]), "the run continues to its end")?;
    }
    // Near the end of a run a stop signal may come too late, and a full disk may have no effect: at the last renames,
    // and at phases of a step, some of which are missed on a busy machine.
    let late: &[i32] = if phase == Phase::Rename || made + 2 >= STEPS { &[0] } else { &[] };
    // Before the first step there is nothing to save.
    if fault.stop().is_some() && state::has_begun(&place.run()) {
        expect(all(&[&[STOPPED], late].concat()), "the run stops with its state saved")?;
    }
    if full {
        let (named, codes) = (output.contains("the disk is full"), [&[1], late].concat());
        expect(all(&codes) && (named || all(late)), "a full disk is reported")?;
    }
    if form.launch && !drawn.to_launcher && matches!(fault, Fault::Kill | Fault::StopKill) {
        expect(output.contains(&format!("rank {rank} failed first")), "the killed rank is named")?;
    }
    Ok(hows)
}

/// Applies the fault while the process `pid` is stopped at the chosen point.
fn apply_fault(drawn: &PlannedRun, place: &Place, job: &mut Job, pid: i32) -> Outcome<()> {
    let target = if drawn.to_launcher { job.children[0].id() as i32 } else { pid };
    let a_moment = Duration::from_millis(50 + drawn.more % 300);
    match drawn.fault {
        Fault::Interrupt | Fault::Terminate | Fault::HangUp => {
            send(target, drawn.fault.stop().unwrap_or_default());
            // A busy launcher may receive the signal only after the remaining steps.
            let began = Instant::now();
            while drawn.to_launcher
                && !job.output().contains("forwarded to all ranks")
                && began.elapsed() < FORWARD_TIMEOUT
            {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        Fault::Kill => send(target, SIGKILL),
        Fault::StopContinue => std::thread::sleep(a_moment),
        Fault::StopKill => {
            std::thread::sleep(a_moment);
            send(pid, SIGKILL);
        }
        Fault::ClosedPipe => job.readers.clear(),
        // Simulated from here on; the process was not stopped.
        Fault::FullDisk => return Ok(()),
        Fault::SecondRun => second_run(place, drawn.more)?,
        Fault::FlippedBit => send(pid, SIGKILL),
        Fault::HostileClient => {
            let silent: Vec<TcpStream> = hostile(job.port, drawn.more);
            send(pid, SIGCONT);
            // The clients stay connected for a while after the rank continues.
            std::thread::sleep(a_moment);
            drop(silent);
        }
    }
    send(pid, SIGCONT);
    Ok(())
}

/// Checks that a second run in the same folder is refused.
fn second_run(place: &Place, more: u64) -> Outcome<()> {
    let form = Form { ranks: 1 + (more % 2) as usize, launch: more % 2 == 1, shard: None };
    let mut second = place.start(form, None, false, "").map_err(failed)?;
    let ended = second.wait()?;
    let refused = ended.iter().all(|status| status.code() == Some(1)) && second.output().contains("another run");
    if refused { Ok(()) } else { Err(format!("a second run was not refused:\n{}", second.output())) }
}

/// Clients that send invalid handshakes, or nothing.
fn hostile(port: u16, more: u64) -> Vec<TcpStream> {
    let mut sockets = Vec::new();
    for number in 0..20_u64 {
        let Ok(mut socket) = TcpStream::connect(("127.0.0.1", port)) else { break };
        let noise: Vec<u8> = (0..more % 200).map(|i| (i * 31 + number * 17 + more) as u8).collect();
        let said = match number % 4 {
            0 => Vec::new(),
            1 => noise,
            2 => [b"twmeet02".as_slice(), &noise].concat(),
            _ => b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        };
        let _ = socket.write_all(&said);
        sockets.push(socket);
    }
    sockets
}

/// Flips a bit of the newest checkpoint, checks that the checkpoint is refused by name, and replaces it by an older
/// one. Returns false if there is no checkpoint.
fn flipped(place: &Place, run: &Path, more: u64) -> Outcome<bool> {
    if state::flip(run, more).is_none() {
        return Ok(false);
    }
    let form = Form { ranks: 1, launch: false, shard: None };
    let mut job = place.start(form, None, false, "").map_err(failed)?;
    let ended = job.wait()?;
    let output = job.output();
    let named = output.lines().any(|line| line.contains("error: ") && line.contains("run/checkpoint.safetensors"));
    if !ended.iter().all(|status| status.code() == Some(1)) || !named || output.contains("panicked") {
        return Err(format!(
            "a checkpoint with a flipped bit (number {more}) was not refused with its name:\n{output}"
        ));
    }
    state::take_older(run)?;
    Ok(true)
}

/// Checks that one rank loads the whole newest checkpoint, before the run resumes with another world size. Returns
/// whether this was checked.
fn loaded(place: &Place, form: Form, then: Form) -> Outcome<bool> {
    let run = place.run();
    if then.ranks == form.ranks || form.ranks == 1 || !run.join("checkpoint.safetensors").exists() {
        return Ok(false);
    }
    let (expected, step) = state::merged(&run)?;
    if step >= STEPS {
        return Ok(false);
    }
    // A copy of the folder: the run itself resumes with another world size.
    let copy = Place { folder: place.folder.join("copy"), cache: place.cache.clone() };
    fs::create_dir_all(copy.run()).map_err(failed)?;
    for name in state::names(&run)? {
        fs::copy(run.join(&name), copy.run().join(&name)).map_err(failed)?;
    }
    finish(&copy, Form { ranks: 1, launch: false, shard: None }, "--export exported")?;
    let (found, _) = state::contents(&copy.folder.join("exported/start.safetensors"))?;
    match found.iter().find(|(name, bytes)| expected.get(*name) != Some(bytes)) {
        None if found.len() == expected.len() => Ok(true),
        None => Err(format!("one rank loads {} tensors of the {} that {form} saved", found.len(), expected.len())),
        Some((name, _)) => Err(format!("one rank loads `{name}` with other values than {form} saved")),
    }
}
