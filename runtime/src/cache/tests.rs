//! Whatever happens to an entry or its directory, the answer is right or missing.

use std::fs;

use tempfile::TempDir;
use tilewright_codegen::target::{ArgDesc, ArgType, Code, GpuArch, HostExpr, Manifest, TensorMapDesc};

use super::*;

fn artifact(code: Code) -> Artifact {
    let manifest = Manifest {
        kernel: "softmax".to_string(),
        entry: "softmax".to_string(),
        target: "sm_90a".to_string(),
        args: vec![ArgDesc { name: "x".to_string(), ty: ArgType::Ptr, divisible_by: 16, equal_to: None }],
        threads: 128,
        shared_bytes: 65536,
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
    };
    Artifact { manifest, code }
}

fn ptx() -> Artifact {
    artifact(Code::Ptx(".version 8.3\n.target sm_90a\n".to_string()))
}

fn key(ir: &str) -> Key {
    Key::new(ir, &Target::Nvptx(GpuArch::Sm90a), &CompileOptions::default(), "1")
}

fn fresh() -> (TempDir, Cache) {
    let dir = TempDir::new().unwrap();
    let cache = Cache::at(dir.path().join("kernels"));
    (dir, cache)
}

#[test]
fn what_was_put_is_got() {
    let (_dir, cache) = fresh();
    let object = artifact(Code::Object(vec![0, 255, 7, 0]));
    assert_eq!(cache.get(&key("a")), None);
    cache.put(&key("a"), &ptx());
    cache.put(&key("b"), &object);
    assert_eq!(cache.get(&key("a")), Some(ptx()));
    assert_eq!(cache.get(&key("b")), Some(object));
    assert_eq!(cache.get(&key("c")), None);
    assert_eq!(cache.usage().0, 2);
    assert_eq!(cache.clear().unwrap(), 2);
    assert_eq!(cache.get(&key("a")), None);
}

#[test]
fn everything_that_matters_is_in_the_key() {
    let (target, options) = (Target::Nvptx(GpuArch::Sm90a), CompileOptions::default());
    let host = |cpu: &str| {
        Target::Host(tilewright_codegen::target::HostCpu {
            triple: "t".to_string(),
            cpu: cpu.to_string(),
            features: String::new(),
        })
    };
    let other = |change: fn(&mut CompileOptions)| {
        let mut options = CompileOptions::default();
        change(&mut options);
        options
    };
    let keys = [
        Key::new("ir", &target, &options, "1"),
        Key::new("ir ", &target, &options, "1"),
        Key::new("ir", &target, &options, "2"),
        Key::new("ir", &Target::Nvptx(GpuArch::Sm80), &options, "1"),
        Key::new("ir", &host("a"), &options, "1"),
        Key::new("ir", &host("b"), &options, "1"),
        Key::new("ir", &target, &other(|o| o.num_warps = 8), "1"),
        Key::new("ir", &target, &other(|o| o.num_stages = 1), "1"),
        Key::new("ir", &target, &other(|o| o.ptx_version = 80), "1"),
        Key::new("ir", &target, &other(|o| o.debug_asserts = false), "1"),
        Key::new("ir", &target, &other(|o| o.max_registers = Some(128)), "1"),
    ];
    let distinct: std::collections::HashSet<_> = keys.iter().collect();
    assert_eq!(distinct.len(), keys.len());
    assert_eq!(keys[0], Key::new("ir", &target, &options, "1"));
}

#[test]
fn damage_anywhere_is_a_miss() {
    let (_dir, cache) = fresh();
    let key = key("a");
    cache.put(&key, &ptx());
    let path = cache.path_of(&key).unwrap();
    let intact = fs::read(&path).unwrap();
    for position in 0..intact.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut damaged = intact.clone();
            damaged[position] ^= flip;
            fs::write(&path, &damaged).unwrap();
            assert_eq!(cache.get(&key), None, "byte {position} changed by {flip:#x} went unnoticed");
        }
    }
    fs::write(&path, &intact).unwrap();
    assert_eq!(cache.get(&key), Some(ptx()));
}

#[test]
fn every_truncation_and_any_tail_is_a_miss() {
    let (_dir, cache) = fresh();
    let key = key("a");
    cache.put(&key, &ptx());
    let path = cache.path_of(&key).unwrap();
    let intact = fs::read(&path).unwrap();
    for length in 0..intact.len() {
        fs::write(&path, &intact[..length]).unwrap();
        assert_eq!(cache.get(&key), None, "{length} of {} bytes went for the whole", intact.len());
    }
    fs::write(&path, [&intact[..], b"x"].concat()).unwrap();
    assert_eq!(cache.get(&key), None);
    cache.put(&key, &ptx());
    assert_eq!(cache.get(&key), Some(ptx()), "a damaged entry must be replaced");
}

#[test]
fn foreign_entries_are_misses() {
    let (_dir, cache) = fresh();
    cache.put(&key("a"), &ptx());
    let (a, b) = (cache.path_of(&key("a")).unwrap(), cache.path_of(&key("b")).unwrap());
    fs::create_dir_all(b.parent().unwrap()).unwrap();
    fs::copy(a, &b).unwrap();
    assert_eq!(cache.get(&key("b")), None, "an entry under another key's name");
    // A whole entry of another format version, checksum and all.
    let mut bytes = format::encode(&ptx(), &key("b"));
    bytes[8] += 1;
    let content = bytes.len() - 32;
    let checksum = blake3::hash(&bytes[..content]);
    bytes[content..].copy_from_slice(checksum.as_bytes());
    fs::write(&b, &bytes).unwrap();
    assert_eq!(cache.get(&key("b")), None, "another format version");
    fs::remove_file(&b).unwrap();
    fs::create_dir(&b).unwrap();
    assert_eq!(cache.get(&key("b")), None, "a directory in the entry's place");
    cache.put(&key("b"), &ptx());
    assert!(cache.has_warned());
}

#[test]
fn threads_that_write_the_same_entry_never_show_half_of_it() {
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
                    None => assert_eq!(found, 0, "an entry that was there is gone"),
                }
            }
        });
    });
    assert!(!cache.has_warned());
    let left: Vec<_> = fs::read_dir(cache.path_of(&key).unwrap().parent().unwrap()).unwrap().collect();
    assert_eq!(left.len(), 1, "temporary files are left over: {left:?}");
}

#[test]
fn a_directory_that_cannot_be_made_is_no_failure() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "in the way").unwrap();
    // Below a file nobody can make a directory, not even root.
    let cache = Cache::at(file.join("kernels"));
    assert_eq!(cache.get(&key("a")), None);
    assert!(!cache.has_warned());
    cache.put(&key("a"), &ptx());
    assert!(cache.has_warned());
    cache.put(&key("a"), &ptx());
    assert_eq!(cache.get(&key("a")), None);
    let message = cache.check_writable().unwrap_err().to_string();
    assert!(message.contains("file/kernels"), "{message}");
}

#[test]
fn a_disabled_cache_keeps_nothing() {
    let cache = Cache::disabled();
    cache.put(&key("a"), &ptx());
    assert_eq!((cache.get(&key("a")), cache.has_warned(), cache.usage()), (None, false, (0, 0)));
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
