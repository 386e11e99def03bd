//! Snapshot tests of help texts and error messages.

use crate::tilewright;
use std::path::Path;

fn help(command: &[&str]) -> String {
    tilewright(Path::new("."), &[command, &["--help"]].concat()).ok()
}

#[test]
fn help_of_the_program_and_its_commands() {
    insta::assert_snapshot!("help", help(&[]));
    for command in ["doctor", "demo", "list", "compile", "run", "cache"] {
        insta::assert_snapshot!(format!("help_{command}"), help(&[command]));
    }
}

#[test]
fn one_kernel_with_its_whole_description() {
    let dir = tempfile::tempdir().unwrap();
    insta::assert_snapshot!(tilewright(dir.path(), &["list", "weighted_sum_fwd"]).ok());
}

#[test]
fn the_list_has_every_kernel_with_all_its_parameters() {
    let dir = tempfile::tempdir().unwrap();
    let text = tilewright(dir.path(), &["list"]).ok();
    for def in tilewright::kernels::KERNELS {
        assert!(text.lines().any(|line| line == def.name || line.starts_with(&format!("{}<", def.name))), "{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
    assert!(tilewright::kernels::KERNELS.is_sorted_by_key(|def| def.name));

    let json = tilewright(dir.path(), &["list", "--json"]).ok();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let kernels = json.as_array().unwrap();
    assert_eq!(kernels.len(), tilewright::kernels::KERNELS.len());
    for (kernel, def) in kernels.iter().zip(tilewright::kernels::KERNELS) {
        assert_eq!(kernel["name"], def.name);
        let count = |key: &str| kernel[key].as_array().unwrap().len();
        assert_eq!(count("parameters") + count("constants"), def.params.len(), "{}", def.name);
        assert_eq!(count("type_parameters"), def.generics.len(), "{}", def.name);
        assert!(!kernel["doc"].as_str().unwrap().is_empty(), "{} has no description", def.name);
    }
}

/// Invalid command lines exit with code 2 and a message with what to write instead.
#[test]
fn mistakes_on_the_command_line() {
    let cases: &[(&str, &[&str])] = &[
        ("unknown_command", &["compil"]),
        ("unknown_kernel", &["list", "weigthed_sum_fwd"]),
        ("unknown_target", &["compile", "weighted_sum_fwd", "--target", "sm_70", "-o", "x"]),
        ("no_dtype", &["compile", "weighted_sum_fwd", "--target", "sm_80", "-o", "x"]),
        ("bad_dtype", &["compile", "weighted_sum_fwd", "--target", "sm_80", "--dtype", "bf17", "-o", "x"]),
        ("foreign_dtype", &["compile", "weighted_sum_fwd", "--target", "sm_80", "--dtype", "i32", "-o", "x"]),
        ("missing_constants", &["compile", "activation_fwd", "--target", "sm_80", "--dtype", "f32", "-o", "x"]),
        (
            "unknown_constant",
            &["compile", "weighted_sum_fwd", "--target", "sm_80", "--dtype", "f32", "--set", "row_tile=16", "-o", "x"],
        ),
        (
            "argument_as_constant",
            &["compile", "weighted_sum_fwd", "--target", "sm_80", "--dtype", "f32", "--set", "rows=16", "-o", "x"],
        ),
        (
            "bad_constant",
            &["compile", "weighted_sum_fwd", "--target", "sm_80", "--dtype", "f32", "--set", "rows_tile=-1", "-o", "x"],
        ),
        (
            "no_equals_sign",
            &["compile", "weighted_sum_fwd", "--target", "sm_80", "--dtype", "f32", "--set", "rows_tile", "-o", "x"],
        ),
        ("emit_of_another_target", &["compile", "weighted_sum_fwd", "--target", "sm_80", "--emit", "asm", "-o", "x"]),
        (
            "bad_assumption",
            &[
                "compile",
                "weighted_sum_fwd",
                "--target",
                "sm_80",
                "--dtype",
                "f32",
                "--set",
                "rows_tile=16,d_tile=16",
                "--assume",
                "x_stride_rows%24",
                "-o",
                "x",
            ],
        ),
        (
            "bad_warps",
            &[
                "compile",
                "weighted_sum_fwd",
                "--target",
                "sm_80",
                "--dtype",
                "f32",
                "--set",
                "rows_tile=16,d_tile=16",
                "--num-warps",
                "3",
                "-o",
                "x",
            ],
        ),
        ("bad_ptx_version", &["compile", "weighted_sum_fwd", "--target", "sm_80", "--ptx-version", "7.0", "-o", "x"]),
        ("bad_device", &["demo", "--device", "gpu"]),
    ];
    let dir = tempfile::tempdir().unwrap();
    for (name, arguments) in cases {
        let message = tilewright(dir.path(), arguments).fails(2);
        // Compare only the part before the list of kernels, which grows.
        let message = message.split(" the kernels are").next().unwrap_or_default();
        insta::assert_snapshot!(format!("mistake_{name}"), message);
    }
    assert!(!dir.path().join("x").exists(), "nothing was written");
}
