//! Generated code depends only on what the key of the disk cache contains: the text of the function, the locations of
//! its assertions and assumptions, the target and the options. A function that is parsed from its own text has no
//! source locations and no value names, and its ops and values have another order in memory. If its code equals that of
//! the original, the code depends on none of these.

use tilewright::cache::Key;
use tilewright_codegen::ir::{DType, Func, Loc, Op};
use tilewright_codegen::target::{CompileOptions, GpuArch, HostCpu, Target};
use tilewright_codegen::testgen::{self, Options};
use tilewright_codegen::{lower, pipeline, text};
use tilewright_tests::configurations::{configurations, well_aligned};
use tilewright_tests::examples::variants;

/// The LLVM IR for each target, without the comments that name source locations; `None` for an error, whose message has
/// the location of an op and is no code.
fn llvm_ir(func: &Func, options: &CompileOptions) -> Vec<(Target, Option<String>)> {
    let gpu = |arch| {
        let gpu_func = pipeline::gpu_ir(func, arch, options, &mut ());
        let code = lower::nvptx::lower(&gpu_func, arch, options).map(|module| {
            let lines = module.llvm_ir.lines().filter(|line| !line.trim_start().starts_with(';'));
            lines.collect::<Vec<_>>().join("\n")
        });
        (Target::Nvptx(arch), code.ok())
    };
    let cpu = HostCpu::native();
    let host = lower::host::lower(func, &cpu, options).map(|module| module.llvm_ir);
    vec![gpu(GpuArch::Sm80), gpu(GpuArch::Sm90a), (Target::Host(cpu), host.ok())]
}

/// Checks a function; returns the number of targets that have code for it.
fn check(func: &Func, options: &CompileOptions) -> usize {
    let text = text::print(func);
    let parsed = text::parse(&text).unwrap_or_else(|error| panic!("{}: {error}", func.name));
    let placed_asserts = func
        .walk()
        .iter()
        .any(|&id| matches!(func.op(id).op, Op::DeviceAssert { .. } | Op::Assume) && func.op(id).loc != Loc::unknown());
    let mut compared = 0;
    for ((target, ours), (_, of_text)) in llvm_ir(func, options).into_iter().zip(llvm_ir(&parsed, options)) {
        let same_key = Key::new(func, &target, options) == Key::new(&parsed, &target, options);
        assert_eq!(same_key, !placed_asserts, "{} for {target}: its key", func.name);
        if same_key {
            assert!(ours == of_text, "{} for {target}: code depends on what is not in the text\n{text}", func.name);
        }
        compared += usize::from(ours.is_some());
    }
    compared
}

#[test]
fn code_of_shipped_kernels_depends_only_on_ir_text() {
    let mut compared = 0;
    for configuration in configurations(DType::BF16) {
        compared += check(&configuration.record(&well_aligned(configuration.def)), &configuration.options);
    }
    for variant in variants() {
        let func = variant.def.record(&variant.dtypes, &variant.consts, &well_aligned(variant.def));
        compared += check(&func.unwrap_or_else(|d| panic!("{}: {d}", variant.def.name)), &CompileOptions::default());
    }
    println!("{compared} pairs of LLVM IR");
    assert!(compared > 100, "{compared}");
}

#[test]
fn code_of_random_programs_depends_only_on_ir_text() {
    let options = CompileOptions::default();
    let compared: usize = (0..300).map(|seed| check(&testgen::program(seed, &Options::default()).func, &options)).sum();
    println!("{compared} pairs of LLVM IR");
    assert!(compared > 600, "{compared}");
}
