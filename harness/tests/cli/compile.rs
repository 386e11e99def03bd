//! Tests of `compile`: files and manifests for every target.

use crate::{tilewright, tilewright_with};
use std::path::Path;

const KERNEL: [&str; 5] = ["compile", "weighted_sum_fwd", "--dtype", "bf16", "--set"];

fn compile(dir: &Path, more: &[&str]) -> crate::Ran {
    tilewright(dir, &[&KERNEL[..], &["rows_tile=32,d_tile=64"], more].concat())
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn manifest(dir: &Path) -> serde_json::Value {
    serde_json::from_str(&read(&dir.join("manifest.json"))).unwrap()
}

#[test]
fn every_stage_of_a_gpu_kernel_is_written() {
    let dir = tempfile::tempdir().unwrap();
    for target in ["sm_80", "sm_90a"] {
        let more = ["--target", target, "--emit", "tile,layout,async,llvm,ptx", "-o", target];
        let listed = compile(dir.path(), &more).ok();
        let out = dir.path().join(target);
        for (extension, telling) in [
            ("tile", "kernel @weighted_sum_fwd"),
            ("layout.tile", "linear<"),
            ("async.tile", "linear<"),
            ("ll", "define ptx_kernel"),
            ("ptx", ".visible .entry weighted_sum_fwd"),
        ] {
            let name = format!("weighted_sum_fwd.{extension}");
            assert!(read(&out.join(&name)).contains(telling), "{name} has no `{telling}`");
            assert!(listed.contains(&name), "{listed}");
        }
        assert!(read(&out.join("weighted_sum_fwd.ptx")).contains(&format!(".target {target}")));
        let manifest = manifest(&out);
        assert_eq!(manifest["target"], target);
        assert_eq!(manifest["compiler"], tilewright::codegen::compiler_id());
        assert_eq!(manifest["files"]["ptx"], "weighted_sum_fwd.ptx");
    }
}

/// The written Tile IR can be parsed, and printing the result gives the same text.
#[test]
fn written_tile_ir_parses() {
    use tilewright::codegen::text;
    let dir = tempfile::tempdir().unwrap();
    compile(dir.path(), &["--target", "sm_90a", "--emit", "tile,async", "-o", "x"]).ok();
    for name in ["weighted_sum_fwd.tile", "weighted_sum_fwd.async.tile"] {
        let written = read(&dir.path().join("x").join(name));
        let func = text::parse(&written).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(text::print(&func), written, "{name}");
    }
}

#[test]
fn options_of_gpus_are_noted_for_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let options = ["--num-warps", "8", "--num-stages", "2", "--tma", "true"];
    let ran = compile(dir.path(), &[&["--target", "host", "-o", "x"][..], &options].concat());
    let note = "note: without effect on code for the CPU: --num-warps, --num-stages, options of the schedule";
    assert!(ran.code == 0 && ran.err.contains(note), "{}", ran.err);
    let ran = compile(dir.path(), &[&["--target", "sm_90a", "-o", "y"][..], &options].concat());
    assert!(ran.code == 0 && !ran.err.contains("without effect"), "{}", ran.err);
}

#[test]
fn an_argument_has_one_assumption() {
    let dir = tempfile::tempdir().unwrap();
    let ran = compile(dir.path(), &["--target", "sm_90a", "--assume", "x_stride_d=1,x_stride_d=2", "-o", "x"]);
    let message = ran.fails(2);
    assert!(message.contains("`x_stride_d` has two assumptions"), "{message}");
}

#[test]
fn an_argument_cannot_be_assumed_to_have_an_impossible_value() {
    let dir = tempfile::tempdir().unwrap();
    for (assumed, part) in [
        ("d=-1", "`d` cannot be -1: it is an extent of tensors"),
        ("d=3000000000", "`d` cannot be 3000000000: it is of type i32, which holds -2147483648 to 2147483647"),
        ("d_tile=64", "`d_tile` is a constant of kernel `weighted_sum_fwd`, not an argument"),
    ] {
        let message = compile(dir.path(), &["--target", "sm_90a", "--assume", assumed, "-o", "x"]).fails(2);
        assert!(message.contains(part) && !dir.path().join("x").exists(), "{assumed}: {message}");
    }
}

/// `dense` is short for the strides and the extents of rows; other assumptions go before it.
#[test]
fn dense_tensors_are_assumed_in_a_word() {
    let dir = tempfile::tempdir().unwrap();
    let matmul =
        ["compile", "matmul", "--target", "sm_90a", "--dtype", "bf16", "--set", "m_tile=64,n_tile=64,k_tile=64"];
    let of = |assumed: &str, out: &str| {
        let ran = tilewright(dir.path(), &[&matmul[..], &["--assume", assumed, "-o", out]].concat());
        let manifest = manifest(&dir.path().join(out));
        (ran.ok(), manifest["args"].clone())
    };
    let strides = "a_stride_m%16,a_stride_k=1,b_stride_k%16,b_stride_n=1,c_stride_m%16,c_stride_n=1";
    let optional = "other_stride_m%16,other_stride_n=1,bias_stride=1";
    let (_, listed) = of(&format!("{strides},{optional},k%16,n%16"), "listed");
    assert_eq!(of("dense", "dense").1, listed);
    let k_of = |assumed: &str| {
        let (_, args) = of(assumed, "other");
        let k = args.as_array().unwrap().iter().find(|arg| arg["name"] == "k").unwrap().clone();
        k["divisible_by"].clone()
    };
    assert_eq!([k_of("dense"), k_of("k%32,dense"), k_of("dense,k%1")], [16, 32, 1]);
    let ran = tilewright(dir.path(), &[&matmul[..], &["-o", "none"]].concat());
    assert!(ran.err.contains("is not prefetched") && ran.err.contains("--assume dense"), "{}", ran.err);
}

#[test]
fn the_manifest_says_what_a_launch_needs() {
    let dir = tempfile::tempdir().unwrap();
    let more = ["--target", "sm_90a", "--assume", "x_stride_d=1,x_stride_rows%16,w%4", "--num-warps", "8", "-o", "x"];
    compile(dir.path(), &more).ok();
    let manifest = manifest(&dir.path().join("x"));
    assert_eq!((&manifest["format"], &manifest["threads"]), (&1.into(), &256.into()));
    assert_eq!(
        manifest["constants"],
        serde_json::json!({ "rows_tile": 32, "d_tile": 64, "x_evict_first": false, "single_tile": false })
    );
    assert_eq!(manifest["types"], serde_json::json!({ "T": "bf16" }));
    assert_eq!(manifest["memory"]["y"], serde_json::json!({ "access": "out", "type": "f32" }));
    assert_eq!(manifest["memory"]["x"], serde_json::json!({ "access": "in", "type": "bf16" }));

    let args = manifest["args"].as_array().unwrap();
    let brief: Vec<String> = args
        .iter()
        .map(|arg| format!("{} {} {} {}", arg["name"], arg["ty"], arg["divisible_by"], arg["equal_to"]))
        .map(|text| text.replace('"', ""))
        .collect();
    let expected = [
        "x ptr 16 null",
        "w ptr 4 null",
        "y ptr 16 null",
        "x_stride_rows i64 16 null",
        "x_stride_d i64 1 1",
        "w_stride_d i64 1 null",
        "y_stride_rows i64 1 null",
        "rows i32 1 null",
        "d i32 1 null",
    ];
    assert_eq!(brief[..expected.len()], expected);

    // The PTX entry has the same parameters in the same order, with matching sizes.
    let ptx = read(&dir.path().join("x/weighted_sum_fwd.ptx"));
    let params: Vec<&str> = ptx.lines().filter(|line| line.trim_start().starts_with(".param .")).collect();
    assert_eq!(params.len(), args.len(), "{params:?}");
    for (param, arg) in params.iter().zip(args) {
        let bits = match arg["ty"].as_str().unwrap() {
            "ptr" | "i64" | "f64" => "64",
            "i32" | "f32" => "32",
            "tensormap" => "8",
            other => panic!("{other}"),
        };
        assert!(param.split_whitespace().nth(1).unwrap().ends_with(bits), "{param} is not {arg}");
    }
}

#[test]
fn native_code_is_written_for_the_host() {
    let dir = tempfile::tempdir().unwrap();
    compile(dir.path(), &["--target", "host", "--emit", "tile,llvm,asm,obj", "-o", "x"]).ok();
    let out = dir.path().join("x");
    let manifest = manifest(&out);
    let entry = manifest["entry"].as_str().unwrap();
    assert!(read(&out.join("weighted_sum_fwd.s")).contains(&format!("{entry}:")));
    let object = std::fs::read(out.join("weighted_sum_fwd.o")).unwrap();
    assert_eq!(&object[..4], b"\x7fELF");
    assert!(object.windows(entry.len()).any(|window| window == entry.as_bytes()));
    assert_eq!((&manifest["target"], &manifest["threads"]), (&"host".into(), &1.into()));
}

/// `--ptx-version` reaches the compiler.
#[test]
fn the_ptx_version_is_the_one_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    for version in ["8.0", "8.3", "8.6"] {
        compile(dir.path(), &["--target", "sm_90a", "--ptx-version", version, "-o", "x"]).ok();
        assert!(read(&dir.path().join("x/weighted_sum_fwd.ptx")).contains(&format!(".version {version}")));
    }
}

/// The error of an invalid constant names the line in the kernel.
#[test]
fn a_tile_of_too_many_parts_names_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().display().to_string();
    let arguments = [&KERNEL[..], &["rows_tile=255,d_tile=63", "--target", "sm_80", "-o", &out]].concat();
    // Run inside the sources, so that the message can show the line.
    let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
    let cache = dir.path().join("cache").display().to_string();
    let message = tilewright_with(sources, &arguments, &[("TILEWRIGHT_CACHE", &cache)]).fails(1);
    for part in ["48 parts", "powers of two", "weighted_sum.rs:", "x.block", "use [256, 64]"] {
        assert!(message.contains(part), "`{part}` is missing in:\n{message}");
    }
}

#[test]
fn tiles_that_do_not_fit_are_refused_with_both_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let message = tilewright(
        dir.path(),
        &[
            "compile",
            "matmul",
            "--target",
            "sm_80",
            "--dtype",
            "f32",
            "--set",
            "m_tile=256,n_tile=256,k_tile=128",
            "-o",
            "x",
        ],
    )
    .fails(1);
    let (notes, error) = message.split_once("error: ").expect("an error");
    assert!(notes.starts_with("note: the loop at ") && notes.contains("1 of the 3 pipeline stages"), "{message}");
    assert!(error.contains("262144 bytes of shared memory") && error.contains("has 166912"), "{message}");
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "").unwrap();
    let message = compile(dir.path(), &["--target", "sm_80", "-o", "file/x"]).fails(1);
    assert!(message.contains("file/x"), "{message}");
    // Before the kernel is compiled: these tiles are too large.
    std::fs::create_dir_all(dir.path().join("y/manifest.json")).unwrap();
    for (out, part) in [("file/x", "cannot create the folder file/x"), ("y", "cannot write y/manifest.json")] {
        let sets = ["rows_tile=65536,d_tile=65536", "--target", "sm_80", "-o", out];
        let message = tilewright(dir.path(), &[&KERNEL[..], &sets].concat()).fails(1);
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn without_constants_the_configuration_is_the_shipped_one() {
    let dir = tempfile::tempdir().unwrap();
    let words = ["compile", "weighted_sum_fwd", "--dtype", "f32", "-o", "x", "--target"];
    let manifest = |more: &[&str]| -> serde_json::Value {
        let ran = tilewright(dir.path(), &[&words[..], more].concat());
        assert_eq!(ran.code, 0, "{}", ran.err);
        assert!(ran.err.contains("note: constants and options that are not given are those of the"), "{}", ran.err);
        serde_json::from_str(&std::fs::read_to_string(dir.path().join("x/manifest.json")).unwrap()).unwrap()
    };
    let [narrow, wide] = ["d=256", "d=8192"].map(|size| manifest(&["sm_90a", "--size", &format!("rows=50000,{size}")]));
    let tile = |manifest: &serde_json::Value| manifest["constants"]["d_tile"].as_u64().unwrap();
    assert!(tile(&narrow) < tile(&wide), "{} {}", narrow["constants"], wide["constants"]);
    // What is given has precedence, and is complete with the rest of the configuration.
    let given = manifest(&["sm_90a", "--set", "rows_tile=2", "--num-warps", "16"]);
    assert_eq!((&given["constants"]["rows_tile"], &given["options"]["num_warps"]), (&2.into(), &16.into()));
    assert!(tile(&given) > 0 && manifest(&["host"])["constants"]["d_tile"].is_u64());

    let wrong = tilewright(dir.path(), &[&words[..], &["host", "--size", "cols=3"]].concat()).fails(2);
    assert!(wrong.contains("--size cols is unused") && wrong.contains("configurations depend on d, rows"), "{wrong}");
    let attention = |size: &str| {
        let words =
            ["compile", "flash_attention_fwd", "--dtype", "bf16", "--target", "sm_90a", "--set", "d=64", "-o", "y"];
        tilewright(dir.path(), &[&words[..], &["--size", size]].concat()).fails(2)
    };
    let (absent, constant) = (attention("num_starts=9"), attention("d=32"));
    assert!(absent.contains("--size num_starts is unused: the constants leave out all tensors"), "{absent}");
    assert!(constant.contains("--size d is unused: it is a constant, 64"), "{constant}");
}

#[test]
fn missing_constants_are_named_with_what_to_write() {
    let dir = tempfile::tempdir().unwrap();
    for (kernel, message, help) in [
        ("softmax_rows", "needs a value for d_tile, on which its configurations depend", "--set d_tile=…"),
        ("flash_attention_fwd", "needs a value for d, on which its configurations depend", "--set d=…"),
        // Those that follow from `d` are not asked for.
        ("flash_attention_bwd_sinks", "needs a value for d, q_tile", "--set d=…,q_tile=…"),
        ("flash_attention_bwd_preprocess", "needs a value for d, q_tile", "--set d=…,q_tile=…"),
    ] {
        let words = ["compile", kernel, "--target", "sm_90a", "--dtype", "bf16", "-o", "o"];
        let error = tilewright(dir.path(), &words).fails(2);
        assert!(error.contains(&format!("kernel `{kernel}` {message}\n  help: {help}\n")), "{error}");
    }
}

#[test]
fn dumps_are_printed_for_the_stage_and_kernel_that_are_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let dump = |request: &str| {
        let arguments = [&KERNEL[..], &["rows_tile=32,d_tile=64", "--target", "sm_90a", "-o", "x"]].concat();
        let ran = tilewright_with(dir.path(), &arguments, &[("TILEWRIGHT_DUMP", request)]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        ran.err
    };
    for (request, telling) in [
        ("tile", "make_view"),
        ("laid:weighted_sum_fwd", "linear<"),
        ("async", "linear<"),
        ("cse", "kernel @weighted_sum_fwd"),
        ("llvm", "define ptx_kernel"),
        ("ptx", ".visible .entry"),
    ] {
        assert!(dump(request).contains(telling), "{request}");
    }
    assert_eq!(dump("ptx:matmul"), "");
    assert!(dump("tile,ptx").contains("make_view") && dump("tile,ptx").contains(".visible .entry"));
}

/// Assumptions that contradict an `assume` of the kernel or a `--size`, of which the message names both; the manifest
/// lists the `assume`s.
#[test]
fn contradictory_assumptions_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let of = |more: &[&str]| compile(dir.path(), &[&["--target", "sm_80", "-o", "x"][..], more].concat());
    let message = of(&["--size", "d=100", "--assume", "rows%4,d%16"]).fails(2);
    assert!(message.contains("the size d = 100 contradicts the assumption `d % 16`"), "{message}");
    assert!(message.contains("change --size or --assume"), "{message}");
    let whole = ["--set", "single_tile=true", "--assume"];
    let message = of(&[&whole[..], &["d=100"]].concat()).fails(1);
    for part in ["the assumptions `d = 100` contradict an `assume`", "weighted_sum.rs:", "false for every launch"] {
        assert!(message.contains(part), "`{part}` is missing in:\n{message}");
    }
    let message = of(&["--set", "single_tile=true", "--size", "d=100"]).fails(1);
    for part in ["the constants and the sizes `d = 100` contradict an `assume`", "false for these sizes"] {
        assert!(message.contains(part), "`{part}` is missing in:\n{message}");
    }
    // A batch of one entry takes keys of one entry.
    let attention = ["compile", "flash_attention_fwd", "--target", "sm_90a", "--dtype", "bf16", "--set", "d=64"];
    let assumed = ["--assume", "batch=1,heads%16,entries_kv%16", "-o", "x"];
    let message = tilewright(dir.path(), &[&attention[..], &assumed].concat()).fails(1);
    for part in ["the assumptions `batch = 1`, `entries_kv % 16` contradict an `assume`", "false for every launch"] {
        assert!(message.contains(part), "`{part}` is missing in:\n{message}");
    }
    assert!(!dir.path().join("x").exists(), "nothing was written");
    of(&[&whole[..], &["d%4"]].concat()).ok();
    let assumes = manifest(&dir.path().join("x"))["assumes"].clone();
    assert!(assumes[0].as_str().unwrap().starts_with("d == 64 ("), "{assumes}");
}
