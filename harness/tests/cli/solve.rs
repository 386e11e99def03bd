//! Tests of `tilewright solve`: schedules in tuning tables, and schedules written by hand.

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::tilewright;

const TILES: &str = "q_tile=128,k_tile=128";
const SCHEDULE: &str = "num_warps=8,num_stages=2,warp_specialize=true";

fn arguments<'a>(target: &'a str, set: &'a str, assume: &'a [&'a str]) -> Vec<&'a str> {
    let kernel = ["solve", "flash_attention_fwd", "--target", target, "--dtype", "bf16", "--set", set];
    let options = ["--num-warps", "8", "--num-stages", "2", "--warp-specialize", "true", "-o", "out"];
    [&kernel[..], &options, assume, &["--export", "t.json"]].concat()
}

/// Schedules go to entries with the same types, constants and options, and no others.
#[test]
fn schedules_are_added_to_the_entries_that_they_are_for() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("t.json");
    let key = |types: &str, causal: bool| {
        format!(
            "{types},d=128,d_v=128,causal={causal},mask=dense,score=plain,keys=Tensor,precision=ieee,rows<=16384,few_rows=false,most_keys<=16384,sub_wave=true"
        )
    };
    let entry = |key: &str, config: String| json!({"kernel": "flash_attention_fwd", "key": key, "config": config});
    let config = format!("{TILES},{SCHEDULE}");
    let bf16 = "T=bf16,R=bf16,C=bf16";
    let entries = [
        entry(&key(bf16, false), config.clone()),
        entry(&key(bf16, true), config.clone()),
        entry(&key("T=f16,R=f16,C=f16", false), config.clone()),
        entry(&key("T=bf16,R=f32,C=bf16", false), config.clone()),
        entry(&key(bf16, false), config.replace("q_tile=128", "q_tile=64")),
        entry(&key(bf16, false), config.replace("num_stages=2", "num_stages=3")),
    ];
    let head = json!({"format": "tilewright tuning table", "version": 1, "device": "NVIDIA H200",
        "compute_capability": "9.0", "entries": entries});
    std::fs::write(&path, head.to_string()).unwrap();
    let before = std::fs::read_to_string(&path).unwrap();
    let (dense, set) = (["--assume", "dense"], format!("{TILES},d=128,d_tile=128,causal=false"));

    for (code, target, set, assume, reason) in [
        (1, "sm_80", &set[..], &dense[..], "compute capability 9.0"),
        (2, "sm_90a", &set, &[], "--assume dense"),
        (1, "sm_90a", &format!("{set},split_rows=512"), &dense, "no entry"),
        (1, "sm_90a", &set.replace("causal=false", "precision=tf32"), &dense, "no entry"),
        (1, "sm_90a", &set.replace("d=128", "d=100"), &dense, "no entry"),
    ] {
        let error = tilewright(dir.path(), &arguments(target, set, assume)).fails(code);
        assert!(error.contains(reason), "{reason}: {error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), before, "{reason}");
    }
    let out = tilewright(dir.path(), &arguments("sm_90a", &set, &dense)).ok();
    assert!(out.contains("(1 entries)"), "{out}");
    let after: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let with_loops = |entry: &Value| entry["config"].as_str().unwrap().contains("loops=");
    let exported: Vec<&Value> = after["entries"].as_array().unwrap().iter().filter(|e| with_loops(e)).collect();
    let [only] = exported[..] else { panic!("{after}") };
    assert_eq!(only["key"], key(bf16, false));
    assert!(only["config"].as_str().unwrap().starts_with("q_tile=128,k_tile=128"), "{only}");
}

/// The text of `--emit schedule` is a schedule, as it is and with other placements.
#[test]
fn schedules_are_read_from_files() {
    let dir = TempDir::new().unwrap();
    let tiles = "m_tile=128,n_tile=128,k_tile=64";
    let compile = |more: &[&str]| {
        let matmul =
            ["compile", "matmul", "--target", "sm_90a", "--dtype", "bf16", "--set", tiles, "--assume", "dense"];
        tilewright(dir.path(), &[&matmul[..], &["--num-warps", "8", "-o", "out"], more].concat())
    };
    let written = |name: &str| std::fs::read_to_string(dir.path().join("out").join(name)).unwrap();
    let with_producer = |more: &[&str]| compile(&[&["--warp-specialize", "true"][..], more].concat());
    with_producer(&["--emit", "schedule,ptx"]).ok();
    let (schedule, own) = (written("matmul.schedule.tile"), written("matmul.ptx"));
    std::fs::write(dir.path().join("own.tile"), &schedule).unwrap();
    with_producer(&["--loops", "@own.tile"]).ok();
    assert_eq!(written("matmul.ptx"), own);
    let deeper = schedule.replace("depth = 3", "depth = 4");
    assert_ne!(deeper, schedule);
    std::fs::write(dir.path().join("deeper.tile"), deeper).unwrap();
    with_producer(&["--loops", "@deeper.tile"]).ok();
    assert_ne!(written("matmul.ptx"), own);

    // Without a producer, loads run two iterations ahead of the main stage, and nothing else does.
    let ahead = |more: &[&str]| compile(&[&["--warp-specialize", "false"][..], more].concat());
    ahead(&["--emit", "schedule"]).ok();
    let schedule_ahead = written("matmul.schedule.tile");
    let wait = schedule_ahead.lines().find(|line| line.contains(" = wgmma_wait ")).unwrap();
    let (op, _) = wait.split_once(" at {").unwrap();
    let early = schedule_ahead.replace(wait, &format!("{op} at {{stage = 1}}"));
    std::fs::write(dir.path().join("early.tile"), early).unwrap();
    let error = ahead(&["--loops", "@early.tile"]).fails(1);
    assert!(error.contains("only loads with a ring"), "{error}");

    std::fs::write(dir.path().join("wrong.tile"), schedule.replace("wgmma_wait", "wgmma_await")).unwrap();
    std::fs::write(dir.path().join("empty.tile"), "").unwrap();
    for (code, loops, reason) in
        [(1, "@wrong.tile", "wgmma_await"), (2, "@none.tile", "cannot read none.tile"), (2, "@empty.tile", "no kernel")]
    {
        let error = with_producer(&["--loops", loops]).fails(code);
        assert!(error.contains(reason), "{reason}: {error}");
    }
}
