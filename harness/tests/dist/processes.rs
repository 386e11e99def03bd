//! Ranks that are processes, started by `tilewright launch`.

use std::process::Command;
use std::time::{Duration, Instant};

use tilewright_harness::dist;
use tilewright_harness::dist::comm::{CommError, Communicator, Reduce};
use tilewright_harness::dist::rank::Environment;

use crate::{collectives, training};

/// What a rank of a test does; a launcher runs this test alone, in this same program, with `TILEWRIGHT_TEST_RANK` set.
#[test]
fn program_of_a_rank() {
    let Ok(what) = std::env::var("TILEWRIGHT_TEST_RANK") else { return };
    let (what, who) = what.split_once(':').unwrap_or((&what, ""));
    let mut environment = Environment::get().unwrap();
    if what == "hang" {
        environment.options.timeout = Duration::from_secs(1);
    }
    let outcome = dist::connect_to(&environment).and_then(|comm| {
        println!("carried by {}", comm.back_end());
        match what {
            "suite" => collectives::check(&comm),
            "train" => training::check(comm),
            "disagree" if comm.rank() == 2 => return comm.barrier(),
            "disagree" => return comm.all_reduce(&mut [1.0_f32], Reduce::Sum),
            _ => return fail(comm, what, who),
        }
        Ok(())
    });
    if let Err(error) = outcome {
        eprintln!("{error}");
        std::process::exit(3);
    }
}

/// Works on, until rank `who` does `what`.
fn fail(comm: Communicator, what: &str, who: &str) -> Result<(), CommError> {
    let chosen = comm.rank().to_string() == who;
    for step in 1.. {
        if chosen && step == 5 {
            match what {
                // SAFETY: ends this very process.
                "kill" => drop(unsafe { libc::kill(std::process::id() as i32, libc::SIGKILL) }),
                "hang" => std::thread::sleep(Duration::from_secs(600)),
                "exit" => std::process::exit(7),
                "leave" => return Ok(()),
                _ => std::panic::resume_unwind(Box::new("thrown")),
            }
        }
        comm.all_reduce(&mut vec![1.0_f32; 10_000], Reduce::Sum)?;
    }
    Ok(())
}

struct Ran {
    code: Option<i32>,
    text: String,
    took: Duration,
}

/// Launches this program's `program_of_a_rank`.
fn launch(ranks: usize, what: &str) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(["launch", "--grace", "4", "--nproc", &ranks.to_string(), "--"]);
    command.arg(std::env::current_exe().unwrap()).args(["processes::program_of_a_rank", "--exact", "--nocapture"]);
    command.env("TILEWRIGHT_TEST_RANK", what).env("TILEWRIGHT_COMM_TIMEOUT", "60");
    for name in ["MASTER_ADDR", "MASTER_PORT", "TILEWRIGHT_COMM", "TILEWRIGHT_JOB", "RANK", "WORLD_SIZE"] {
        command.env_remove(name);
    }
    let began = Instant::now();
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    Ran { code: output.status.code(), text, took: began.elapsed() }
}

#[test]
fn all_collectives_between_processes() {
    for ranks in [2, 3] {
        let ran = launch(ranks, "suite");
        assert_eq!(ran.code, Some(0), "{}", ran.text);
        for rank in 0..ranks {
            assert!(ran.text.contains(&format!("[rank {rank}] test result: ok. 1 passed")), "{}", ran.text);
        }
    }
}

#[test]
fn training_in_processes_gives_the_weights_of_training_on_one_rank() {
    for ranks in [2, 4] {
        let ran = launch(ranks, "train");
        assert_eq!(ran.code, Some(0), "{}", ran.text);
        assert_eq!(ran.text.matches("carried by tcp").count(), ranks, "{}", ran.text);
    }
}

/// Every rank but the one at fault names it and the operation.
fn others_name(ran: &Ran, ranks: usize, at_fault: usize, words: &[&str]) {
    for rank in (0..ranks).filter(|&rank| rank != at_fault) {
        let prefix = format!("[rank {rank}] ");
        let lines: String = ran.text.lines().filter_map(|line| line.strip_prefix(&prefix)).collect();
        let name = format!("rank {at_fault}");
        let all =
            words.iter().chain([&name.as_str(), &"all_reduce(sum) of 10000 f32"]).all(|word| lines.contains(word));
        assert!(all, "rank {rank}: {}", ran.text);
    }
    assert!(ran.took < Duration::from_secs(40), "{:?}\n{}", ran.took, ran.text);
}

#[test]
fn a_killed_rank_ends_all() {
    let ran = launch(3, "kill:1");
    others_name(&ran, 3, 1, &[]);
    assert!(ran.text.contains("error: rank 1 failed first: it ended by signal 9 (SIGKILL)"), "{}", ran.text);
    assert_eq!(ran.code, Some(1));
}

#[test]
fn a_rank_that_exits_ends_all() {
    let ran = launch(2, "exit:0");
    others_name(&ran, 2, 0, &[]);
    assert!(ran.text.contains("rank 0 failed first: it ended with exit code 7"), "{}", ran.text);
}

#[test]
fn a_rank_that_throws_ends_all() {
    let ran = launch(3, "throw:2");
    others_name(&ran, 3, 2, &["gave up: it panicked"]);
    assert_eq!(ran.code, Some(1), "{}", ran.text);
}

#[test]
fn a_hanging_rank_is_named_and_ended() {
    let ran = launch(3, "hang:0");
    others_name(&ran, 3, 0, &["waited 1 s"]);
    assert!(ran.text.contains("rank 0 ended by signal 15 (SIGTERM), which the launcher sent"), "{}", ran.text);
}

#[test]
fn a_program_that_does_not_exist_is_named() {
    let launch = ["launch", "--nproc", "2", "--", "/no/such/program"];
    let output = Command::new(env!("CARGO_BIN_EXE_tilewright")).args(launch).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("cannot start /no/such/program") && output.status.code() == Some(1), "{text}");
}
