//! The fault of each run, drawn from a seed and the run's number only.

use std::fmt;

use libc::{SIGHUP, SIGINT, SIGTERM};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// Number of steps of every run.
pub const STEPS: u64 = 24;
/// Steps between checkpoints.
pub const SAVE_EVERY: u64 = 4;

/// Phase of a rank in which the fault is injected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Rendezvous,
    Forward,
    Backward,
    Collective,
    Update,
    Write,
    Rename,
}

impl Phase {
    pub const ALL: [Phase; 7] = [
        Phase::Rendezvous,
        Phase::Forward,
        Phase::Backward,
        Phase::Collective,
        Phase::Update,
        Phase::Write,
        Phase::Rename,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Phase::Rendezvous => "rendezvous",
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Collective => "collective",
            Phase::Update => "update",
            Phase::Write => "write",
            Phase::Rename => "rename",
        }
    }
}

/// The injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    Interrupt,
    Terminate,
    HangUp,
    Kill,
    /// SIGSTOP, then SIGCONT.
    StopContinue,
    /// SIGSTOP, then SIGKILL.
    StopKill,
    ClosedPipe,
    FullDisk,
    SecondRun,
    FlippedBit,
    HostileClient,
}

impl Fault {
    pub const ALL: [Fault; 11] = [
        Fault::Interrupt,
        Fault::Terminate,
        Fault::HangUp,
        Fault::Kill,
        Fault::StopContinue,
        Fault::StopKill,
        Fault::ClosedPipe,
        Fault::FullDisk,
        Fault::SecondRun,
        Fault::FlippedBit,
        Fault::HostileClient,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Fault::Interrupt => "SIGINT",
            Fault::Terminate => "SIGTERM",
            Fault::HangUp => "SIGHUP",
            Fault::Kill => "SIGKILL",
            Fault::StopContinue => "SIGSTOP, SIGCONT",
            Fault::StopKill => "SIGSTOP, SIGKILL",
            Fault::ClosedPipe => "closed pipe",
            Fault::FullDisk => "full disk",
            Fault::SecondRun => "second run",
            Fault::FlippedBit => "flipped bit",
            Fault::HostileClient => "hostile client",
        }
    }

    /// The signal that asks a run to stop.
    pub fn stop(self) -> Option<i32> {
        match self {
            Fault::Interrupt => Some(SIGINT),
            Fault::Terminate => Some(SIGTERM),
            Fault::HangUp => Some(SIGHUP),
            _ => None,
        }
    }

    /// Whether the run continues to its end unaffected.
    pub fn is_survived(self) -> bool {
        matches!(self, Fault::StopContinue | Fault::ClosedPipe | Fault::SecondRun | Fault::HostileClient)
    }

    fn fits(self, phase: Phase, ranks: usize) -> bool {
        match phase {
            // Before the rendezvous the folder is not locked, and nothing is written.
            Phase::Rendezvous => ranks > 1 && !matches!(self, Fault::SecondRun | Fault::FullDisk | Fault::FlippedBit),
            Phase::Collective => ranks > 1 && self != Fault::HostileClient,
            _ => self != Fault::HostileClient,
        }
    }
}

/// How ranks are started, and how the optimizer is sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Form {
    pub ranks: usize,
    pub launch: bool,
    pub shard: Option<&'static str>,
}

/// A planned run.
#[derive(Clone, Debug)]
pub struct PlannedRun {
    pub number: u64,
    pub form: Form,
    pub fault: Fault,
    pub phase: Phase,
    /// Which occurrence of the phase, from 1.
    pub count: u64,
    /// The rank with the fault.
    pub rank: usize,
    /// Whether a signal goes to the launcher, if there is one, instead of the rank.
    pub to_launcher: bool,
    /// How the run resumes: the same, or with another world size.
    pub then: Form,
    /// Random bits for other choices: an offset in a file, a time.
    pub more: u64,
}

impl PlannedRun {
    pub fn new(seed: u64, number: u64) -> PlannedRun {
        let mut random = StdRng::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number);
        // Cycles through all faults, and through all phases of each fault.
        let fault = Fault::ALL[(number % 11) as usize];
        let least = if fault == Fault::HostileClient { 2 } else { 1 };
        let form = form(&mut random, least);
        let phases: Vec<Phase> = Phase::ALL.into_iter().filter(|phase| fault.fits(*phase, form.ranks)).collect();
        let phase = phases[((number / 11 + number % 11) % phases.len() as u64) as usize];
        let writes = matches!(phase, Phase::Write | Phase::Rename);
        let rank = match () {
            // Rank 0 writes; the others only their shards.
            () if (writes || fault == Fault::FullDisk) && form.shard.is_none() => 0,
            () => random.random_range(0..form.ranks),
        };
        let count = match phase {
            // Rank 0 listens once; the others connect, and listen for each other.
            Phase::Rendezvous => 1,
            Phase::Write => random.random_range(1..=4),
            Phase::Rename => random.random_range(1..=8),
            // A checkpoint exists by then.
            _ if fault == Fault::FlippedBit => random.random_range(2 * SAVE_EVERY..STEPS - 6),
            _ => random.random_range(1..STEPS - 6),
        };
        let to_launcher = form.launch && random.random_bool(0.6);
        let then = if random.random_bool(0.75) { form } else { other(&mut random, form) };
        PlannedRun { number, form, fault, phase, count, rank, to_launcher, then, more: random.random() }
    }
}

fn form(random: &mut StdRng, least: usize) -> Form {
    let ranks = random.random_range(least..=4);
    let shard = [None, Some("zero1"), Some("broadcast")][random.random_range(0..3)].filter(|_| ranks > 1);
    Form { ranks, launch: random.random_bool(0.5), shard }
}

fn other(random: &mut StdRng, than: Form) -> Form {
    loop {
        let form = form(random, 1);
        if form.ranks != than.ranks {
            return form;
        }
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.ranks, if self.ranks == 1 { "rank" } else { "ranks" })?;
        write!(f, "{}", if self.launch { " under launch" } else { " alone" })?;
        self.shard.map_or(Ok(()), |shard| write!(f, ", {shard}"))
    }
}

impl fmt::Display for PlannedRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlannedRun { number, form, fault, phase, count, rank, then, .. } = self;
        write!(f, "run {number}: {form}: {} in {} {count} of rank {rank}", fault.name(), phase.name())?;
        if fault.stop().is_some() || *fault == Fault::Kill {
            write!(f, ", sent to {}", if self.to_launcher { "the launcher" } else { "the rank" })?;
        }
        if then != form { write!(f, "; then {then}") } else { Ok(()) }
    }
}
