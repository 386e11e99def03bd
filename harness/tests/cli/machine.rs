//! Tests of `doctor`, `cache`, `version` and `demo`.

use crate::{tilewright, tilewright_with};

#[test]
fn doctor_reports_every_part() {
    let dir = tempfile::tempdir().unwrap();
    let text = tilewright(dir.path(), &["doctor"]).ok();
    for part in ["LLVM", "22.", "CPU", "CUDA driver", "CUDA libraries", "ptxas", "cache folder", "Kernels run on"] {
        assert!(text.contains(part), "`{part}` is missing in:\n{text}");
    }
    let json: serde_json::Value = serde_json::from_str(&tilewright(dir.path(), &["doctor", "--json"]).ok()).unwrap();
    assert_eq!(json["runs_on"], "the CPU");
    assert!(json["cpu"]["threads"].as_u64().unwrap() > 0);
    for part in json["parts"].as_array().unwrap() {
        let (ok, cost) = (part["ok"].as_bool().unwrap(), part["cost"].as_str());
        assert!(ok || cost.is_some_and(|cost| !cost.is_empty()), "{part} is missing, but has no `cost`");
    }
}

#[test]
fn doctor_finds_what_is_broken_and_still_succeeds() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let text = |path: &std::path::Path| path.display().to_string();
    let broken = [("TILEWRIGHT_CACHE", text(&file)), ("TILEWRIGHT_PTXAS", text(&dir.path().join("absent")))];
    let broken: Vec<(&str, &str)> = broken.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let text = tilewright_with(dir.path(), &["doctor"], &broken).ok();
    assert!(text.contains("- cache folder"), "{text}");
    assert!(text.contains("- ptxas"), "{text}");
}

/// Commands that compute continue without the cache: see `runtime/tests/hostile_cache.rs`.
#[test]
fn a_cache_that_others_can_write_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("open");
    std::fs::create_dir(&cache).unwrap();
    std::fs::set_permissions(&cache, std::fs::Permissions::from_mode(0o777)).unwrap();
    let open = [("TILEWRIGHT_CACHE", cache.to_str().unwrap())];
    for arguments in [&["cache"][..], &["cache", "clear"]] {
        let message = tilewright_with(dir.path(), arguments, &open).fails(1);
        assert!(message.contains("can be written by others (mode 0777)") && message.contains("chmod 700"), "{message}");
    }
    let text = tilewright_with(dir.path(), &["doctor"], &open).ok();
    assert!(text.contains("- cache folder") && text.contains("chmod 700"), "{text}");
    assert_eq!(std::fs::read_dir(&cache).unwrap().count(), 0, "nothing is written there");
}

#[test]
fn doctor_fails_without_a_usable_device() {
    let dir = tempfile::tempdir().unwrap();
    for arguments in [&["doctor"][..], &["doctor", "--json"]] {
        for (device, says) in [
            ("gpu", "the environment variable TILEWRIGHT_DEVICE is `gpu`: expected"),
            ("cuda:99", "no device can run kernels: "),
        ] {
            let message = tilewright_with(dir.path(), arguments, &[("TILEWRIGHT_DEVICE", device)]).fails(1);
            assert!(message.contains(says) && message.contains("TILEWRIGHT_DEVICE"), "{message}");
        }
    }
}

#[test]
fn a_bad_variable_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let message = tilewright_with(dir.path(), &["demo"], &[("TILEWRIGHT_DEVICE", "gpu")]).fails(1);
    assert!(message.contains("TILEWRIGHT_DEVICE") && message.contains("cuda:N"), "{message}");
}

#[test]
fn version_names_both_compilers() {
    let dir = tempfile::tempdir().unwrap();
    let text = tilewright(dir.path(), &["version"]).ok();
    assert!(text.starts_with(concat!("tilewright ", env!("CARGO_PKG_VERSION"))) && text.contains("LLVM 22."), "{text}");
}

/// The demo's results are correct, its files exist, and `cache clear` removes the kernels that it compiled.
#[test]
fn the_demo_runs_on_the_cpu() {
    let dir = tempfile::tempdir().unwrap();
    let text = tilewright(dir.path(), &["demo", "--out", "made"]).ok();
    for part in ["weighted sum backward", "attention backward", "causal", "bf16", "f32", "CPU"] {
        assert!(text.contains(part), "`{part}` is missing in:\n{text}");
    }
    assert!(text.contains("agree with their references"), "{text}");
    for file in [
        "weighted-sum.f32/sm_90a/weighted_sum_fwd.ptx",
        "weighted-sum.f32/sm_90a/weighted_sum_fwd.json",
        "attention-backward-causal.bf16/sm_90a/flash_attention_bwd_dkdv.ptx",
        "attention-backward-causal.bf16/host/flash_attention_bwd_dq.o",
    ] {
        let path = dir.path().join("made").join(file);
        assert!(path.metadata().is_ok_and(|m| m.len() > 0), "{file} is missing");
    }

    let listed = tilewright(dir.path(), &["cache"]).ok();
    let count = |text: &str| -> usize {
        let before = text.split(" kernel").next().unwrap();
        before.split_whitespace().last().unwrap().parse().unwrap()
    };
    assert!(count(&listed) >= 10, "{listed}");
    assert!(tilewright(dir.path(), &["cache", "path"]).ok().trim_end().ends_with("cache"));
    let cleared = tilewright(dir.path(), &["cache", "clear"]).ok();
    assert_eq!(count(&cleared), count(&listed));
    assert_eq!(count(&tilewright(dir.path(), &["cache", "list"]).ok()), 0);
}

#[test]
fn the_demo_refuses_inputs_that_it_cannot_use() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("bad.safetensors");
    let refuse = |bytes: &[u8]| {
        std::fs::write(&file, bytes).unwrap();
        tilewright(dir.path(), &["demo", "--input", "bad.safetensors"]).fails(1)
    };
    assert!(refuse(b"no tensors here at all").contains("safetensors"));
    assert!(refuse(&crate::run::file(&[])).contains("q, k and v"));
    let x = crate::run::tensor("x", &[2, 3], &[0.0; 6]);
    let message = refuse(&crate::run::file(&[x, crate::run::tensor("w", &[4], &[0.0; 4])]));
    assert!(message.contains("[4]") && message.contains("[3]"), "{message}");
    let message = tilewright(dir.path(), &["demo", "--input", "absent.safetensors"]).fails(1);
    assert!(message.contains("absent.safetensors"), "{message}");
}

#[test]
fn the_demo_takes_empty_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = [crate::run::tensor("x", &[0, 5], &[]), crate::run::tensor("w", &[5], &[1.0; 5])];
    std::fs::write(dir.path().join("empty.safetensors"), crate::run::file(&tensors)).unwrap();
    let text = tilewright(dir.path(), &["demo", "--input", "empty.safetensors"]).ok();
    assert!(text.contains("agree with their references"), "{text}");
}
