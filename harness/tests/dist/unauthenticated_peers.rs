//! Tests of unauthenticated peers: they cannot delay a job, make it fail or take part in it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::process::Command;
use std::sync::{Condvar, Mutex};
use std::thread::Scope;
use std::time::{Duration, Instant};

use tilewright_harness::dist::comm::{CommError, Communicator, Options, Reduce};
use tilewright_harness::dist::rank::RankInfo;
use tilewright_harness::dist::rendezvous::{self, Job};
use tilewright_harness::dist::secret::{Access, Secret};

use crate::world::{Kind, free_port, options, rank_info, ranks};

/// Upper bound of a rendezvous that unauthenticated peers do not delay.
const IN_TIME: Duration = Duration::from_secs(20);

fn connect(rank_info: &RankInfo, job: &Job, options: Options) -> Result<Communicator, CommError> {
    rendezvous::connect(rank_info, job, options)
}

/// A job with a known name, and a secret that the clients do not know.
fn job() -> Job {
    Job { name: "known".into(), ..Job::generate("").unwrap() }
}

/// Starts rank 0 of `world`, runs the clients, then starts the other ranks. Returns the sum of ones on each rank, and
/// the time that the ranks took.
fn start_with_clients(world: usize, clients: impl FnOnce(u16)) -> (Vec<f32>, Duration) {
    let (port, job) = (free_port(), job());
    let rank = |rank| {
        let comm = connect(&rank_info(rank, world, port), &job, options()).unwrap();
        let mut ones = [1.0_f32];
        comm.all_reduce(&mut ones, Reduce::Sum).unwrap();
        ones[0]
    };
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| rank(0));
        clients(port);
        let began = Instant::now();
        let others: Vec<_> = (1..world).map(|number| scope.spawn(move || rank(number))).collect();
        let sums = std::iter::once(zero).chain(others).map(|thread| thread.join().unwrap()).collect();
        (sums, began.elapsed())
    })
}

/// Connects to rank 0 as soon as it listens.
fn knock(port: u16) -> TcpStream {
    let began = Instant::now();
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(socket) => return socket,
            Err(error) => assert!(began.elapsed() < Duration::from_secs(60), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A hello of rank 1 of 3 of [`job`], which needs no secret.
fn hello() -> Vec<u8> {
    let mut tag = blake3::Hasher::new();
    tag.update(b"\x05ranksknown");
    let numbers = [1_u32, 0, 3].map(u32::to_le_bytes).concat();
    [b"twmeet02".as_slice(), &numbers, tag.finalize().as_bytes(), &[7; 32]].concat()
}

/// Opens twenty silent connections, and twenty that send a valid hello, one byte every two seconds, until `done`.
fn hold_up<'scope>(scope: &'scope Scope<'scope, '_>, port: u16, done: &'scope Done) -> Vec<TcpStream> {
    for _ in 0..20 {
        let mut socket = knock(port);
        scope.spawn(move || {
            for byte in hello() {
                let _ = socket.write_all(&[byte]);
                let over = done.0.lock().unwrap();
                if *done.1.wait_timeout_while(over, Duration::from_secs(2), |over| !*over).unwrap().0 {
                    return;
                }
            }
        });
    }
    (0..20).map(|_| knock(port)).collect()
}

type Done = (Mutex<bool>, Condvar);

fn end(done: &Done) {
    *done.0.lock().unwrap() = true;
    done.1.notify_all();
}

#[test]
fn silent_and_slow_clients_do_not_delay_ranks() {
    let done = Done::default();
    std::thread::scope(|scope| {
        let mut silent = Vec::new();
        let (sums, took) = start_with_clients(3, |port| silent = hold_up(scope, port, &done));
        end(&done);
        assert_eq!(sums, [3.0; 3]);
        assert!(took < IN_TIME, "{took:?}");
    });
}

/// The messages of a hostile client, in order; it waits for an answer in between.
fn hostile(number: usize) -> Vec<Vec<u8>> {
    let noise = |length: usize| (0..length).map(|i| (i * 31 + number * 17) as u8).collect::<Vec<u8>>();
    let with = |at: usize, byte: u8| {
        let mut hello = hello();
        hello[at] ^= byte;
        hello
    };
    match number % 10 {
        0 => vec![noise(1 + number % 300)],
        1 => vec![b"GET / HTTP/1.1\r\n\r\n".to_vec()],
        // A handshake of an older version, as rank 1, with an endless length.
        2 => vec![[b"twmeet01".as_slice(), &[255; 4], &noise(200)].concat()],
        3 => vec![[b"twmeet01".as_slice(), &[13, 0, 0, 0], b"3\n1\n9\nknown"].concat()],
        // Truncated.
        4 => vec![hello()[..number % 84].to_vec()],
        // Another job, another rank 0, a rank that does not exist.
        5 => vec![with(20 + number % 32, 1), noise(34)],
        6 => vec![with(12, 5), noise(34)],
        7 => vec![with(8, 255), noise(34)],
        // Rank 1, with invalid proofs.
        8 => vec![hello(), noise(34)],
        _ => vec![hello(), noise(10)],
    }
}

/// With silent and slow clients at the same time; the clients continue while the ranks connect.
#[test]
fn a_thousand_hostile_handshakes_are_rejected() {
    let done = Done::default();
    std::thread::scope(|scope| {
        let mut silent = Vec::new();
        let (sums, took) = start_with_clients(3, |port| {
            silent = hold_up(scope, port, &done);
            let crowd = move |numbers: Range<usize>| {
                for number in numbers {
                    // After the rendezvous rank 0 no longer listens.
                    let Ok(mut socket) = TcpStream::connect(("127.0.0.1", port)) else { return };
                    socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
                    for (index, message) in hostile(number).iter().enumerate() {
                        // The challenge, or the end of the connection.
                        let _ = (index > 0).then(|| socket.read(&mut [0; 72]));
                        let _ = socket.write_all(message);
                    }
                }
            };
            let first: Vec<_> = (0..4).map(|part| scope.spawn(move || crowd(250 * part..250 * (part + 1)))).collect();
            first.into_iter().for_each(|part| part.join().unwrap());
            (0..4).for_each(|part| drop(scope.spawn(move || crowd(250 * part..250 * (part + 1)))));
        });
        end(&done);
        assert_eq!(sums, [3.0; 3]);
        assert!(took < IN_TIME, "{took:?}");
    });
}

/// A duplicate rank without a proof does not replace the connected one.
#[test]
fn a_duplicate_rank_without_a_proof_is_rejected() {
    let (port, job) = (free_port(), job());
    let rank = |rank| {
        let comm = connect(&rank_info(rank, 3, port), &job, options()).unwrap();
        let mut own = [comm.rank() as f32];
        comm.all_reduce(&mut own, Reduce::Sum).unwrap();
        own[0]
    };
    let sums: Vec<f32> = std::thread::scope(|scope| {
        let first = [0, 1].map(|number| scope.spawn(move || rank(number)));
        for _ in 0..50 {
            let mut socket = knock(port);
            let _ = socket.write_all(&hello());
            let mut challenge = [0; 72];
            socket.read_exact(&mut challenge).unwrap();
            // Sending back the received proof proves nothing.
            let _ = socket.write_all(&[&[0, 0], &challenge[40..]].concat());
            assert_eq!(socket.read(&mut challenge).unwrap_or(0), 0, "it was accepted");
        }
        let last = scope.spawn(move || rank(2));
        first.into_iter().chain([last]).map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(sums, [3.0; 3]);
}

/// A program that listens at rank 0's address first is not accepted as rank 0.
#[test]
fn a_rank_retries_while_another_program_has_the_address() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (port, job) = (listener.local_addr().unwrap().port(), job());
    let met = std::thread::scope(|scope| {
        let one = scope.spawn(|| connect(&rank_info(1, 2, port), &job, options()).map(|comm| comm.world()));
        for answer in [b"no\x1b[2J\n".repeat(20), Vec::new(), vec![0; 5]] {
            let mut socket = listener.accept().unwrap().0;
            let _ = socket.write_all(&answer);
        }
        drop(listener);
        let zero = connect(&rank_info(0, 2, port), &job, options()).unwrap();
        (zero.world(), one.join().unwrap())
    });
    assert_eq!(met, (2, Ok(2)));
}

/// An authenticated rank that then ends is noticed immediately, with its reason.
#[test]
fn a_rank_that_ends_while_others_come_is_named() {
    let (port, job) = (free_port(), job());
    let began = Instant::now();
    let text = std::thread::scope(|scope| {
        // Rank 1 runs into its timeout: the only way for a rank to end without ending this process.
        let one = scope.spawn(|| connect(&rank_info(1, 3, port), &job, SHORT).map(|_| ()));
        let text = connect(&rank_info(0, 3, port), &job, options()).map(|_| ()).unwrap_err().to_string();
        assert!(one.join().unwrap().is_err());
        text
    });
    let why = format!("rank 0 at 127.0.0.1:{port} no longer answers rank 1");
    assert_eq!(text, format!("rank 1 aborted: {why}"));
    assert!(began.elapsed() < IN_TIME);
}

const SHORT: Options = Options { timeout: Duration::from_secs(60), start_timeout: Duration::from_millis(800) };

/// The errors of two ranks whose handshake fails.
fn mismatched_pair(jobs: [Job; 2]) -> [String; 2] {
    let port = free_port();
    let rank =
        |rank: usize| connect(&rank_info(rank, 2, port), &jobs[rank], SHORT).map(|_| ()).unwrap_err().to_string();
    std::thread::scope(|scope| {
        let threads = [0, 1].map(|number| scope.spawn(move || rank(number)));
        threads.map(|thread| thread.join().unwrap())
    })
}

#[test]
fn ranks_with_another_secret_or_none_are_rejected() {
    for other in [job(), Job { access: Access::Loopback, ..job() }] {
        let [zero, one] = mismatched_pair([job(), other]);
        assert!(zero.contains("rank 1 of 2 did not connect to 127.0.0.1:"), "{zero}");
        assert!(zero.contains("rejected; the last one, from 127.0.0.1: it does not know the job's secret"), "{zero}");
        assert!(one.contains("the program that answers there does not know this job's secret"), "{one}");
    }
}

#[test]
fn without_a_secret_ranks_stay_on_the_loopback_interface() {
    let elsewhere = |rank| RankInfo { master: ("192.0.2.1".into(), 29999), ..rank_info(rank, 2, 0) };
    let job = |access| Job { access, ..Job::default() };
    let error = |rank, access| connect(&elsewhere(rank), &job(access), SHORT).map(|_| ()).unwrap_err().to_string();
    for rank in [0, 1] {
        let text = error(rank, Access::Loopback);
        assert!(
            text.contains("192.0.2.1, which other hosts can reach") && text.contains("TILEWRIGHT_SECRET"),
            "{text}"
        );
    }
    for access in [Access::Unauthenticated, Access::Secret(Secret::generate().unwrap())] {
        let text = error(0, access);
        assert!(text.contains("cannot listen at 192.0.2.1:29999") && text.contains("MASTER_ADDR has to be"), "{text}");
    }
}

#[test]
fn other_hosts_are_not_sent_to_the_loopback_interface() {
    let rank_info = RankInfo { local_world: 1, ..rank_info(0, 4, free_port()) };
    let text = connect(&rank_info, &job(), SHORT).map(|_| ()).unwrap_err().to_string();
    assert!(text.contains("3 of 4 ranks are on other hosts") && text.contains("set MASTER_ADDR"), "{text}");
}

/// All of 127.0.0.0/8 is this host: different addresses stand for different interfaces.
#[cfg(target_os = "linux")]
#[test]
fn rank_0_listens_where_it_was_told_and_nowhere_else() {
    let port = free_port();
    let rank_info = RankInfo { master: ("127.0.0.2".into(), port), ..rank_info(0, 2, 0) };
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| connect(&rank_info, &job(), SHORT).map(|_| ()));
        while !zero.is_finished() {
            assert!(TcpStream::connect(("127.0.0.1", port)).is_err(), "it also listens at another address");
            drop(TcpStream::connect(("127.0.0.2", port)));
        }
        let text = zero.join().unwrap().unwrap_err().to_string();
        // Rank 0 did listen: a client connected.
        assert!(text.contains("rejected; the last one, from 127.0.0.1: it did not identify itself"), "{text}");
    });
}

#[test]
fn messages_of_ranks_are_escaped() {
    let texts = ranks(Kind::Tcp, 2, options(), |comm| match comm.rank() {
        0 => {
            comm.abort("\x1b]0;title\x07\x1b[2J\u{202e}the disk is full\n  help: make room");
            comm.barrier().unwrap_err().to_string()
        }
        _ => comm.barrier().unwrap_err().to_string(),
    });
    let found = &texts[1];
    assert!(
        found.contains("aborted: \\u{1b}]0;title\\u{7}\\u{1b}[2J\\u{202e}the disk is full\n  help: make room"),
        "{found}"
    );
}

/// The output of `tilewright launch` with two shells.
fn launch(arguments: &[&str], script: &str, variables: &[(&str, &str)]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(["launch", "--nproc", "2"]).args(arguments).args(["--", "sh", "-c", script]);
    for name in ["TILEWRIGHT_SECRET", "TILEWRIGHT_SECRET_FILE", "TILEWRIGHT_UNAUTHENTICATED", "MASTER_ADDR"] {
        command.env_remove(name);
    }
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.success(), text)
}

/// A non-UTF-8 secret must not count as unset, which would admit any program on this host.
#[test]
fn a_secret_that_is_no_text_is_refused() {
    use std::os::unix::ffi::OsStrExt;

    for (variable, words) in [
        ("TILEWRIGHT_SECRET", "launch --nproc 1 -- true"),
        ("TILEWRIGHT_SECRET_FILE", "launch --nproc 1 -- true"),
        ("TILEWRIGHT_SECRET", "train --steps 1 --out /nowhere/run"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
        command.args(words.split(' ')).env("RANK", "0").env("WORLD_SIZE", "2");
        command.env("TILEWRIGHT_START_TIMEOUT", "1").env("TILEWRIGHT_DEVICE", "cpu").env_remove("TILEWRIGHT_SECRET");
        let output = command.env(variable, std::ffi::OsStr::from_bytes(&[0xfe; 32])).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words}: {text}");
        assert!(text.contains(&format!("{variable} is not valid UTF-8")), "{words}: {text}");
    }
}

#[test]
fn the_launcher_generates_a_secret() {
    let say = "echo secret=$TILEWRIGHT_SECRET=$TILEWRIGHT_SECRET_FILE$TILEWRIGHT_UNAUTHENTICATED";
    let secrets = |(good, text): (bool, String)| {
        assert!(good, "{text}");
        let found: Vec<String> = text.lines().filter_map(|line| line.split('=').nth(1)).map(Into::into).collect();
        assert!(found.len() == 2 && found[0] == found[1], "{text}");
        found[0].clone()
    };
    let (first, second) = (secrets(launch(&[], say, &[])), secrets(launch(&[], say, &[])));
    assert!(first.len() == 64 && first != second, "{first} {second}");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("secret");
    std::fs::write(&file, "0123456789abcdef\n").unwrap();
    let path = file.to_str().unwrap();
    let mode = |mode| std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    mode(0o644);
    let (good, text) = launch(&["--secret-file", path], say, &[]);
    assert!(
        !good && text.contains("is accessible to other users (mode 0644)") && !text.contains("0123456789"),
        "{text}"
    );
    mode(0o600);
    assert_eq!(secrets(launch(&["--secret-file", path], say, &[])), "0123456789abcdef");
    assert_eq!(secrets(launch(&[], say, &[("TILEWRIGHT_SECRET_FILE", path)])), "0123456789abcdef");
    assert_eq!(secrets(launch(&["--unauthenticated"], say, &[("TILEWRIGHT_SECRET", "of another user")])), "");

    let several = ["--hosts", "2", "--master-addr", "127.0.0.1"];
    let (good, text) = launch(&several, say, &[]);
    assert!(!good && text.contains("ranks on several hosts need a secret") && !text.contains("secret="), "{text}");
}
