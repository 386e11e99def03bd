//! Failures inside kernels. They end a process's use of the GPU, so each runs in a separate process.

use std::process::Command;

use tilewright_codegen::target::ArgType;
use tilewright_runtime::{Buffer, LaunchArg};

use crate::{arg, artifact, gpu};

const ROLE: &str = "TILEWRIGHT_TEST_ROLE";

/// Runs `child_fails` for one kind of failure; returns its output, including standard error.
fn output_of(failure: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "failures::child_fails", "--nocapture"])
        .env(ROLE, failure)
        .output()
        .unwrap();
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(output.status.success(), "{text}");
    println!("{text}");
    text
}

fn expect(failure: &str, parts: &[&str]) {
    let Some(_device) = gpu() else { return };
    let text = output_of(failure);
    for part in parts.iter().chain(&["last launches, newest first: `probe` (probe.rs:7)"]) {
        assert!(text.contains(part), "`{part}` is missing in: {text}");
    }
}

#[test]
fn an_illegal_access_says_what_to_do() {
    expect("illegal", &["CUDA_ERROR_ILLEGAL_ADDRESS (700)", "compute-sanitizer"]);
}

#[test]
fn a_failed_assertion_shows_its_message() {
    expect("assert", &["CUDA_ERROR_ASSERT (710)", "device_assert failed", "rows must be even", "probe.rs:12"]);
}

#[test]
fn a_trap_is_explained() {
    expect("trap", &["trap"]);
}

/// Causes the failure of its role, and prints the error.
#[test]
fn child_fails() {
    let Ok(failure) = std::env::var(ROLE) else { return };
    let Some(device) = gpu() else { return };
    let ptx = match failure.as_str() {
        "illegal" => {
            ".visible .entry entry(.param .u64 out) { .reg .b64 %d; mov.u64 %d, 64; st.global.u32 [%d], 1; ret; }\n"
        }
        "trap" => ".visible .entry entry(.param .u64 out) { trap; ret; }\n",
        _ => ASSERT_PTX,
    };
    let kernel = device.load(&artifact(ptx, "sm_80", 1, vec![arg("out", ArgType::Ptr)])).unwrap();
    let mut out = Buffer::<u32>::zeros(&device, 1).unwrap();
    // SAFETY: the kernel fails on purpose, in a process that does nothing else.
    unsafe { kernel.launch([1, 1, 1], &[LaunchArg::from(&mut out)]) }.unwrap();
    println!("{}", device.synchronize().unwrap_err());
    assert!(out.to_vec().is_err());
}

const ASSERT_PTX: &str = r#"
.extern .func __assertfail(.param .b64 message, .param .b64 file, .param .b32 line, .param .b64 function, .param .b64 size);
.global .align 1 .b8 message[18] = {114,111,119,115,32,109,117,115,116,32,98,101,32,101,118,101,110,0};
.global .align 1 .b8 file[9] = {112,114,111,98,101,46,114,115,0};
.visible .entry entry(.param .u64 out) {
  .reg .b64 %d<4>;
  mov.u64 %d0, message;
  cvta.global.u64 %d0, %d0;
  mov.u64 %d1, file;
  cvta.global.u64 %d1, %d1;
  .param .b64 p0; .param .b64 p1; .param .b32 p2; .param .b64 p3; .param .b64 p4;
  st.param.b64 [p0], %d0;
  st.param.b64 [p1], %d1;
  st.param.b32 [p2], 12;
  st.param.b64 [p3], %d1;
  st.param.b64 [p4], 1;
  call.uni __assertfail, (p0, p1, p2, p3, p4);
  ret;
}
"#;
