//! Tests `tilewright explain`, with NVIDIA's tools if they are installed, and without.

use tempfile::TempDir;

use crate::{tilewright, tilewright_with};

/// Environment variables with which no tool is found.
const BARE: [(&str, &str); 2] = [("PATH", ""), ("TILEWRIGHT_PTXAS", "")];

#[test]
fn without_tools_ptx_is_explained_and_missing_tools_are_named() {
    let dir = TempDir::new().unwrap();
    let arguments = ["explain", "flash_attention_fwd", "--set", "causal=true", "--shape", "q=1,16,16384,64"];
    let measured = ["--time-ms", "1.293", "--peak-tflops", "687", "--markdown", "e.md"];
    let out = tilewright_with(dir.path(), &[&arguments[..], &measured[..]].concat(), &BARE).ok();
    for part in ["ptxas was not found", "make cuda-tools", "PTX instructions", "tensor core (wgmma)", "loop 1"] {
        // Notes are wrapped.
        let text = out.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(part), "{part}: {out}");
    }
    // The configuration for this problem in the shipped table of the H200.
    for part in [
        "q_tile=64 k_tile=128 replicas=3 persistent=true ",
        " d_tile=64 d_v_tile=64 group=1 even_keys=true page=0 num_warps=4",
    ] {
        assert!(out.contains(part), "{part}: {out}");
    }
    // 4 · 16 · 16384² · 64 / 2 FLOP at 687 TFLOP/s take 800 µs, 61.9 % of 1.293 ms.
    let markdown = std::fs::read_to_string(dir.path().join("e.md")).unwrap();
    let compute = markdown.lines().find(|line| line.starts_with("| compute")).expect("a bound");
    for part in ["549.8", "GFLOP", "800.2", "61.9"] {
        assert!(compute.contains(part), "{part}: {compute}");
    }
    // q, k, v and o of 32 MiB each.
    let memory = markdown.lines().find(|line| line.starts_with("| memory")).expect("a bound");
    assert!(memory.contains("134.2") && markdown.contains("The shape of lse, "), "{memory}");
}

#[test]
fn schedules_are_the_shipped_ones_unless_the_command_line_says_otherwise() {
    let dir = TempDir::new().unwrap();
    let explain = |more: &[&str]| {
        let arguments = ["explain", "flash_attention_fwd", "--set", "d=128,causal=true"];
        tilewright_with(dir.path(), &[&arguments[..], more].concat(), &BARE).ok()
    };
    // Warp specialization: 128 threads of producer warps in addition to the 4 consumer warps of each of two programs.
    let shipped = explain(&[]);
    assert!(shipped.contains("warp_specialize=true") && shipped.contains("│ 384 "), "{shipped}");
    assert!(shipped.contains("TMA, bulk async copy"), "{shipped}");
    let other = explain(&["--warp-specialize", "false", "--tma", "false"]);
    assert!(other.contains("warp_specialize=false") && other.contains("│ 128 "), "{other}");
    assert!(!other.contains("TMA, bulk async copy"), "{other}");
}

#[test]
fn tiles_of_attention_without_configurations_are_small_by_default() {
    let dir = TempDir::new().unwrap();
    let out = tilewright_with(dir.path(), &["explain", "flash_attention_bwd_relative"], &BARE).ok();
    assert!(out.contains("tile=64"), "{out}");
}

/// A stage of these tiles takes 96 KB.
#[test]
fn fewer_stages_than_requested_are_noted() {
    let dir = TempDir::new().unwrap();
    let tiles = "m_tile=128,n_tile=256,k_tile=128,persistent=false,replicas=1";
    let options = ["--num-warps", "8", "--num-stages", "4", "--warp-specialize", "true", "--tma", "true"];
    let ran = tilewright_with(dir.path(), &[&["explain", "matmul", "--set", tiles][..], &options].concat(), &BARE);
    let note =
        " of the 4 pipeline stages that are requested: a stage takes 98304 bytes of shared memory in addition to ";
    assert!(ran.err.contains(note), "{}", ran.err);
    ran.ok();
}

#[test]
fn ptxas_gives_registers_and_nvdisasm_instructions() {
    let dir = TempDir::new().unwrap();
    let found = std::env::var("TILEWRIGHT_PTXAS").ok().filter(|path| !path.is_empty());
    let Some(ptxas) = found else {
        eprintln!("skipped: ptxas was not found: `make cuda-tools` downloads it");
        return;
    };
    let variables = [("TILEWRIGHT_PTXAS", ptxas.as_str())];
    let out = tilewright_with(dir.path(), &["explain", "matmul"], &variables).ok();
    assert!(out.contains("registers per thread") && out.contains("spills per thread") && out.contains("none"), "{out}");
    assert!(out.contains("occupancy of an SM") && out.contains("asynchronous MMAs"), "{out}");
    if std::path::Path::new(&ptxas).with_file_name("nvdisasm").is_file() {
        assert!(out.contains("SASS instructions") && out.contains("tensor core (wgmma)"), "{out}");
    }
    for kernel in ["rms_norm_fwd", "embedding_bwd", "adamw", "flash_attention_bwd_preprocess", "rope_at"] {
        let out = tilewright_with(dir.path(), &["explain", kernel, "--target", "sm_80"], &variables).ok();
        assert!(out.contains("of 255"), "{kernel}: {out}");
    }
}

#[test]
fn a_record_gives_time_shape_and_peak() {
    let dir = TempDir::new().unwrap();
    let row = r#"{"kernel": "matmul", "shape": [1024, 512, 256], "case": "tf32", "dtype": "f32", "median_ms": 0.01, "tflops": 26.8, "fraction": 0.5}"#;
    let peer = r#"{"peer": "other", "kernel": "matmul", "shape": [1, 1, 1], "dtype": "f32", "median_ms": 9.0}"#;
    std::fs::write(dir.path().join("rows.jsonl"), format!("{row}\n{peer}\nnothing\n")).unwrap();
    let out = tilewright_with(dir.path(), &["explain", "matmul", "--record", "rows.jsonl"], &BARE).ok();
    assert!(out.contains("precision=tf32") && out.contains("A launch takes 0.01 ms"), "{out}");
    // 2 · 1024 · 512 · 256 FLOP in 0.01 ms are half of the peak rate, 26.8 / 0.5 TFLOP/s.
    assert!(out.contains("0.2684") && out.contains("50.1"), "{out}");
    let error = tilewright_with(dir.path(), &["explain", "softmax_rows", "--record", "rows.jsonl"], &BARE).fails(2);
    assert!(error.contains("no row with a time of `softmax_rows`"), "{error}");
}

/// The device of a row is said; rows of a CPU are not taken, and lines that were cut are said.
#[test]
fn a_row_of_a_record_is_of_a_gpu() {
    let dir = TempDir::new().unwrap();
    let row = |device: &str| {
        format!(
            r#"{{"device": "{device}", "kernel": "matmul", "shape": [64, 64, 64], "dtype": "bf16", "median_ms": 0.01}}"#
        )
    };
    let explain = |text: String| {
        std::fs::write(dir.path().join("rows.jsonl"), text).unwrap();
        tilewright_with(dir.path(), &["explain", "matmul", "--record", "rows.jsonl"], &BARE)
    };
    let ran = explain(format!("{}\n{}\n{{\"device\": \"NVI", row("NVIDIA H200"), row("CPU (x86_64)")));
    assert!(ran.err.contains("note: rows.jsonl:3 is skipped"), "{}", ran.err);
    assert!(ran.ok().contains("A launch takes 0.01 ms on NVIDIA H200"));
    assert!(explain(row("CPU (x86_64)")).fails(2).contains("no row with a time of `matmul`"));
}

/// The types, the shape and the constants of a row are those of the kernel that is explained.
#[test]
fn a_row_of_a_record_is_of_the_same_launch() {
    let dir = TempDir::new().unwrap();
    let row = |dtype: &str, case: &str, ms: f64| {
        format!(
            r#"{{"kernel": "matmul", "shape": [1024, 512, 256], "case": "{case}", "dtype": "{dtype}", "median_ms": {ms}}}"#
        )
    };
    std::fs::write(dir.path().join("rows.jsonl"), format!("{}\n{}\n", row("bf16", "", 0.01), row("f32", "tf32", 0.02)))
        .unwrap();
    let explain = |more: &[&str]| {
        let arguments = ["explain", "matmul", "--record", "rows.jsonl"];
        tilewright_with(dir.path(), &[&arguments[..], more].concat(), &BARE)
    };
    assert!(explain(&[]).ok().contains("A launch takes 0.02 ms"));
    assert!(explain(&["--dtype", "bf16", "--shape", "a=1024,256"]).ok().contains("A launch takes 0.01 ms"));
    let none = "no row with a time of `matmul` and of these types and constants: its rows are of bf16, f32 tf32";
    for (more, part) in [
        (&["--dtype", "f16"][..], none),
        (&["--dtype", "f32", "--set", "precision=ieee"], none),
        (&["--shape", "a=64,256"], "--shape: `a` has shape [64, 256], and [1024, 256] in the row of the record"),
    ] {
        let message = explain(more).fails(2);
        assert!(message.contains(part), "{message}");
    }
}

/// Work and roofline are of the row's problem: its case has the columns of v, and a row of something else is refused.
#[test]
fn a_row_of_a_record_has_the_case_of_the_launch() {
    let dir = TempDir::new().unwrap();
    let explain = |case: &str, ms: f64, more: &[&str]| {
        let row = format!(
            r#"{{"kernel": "attention_fwd", "shape": [1, 4, 128, 64], "case": "{case}", "dtype": "bf16", "median_ms": {ms}}}"#
        );
        std::fs::write(dir.path().join("rows.jsonl"), row).unwrap();
        let arguments = ["explain", "flash_attention_fwd", "--record", "rows.jsonl"];
        tilewright_with(dir.path(), &[&arguments[..], more].concat(), &BARE)
    };
    // 2 · 4 · 128 · 128 · (64 + 32) FLOP, as of shapes and a constant.
    let shape = ["explain", "flash_attention_fwd", "--set", "causal=false,d_v=32", "--shape", "q=1,4,128,64"];
    for out in [explain("full d_v=32", 0.01, &[]).ok(), tilewright_with(dir.path(), &shape, &BARE).ok()] {
        assert!(out.contains("d_v=32") && out.contains("0.01258"), "{out}");
    }
    for (case, ms) in [("causal window=9", 0.01), ("full sinks", 0.01), ("full", 0.0), ("full", -1.0)] {
        let message = explain(case, ms, &[]).fails(2);
        assert!(message.contains("has no row with a time of `attention_fwd`"), "{message}");
    }
}

/// The default assumptions hold for the shapes, and none contradicts an `assume` of the kernel.
#[test]
fn shapes_and_assumes_of_the_kernel_agree() {
    let dir = TempDir::new().unwrap();
    let explain = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        tilewright_with(dir.path(), &[&["explain"][..], &words[..]].concat(), &BARE)
    };
    explain("softmax_rows --set d_tile=128 --shape x=8,100").ok();
    let message = explain("softmax_rows --set d_tile=64 --shape x=8,100").fails(1);
    assert!(message.contains("the sizes `d = 100` contradict an `assume` of the kernel"), "{message}");
    // A batch of one entry, and as many sequences as there are numbers of starts but one.
    explain("flash_attention_fwd --set d=64,lengths_given=true,row_starts_given=true").ok();
}

#[test]
fn the_page_replaces_a_file_and_follows_links() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    let explain = |more: &[&str]| tilewright_with(dir.path(), &[&["explain", "rms_norm_fwd"], more].concat(), &BARE);
    std::fs::write(at("old.html"), "old").unwrap();
    std::os::unix::fs::symlink("old.html", at("link.html")).unwrap();
    let out = explain(&["--html", "link.html"]).ok();
    assert!(out.contains("wrote link.html"), "{out}");
    assert!(at("link.html").is_symlink());
    let page = std::fs::read_to_string(at("old.html")).unwrap();
    // The kernel's source is not in this folder.
    for part in ["<!DOCTYPE html>", "IR after each pass", "cannot be read here", "prefers-color-scheme: dark"] {
        assert!(page.contains(part), "{part}");
    }
    explain(&["--out", "all"]).ok();
    let inside = std::fs::read_to_string(at("all/explain.html")).unwrap();
    assert!(inside.contains("IR after each pass"));
    // Other formats have the tables only.
    let data = std::fs::read_to_string(at("all/explain.json")).unwrap();
    assert!(!data.contains("IR after each pass") && data.contains("resources"), "{data}");
    let error = explain(&["--html", "missing/page.html"]).fails(1);
    assert!(error.contains("cannot write missing/page.html"), "{error}");
}

#[test]
fn the_page_does_not_replace_what_it_shows() {
    let dir = TempDir::new().unwrap();
    let source = dir.path().join("kernels/src/rms_norm.rs");
    std::fs::create_dir_all(source.parent().unwrap()).unwrap();
    std::fs::write(&source, "// one\n// two\n").unwrap();
    std::os::unix::fs::symlink(&source, dir.path().join("page.html")).unwrap();
    let explain = |page: &str| tilewright_with(dir.path(), &["explain", "rms_norm_fwd", "--html", page], &BARE);
    for page in ["kernels/src/rms_norm.rs", "page.html"] {
        let error = explain(page).fails(2);
        assert!(error.contains("it is the same file as the input kernels/src/rms_norm.rs"), "{error}");
    }
    assert_eq!(std::fs::read_to_string(&source).unwrap(), "// one\n// two\n");
    // The file has fewer lines than the kernel.
    explain("other.html").ok();
    let page = std::fs::read_to_string(dir.path().join("other.html")).unwrap();
    assert!(page.contains("The file is not the one that was compiled") && !page.contains("// two"));
}

/// Before the kernel is compiled, and before the report is printed.
#[test]
fn a_folder_of_pictures_that_is_a_file_is_refused_first() {
    let dir = TempDir::new().unwrap();
    std::fs::write(dir.path().join("afile"), "old").unwrap();
    let ran = tilewright_with(dir.path(), &["explain", "rms_norm_fwd", "--svg", "afile"], &BARE);
    assert!(ran.out.is_empty(), "{}", ran.out);
    let error = ran.fails(1);
    assert!(error.contains("cannot create the folder afile"), "{error}");
    assert_eq!(std::fs::read_to_string(dir.path().join("afile")).unwrap(), "old");
}

#[test]
fn a_folder_of_pictures_is_created_for_pictures_only() {
    let dir = TempDir::new().unwrap();
    let explain = |more: &[&str]| {
        let arguments = ["explain", "rms_norm_fwd", "--svg", "new/pictures"];
        tilewright_with(dir.path(), &[&arguments[..], more].concat(), &BARE)
    };
    explain(&["--dtype", "i32"]).fails(2);
    let error = explain(&["--plot", "plot.svg"]).fails(2);
    assert!(error.contains("--plot is unused: this command draws no plot"), "{error}");
    assert!(!dir.path().join("new").exists() && !dir.path().join("plot.svg").exists());
    explain(&[]).ok();
    assert!(std::fs::read_dir(dir.path().join("new/pictures")).unwrap().count() > 0);
}

#[test]
fn mistakes_name_the_remedy() {
    let dir = TempDir::new().unwrap();
    let refused = |arguments: &[&str], reason: &str| {
        let message = tilewright(dir.path(), &[&["explain"], arguments].concat()).fails(2);
        assert!(message.contains(reason), "{arguments:?}: {message}");
    };
    refused(&["matmull"], "did you mean `matmul`?");
    refused(&["matmul", "--target", "sm_70"], "or sm_90a");
    refused(&["matmul", "--shape", "x=1,2"], "has no tensor `x`");
    refused(&["matmul", "--shape", "a=1"], "2 strides");
    refused(
        &["matmul", "--shape", "a=64,64", "--shape", "b=32,64"],
        "tensor `b` has shape [32, 64]: `k` is 32 there, and 64 in `a`",
    );
    refused(&["matmul", "--shape", "a=64,64", "--shape", "a=32,64"], "--shape names `a` twice");
    refused(
        &["flash_attention_fwd", "--set", "d=64", "--shape", "q=1,16,1024,128"],
        "the constant d is 64, and dimension 3 of `q`, its extent, is 128",
    );
    refused(
        &["matmul", "--assume", "k%16", "--shape", "a=64,100"],
        "the size k = 100 contradicts the assumption `k % 16`\n  help: change --shape or --assume",
    );
    refused(&["matmul", "--set", "tile=5"], "no constant `tile`");
    refused(&["matmul", "--num-warps", "3"], "--num-warps cannot be 3");
}

#[test]
fn element_types_that_compile_refuses_are_refused() {
    let dir = TempDir::new().unwrap();
    for (kernel, dtype) in [
        ("cross_entropy_fwd", "f32"),
        ("flash_attention_fwd", "f8e4m3"),
        ("quantize_rows", "i32"),
        ("quantize_rows", "T=i32,U=f8e4m3"),
        ("softmax_rows", "i32"),
        ("softmax_rows", "U=f32"),
        ("softmax_rows", "T=bf16,f16"),
        ("adamw", "G=f32,zzz"),
        ("document_ranges_of_side", "bf16"),
    ] {
        let explained = tilewright(dir.path(), &["explain", kernel, "--dtype", dtype]).fails(2);
        let compile = ["compile", kernel, "--target", "sm_90a", "--dtype", dtype, "-o", "o"];
        assert_eq!(explained, tilewright(dir.path(), &compile).fails(2), "{kernel}, {dtype}");
    }
    let out = tilewright_with(dir.path(), &["explain", "cross_entropy_fwd", "--dtype", "T=f32"], &BARE).ok();
    assert!(out.contains("cross_entropy_fwd f32 i64 for sm_90a"), "{out}");
}

#[test]
fn constants_that_follow_from_extents_are_derived_or_asked_for() {
    let dir = TempDir::new().unwrap();
    let explain = |more: &[&str]| {
        let arguments = ["explain", "quantize_rows", "--dtype", "T=bf16,U=f8e4m3"];
        tilewright_with(dir.path(), &[&arguments[..], more].concat(), &BARE)
    };
    for (option, value, tile) in [
        ("--shape", "x=1,2,256,100", "d_tile=128 "),
        ("--shape", "y=1,2,256,20", "d_tile=32 "),
        ("--assume", "d=48", "d_tile=64 "),
        ("--set", "d_tile=16", "d_tile=16 "),
    ] {
        let out = explain(&[option, value]).ok();
        assert!(out.contains(tile) && !out.contains("Assumed"), "{option} {value}: {out}");
    }
    let error = explain(&[]).fails(2);
    assert!(error.contains("`quantize_rows` needs a value for d_tile"), "{error}");
    assert!(error.contains("--set d_tile=…; `d_tile` follows from `d`"), "{error}");
}

#[test]
fn dots_name_their_instructions_and_where_operands_come_from() {
    let dir = TempDir::new().unwrap();
    let dots = |target: &str, dtype: &str, more: &[&str]| {
        let arguments = ["explain", "scaled_matmul", "--target", target, "--dtype", dtype];
        let set = ["--set", "b_col_major=true,fast_accumulation=true"];
        let out = tilewright_with(dir.path(), &[&arguments[..], &set, more].concat(), &BARE).ok();
        let (_, table) = out.split_once("\nDots\n").expect("a table of dots");
        table.split_once("\n\n").expect("another table").0.to_string()
    };
    let weight = ["--assume", "a_stride_m%16,a_stride_k=1,b_stride_k=1,b_stride_n%16,m%16,n%16,k%16"];
    let fast = dots("sm_90a", "T=f8e4m3,O=bf16", &weight);
    assert!(fast.contains("m64n256k32.f32.e4m3.e4m3") && !fast.contains("stored from registers"), "{fast}");
    // Dense tensors: b is not contiguous along K.
    let transposed = dots("sm_90a", "T=f8e4m3,O=bf16", &[]);
    assert!(transposed.contains("e4m3") && transposed.contains("stored from registers"), "{transposed}");
    let widened = dots("sm_80", "T=f8e4m3,O=bf16", &weight);
    assert!(widened.contains("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"), "{widened}");
    let integers = dots("sm_80", "T=i8,O=i32", &weight);
    assert!(integers.contains("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"), "{integers}");
}

#[test]
fn times_and_rates_without_a_roofline_are_refused() {
    let dir = TempDir::new().unwrap();
    let explain = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        tilewright_with(dir.path(), &[&["explain"][..], &words[..]].concat(), &BARE)
    };
    for option in ["--time-ms", "--peak-tflops", "--peak-gbps"] {
        let message = explain(&format!("matmul {option} 5")).fails(2);
        let unused = format!("{option} is unused");
        assert!(message.contains(&unused) && message.contains("there is no roofline\n  help: --shape"), "{message}");
    }
    let message = explain("softmax_rows --shape x=64,1024 --peak-tflops 5").fails(2);
    assert!(message.contains("--peak-tflops is unused: the FLOPs of this kernel are not known"), "{message}");
    let out = explain("softmax_rows --shape x=64,1024 --time-ms 5").ok();
    assert!(out.contains("Roofline") && out.contains("5 ms"), "{out}");
}
