//! Launches on the CPU, of native code from hand-written IR.

use tilewright_codegen::llvm::{Opt, object};
use tilewright_codegen::target::{ArgDesc, ArgType, Artifact, Code, HostCpu, Manifest};

use super::*;
use crate::buffer::Buffer;

fn arg(name: &str, ty: ArgType) -> ArgDesc {
    ArgDesc { name: name.to_string(), ty, divisible_by: 1, equal_to: None }
}

fn artifact(ir: &str, args: Vec<ArgDesc>, arena_bytes: u64) -> Artifact {
    let manifest = Manifest {
        kernel: "probe".to_string(),
        entry: "entry".to_string(),
        target: "host".to_string(),
        args,
        threads: 1,
        shared_bytes: 0,
        programs_per_block: 1,
        ctas_per_program: 1,
        arena_bytes,
        tensor_maps: vec![],
        source: "probe.rs:7".to_string(),
        clocks_of: None,
        footprint: None,
    };
    Artifact { manifest, code: Code::Object(object(ir, &HostCpu::native(), &Opt::host()).unwrap().code) }
}

/// `out[linear pid] += x + 10 y + 100 z + a(i8) + b(i64) + c(f64)`, and writes the arena's offset from a multiple of 64
/// bytes to `misalignment`.
const GRID_IR: &str = r#"
define i32 @entry(ptr %args, ptr %pid, ptr %num, ptr %arena, ptr %hooks) {
  %out.s = load ptr, ptr %args
  %out = load ptr, ptr %out.s
  %misalignment.p = getelementptr ptr, ptr %args, i64 1
  %misalignment.s = load ptr, ptr %misalignment.p
  %misalignment = load ptr, ptr %misalignment.s
  %a.p = getelementptr ptr, ptr %args, i64 2
  %a.s = load ptr, ptr %a.p
  %a = load i8, ptr %a.s
  %b.p = getelementptr ptr, ptr %args, i64 3
  %b.s = load ptr, ptr %b.p
  %b = load i64, ptr %b.s
  %c.p = getelementptr ptr, ptr %args, i64 4
  %c.s = load ptr, ptr %c.p
  %c = load double, ptr %c.s
  %x = load i32, ptr %pid
  %y.p = getelementptr i32, ptr %pid, i64 1
  %y = load i32, ptr %y.p
  %z.p = getelementptr i32, ptr %pid, i64 2
  %z = load i32, ptr %z.p
  %nx = load i32, ptr %num
  %ny.p = getelementptr i32, ptr %num, i64 1
  %ny = load i32, ptr %ny.p
  %zy = mul i32 %z, %ny
  %zy.y = add i32 %zy, %y
  %row = mul i32 %zy.y, %nx
  %linear = add i32 %row, %x
  %y10 = mul i32 %y, 10
  %z100 = mul i32 %z, 100
  %xy = add i32 %x, %y10
  %xyz = add i32 %xy, %z100
  %xyz.d = sitofp i32 %xyz to double
  %a.d = sitofp i8 %a to double
  %b.d = sitofp i64 %b to double
  %s1 = fadd double %xyz.d, %a.d
  %s2 = fadd double %s1, %b.d
  %s3 = fadd double %s2, %c
  %linear64 = sext i32 %linear to i64
  %dst = getelementptr double, ptr %out, i64 %linear64
  %old = load double, ptr %dst
  %new = fadd double %old, %s3
  store double %new, ptr %dst
  store i32 %xyz, ptr %arena
  %address = ptrtoint ptr %arena to i64
  %low = and i64 %address, 63
  %bad = icmp ne i64 %low, 0
  br i1 %bad, label %misaligned, label %done
misaligned:
  store i64 %low, ptr %misalignment
  br label %done
done:
  ret i32 0
}
"#;

fn grid_kernel() -> CompiledKernel {
    let args = vec![
        arg("out", ArgType::Ptr),
        arg("misalignment", ArgType::Ptr),
        arg("a", ArgType::I8),
        arg("b", ArgType::I64),
        arg("c", ArgType::F64),
    ];
    Device::cpu().load(&artifact(GRID_IR, args, 100)).unwrap()
}

fn run_grid_kernel(grid: [u32; 3]) -> Vec<f64> {
    let device = Device::cpu();
    let programs = grid.iter().map(|&extent| extent as usize).product();
    let mut out = Buffer::<f64>::zeros(&device, programs).unwrap();
    let mut misalignment = Buffer::<i64>::zeros(&device, 1).unwrap();
    let args = [
        LaunchArg::from(&mut out),
        LaunchArg::from(&mut misalignment),
        LaunchArg::I8(-3),
        LaunchArg::I64(-(1 << 40)),
        LaunchArg::F64(0.25),
    ];
    // SAFETY: the kernel writes one f64 for each program, and one i64.
    unsafe { grid_kernel().launch(grid, &args) }.unwrap();
    assert_eq!(misalignment.to_vec().unwrap(), [0], "the arena is not 64-byte aligned");
    out.to_vec().unwrap()
}

#[test]
fn every_program_runs_once_with_its_coordinates_and_arguments() {
    for grid in [[1, 1, 1], [7, 1, 1], [5, 4, 3], [1, 1, 9], [1000, 3, 1]] {
        let [nx, ny, _] = grid.map(|extent| extent as usize);
        for (linear, found) in run_grid_kernel(grid).into_iter().enumerate() {
            let (x, y, z) = (linear % nx, linear / nx % ny, linear / (nx * ny));
            let expected = (x + 10 * y + 100 * z) as f64 - 3.0 - (1_i64 << 40) as f64 + 0.25;
            assert_eq!(found, expected, "program ({x}, {y}, {z}) of {grid:?}");
        }
    }
}

/// Calls `assert_failed` where x is 2, and `print` with the values 1.5 and -2 where x is 1.
const HOOK_IR: &str = r#"
@message = private constant [24 x i8] c"probe.rs:9: x is not 2\0A\00"
@prefix = private constant [3 x i8] c"xs\00"
@values = private constant [2 x double] [double 1.5, double -2.0]
define i32 @entry(ptr %args, ptr %pid, ptr %num, ptr %arena, ptr %hooks) {
  %x = load i32, ptr %pid
  switch i32 %x, label %fine [ i32 2, label %fail i32 1, label %say ]
fail:
  %assert.p = getelementptr ptr, ptr %hooks, i64 1
  %assert = load ptr, ptr %assert.p
  call void %assert(ptr @message, ptr %pid)
  ret i32 1
say:
  %print = load ptr, ptr %hooks
  call void %print(ptr @prefix, ptr @values, i64 2, ptr %pid)
  ret i32 0
fine:
  ret i32 0
}
"#;

#[test]
fn a_failed_assertion_names_the_program() {
    let kernel = Device::cpu().load(&artifact(HOOK_IR, vec![], 0)).unwrap();
    // SAFETY: the kernel accesses no buffers.
    let launch = |grid| unsafe { kernel.launch(grid, &[]) };
    launch([2, 1, 1]).unwrap();
    let message = launch([3, 1, 1]).unwrap_err().to_string();
    for part in ["`probe` (probe.rs:7)", "program (2, 0, 0)", "probe.rs:9: x is not 2"] {
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
}

/// A kernel that does nothing, for invalid launches: the checks run before the code.
const EMPTY_IR: &str = "define i32 @entry(ptr %args, ptr %pid, ptr %num, ptr %arena, ptr %hooks) {\n  ret i32 0\n}\n";

#[test]
fn invalid_arguments_are_reported_before_launch() {
    let device = Device::cpu();
    let args = vec![
        ArgDesc { divisible_by: 16, ..arg("x", ArgType::Ptr) },
        ArgDesc { divisible_by: 8, ..arg("stride", ArgType::I64) },
        ArgDesc { equal_to: Some(1), ..arg("step", ArgType::I32) },
        arg("scale", ArgType::F32),
    ];
    let kernel = device.load(&artifact(EMPTY_IR, args, 0)).unwrap();
    let x = Buffer::<f32>::zeros(&device, 64).unwrap();
    let good = [LaunchArg::from(&x), LaunchArg::I64(64), LaunchArg::I32(1), LaunchArg::F32(2.0)];
    // SAFETY: the kernel accesses nothing.
    let launch = |grid, args: &[LaunchArg]| unsafe { kernel.launch(grid, args) };
    let with = |position: usize, wrong: LaunchArg| {
        let mut args = good;
        args[position] = wrong;
        launch([1, 1, 1], &args).unwrap_err().to_string()
    };
    launch([1, 1, 1], &good).unwrap();
    let part_of_x = x.slice(1..).unwrap();
    let cases = [
        (launch([1, 1, 1], &good[..3]).unwrap_err().to_string(), vec!["takes 4 arguments", "found 3"]),
        (with(0, LaunchArg::I64(0)), vec!["argument 0 (`x`)", "expected a buffer", "found an i64"]),
        (with(3, LaunchArg::F64(2.0)), vec!["argument 3 (`scale`)", "expected an f32", "found an f64"]),
        (with(0, LaunchArg::from(part_of_x)), vec!["`x`", "addresses divisible by 16"]),
        (with(1, LaunchArg::I64(-12)), vec!["`stride`", "values divisible by 8", "found -12"]),
        (with(2, LaunchArg::I32(2)), vec!["`step`", "the value 1", "found 2"]),
        (
            launch([1, 70000, 1], &good).unwrap_err().to_string(),
            vec!["grid's y extent is 70000", "limit is 65535", "the x axis"],
        ),
        (launch([u32::MAX, 1, 1], &good).unwrap_err().to_string(), vec!["x extent", "2147483647"]),
    ];
    for (message, parts) in cases {
        for part in parts.into_iter().chain(["`probe` (probe.rs:7)"]) {
            assert!(message.contains(part), "`{part}` is missing in: {message}");
        }
    }
}

#[test]
fn an_empty_grid_runs_nothing() {
    let kernel = Device::cpu().load(&artifact(HOOK_IR, vec![], 0)).unwrap();
    // SAFETY: the kernel accesses no buffers. With three programs it would fail.
    unsafe { kernel.launch([3, 0, 1], &[]) }.unwrap();
}

#[test]
fn gpu_code_does_not_load_on_the_cpu() {
    let mut artifact = artifact(EMPTY_IR, vec![], 0);
    artifact.code = Code::Ptx(String::new());
    artifact.manifest.target = "sm_90a".to_string();
    let message = Device::cpu().load(&artifact).unwrap_err().to_string();
    assert!(message.contains("compiled for sm_90a") && message.contains("the CPU runs host"), "{message}");
}

#[test]
fn threads_share_a_kernel() {
    let kernel = grid_kernel();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let kernel = &kernel;
            scope.spawn(move || {
                let mut out = Buffer::<f64>::zeros(kernel.device(), 64).unwrap();
                let mut misalignment = Buffer::<i64>::zeros(kernel.device(), 1).unwrap();
                for _ in 0..50 {
                    let args = [
                        LaunchArg::from(&mut out),
                        LaunchArg::from(&mut misalignment),
                        LaunchArg::I8(1),
                        LaunchArg::I64(0),
                        LaunchArg::F64(0.0),
                    ];
                    // SAFETY: the buffers belong to this thread and are large enough.
                    unsafe { kernel.launch([64, 1, 1], &args) }.unwrap();
                }
                let expected: Vec<f64> = (0..64).map(|x| 50.0 * (x + 1) as f64).collect();
                assert_eq!(out.to_vec().unwrap(), expected);
            });
        }
    });
}
