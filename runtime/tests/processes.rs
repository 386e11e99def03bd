//! Tests of several processes: a shared cache, standard output, environment variables.
//!
//! A test starts this same binary again, for one `child_*` test, with a variable that sets its role; without the
//! variable, `child_*` tests do nothing.

use std::process::{Command, Output};

use tempfile::TempDir;
use tilewright_codegen::llvm::{Opt, object};
use tilewright_codegen::target::{Artifact, Code, CompileOptions, GpuArch, HostCpu, Manifest, Target};
use tilewright_codegen::text;
use tilewright_runtime::cache::{Cache, Key};
use tilewright_runtime::{Device, probe};

const ROLE: &str = "TILEWRIGHT_TEST_ROLE";

fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

fn child(test: &str, role: &str, vars: &[(&str, &str)]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(ROLE, role).envs(vars.iter().copied());
    command
}

fn run(test: &str, role: &str, vars: &[(&str, &str)]) -> Output {
    let output = child(test, role, vars).output().unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

fn manifest(kernel: &str) -> Manifest {
    Manifest {
        kernel: kernel.to_string(),
        entry: "entry".to_string(),
        target: "host".to_string(),
        args: vec![],
        threads: 1,
        shared_bytes: 0,
        programs_per_block: 1,
        ctas_per_program: 1,
        arena_bytes: 0,
        tensor_maps: vec![],
        source: "processes.rs:1".to_string(),
        clocks_of: None,
        footprint: None,
    }
}

fn key(entry: usize) -> Key {
    let func = text::parse(&format!("kernel @k{entry}() {{\n  return\n}}\n")).unwrap_or_else(|error| panic!("{error}"));
    Key::new(&func, &Target::Nvptx(GpuArch::Sm80), &CompileOptions::default())
}

/// Large enough that a write takes several system calls; different for every writer.
fn entry(writer: &str, entry: usize) -> Artifact {
    let line = format!("// {writer} wrote entry {entry}\n");
    Artifact { manifest: manifest(&format!("k{entry}")), code: Code::Ptx(line.repeat(5000)) }
}

#[test]
fn processes_share_a_cache() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().to_str().unwrap();
    let writers: Vec<_> = ["a", "b", "c"]
        .map(|writer| child("child_writes_the_cache", writer, &[("TILEWRIGHT_CACHE", path)]).spawn().unwrap())
        .into();
    for mut writer in writers {
        assert!(writer.wait().unwrap().success());
    }
    let cache = Cache::at(dir.path());
    for number in 0..4 {
        let found = cache.get(&key(number)).expect("every entry is there");
        assert!(["a", "b", "c"].map(|writer| entry(writer, number)).contains(&found), "a mixture of two writers");
    }
    assert_eq!(cache.usage().unwrap().0, 4);
}

/// Writes and reads the same four entries as its siblings, in the directory that the environment names.
#[test]
fn child_writes_the_cache() {
    let Some(writer) = role() else { return };
    let cache = Cache::from_env().unwrap();
    for round in 0..50 {
        let number = round % 4;
        cache.put(&key(number), &entry(&writer, number));
        let found = cache.get(&key(number)).expect("just written");
        assert!(["a", "b", "c"].map(|writer| entry(writer, number)).contains(&found), "a mixture of two writers");
    }
    assert!(cache.warnings().is_empty());
}

#[cfg(unix)]
#[test]
fn a_read_only_directory_serves_what_it_has() {
    use std::os::unix::fs::PermissionsExt;
    let dir = TempDir::new().unwrap();
    let cache = Cache::at(dir.path());
    cache.put(&key(0), &entry("a", 0));
    let shards: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path()).collect();
    let set_mode = |mode| {
        for path in shards.iter().chain([&dir.path().to_path_buf()]) {
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    set_mode(0o555);
    let writable = std::fs::write(dir.path().join("try"), "").is_ok();
    assert_eq!(cache.get(&key(0)), Some(entry("a", 0)));
    cache.put(&key(1), &entry("a", 1));
    set_mode(0o755);
    if writable {
        println!("skipped: this user may write everywhere");
        return;
    }
    assert_eq!(cache.warnings().len(), 1);
    assert_eq!(cache.get(&key(1)), None);
}

/// Kernels that occur twice in this file, on different lines.
mod here {
    use tilewright_runtime::prelude::*;

    #[kernel]
    pub fn copy(x: In<f32>, y: Out<f32>, n: i32) {
        let i = arange(0, 32);
        store(y + i, load(x + i, mask = i < n), mask = i < n);
    }

    #[kernel]
    pub fn guarded(x: In<f32>, y: Out<f32>, n: i32) {
        let i = arange(0, 32);
        device_assert(n < 0, "n is negative");
        store(y + i, load(x + i, mask = i < n), mask = i < n);
    }
}

mod there {
    use tilewright_runtime::prelude::*;

    #[kernel]
    pub fn copy(x: In<f32>, y: Out<f32>, n: i32) {
        let i = arange(0, 32);
        store(y + i, load(x + i, mask = i < n), mask = i < n);
    }

    #[kernel]
    pub fn guarded(x: In<f32>, y: Out<f32>, n: i32) {
        let i = arange(0, 32);
        device_assert(n < 0, "n is negative");
        store(y + i, load(x + i, mask = i < n), mask = i < n);
    }
}

/// The kernels of both modules have the same text, so the second is a cache hit; each still reports its own location.
#[test]
fn equal_kernels_keep_their_own_source_location() {
    let dir = TempDir::new().unwrap();
    let cache = [("TILEWRIGHT_CACHE", dir.path().to_str().unwrap())];
    let places = |role: &str| {
        let output = String::from_utf8_lossy(&run("child_says_where", role, &cache).stdout).into_owned();
        ["copy at ", "guarded at "].map(|what| {
            let line = output.lines().find_map(|line| Some(line.split_once(what)?.1.to_string()));
            line.unwrap_or_else(|| panic!("{what}: {output}"))
        })
    };
    let (here, there) = (places("here"), places("there"));
    assert_eq!(places("here"), here, "from the cache");
    let lines = |[copy, guarded]: [String; 2]| {
        [copy, guarded].map(|place| place.split(':').nth(1).unwrap().parse::<u32>().unwrap())
    };
    let (here, there) = (lines(here), lines(there));
    assert!(here.iter().all(|&line| (here::COPY.line..there::COPY.line).contains(&line)), "{here:?}");
    assert!(there.iter().all(|&line| line >= there::COPY.line), "{there:?}: what the cache said of the others");
    let entries = Cache::at(dir.path()).usage().unwrap().0;
    assert_eq!(entries, 3, "one for both copies, one for each assertion");
}

#[test]
fn child_says_where() {
    use tilewright_runtime::prelude::*;
    let Some(role) = role() else { return };
    let device = Device::cpu();
    let x = Buffer::from_slice(&device, &[1.0f32; 32]).unwrap();
    let mut y = Buffer::<f32>::poisoned(&device, 32).unwrap();
    let config = LaunchConfig::new(1);
    let (kernel, outcome) = match role.as_str() {
        "here" => (
            here::Copy { x: &x, y: &mut y, n: 32 }.compile(&device, &config),
            here::Guarded { x: &x, y: &mut y, n: 32 }.launch(&device, 1),
        ),
        _ => (
            there::Copy { x: &x, y: &mut y, n: 32 }.compile(&device, &config),
            there::Guarded { x: &x, y: &mut y, n: 32 }.launch(&device, 1),
        ),
    };
    println!("copy at {}", kernel.unwrap().manifest().source);
    let message = match outcome.and_then(|()| device.synchronize()) {
        Err(Error::DeviceAssert { message, .. }) => message,
        other => panic!("the assertion holds: {other:?}"),
    };
    println!("guarded at {message}");
}

#[test]
fn device_print_reaches_standard_output() {
    let output = run("child_prints", "print", &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    let mut lines: Vec<&str> = text.lines().filter(|line| line.contains("pid (")).collect();
    lines.sort();
    // The test runner's own `test child_prints ...` may precede the first of them.
    let expected = ["pid (0, 0, 0) sum: 0.5 -3", "pid (1, 0, 0) sum: 0.5 -3", "pid (2, 0, 0) sum: 0.5 -3"];
    assert_eq!(lines.len(), 3, "{text}");
    assert!(expected.iter().all(|line| lines.iter().any(|found| found.ends_with(line))), "{text}");
}

#[test]
fn child_prints() {
    if role().is_none() {
        return;
    }
    let ir = r#"
@prefix = private constant [4 x i8] c"sum\00"
@values = private constant [2 x double] [double 0.5, double -3.0]
define i32 @entry(ptr %args, ptr %pid, ptr %num, ptr %arena, ptr %hooks) {
  %print = load ptr, ptr %hooks
  call void %print(ptr @prefix, ptr @values, i64 2, ptr %pid)
  ret i32 0
}
"#;
    let code = object(ir, &HostCpu::native(), &Opt::host()).unwrap().code;
    let kernel = Device::cpu().load(&Artifact { manifest: manifest("print"), code: Code::Object(code) }).unwrap();
    // SAFETY: the kernel has no arguments.
    unsafe { kernel.launch([3, 1, 1], &[]) }.unwrap();
}

#[test]
fn the_environment_chooses_the_device() {
    run("child_has_a_device", "the CPU", &[("TILEWRIGHT_DEVICE", "cpu")]);
    run("child_has_a_device", "error TILEWRIGHT_DEVICE is `abacus`", &[("TILEWRIGHT_DEVICE", "abacus")]);
    match probe::cuda_driver() {
        Ok(_) => run("child_has_a_device", "GPU 0", &[("TILEWRIGHT_DEVICE", "cuda")]),
        Err(_) => run("child_has_a_device", "error no CUDA device", &[("TILEWRIGHT_DEVICE", "cuda:0")]),
    };
    run("child_has_a_device", "error there is no GPU 99|no CUDA device", &[("TILEWRIGHT_DEVICE", "cuda:99")]);
}

/// Checks the result of `Device::best`: it contains one of the texts that the role lists.
#[test]
fn child_has_a_device() {
    let Some(expected) = role() else { return };
    let found = match Device::best() {
        Ok(device) => device.to_string(),
        Err(error) => format!("error {error}"),
    };
    let expected: Vec<&str> = expected.trim_start_matches("error ").split('|').collect();
    assert!(expected.iter().any(|text| found.contains(text)), "{found}");
}
