//! Compiles and runs the host programs of `docs/ahead-of-time.md`; those for a GPU with a driver that only records calls.

use crate::tilewright;
use std::path::Path;
use std::process::Command;

use tilewright::LaunchArg;
use tilewright::precompiled::{Document, tensor_maps};

/// Returns the code block of `docs/ahead-of-time.md` that begins with this line.
fn block(first_line: &str) -> String {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/ahead-of-time.md");
    let page = std::fs::read_to_string(page).unwrap();
    let start = page.find(first_line).unwrap_or_else(|| panic!("the page has no `{first_line}`"));
    page[start..].split("```").next().unwrap().to_string()
}

/// Compiles the kernel as on that page, and returns the manifest.
fn compile(dir: &Path, target: &str, out: &str) -> serde_json::Value {
    let constants = ["--dtype", "f32", "--set", "rows_tile=32,d_tile=64"];
    tilewright(dir, &[&["compile", "weighted_sum_fwd", "--target", target, "-o", out], &constants[..]].concat()).ok();
    serde_json::from_str(&std::fs::read_to_string(dir.join(out).join("manifest.json")).unwrap()).unwrap()
}

/// Runs a command in `dir`, and returns its output.
fn run(dir: &Path, command: &[&str]) -> String {
    let output = Command::new(command[0]).args(&command[1..]).current_dir(dir).env("LD_LIBRARY_PATH", dir).output();
    let output = output.unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command:?}\n{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn the_c_program_runs_native_code() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = compile(dir.path(), "host", "out");
    let source = block("/* cpu.c");
    let written = source.lines().find(|line| line.starts_with("#define ARENA_BYTES")).unwrap().to_string();
    let source = source.replace(&written, &format!("#define ARENA_BYTES {}", manifest["arena_bytes"]));
    std::fs::write(dir.path().join("cpu.c"), source).unwrap();
    run(dir.path(), &["cc", "-Wall", "-Werror", "cpu.c", "out/weighted_sum_fwd.o", "-o", "cpu"]);
    assert_eq!(run(dir.path(), &["./cpu"]), "right\n");
}

/// A driver that prints the parameters of tensor maps and launches. Its maps contain the address that they are of.
const DRIVER: &str = r#"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int cuModuleLoadData(void **module, const char *ptx) { *module = (void *)1; return strstr(ptx, ".entry") ? 0 : 1; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)2; return name[0] == 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { printf("attribute %d %d\n", attribute, value); return 0; }
int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *base, const uint64_t *shape, const uint64_t *strides,
                           const uint32_t *block, const uint32_t *ones, int interleave, int swizzle, int l2, int fill) {
    if ((uintptr_t)map % 64 != 0) return 1;
    memcpy(map, &base, sizeof base);
    printf("map type %d base %llu shape", type, (unsigned long long)(uintptr_t)base);
    for (uint32_t i = 0; i < rank; i++) printf(" %llu", (unsigned long long)shape[i]);
    printf(" strides");
    for (uint32_t i = 0; i + 1 < rank; i++) printf(" %llu", (unsigned long long)strides[i]);
    printf(" block");
    for (uint32_t i = 0; i < rank; i++) printf(" %u/%u", block[i], ones[i]);
    printf(" options %d %d %d %d\n", interleave, swizzle, l2, fill);
    return 0;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz, unsigned shared,
                   void *stream, void **args, void **extra) {
    printf("launch %u %u %u threads %u %u %u shared %u", x, y, z, tx, ty, tz, shared);
    /* q, q_stride_n_q, n_q, scale, and the four maps. */
    printf(" q %llu row %lld", *(unsigned long long *)args[0], *(long long *)args[23]);
    printf(" n %d scale %g", *(int32_t *)args[15], *(float *)args[17]);
    printf(" maps");
    for (int i = 61; i < 65; i++) printf(" %llu", *(unsigned long long *)args[i]);
    printf("\n");
    return 0;
}
"#;

#[test]
fn the_python_launcher_launches_flash_attention() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let page = block("tilewright compile flash_attention_fwd").replace('\\', " ");
    let words: Vec<&str> = page.split_whitespace().skip(1).collect();
    tilewright(dir, &words).ok();
    for file in ["launcher.py", "attention.py"] {
        std::fs::write(dir.join(file), block(&format!("# {file}"))).unwrap();
    }
    std::fs::write(dir.join("driver.c"), DRIVER).unwrap();
    run(dir, &["cc", "-shared", "-fPIC", "driver.c", "-o", "libcuda.so.1"]);
    let addresses = [0x1000_u64, 0x2000, 0x3000, 0x4000, 0x5000, 0x6000];
    let [batch, heads, n, d] = [2_i64, 3, 100, 64];
    let program = format!("from attention import launch; launch(*{addresses:?}, ({batch}, {heads}, {n}, {d}), 132)");
    let output = run(dir, &["python3", "-c", &program]);
    let lines: Vec<&str> = output.lines().collect();

    // What the runtime would encode for the same arguments.
    let text = std::fs::read_to_string(dir.join("attention/manifest.json")).unwrap();
    let manifest = Document::from_json(&text).unwrap().manifest;
    let memory = |addr| LaunchArg::Ptr { addr, bytes: 1 << 20 };
    let [q, k, v, o, lse, taken] = addresses.map(memory);
    let none = LaunchArg::Ptr { addr: 0, bytes: 0 };
    let mut args = vec![q, k, v, o, lse, none, none, none, none, none, none, none, taken, none, none];
    args.extend([LaunchArg::I32(n as i32), LaunchArg::I32(n as i32), LaunchArg::F32(0.125)]);
    args.extend([LaunchArg::I32(0), LaunchArg::F32(0.0), LaunchArg::I32(132)]);
    for _ in 0..4 {
        args.extend([heads * n * d, n * d, d, 1].map(LaunchArg::I64));
    }
    args.extend([0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1].map(LaunchArg::I64));
    args.extend(
        [batch, heads, batch, heads, n, batch, batch, 0, 0, 0, batch, 0].map(|extent| LaunchArg::I32(extent as i32)),
    );
    // The code was compiled for these numbers.
    let assumed: serde_json::Value = serde_json::from_str(&text).unwrap();
    let assumed = assumed["args"].as_array().unwrap();
    assert_eq!(args.len() + manifest.tensor_maps.len(), assumed.len());
    for (arg, assumed) in args.iter().zip(assumed) {
        let number = match *arg {
            LaunchArg::Ptr { addr, .. } => addr as i64,
            LaunchArg::I32(n) => n.into(),
            LaunchArg::I64(n) => n,
            _ => continue,
        };
        assert_eq!(number % assumed["divisible_by"].as_i64().unwrap(), 0, "{assumed}");
        assert!(assumed["equal_to"].as_i64().is_none_or(|only| only == number), "{assumed}: {number}");
    }
    let expected = tensor_maps(&manifest, &args).unwrap();
    let mut bases: Vec<u64> = expected.iter().map(|map| map.base).collect();
    let in_order = bases.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
    bases.sort_unstable();
    assert_eq!(bases, addresses[..4], "Q, K, V and O");
    let joined = |numbers: &[u64]| numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(" ");
    for (map, described) in expected.iter().zip(&manifest.tensor_maps) {
        let block: Vec<String> = described.block.iter().map(|extent| format!("{extent}/1")).collect();
        // bf16; no interleaving, 128-byte swizzle, promotion to 128 bytes, zeros out of bounds.
        let line = format!(
            "map type 9 base {} shape {} strides {} block {} options 0 3 2 0",
            map.base,
            joined(&map.shape),
            joined(&map.strides),
            block.join(" ")
        );
        assert!(lines.contains(&line.as_str()), "{line}\nis not in\n{output}");
        // Rows of d bf16 numbers; the extents of heads and batch are not needed.
        assert_eq!((&map.shape[..2], map.strides[0]), (&[64, 100][..], 128));
    }
    let (threads, shared) = (manifest.threads, manifest.shared_bytes);
    assert_eq!(lines[0], format!("attribute 8 {shared}"));
    // Four tiles of 64 rows share a block, so one block covers the 100 rows of a head, and there is one for each.
    let launch =
        format!("launch 6 1 1 threads {threads} 1 1 shared {shared} q 4096 row 64 n 100 scale 0.125 maps {in_order}");
    assert_eq!(*lines.last().unwrap(), launch, "{output}");
}
