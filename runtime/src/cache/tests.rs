//! A lookup returns the correct artifact or none, in every state of an entry and its directory.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::time::Duration;

use tempfile::TempDir;
use tilewright_codegen::ir::{Func, Loc, Op};
use tilewright_codegen::target::{
    ArgDesc, ArgType, Code, CompileOptions, GpuArch, HostExpr, Manifest, Target, TensorMapDesc,
};
use tilewright_codegen::{compiler_id, llvm, pipeline, text};

use super::*;

fn artifact(code: Code) -> Artifact {
    let manifest = Manifest {
        kernel: "softmax".to_string(),
        entry: "softmax".to_string(),
        target: "sm_90a".to_string(),
        args: vec![ArgDesc { name: "x".to_string(), ty: ArgType::Ptr, divisible_by: 16, equal_to: None }],
        threads: 128,
        shared_bytes: 65536,
        programs_per_block: 1,
        ctas_per_program: 1,
        arena_bytes: 0,
        tensor_maps: vec![TensorMapDesc {
            arg: 1,
            base: 0,
            elem: "bf16".to_string(),
            shape: vec![HostExpr::Arg(0), HostExpr::Const(3)],
            strides: vec![HostExpr::Const(64)],
            block: vec![64, 3],
            swizzle_bytes: 128,
        }],
        source: "softmax.rs:3".to_string(),
        clocks_of: None,
        footprint: None,
    };
    Artifact { manifest, code }
}

fn ptx() -> Artifact {
    artifact(Code::Ptx(".version 8.3\n.target sm_90a\n".to_string()))
}

const SM90: Target = Target::Nvptx(GpuArch::Sm90a);

fn function(text: &str) -> Func {
    text::parse(text).unwrap_or_else(|error| panic!("{error}"))
}

/// The key of a kernel of that name.
fn key(name: &str) -> Key {
    Key::new(&function(&format!("kernel @{name}() {{\n  return\n}}\n")), &SM90, &CompileOptions::default())
}

fn path_of(cache: &Cache, key: &Key) -> PathBuf {
    let name = file_name(key);
    cache.dir().unwrap().join(shard(&name)).join(name)
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

fn fresh() -> (TempDir, Cache) {
    let dir = TempDir::new().unwrap();
    let cache = Cache::at(dir.path().join("kernels"));
    (dir, cache)
}

#[test]
fn get_returns_what_was_put() {
    let (_dir, cache) = fresh();
    let object = artifact(Code::Object(vec![0, 255, 7, 0]));
    assert_eq!(cache.get(&key("a")), None);
    cache.put(&key("a"), &ptx());
    cache.put(&key("b"), &object);
    assert_eq!(cache.get(&key("a")), Some(ptx()));
    assert_eq!(cache.get(&key("b")), Some(object));
    assert_eq!(cache.get(&key("c")), None);
    assert_eq!(cache.usage().unwrap().0, 2);
    assert_eq!(cache.clear().unwrap(), 2);
    assert_eq!(cache.get(&key("a")), None);
}

#[test]
fn key_covers_compiler_target_options_and_text() {
    let (target, options) = (Target::Nvptx(GpuArch::Sm90a), CompileOptions::default());
    let host = |cpu: &str, features: &str| {
        Target::Host(tilewright_codegen::target::HostCpu {
            triple: "t".to_string(),
            cpu: cpu.to_string(),
            features: features.to_string(),
        })
    };
    let other = |change: fn(&mut CompileOptions)| {
        let mut options = CompileOptions::default();
        change(&mut options);
        options
    };
    let (func, renamed) = (function("kernel @k() {\n  return\n}\n"), function("kernel @l() {\n  return\n}\n"));
    let keys = [
        Key::of("1", &func, &target, &options),
        Key::of("1", &renamed, &target, &options),
        Key::of("2", &func, &target, &options),
        Key::of("1", &func, &Target::Nvptx(GpuArch::Sm80), &options),
        Key::of("1", &func, &host("a", ""), &options),
        Key::of("1", &func, &host("b", ""), &options),
        Key::of("1", &func, &host("a", "+avx2"), &options),
        Key::of("1", &func, &target, &other(|o| o.num_warps = 8)),
        Key::of("1", &func, &target, &other(|o| o.num_stages = 1)),
        Key::of("1", &func, &target, &other(|o| o.ptx_version = 80)),
        Key::of("1", &func, &target, &other(|o| o.debug_asserts = false)),
        Key::of("1", &func, &target, &other(|o| o.fp_fusion = false)),
        Key::of("1", &func, &target, &other(|o| o.max_registers = Some(128))),
        Key::of("1", &func, &target, &other(|o| o.schedule.overlap = Some(true))),
    ];
    let distinct: std::collections::HashSet<_> = keys.iter().collect();
    assert_eq!(distinct.len(), keys.len());
    assert_eq!(keys[0], Key::of("1", &func, &target, &options));
}

#[test]
fn the_key_names_the_llvm_that_makes_the_code() {
    let version = llvm::version().unwrap();
    assert!(compiler_id().ends_with(&format!("LLVM {version}")), "{}", compiler_id());
    let func = function("kernel @k() {\n  return\n}\n");
    let key = |compiler: &str| Key::of(compiler, &func, &SM90, &CompileOptions::default());
    assert_eq!(Key::new(&func, &SM90, &CompileOptions::default()), key(compiler_id()));
    let other = compiler_id().replace(&format!("LLVM {}.", version.major), &format!("LLVM {}.", version.major + 1));
    assert_ne!(key(compiler_id()), key(&other));
}

/// A kernel with an assertion and all other ops that have a location, as if it were at that line.
fn at_line(line: u32) -> Func {
    let mut func = function(
        "kernel @k(%x: ptr<f32>, %n: i32) {\n  %0 = constant {value = 0} : i32\n  %1 = cmp_gt %n, %0 : bool\n  \
         device_assert %1 {message = \"n\"}\n  device_print %n {prefix = \"n\"}\n  return\n}\n",
    );
    let place = |line| Loc { file: "kernel.rs".into(), line, column: 5 };
    func.loc = place(line);
    for id in func.walk() {
        func.set_loc(id, place(line + 1));
    }
    func
}

/// The location of an assertion is in the code, and so in the key; other locations are in neither.
#[test]
fn kernels_that_differ_in_the_place_of_an_assertion_have_keys_of_their_own() {
    let options = CompileOptions::default();
    let (here, there) = (at_line(10), at_line(20));
    assert_eq!(text::print(&here), text::print(&there));
    let host = Target::Host(tilewright_codegen::target::HostCpu::native());
    for target in [SM90, host] {
        let code = |func: &Func| pipeline::compile(func, &target, &options, &mut ()).unwrap().code;
        assert_ne!(code(&here), code(&there), "a failing assertion reports its location");
        assert_ne!(Key::new(&here, &target, &options), Key::new(&there, &target, &options));
        let without = |mut func: Func| {
            let is_assert = |id: &_| matches!(func.op(*id).op, Op::DeviceAssert { .. });
            let assert = func.walk().into_iter().find(is_assert).unwrap();
            *func.op_mut(assert) = Op::DevicePrint { prefix: "positive".into() };
            func
        };
        let (here, there) = (without(here.clone()), without(there.clone()));
        assert_eq!(code(&here), code(&there));
        assert_eq!(Key::new(&here, &target, &options), Key::new(&there, &target, &options));
    }
}

#[test]
fn damage_anywhere_is_a_miss() {
    let (_dir, cache) = fresh();
    let key = key("a");
    cache.put(&key, &ptx());
    let path = path_of(&cache, &key);
    let intact = fs::read(&path).unwrap();
    for position in 0..intact.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut damaged = intact.clone();
            damaged[position] ^= flip;
            fs::write(&path, &damaged).unwrap();
            assert_eq!(cache.get(&key), None, "byte {position} changed by {flip:#x} was not detected");
        }
    }
    fs::write(&path, &intact).unwrap();
    assert_eq!(cache.get(&key), Some(ptx()));
}

#[test]
fn truncated_and_extended_entries_are_misses() {
    let (_dir, cache) = fresh();
    let key = key("a");
    cache.put(&key, &ptx());
    let path = path_of(&cache, &key);
    let intact = fs::read(&path).unwrap();
    for length in 0..intact.len() {
        fs::write(&path, &intact[..length]).unwrap();
        assert_eq!(cache.get(&key), None, "{length} of {} bytes were accepted as a complete entry", intact.len());
    }
    fs::write(&path, [&intact[..], b"x"].concat()).unwrap();
    assert_eq!(cache.get(&key), None);
    cache.put(&key, &ptx());
    assert_eq!(cache.get(&key), Some(ptx()), "a damaged entry must be replaced");
}

#[test]
fn entries_of_other_keys_and_versions_are_misses() {
    let (_dir, cache) = fresh();
    cache.put(&key("a"), &ptx());
    let (a, b) = (path_of(&cache, &key("a")), path_of(&cache, &key("b")));
    fs::create_dir_all(b.parent().unwrap()).unwrap();
    fs::copy(a, &b).unwrap();
    assert_eq!(cache.get(&key("b")), None, "an entry of another key");
    // A complete entry of another format version, with a correct checksum.
    let mut bytes = format::encode(&ptx(), &key("b"));
    bytes[8] += 1;
    let content = bytes.len() - 32;
    let checksum = blake3::hash(&bytes[..content]);
    bytes[content..].copy_from_slice(checksum.as_bytes());
    fs::write(&b, &bytes).unwrap();
    assert_eq!(cache.get(&key("b")), None, "another format version");
    fs::remove_file(&b).unwrap();
    fs::create_dir(&b).unwrap();
    assert_eq!(cache.get(&key("b")), None, "a directory in place of the entry");
    cache.put(&key("b"), &ptx());
    assert_eq!(cache.warnings().len(), 2, "{:?}", cache.warnings());
}

#[test]
fn concurrent_writes_are_atomic() {
    let (_dir, cache) = fresh();
    let key = key("shared");
    let large = |fill: char| artifact(Code::Ptx(fill.to_string().repeat(200_000)));
    let candidates = [large('a'), large('b')];
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let (cache, key, candidates) = (&cache, &key, &candidates);
            scope.spawn(move || (0..40).for_each(|_| cache.put(key, &candidates[writer % 2])));
        }
        let (cache, key, candidates) = (&cache, &key, &candidates);
        scope.spawn(move || {
            let mut found = 0;
            while found < 40 {
                match cache.get(key) {
                    Some(artifact) => {
                        assert!(candidates.contains(&artifact));
                        found += 1;
                    }
                    None => assert_eq!(found, 0, "an existing entry was lost"),
                }
            }
        });
    });
    assert!(cache.warnings().is_empty());
    let left: Vec<_> = fs::read_dir(path_of(&cache, &key).parent().unwrap()).unwrap().collect();
    assert_eq!(left.len(), 1, "temporary files are left over: {left:?}");
}

#[test]
fn uncreatable_directory_disables_the_cache() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "in the way").unwrap();
    // No user can create a directory below a file, not even root.
    let cache = Cache::at(file.join("kernels"));
    assert_eq!(cache.get(&key("a")), None);
    cache.put(&key("a"), &ptx());
    cache.put(&key("a"), &ptx());
    assert_eq!(cache.get(&key("a")), None);
    assert_eq!(cache.warnings().len(), 1, "{:?}", cache.warnings());
    let message = cache.check_writable().unwrap_err().to_string();
    assert!(message.contains("file/kernels"), "{message}");
}

#[test]
fn a_disabled_cache_keeps_nothing() {
    let cache = Cache::disabled();
    cache.put(&key("a"), &ptx());
    assert_eq!((cache.get(&key("a")), cache.warnings(), cache.usage().unwrap()), (None, vec![], (0, 0)));
    cache.check_writable().unwrap();
}

#[test]
fn a_hit_takes_less_than_five_milliseconds() {
    let (_dir, cache) = fresh();
    let large = artifact(Code::Ptx("add.f32 %f1, %f2, %f3;\n".repeat(20_000)));
    cache.put(&key("a"), &large);
    let times = (0..20).map(|_| {
        let start = std::time::Instant::now();
        assert!(cache.get(&key("a")).is_some());
        start.elapsed()
    });
    let best = times.min().unwrap();
    assert!(best.as_millis() < 5, "a hit on a 460 kB entry took {best:?}");
}

/// As seen by a process of another user: directory and entry are intact, but belong to a different user.
#[test]
fn files_of_another_user_are_ignored() {
    let (_dir, own) = fresh();
    own.put(&key("a"), &ptx());
    let other_user = Cache { user: own.user + 1, ..Cache::at(own.dir().unwrap()) };
    assert_eq!(other_user.get(&key("a")), None);
    other_user.put(&key("b"), &ptx());
    let message = other_user.check_writable().unwrap_err().to_string();
    assert!(message.contains("belongs to user"), "{message}");
    for outcome in [other_user.usage().map(drop), other_user.clear().map(drop)] {
        assert!(outcome.unwrap_err().to_string().contains("a directory that you own"));
    }
    let warnings = other_user.warnings();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    for part in ["belongs to user", "a directory that you own", "TILEWRIGHT_CACHE"] {
        assert!(warnings[0].contains(part), "`{part}` is missing in: {}", warnings[0]);
    }
    assert_eq!(own.usage().unwrap().0, 1, "nothing was written or removed");
    assert_eq!(own.get(&key("a")), Some(ptx()));
}

#[test]
fn files_writable_by_others_are_ignored() {
    for (which, remedy) in [(0, "chmod 700"), (1, "chmod 700"), (2, "remove it")] {
        for bits in [0o020, 0o002, 0o022, 0o077] {
            let (_dir, cache) = fresh();
            cache.put(&key("a"), &ptx());
            let entry = path_of(&cache, &key("a"));
            let place = entry.ancestors().nth(2 - which).unwrap();
            let before = mode(place);
            fs::set_permissions(place, Permissions::from_mode(before | bits)).unwrap();
            assert_eq!(cache.get(&key("a")), None, "{} with mode {:o}", place.display(), before | bits);
            let warnings = cache.warnings();
            assert!(warnings.len() == 1 && warnings[0].contains(remedy), "{warnings:?}");
            if which == 2 {
                cache.put(&key("a"), &ptx());
                assert_eq!(mode(&entry), 0o600, "a new file takes its place");
            } else {
                cache.put(&key("b"), &ptx());
                fs::set_permissions(place, Permissions::from_mode(before)).unwrap();
            }
            assert_eq!(cache.get(&key("a")), Some(ptx()));
            assert_eq!(cache.warnings().len(), 1);
        }
    }
}

/// Read permission of others is accepted: directories of earlier versions have mode 0755.
#[test]
fn files_readable_by_others_are_used() {
    let (_dir, cache) = fresh();
    fs::create_dir(cache.dir().unwrap()).unwrap();
    fs::set_permissions(cache.dir().unwrap(), Permissions::from_mode(0o755)).unwrap();
    cache.put(&key("a"), &ptx());
    fs::set_permissions(path_of(&cache, &key("a")), Permissions::from_mode(0o644)).unwrap();
    assert_eq!(cache.get(&key("a")), Some(ptx()));
    assert!(cache.warnings().is_empty());
}

#[test]
fn folders_and_entries_are_private() {
    let dir = TempDir::new().unwrap();
    let cache = Cache::at(dir.path().join("deep/er/kernels"));
    cache.put(&key("a"), &ptx());
    let entry = path_of(&cache, &key("a"));
    assert_eq!(mode(&entry), 0o600);
    for folder in entry.ancestors().skip(1).take(4) {
        assert_eq!(mode(folder), 0o700, "{}", folder.display());
    }
}

#[test]
fn links_are_not_followed() {
    let (dir, cache) = fresh();
    cache.put(&key("a"), &ptx());
    let entry = path_of(&cache, &key("a"));
    for place in entry.ancestors().take(3) {
        let elsewhere = dir.path().join("elsewhere");
        fs::rename(place, &elsewhere).unwrap();
        symlink(&elsewhere, place).unwrap();
        let cache = Cache::at(format!("{}/", cache.dir().unwrap().display()));
        assert_eq!(cache.get(&key("a")), None, "{} is a link", place.display());
        assert_eq!(cache.warnings().len(), 1, "{:?}", cache.warnings());
        let before = fs::metadata(&elsewhere).unwrap().modified().unwrap();
        cache.put(&key("a"), &ptx());
        assert_eq!(fs::metadata(&elsewhere).unwrap().modified().unwrap(), before, "written through the link");
        fs::remove_file(place).unwrap();
        fs::rename(&elsewhere, place).unwrap();
    }
    // Directories above the one that the user names are not checked.
    let link = dir.path().join("link");
    symlink(dir.path(), &link).unwrap();
    assert_eq!(Cache::at(link.join("kernels")).get(&key("a")), Some(ptx()));
}

/// The check and the read use the same open file: replacing the path in between changes nothing.
#[test]
fn entries_replaced_during_a_read_are_not_trusted() {
    let (dir, cache) = fresh();
    let key = key("a");
    cache.put(&key, &ptx());
    let entry = path_of(&cache, &key);
    let genuine = fs::read(&entry).unwrap();
    let forged = format::encode(&artifact(Code::Ptx("forged".to_string())), &key);
    let (own, writable_by_others) = (dir.path().join("own"), dir.path().join("writable_by_others"));
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let place = |bytes: &[u8], from: &Path, mode| {
                fs::write(from, bytes).unwrap();
                fs::set_permissions(from, Permissions::from_mode(mode)).unwrap();
                fs::rename(from, &entry).unwrap();
            };
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                place(&forged, &writable_by_others, 0o666);
                place(&genuine, &own, 0o600);
                fs::write(&writable_by_others, &forged).unwrap();
                symlink(&writable_by_others, &own).unwrap();
                fs::rename(&own, &entry).unwrap();
            }
        });
        let (mut hits, start) = (0, std::time::Instant::now());
        while hits < 200 && start.elapsed() < Duration::from_secs(20) {
            if let Some(found) = cache.get(&key) {
                assert_eq!(found, ptx(), "another user's code");
                hits += 1;
            }
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(hits > 0, "the genuine entry was never read");
    });
}

#[test]
fn a_huge_file_is_not_read() {
    let (_dir, cache) = fresh();
    cache.put(&key("a"), &ptx());
    let file = fs::File::options().write(true).open(path_of(&cache, &key("a"))).unwrap();
    file.set_len(1 << 40).unwrap();
    let start = std::time::Instant::now();
    assert_eq!(cache.get(&key("a")), None);
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}

/// Lengths of the largest value, or whose sum overflows, with a correct checksum.
#[test]
fn wrong_lengths_are_misses() {
    let (_dir, cache) = fresh();
    let key = key("a");
    cache.put(&key, &ptx());
    let path = path_of(&cache, &key);
    let intact = fs::read(&path).unwrap();
    let numbers = [0, 1, 63, u32::MAX as u64, i64::MAX as u64, u64::MAX - 32, u64::MAX - 31, u64::MAX];
    for manifest in numbers {
        for code in numbers {
            let mut bytes = intact.clone();
            bytes[48..56].copy_from_slice(&manifest.to_le_bytes());
            bytes[56..64].copy_from_slice(&code.to_le_bytes());
            let content = bytes.len() - 32;
            let checksum = blake3::hash(&bytes[..content]);
            bytes[content..].copy_from_slice(checksum.as_bytes());
            fs::write(&path, &bytes).unwrap();
            assert_eq!(cache.get(&key), None, "lengths {manifest} and {code}");
        }
    }
}

fn used_at(path: &Path, seconds: u64) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
}

#[test]
fn eviction_is_least_recently_used() {
    let (_dir, cache) = fresh();
    let names = ["a", "b", "c", "d"];
    let artifact = artifact(Code::Ptx("x".repeat(10_000)));
    for (age, name) in names.iter().enumerate() {
        cache.put(&key(name), &artifact);
        used_at(&path_of(&cache, &key(name)), 1_000_000 + age as u64);
    }
    let size = fs::metadata(path_of(&cache, &key("a"))).unwrap().len();
    assert_eq!(cache.get(&key("a")), Some(artifact.clone()), "the oldest is used now");
    // A sixteenth is reserved for what this process adds before it computes the size again.
    let small = Cache::at(cache.dir().unwrap()).max_bytes(4 * size * 16 / 15 + 16);
    small.put(&key("e"), &artifact);
    let left = ["a", "b", "c", "d", "e"].map(|name| small.get(&key(name)).is_some());
    assert_eq!(left, [true, false, true, true, true]);
    assert!(small.warnings().is_empty());
}

#[test]
fn size_limit_holds() {
    let (_dir, cache) = fresh();
    let limit = 300_000;
    let cache = cache.max_bytes(limit);
    for n in 0..200 {
        let artifact = artifact(Code::Ptx("x".repeat(n * 7919 % 60_000)));
        cache.put(&key(&format!("k{n}")), &artifact);
        assert_eq!(cache.get(&key(&format!("k{n}"))), Some(artifact), "the last one stays");
        let (_, bytes) = cache.usage().unwrap();
        assert!(bytes <= limit, "{bytes} bytes after {n}");
    }
    assert!(cache.usage().unwrap().1 > limit / 2, "the limit is used up");
    cache.put(&key("large"), &artifact(Code::Ptx("x".repeat(limit as usize))));
    assert_eq!(cache.get(&key("large")), None, "larger than the cache");
    assert!(cache.usage().unwrap().0 > 1, "and nothing was evicted for it");
    assert!(cache.warnings().is_empty());
}

#[test]
fn stale_temporary_files_are_removed() {
    let (_dir, cache) = fresh();
    cache.put(&key("a"), &ptx());
    let shard = path_of(&cache, &key("a")).parent().unwrap().to_path_buf();
    let (old, young) = (shard.join(".tmp-old"), shard.join(".tmp-young"));
    fs::write(&old, "half").unwrap();
    fs::write(&young, "half").unwrap();
    used_at(&old, 1_000_000);
    Cache::at(cache.dir().unwrap()).put(&key("b"), &ptx());
    assert!(!old.exists() && young.exists());
    assert_eq!(cache.usage().unwrap().0, 2);
}

#[test]
fn concurrent_eviction_never_returns_wrong_entries() {
    let (_dir, cache) = fresh();
    let artifact_of = |n: usize| artifact(Code::Ptx(format!("kernel {n} ").repeat(2000)));
    let limit = 60_000;
    std::thread::scope(|scope| {
        for thread in 0..6 {
            let dir = cache.dir().unwrap();
            scope.spawn(move || {
                let cache = Cache::at(dir).max_bytes(limit);
                let mut hits = 0;
                for round in 0..100 {
                    let n = (round * 5 + thread) % 12;
                    match cache.get(&key(&format!("k{n}"))) {
                        Some(found) => {
                            assert_eq!(found, artifact_of(n));
                            hits += 1;
                        }
                        None => cache.put(&key(&format!("k{n}")), &artifact_of(n)),
                    }
                }
                assert!(cache.warnings().is_empty(), "{:?}", cache.warnings());
                hits
            });
        }
    });
    let (_, bytes) = cache.usage().unwrap();
    assert!(bytes <= limit + 5 * limit / 16, "{bytes} bytes");
}
