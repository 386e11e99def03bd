//! Failures that must end in one error message and an exit code, and never in a panic, an abort, a hang or lost data:
//! absurd numbers, unusual files, full streams, a system without threads.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::run::{file, tensor};
use crate::{Ran, tilewright};

/// Timeout of one command, far longer than any of these takes.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

const MOST: &str = "18446744073709551615";

/// Creates a folder with the input files of commands: a kernel's inputs, and a text.
fn folder() -> tempfile::TempDir {
    // Its name lacks the usual prefix `.tmp`, which messages must not contain.
    let dir = tempfile::Builder::new().prefix("faults").tempdir().unwrap();
    fs::write(dir.path().join("in.st"), inputs()).unwrap();
    fs::write(dir.path().join("text"), "one fish two fish red fish blue fish. ".repeat(400)).unwrap();
    dir
}

fn inputs() -> Vec<u8> {
    let x: Vec<f32> = (0..64 * 16).map(|i| i as f32).collect();
    file(&[tensor("x", &[64, 16], &x), tensor("w", &[16], &[1.0; 16])])
}

/// A valid `run` command with 8 programs, to which tests append options.
const RUN: &str =
    "run weighted_sum_fwd -i in.st -o out.st --grid rows/rows_tile --set rows_tile=8,d_tile=16 --shape y=rows";

/// A valid `train` command.
const TRAIN: &str =
    "train --data text --out run --steps 1 --layers 1 --d-model 16 --d-ff 16 --heads 1 --vocab-size 300";

fn words(line: &str) -> Vec<&str> {
    line.split(' ').filter(|word| !word.is_empty()).collect()
}

/// Returns a command that runs in `dir`, on the CPU.
fn command(dir: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.env("TILEWRIGHT_DEVICE", "cpu").env("TILEWRIGHT_CACHE", dir.join("cache")).env_remove("TILEWRIGHT_LOG");
    command.current_dir(dir).args(words(line)).stdin(Stdio::null());
    command
}

/// Runs a command, which must exit by itself and in time.
#[track_caller]
fn finish(mut command: Command) -> Ran {
    let began = Instant::now();
    let Output { status, stdout, stderr } = command.output().expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    let (out, err) = (text(stdout), text(stderr));
    assert!(began.elapsed() < COMMAND_TIMEOUT, "{command:?} took {:?}", began.elapsed());
    let code = status.code().unwrap_or_else(|| panic!("{command:?} was ended by a signal: {err}"));
    for word in ["panicked", "memory allocation of", "internal", ".tmp", ".tilewright-"] {
        assert!(!err.contains(word), "{command:?} says `{word}`: {err}");
    }
    Ran { code, out, err }
}

/// Runs a command that must fail with one message that contains all of `parts`.
#[track_caller]
fn refused(dir: &Path, line: &str, parts: &[&str]) {
    let ran = finish(command(dir, line));
    assert!(matches!(ran.code, 1 | 2), "`{line}` exits with {}: {}{}", ran.code, ran.out, ran.err);
    assert_eq!(
        ran.err.lines().filter(|line| line.starts_with("error")).count(),
        1,
        "`{line}` has one message: {}",
        ran.err
    );
    for part in parts {
        assert!(ran.err.contains(part), "`{line}` does not say `{part}`: {}", ran.err);
    }
}

#[test]
fn absurd_numbers_are_refused_with_their_option() {
    let dir = folder();
    // Options after `train`, and parts of the message.
    let train: &[(&str, &[&str])] = &[
        ("--minutes inf", &["'inf'", "--minutes", "a number of minutes from 0"]),
        ("--minutes NaN", &["'NaN'", "--minutes"]),
        (&format!("--batch {MOST}"), &["--batch 18446744073709551615", "--context 128"]),
        ("--batch 4294967295", &["out of memory", "--micro-batch"]),
        (&format!("--context {MOST}"), &["context", MOST, "2147483647"]),
        ("--context 2147483647", &["context 2147483647", "2147483648"]),
        (&format!("--layers {MOST}"), &[MOST, "parameters", "at most 2.8e14"]),
        ("--layers 1000000", &["out of memory"]),
        (&format!("--d-ff {MOST}"), &[MOST, "parameters"]),
        (&format!("--heads {MOST}"), &[MOST]),
        (&format!("--heads-kv {MOST}"), &[MOST]),
        ("--steps 0", &["--steps is 0"]),
        ("--lr inf", &["'inf'", "--lr"]),
        ("--lr -1", &["invalid value '-1'", "--lr"]),
    ];
    for (more, parts) in train {
        refused(dir.path(), &format!("train --data text --vocab-size 300 --out run {more}"), parts);
    }
    assert!(!dir.path().join("run/checkpoint.safetensors").exists());
    let model = "--layers 1 --d-model 16 --d-ff 16 --heads 1";
    let others: &[(&str, &[&str])] = &[
        (&format!("memory {model} --context 2147483647 --work forward-backward"), &[]),
        (&format!("profile {model} --batch 4294967295"), &["out of memory", "--batch"]),
        (&format!("profile {model} --vocab-size 4294967295"), &["out of memory"]),
        (&format!("bench ddp {model} --batch 4294967294"), &["out of memory"]),
        (&format!("bench kernels --only softmax --rows {MOST} --d 16"), &[MOST, "more elements than"]),
        ("bench kernels --only softmax --rows 1099511627776 --d 16", &["out of memory"]),
        ("bench kernels --only softmax --rep-ms inf", &["--rep-ms", "'inf'", "milliseconds"]),
        (&format!("bench attention --batch {MOST}"), &[MOST]),
        ("bench comm --sizes 1000000 --ranks 8", &["out of memory"]),
        ("bench comm --sizes 0.001 --repeat 4294967295", &["out of memory"]),
        (&format!("tune softmax_rows --rows {MOST} --d 16 --budget 1"), &[MOST]),
        ("tune softmax_rows --budget -1", &["'-1'", "--budget", "a number of seconds above 0"]),
        (&format!("{RUN} --num-warps -1"), &["'-1'", "--num-warps", "a whole number above 0"]),
        ("explain matmul --num-warps -1", &["'-1'", "--num-warps", "a whole number above 0"]),
        ("account fsdp --tokens inf", &["--tokens", "inf", "a number"]),
        (
            "compile cross_entropy_fwd --target sm_80 --dtype T=f32,I=i64 -o o --set rows_tile=16,slots=16,d_tile=16,vector=65536",
            &["1048576"],
        ),
        (
            "compile cross_entropy_fwd --target sm_80 --dtype T=f32,I=i64 -o o --set rows_tile=16,slots=16,d_tile=16,vector=9223372036854775807",
            &["1048576"],
        ),
        (
            "compile rank_sum --target host --dtype f32 -o o --set tile=16,rank=0,world=9223372036854775807",
            &["more than 32768 operations"],
        ),
        (
            "compile layer_norm_bwd --target sm_80 --dtype f32 -o o --set rows_tile=16,d_tile=16,whole_rows=true,stages=4294967295",
            &["1 to 16"],
        ),
        ("generate --temperature NaN", &["--temperature", "'NaN'", "a number from 0"]),
    ];
    for (line, parts) in others {
        // In the table of `memory`, a context that runs out of memory is a row.
        match line.starts_with("memory") {
            true => assert!(finish(command(dir.path(), line)).ok().contains("OOM")),
            false => refused(dir.path(), line, parts),
        }
    }
    // The number of devices overflows; the output is still correct.
    let text = finish(command(dir.path(), "account fsdp --limit-gb 1e-300")).ok();
    assert!(text.contains("No N is enough"), "{text}");
}

#[test]
fn absurd_worlds_are_refused_with_their_variable() {
    let dir = folder();
    for (name, value) in [("WORLD_SIZE", MOST), ("LOCAL_RANK", MOST), ("TILEWRIGHT_START_TIMEOUT", "inf")] {
        let mut one = command(dir.path(), "bench comm --sizes 0.001 --warmup 0 --repeat 1");
        one.env("RANK", "0").env("WORLD_SIZE", "1").env(name, value);
        let message = finish(one).fails(1);
        assert!(message.contains(&format!("{name} is `{value}`, expected a number")), "{message}");
    }
}

/// A step whose lower bound of memory is not available is refused: compares the bound with the measured peak.
#[test]
fn estimates_of_memory_are_below_what_steps_take() {
    use tilewright_harness::model::{Attention, Config, Fusion, StepKind};
    let dir = folder();
    let mut found = Vec::new();
    for (attention, fusion, recompute) in [
        (Attention::Flash, Fusion::Blocks, false),
        (Attention::Flash, Fusion::Blocks, true),
        (Attention::Flash, Fusion::Ops, false),
        (Attention::Naive, Fusion::None, false),
    ] {
        let line = format!(
            "memory --layers 2 --d-model 64 --d-ff 128 --heads 2 --vocab-size 300 --batch 2 --context 64 --attention {attention} \
             --fusion {fusion} --work forward,forward-backward,train-step --json m.json {}",
            if recompute { "--recompute" } else { "" }
        );
        finish(command(dir.path(), &line)).ok();
        let json: serde_json::Value = serde_json::from_slice(&fs::read(dir.path().join("m.json")).unwrap()).unwrap();
        let row = json["tables"][0]["rows"][0].as_object().unwrap();
        let config = Config {
            layers: 2,
            d_model: 64,
            d_ff: 128,
            heads: 2,
            heads_kv: 2,
            vocabulary: 300,
            context: 64,
            attention,
            fusion,
            checkpoint: recompute,
            ..Config::default()
        };
        for (work, kind) in [
            ("forward", StepKind::Forward),
            ("forward-backward", StepKind::ForwardBackward),
            ("train-step", StepKind::TrainStep),
        ] {
            let key = row.keys().find(|key| key.replace(['_', ' '], "-").contains(&format!("peak-of-{work}-mi")));
            let peak = row[key.unwrap_or_else(|| panic!("no peak of {work} in {row:?}"))].as_f64().unwrap();
            let estimate = config.step_bytes(2, 1, kind).total() / f64::from(1 << 20);
            found.push((estimate <= peak, format!("{attention} {fusion} {work}: {estimate:.3} MiB of {peak:.3}")));
        }
    }
    assert!(found.iter().all(|(below, _)| *below), "{found:#?}");
}

#[test]
fn unused_options_are_errors() {
    let dir = folder();
    let cases: &[(&str, &[&str])] = &[
        ("--dtype zzz", &["`zzz` is not an element type", "bf16"]),
        ("--dtype T=zzz", &["`zzz` is not an element type"]),
        ("--dtype Q=f32", &["no type parameter `Q`"]),
        ("--dtype bf16", &["--dtype bf16 is unused", "`x`", "f32"]),
        ("--dtype bf16,f32", &["--dtype gives 2 types for all type parameters", "T=bf16,U=f32"]),
        ("--dtype T=f32 --dtype T=f16", &["--dtype names `T` twice"]),
        ("--set zzz=1", &["--set zzz is unused", "the constants are"]),
        ("--arg zzz=1", &["--arg zzz is unused", "the arguments are"]),
        ("--shape zzz=1", &["--shape zzz is unused", "the tensors are"]),
        ("--shape x=1,1", &["--shape x is unused", "[64, 16]"]),
        ("--shape y=64", &["--shape names `y` twice"]),
        ("--arg rows=8,rows=9", &["--arg names `rows` twice"]),
        ("--set rows_tile=16", &["--set names `rows_tile` twice"]),
        ("--arg rows=-9223372036854775809", &["`rows`", "-9223372036854775809", "i32"]),
    ];
    for (more, parts) in cases {
        refused(dir.path(), &format!("{RUN} {more}"), parts);
    }
    refused(dir.path(), &RUN.replace("y=rows", "y=-1"), &["--shape y=-1", "expected an extent"]);
    for grid in ["--grid=-1", "--grid -1"] {
        refused(dir.path(), &RUN.replace("--grid rows/rows_tile", grid), &["--grid -1", "cannot be -1"]);
    }
    refused(dir.path(), "compile adamw --target sm_80 --dtype zzz -o o", &["zzz"]);
    refused(dir.path(), "explain adamw --dtype zzz", &["zzz"]);
    refused(dir.path(), "explain matmul --dtype bf16,f32", &["--dtype gives 2 types for all type parameters"]);
    refused(dir.path(), "explain matmul --dtype T=bf16 --dtype T=f16", &["--dtype names `T` twice"]);
    refused(dir.path(), "explain adamw --dtype G=f32,zzz", &["`zzz` is not an element type"]);
    finish(command(dir.path(), &format!("{RUN} --dtype f32"))).ok();
}

#[test]
fn odd_inputs_are_refused_and_nothing_waits() {
    let dir = folder();
    let place = |name: &str| dir.path().join(name);
    fifo(&place("pipe"));
    fs::write(place("short"), &inputs()[..50]).unwrap();
    fs::write(place("long"), [(1_u64 << 63).to_le_bytes().as_slice(), b"{}"].concat()).unwrap();
    fs::write(place("deep"), "[".repeat(200_000)).unwrap();
    let empty = r#"{"x":{"dtype":"F32","shape":[9223372036854775807,0],"data_offsets":[0,0]},"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#;
    fs::write(place("empty"), [(empty.len() as u64).to_le_bytes().as_slice(), empty.as_bytes()].concat()).unwrap();
    for (input, what) in [
        ("pipe", "pipe"),
        ("/dev/zero", "device"),
        (".", "folder"),
        ("missing", "missing"),
        ("short", "safetensors"),
        ("long", "safetensors"),
        ("deep", "safetensors"),
    ] {
        refused(dir.path(), &RUN.replace("in.st", input), &[input, what]);
    }
    refused(dir.path(), "demo -i empty -o o", &["more elements than"]);
    for (line, input) in [
        ("train --out run2 --data", "pipe"),
        ("generate", "pipe"),
        ("account ddp --records", "pipe"),
        ("account ddp --records", "deep"),
        ("report --include", "deep"),
        ("explain weighted_sum_fwd --record", "pipe"),
    ] {
        refused(dir.path(), &format!("{line} {input}"), &[input]);
    }
    // A pipe from another program is a valid input.
    let (mut piped, child) = (command(dir.path(), &RUN.replace("in.st", "/dev/stdin")), inputs());
    let (reader, mut writer) = io::pipe().unwrap();
    piped.stdin(reader);
    let writing = std::thread::spawn(move || writer.write_all(&child));
    finish(piped).ok();
    writing.join().unwrap().unwrap();
}

fn fifo(path: &Path) {
    let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the name is a NUL-terminated string.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
}

#[test]
fn outputs_keep_links_and_permissions_and_are_never_inputs() {
    let dir = folder();
    let place = |name: &str| dir.path().join(name);
    fs::write(place("old"), "old").unwrap();
    fs::set_permissions(place("old"), Permissions::from_mode(0o640)).unwrap();
    symlink("old", place("link")).unwrap();
    finish(command(dir.path(), &RUN.replace("out.st", "link"))).ok();
    assert!(fs::symlink_metadata(place("link")).unwrap().is_symlink());
    assert_eq!(fs::metadata(place("old")).unwrap().permissions().mode() & 0o777, 0o640);
    assert_ne!(fs::read(place("old")).unwrap(), b"old");

    fs::hard_link(place("in.st"), place("hard")).unwrap();
    symlink("in.st", place("soft")).unwrap();
    for output in ["in.st", "./in.st", "hard", "soft"] {
        refused(dir.path(), &RUN.replace("out.st", output), &[output, "it is the same file as the input in.st"]);
    }
    assert_eq!(fs::read(place("in.st")).unwrap(), inputs());
    fs::create_dir(place("run")).unwrap();
    fs::rename(place("text"), place("run/log.jsonl")).unwrap();
    refused(
        dir.path(),
        &TRAIN.replace("--data text", "--data ./run/log.jsonl"),
        &["run/log.jsonl", "it is the same file as the input"],
    );
    refused(
        dir.path(),
        "account memory --json a --markdown ./a",
        &["cannot write ./a: --json and --markdown name the same file"],
    );
    finish(command(dir.path(), "account memory --json r.json")).ok();
    refused(dir.path(), "report --include r.json --page r.json", &["r.json", "it is the same file as the input"]);

    fifo(&place("pipe"));
    for output in ["missing/out.st", ".", "in.st/out.st", "pipe", "/dev/full"] {
        refused(dir.path(), &RUN.replace("out.st", output), &[output]);
    }
    assert!(fs::metadata(place("pipe")).unwrap().file_type().is_fifo());
    fs::create_dir_all(place("c/softmax_rows.ptx")).unwrap();
    refused(
        dir.path(),
        "compile softmax_rows --target sm_80 --dtype f32 --set rows_tile=8,d_tile=16 -o c",
        &["c/softmax_rows.ptx"],
    );
    let mut without_folder = command(dir.path(), "tune softmax_rows --rows 8 --d 16 --budget 1");
    without_folder.env("TILEWRIGHT_CACHE", "off").env("TMPDIR", "/missing");
    let message = finish(without_folder).fails(1);
    assert!(message.contains("cannot create a folder in /missing"), "{message}");
    let left = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(!left.into_iter().any(|name| name.starts_with(".tilewright-")), "a temporary file was left");
}

/// Opens `/dev/full` for writing.
fn full() -> File {
    OpenOptions::new().write(true).open("/dev/full").unwrap()
}

#[test]
fn full_and_closed_streams_change_nothing_but_the_exit_code() {
    let dir = folder();
    let lines = [
        "version",
        "--help",
        "train --help",
        "list",
        "lists",
        "list zzz",
        "account memory",
        RUN,
        "launch --nproc 1 -- echo x",
    ];
    for line in lines {
        let usual = finish(command(dir.path(), line));
        // A full standard error: messages are lost.
        let mut silent = command(dir.path(), line);
        silent.stderr(full()).env("TILEWRIGHT_LOG", "trace");
        assert_eq!(silent.output().unwrap().status.code(), Some(usual.code), "`{line}` with a full standard error");
        // A full standard output: an error, if there is output.
        let mut lost = command(dir.path(), line);
        lost.stdout(full());
        let lost = finish(lost);
        match usual.out.is_empty() {
            true => assert_eq!(lost.code, usual.code, "`{line}`"),
            false => assert!(lost.code == 1 && lost.err.contains("cannot write the output"), "`{line}`: {}", lost.err),
        }
        // A standard output that is closed from the start, as by `>&-`: an error too, except for a launcher, whose ranks
        // continue without it.
        let mut closed = command(dir.path(), line);
        closed.stdout(Stdio::inherit());
        // SAFETY: close is safe to call between fork and exec.
        unsafe { closed.pre_exec(|| if libc::close(1) == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }) };
        let closed = finish(closed);
        match usual.out.is_empty() || line.starts_with("launch") {
            true => assert_eq!((closed.code, closed.err), (usual.code, usual.err.clone()), "`{line}`, closed"),
            false => assert!(
                closed.code == 1 && closed.err.contains("cannot write the output: standard output is closed"),
                "`{line}`, closed: {}",
                closed.err
            ),
        }
        let mut both = command(dir.path(), line);
        both.stdout(full()).stderr(full());
        assert_eq!(both.output().unwrap().status.code(), Some(lost.code), "`{line}` with both full");
        // A closed pipe: a silent exit, as by SIGPIPE if there is output. The ranks of a launcher continue.
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let mut unread = command(dir.path(), line);
        unread.stdout(writer);
        let unread = finish(unread);
        let code = if usual.out.is_empty() || line.starts_with("launch") { usual.code } else { 141 };
        assert_eq!((unread.code, unread.err), (code, usual.err), "`{line}` with a closed pipe");
    }
}

/// Tokens and compiled kernels share one cache folder, so a run prints one warning.
#[test]
fn an_unusable_cache_is_one_warning() {
    let dir = folder();
    let open = dir.path().join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
    let mut training = command(dir.path(), TRAIN);
    training.env("TILEWRIGHT_CACHE", &open);
    let ran = finish(training);
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    assert_eq!(ran.err.matches("the cache directory is not used").count(), 1, "{}", ran.err);
}

/// Every command checks all environment variables before it starts, even those that it does not use.
#[test]
fn invalid_environment_variables_fail_every_command() {
    let dir = folder();
    for (name, value, expected) in [
        ("TILEWRIGHT_DEVICE", "gpu", "cuda:N"),
        ("TILEWRIGHT_CACHE_MAX_SIZE", "lots", "2G"),
        ("TILEWRIGHT_DUMP", "nonsense", "assign_layouts"),
        ("TILEWRIGHT_TUNE", "soon", "a number of seconds"),
        ("TILEWRIGHT_LOG", "wran", "off, error, warn"),
        ("TILEWRIGHT_LOG", "tilewright=loud", "MODULE=LEVEL"),
        ("TILEWRIGHT_LOG", "a=b=c", "MODULE=LEVEL"),
        ("TILEWRIGHT_COMM", "x", "tcp, mpi or nccl"),
        ("TILEWRIGHT_COMM_TIMEOUT", "-1", "a number of seconds"),
        ("TILEWRIGHT_START_TIMEOUT", "soon", "a number of seconds"),
        ("TILEWRIGHT_UNAUTHENTICATED", "yes", "expected 1, or nothing"),
        ("TILEWRIGHT_LIFELINE", "zz", "DESCRIPTOR:INODE"),
    ] {
        let mut listing = command(dir.path(), "list");
        listing.env(name, value);
        let ran = finish(listing);
        assert_eq!((ran.code, ran.out.as_str()), (1, ""), "{name}={value}: {}", ran.err);
        for part in [name, value, expected] {
            assert!(ran.err.contains(part), "`{part}` is missing for {name}={value}: {}", ran.err);
        }
    }
    for (name, value) in
        [("TILEWRIGHT_LOG", "info"), ("TILEWRIGHT_LOG", "warn,tilewright=TRACE"), ("TILEWRIGHT_COMM", "")]
    {
        let mut listing = command(dir.path(), "list");
        listing.env(name, value);
        assert_eq!(finish(listing).code, 0, "{name}={value}");
    }
}

/// Other programs may read variables whose names begin like ours, so an unknown one is no error.
#[test]
fn unknown_environment_variables_are_one_warning() {
    let dir = folder();
    let [typo, other] = ["DEVCE", "SECRT"].map(|name| format!("TILEWRIGHT_{name}"));
    let mut listing = command(dir.path(), "list");
    listing.env(&typo, "cpu").env(&other, "private").env("TILEWRIGHT_COMM", "tcp").env("TILEWRIGHT_TEST_MARK", "1");
    let ran = finish(listing);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert_eq!(ran.err.matches("nothing reads these environment variables").count(), 1, "{}", ran.err);
    for part in [format!("`{typo}` (the nearest known name is `TILEWRIGHT_DEVICE`)"), format!("`{other}` (")] {
        assert!(ran.err.contains(&part), "`{part}` is missing: {}", ran.err);
    }
    assert!(!["COMM", "MARK", "private"].iter().any(|word| ran.err.contains(word)), "{}", ran.err);
    let mut silent = command(dir.path(), "list");
    silent.env(&typo, "cpu").env("TILEWRIGHT_LOG", "error");
    assert_eq!(finish(silent).err, "");
}

/// Sets a resource limit of a child, between fork and exec.
fn limit(command: &mut Command, resource: libc::__rlimit_resource_t, value: u64) {
    let set = move || {
        let limit = libc::rlimit { rlim_cur: value, rlim_max: value };
        // SAFETY: the struct is valid during the call.
        if unsafe { libc::setrlimit(resource, &limit) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: setrlimit is safe to call between fork and exec.
    unsafe { command.pre_exec(set) };
}

#[test]
fn thread_limits_are_slow_or_an_error() {
    let dir = folder();
    // SAFETY: geteuid has no preconditions.
    let is_root = unsafe { libc::geteuid() } == 0;
    let limited = |line: &str| {
        let mut command = command(dir.path(), line);
        // Limits on processes do not apply to root.
        if is_root {
            command.uid(65534).gid(65534);
        }
        limit(&mut command, libc::RLIMIT_NPROC, 0);
        command
    };
    fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
    if let Err(error) = limited("version").output() {
        println!("skipped: the program does not start with a limit on processes ({error})");
        return;
    }
    let ran = finish(limited(RUN));
    assert!(ran.err.contains("threads"), "{}", ran.err);
    assert!(ran.ok().contains("grid (8, 1, 1)"));
    let expected = finish(command(dir.path(), &RUN.replace("out.st", "usual.st"))).ok();
    assert!(expected.contains("grid (8, 1, 1)"));
    assert_eq!(fs::read(dir.path().join("out.st")).unwrap(), fs::read(dir.path().join("usual.st")).unwrap());
    for line in [
        "bench comm --sizes 0.001 --ranks 2",
        "launch --nproc 2 -- true",
        "tune softmax_rows --rows 8 --d 16 --budget 1",
    ] {
        let ran = finish(limited(line));
        assert_eq!(ran.code, 1, "`{line}`: {}", ran.err);
        assert!(ran.err.contains("Resource temporarily unavailable"), "`{line}`: {}", ran.err);
    }
}

#[test]
fn limits_on_memory_and_files_are_errors() {
    let dir = folder();
    let mut small = command(dir.path(), &RUN.replace("out.st", "limited.st"));
    small.env("TILEWRIGHT_CACHE", "off");
    limit(&mut small, libc::RLIMIT_FSIZE, 1);
    let message = finish(small).fails(1);
    assert!(message.contains("limited.st") && !dir.path().join("limited.st").exists(), "{message}");
    let mut tight = command(
        dir.path(),
        "profile --layers 1 --d-model 64 --d-ff 64 --heads 1 --vocab-size 8000000 --batch 1 --context 8",
    );
    limit(&mut tight, libc::RLIMIT_AS, 4 << 30);
    let message = finish(tight).fails(1);
    assert!(message.contains("out of memory"), "{message}");
    assert!(tilewright(dir.path(), &["version"]).ok().contains("tilewright"));
}

/// Returns the numbers in front of `GiB` in a text.
fn gib(text: &str) -> Vec<f64> {
    let words: Vec<&str> = text.split([' ', '\n', ',', ';', ':']).collect();
    words.windows(2).filter(|pair| pair[1] == "GiB").map(|pair| pair[0].parse().unwrap()).collect()
}

#[test]
fn a_step_that_does_not_fit_says_what_its_parts_take() {
    let dir = folder();
    let train = "train --data text --vocab-size 300 --out run --layers 1000000";
    for (options, less) in [
        ("--precision bf16 --recompute --batch 4 --micro-batch 1", "help: use a smaller --context or a smaller model"),
        (
            "--attention naive --batch 4",
            "help: use --micro-batch 2 (the batch size does not change), --recompute, --attention flash, ",
        ),
    ] {
        let message = finish(command(dir.path(), &format!("{train} {options}"))).fails(1);
        assert_eq!(message.matches("out of memory").count(), 1, "{message}");
        let numbers = gib(&message);
        let [needed, available, total, parts @ ..] = numbers.as_slice() else { panic!("{message}") };
        assert!(needed > available && parts.len() == 5, "{message}");
        let sum: f64 = parts.iter().sum();
        assert!((needed - total).abs() <= 0.06 && (total - sum).abs() <= 0.03, "{message}");
        assert!(message.contains(less), "{message}");
    }
    // Gradients of several micro-batches are accumulated in f32; those of a single one have the dtype of the matmuls.
    let gradients = |options: &str| {
        let ran = finish(command(dir.path(), &format!("{train} --precision bf16 --batch 4 {options}")));
        gib(&ran.fails(1))[4]
    };
    let (one, two) = (gradients(""), gradients("--micro-batch 2"));
    assert!((two - 2.0 * one).abs() <= 0.02, "{one} {two}");
}

#[test]
fn forward_alone_has_no_gradients() {
    let dir = folder();
    let line = "memory --layers 1 --d-model 64 --d-ff 64 --heads 1 --vocab-size 40000 --batch 1 --context 8 --work forward,forward-backward";
    let table = finish(command(dir.path(), line)).ok();
    let row = table.lines().find(|line| line.starts_with("│       8 │")).unwrap_or_else(|| panic!("{table}"));
    let cells: Vec<f64> = row.split('│').filter_map(|cell| cell.trim().parse().ok()).collect();
    let [_, parameters, forward, backward] = cells.as_slice() else { panic!("{table}") };
    assert!(*forward < 1.3 * parameters && *backward > 2.0 * parameters, "{table}");
}

/// A model whose step needs far more memory than the estimate: about ten score matrices, of 64 MiB each at 1024 tokens.
const SCORES: &str = "--layers 1 --d-model 16 --d-ff 16 --heads 4 --batch 4 --attention naive --fusion none";

#[test]
fn steps_that_do_not_fit_say_so_and_sweeps_go_on() {
    let dir = folder();
    let limited = |line: &str| {
        let mut command = command(dir.path(), line);
        limit(&mut command, libc::RLIMIT_AS, 900 << 20);
        finish(command)
    };
    let ran = limited(&format!("memory {SCORES} --vocab-size 300 --context 64,1024,32 --work train-step"));
    let table = ran.ok();
    let row =
        |context: &str| table.lines().find(|line| line.starts_with(&format!("│ {context:>7} │"))).unwrap_or_default();
    assert!(row("1024").contains("OOM"), "{table}");
    let why = table.split("context 1024, train-step: out of memory on the CPU: ").nth(1);
    assert!(
        why.is_some_and(|why| why.lines().next().unwrap_or_default().contains(|c: char| c.is_ascii_digit())),
        "{table}"
    );
    assert!(row("64").contains('.') && !row("64").contains("OOM") && !row("32").contains("OOM"), "{table}");
    let norm = limited("bench norm --rows 8000 --d 64,1536,32 --runs 1").ok();
    assert!(norm.contains("OOM") && norm.contains("more are needed at once"), "{norm}");
    for line in [
        format!("profile {SCORES} --vocab-size 300 --context 1024 --warmup 0 --steps 1"),
        format!(
            "train {SCORES} --data text --vocab-size 300 --out run --context 1024 --steps 1 --evaluate-sequences 1"
        ),
    ] {
        std::fs::write(dir.path().join("text"), "one fish two fish red fish blue fish. ".repeat(6000)).unwrap();
        let message = limited(&line).fails(1);
        assert!(message.contains("out of memory on the CPU") && message.contains("available"), "{line}: {message}");
    }
}
