//! Tests of cases, checks and comparisons. `harness/tests/leaderboard.rs` runs the program itself.

use clap::Parser;
use tilewright::kernels::attention::Backward;

use super::arguments::Arguments;
use super::measure::Plan;
use super::peak::Peak;
use super::peers::Peers;
use super::single::{report, rows, to_cli_error};
use crate::cli::bench::attention_check::Attention;
use crate::cli::bench::record::BenchError;

fn plans(words: &[&str]) -> Result<Vec<Plan>, String> {
    let words = [&["leaderboard", "--device", "cpu"], words].concat();
    let arguments = Arguments::try_parse_from(words).map_err(|error| error.to_string())?;
    arguments.plans().map(|(_, plans)| plans).map_err(|error| error.to_string())
}

#[test]
fn arguments_become_cases() {
    let one = plans(&[]).unwrap();
    assert_eq!(one.len(), 1);
    assert_eq!((one[0].problem.n_q, one[0].problem.d, one[0].problem.causal), (512, 64, true));
    assert_eq!((one[0].dtype.as_str(), one[0].precision), ("bf16", None));
    let sweep = plans(&["--sweep", "--seq-len", "64,128", "--head-dim", "16", "--non-causal"]).unwrap();
    let cases: Vec<_> = sweep.iter().map(|plan| (plan.dtype.as_str(), plan.problem.n_q, plan.problem.causal)).collect();
    assert_eq!(cases, [("bf16", 64, false), ("bf16", 128, false), ("f32", 64, false), ("f32", 128, false)]);
    for (words, reason) in [
        (&["--seq-len", "1,2"][..], "--sweep"),
        (&["--head-dim", "300"], "1 to 256"),
        (&["--heads", "0"], "at least 1"),
        (&["--tune", "soon"], "a number of seconds"),
        (&["--dtype", "f64"], "possible values"),
        (&["--fwd-tiles", "1,2"], "q_tile,k_tile,warps,stages"),
    ] {
        let message = plans(words).unwrap_err();
        assert!(message.contains(reason), "{words:?}: {message}");
    }
}

#[test]
fn flop_matches_published_counts() {
    let plan = &plans(&["--heads", "16", "--seq-len", "16384"]).unwrap()[0];
    // 1.2557 ms are 437.8 TFLOP/s in a published row of this case.
    assert!((plan.flop()[0] / 1.2557e-3 / 1e12 - 437.8).abs() < 0.1);
    assert_eq!((plan.flop()[1], plan.flop()[2]), (2.5 * plan.flop()[0], 3.5 * plan.flop()[0]));
}

#[test]
fn only_right_results_are_timed() {
    let plan = &plans(&["--seq-len", "70", "--head-dim", "16", "--heads", "1", "--dtype", "f32"]).unwrap()[0];
    let device = tilewright::Device::cpu();
    let measured = plan.measure(&device, (0.0, 0.0)).unwrap();
    assert!(measured.checked.error < 1e-5 && measured.times.iter().all(|timing| timing.median > 0.0));
    assert_eq!(measured.tiles_text(2), "64,64,1,1 64,64,1,1 64,64,1,1");

    let peak = Peak { size: 512, dtype: "f32", tflops: 1.0 };
    let text = report(&device, plan, &measured, &peak, None).to_markdown();
    for part in ["forward + sum + backward", "Checked before timing: all outputs", "not a valid entry of the", "512³"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let rows = rows(plan, &measured, &peak);
    assert_eq!((rows.len(), rows[2].kernel.as_str()), (3, "attention_fwd_sum_bwd"));
    assert!(rows[2].fraction.is_some() && rows[2].mean_ms.is_some() && rows[2].peer.is_none());

    let one_pass = Plan { backward: Backward::OnePass, ..plan.clone() };
    let measured = one_pass.measure(&device, (0.0, 0.0)).unwrap();
    assert!(measured.checked.error < 1e-5 && measured.tiles_text(1).ends_with(" one pass"), "{measured:?}");

    // A fault in the last row of a gradient, as from a kernel that skips a tile.
    fn corrupt(attention: &mut Attention<f32>) -> tilewright::Result<()> {
        let last = attention.problem().n_q * attention.problem().d - 1;
        attention.corrupt_dv(last)
    }
    let error = plan.measure_as::<f32>(&device, (0.0, 0.0), corrupt).unwrap_err();
    assert!(matches!(&error, BenchError::WrongResult(why) if why.contains("dv")), "{error:?}");
    let message = to_cli_error(error).to_string();
    assert!(message.contains("no time is reported") && !message.contains(" ms"), "{message}");
}

#[test]
fn peers_are_matched_to_their_case() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("peers.jsonl");
    let row = |name: &str, n: usize, fb: f64| {
        format!(
            r#"{{"peer": "{name}", "B": 1, "H": 1, "N": {n}, "D": 16, "dtype": "float32", "causal": true, "fwd_ms": 1.0, "bwd_ms": 2.0, "fb_sum_ms": {fb}}}"#
        )
    };
    let lines = [
        r#"{"ceiling": "copy_GBps", "v": 4295.9}"#.to_string(),
        "progress: 3 of 4".to_string(),
        row("eager", 70, 5.0),
        row("compiled", 70, 4.0),
        row("eager", 71, 1.0),
        r#"{"peer": "huge", "N": 70, "D": 16, "dtype": "float32", "causal": true, "error": "OutOfMemoryError"}"#
            .to_string(),
    ];
    std::fs::write(&path, lines.join("\n")).unwrap();
    let peers = Peers::read(&path).unwrap();
    let plan = &plans(&["--seq-len", "70", "--head-dim", "16", "--heads", "1", "--dtype", "f32"]).unwrap()[0];
    let names: Vec<&str> = peers.of(plan).iter().map(|peer| peer.name.as_str()).collect();
    assert_eq!((names, peers.best(plan, 2)), (vec!["eager", "compiled", "huge"], Some(("compiled", 4.0))));
    let other = &plans(&["--seq-len", "70", "--head-dim", "16", "--heads", "1", "--dtype", "bf16"]).unwrap()[0];
    assert!(peers.of(other).is_empty());

    let device = tilewright::Device::cpu();
    let measured = plan.measure(&device, (0.0, 0.0)).unwrap();
    let peak = Peak { size: 512, dtype: "f32", tflops: 1.0 };
    let text = report(&device, plan, &measured, &peak, Some(&peers)).to_markdown();
    for part in ["| compiled |", "OutOfMemoryError", "N/A", "copy_GBps 4295.9", "ours / peer"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    std::fs::write(&path, "nothing\n").unwrap();
    assert!(Peers::read(&path).unwrap_err().to_string().contains("no row of another implementation"));
}
