//! Fuzzes the compiler with random programs: analysis results hold, and the IR after every pass, native code and the
//! GPU simulator (sm_80, sm_90a) agree with the interpreter.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tilewright_codegen::target::{GpuArch, HostCpu};
use tilewright_codegen::testgen::case;
use tilewright_codegen::testgen::check::{Checks, check};

fuzz_target!(|seed: u64| {
    let hosts = [HostCpu::native()];
    let simulated = [GpuArch::Sm80, GpuArch::Sm90a];
    let checks = Checks { analyses: true, each_pass: true, hosts: &hosts, simulated: &simulated, ..Checks::default() };
    if let Err(failure) = check(&case(seed), &checks) {
        panic!("seed {seed}: {failure}");
    }
});
