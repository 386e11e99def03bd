//! Compiles small hand-written IR to every output of the module.

use std::ffi::c_void;
use std::path::PathBuf;
use std::process::Command;

use super::module::{PTX_VERSIONS, supported_ptx_version};
use super::*;
use crate::target::HostHooks;

/// `out[i] = a[i] + b[i]`, one element per thread.
const ADD_KERNEL: &str = r#"
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
define ptx_kernel void @add(ptr addrspace(1) %a, ptr addrspace(1) %b, ptr addrspace(1) %out) {
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %i = zext i32 %tid to i64
  %pa = getelementptr float, ptr addrspace(1) %a, i64 %i
  %pb = getelementptr float, ptr addrspace(1) %b, i64 %i
  %po = getelementptr float, ptr addrspace(1) %out, i64 %i
  %x = load float, ptr addrspace(1) %pa
  %y = load float, ptr addrspace(1) %pb
  %s = fadd float %x, %y
  store float %s, ptr addrspace(1) %po
  ret void
}
"#;

/// `args[0][i] = expf(args[1][i]) + pid.x` for i < 64, through a copy in the arena.
const HOST_ENTRY: &str = r#"
declare float @expf(float)
declare ptr @memcpy(ptr, ptr, i64)
define i32 @entry(ptr %args, ptr %pid, ptr %num, ptr %arena, ptr %hooks) {
head:
  %out_slot = load ptr, ptr %args
  %out = load ptr, ptr %out_slot
  %in_arg = getelementptr ptr, ptr %args, i64 1
  %in_slot = load ptr, ptr %in_arg
  %in = load ptr, ptr %in_slot
  %copied = call ptr @memcpy(ptr %arena, ptr %in, i64 256)
  %x = load i32, ptr %pid
  %xf = sitofp i32 %x to float
  br label %body
body:
  %i = phi i64 [ 0, %head ], [ %next, %body ]
  %src = getelementptr float, ptr %arena, i64 %i
  %v = load float, ptr %src
  %e = call float @expf(float %v)
  %s = fadd float %e, %xf
  %dst = getelementptr float, ptr %out, i64 %i
  store float %s, ptr %dst
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, 64
  br i1 %more, label %body, label %done
done:
  ret i32 0
}
"#;

/// Finds `ptxas` by the variable TILEWRIGHT_PTXAS or on PATH.
fn find_ptxas() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("TILEWRIGHT_PTXAS") {
        return Some(PathBuf::from(path));
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join("ptxas")).find(|candidate| candidate.is_file())
}

#[test]
fn kernel_becomes_ptx_of_the_right_target_and_version() {
    for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
        let ptx = ptx(ADD_KERNEL, arch, 83, &Opt::gpu()).unwrap().code;
        assert!(ptx.contains(".version 8.3"), "{ptx}");
        assert!(ptx.contains(&format!(".target {}", arch.name())), "{ptx}");
        assert!(ptx.contains(".visible .entry add("), "{ptx}");
        assert!(ptx.contains("ld.global"), "{ptx}");
    }
}

#[test]
fn every_listed_ptx_version_is_one_llvm_writes() {
    for version in PTX_VERSIONS.into_iter().filter(|v| *v >= 80) {
        let ptx = ptx(ADD_KERNEL, GpuArch::Sm90a, version, &Opt::gpu()).unwrap().code;
        let wanted = format!(".version {}.{}\n", version / 10, version % 10);
        assert!(ptx.contains(&wanted), "asked for {version}: {ptx}");
    }
    assert_eq!(supported_ptx_version(79), 78);
    assert_eq!(supported_ptx_version(999), *PTX_VERSIONS.last().unwrap());
    assert_eq!(supported_ptx_version(10), PTX_VERSIONS[0]);
}

#[test]
fn ptxas_accepts_the_kernel() {
    let Some(ptxas) = find_ptxas() else {
        println!("skipped: no ptxas in TILEWRIGHT_PTXAS or on PATH");
        return;
    };
    for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
        let ptx = ptx(ADD_KERNEL, arch, 83, &Opt::gpu()).unwrap().code;
        let file = std::env::temp_dir().join(format!("tilewright-llvm-{}-{}.ptx", std::process::id(), arch.name()));
        std::fs::write(&file, &ptx).unwrap();
        let run = Command::new(&ptxas).args(["-arch", arch.name(), "-o", "/dev/null"]).arg(&file).output().unwrap();
        std::fs::remove_file(&file).unwrap();
        assert!(run.status.success(), "{}\n{ptx}", String::from_utf8_lossy(&run.stderr));
    }
}

fn rejection<T: std::fmt::Debug>(outcome: Result<T, LlvmError>) -> Rejection {
    match outcome.unwrap_err() {
        LlvmError::Rejected(rejection) => rejection,
        LlvmError::Absent(error) => panic!("{error}"),
    }
}

#[test]
fn parse_error_names_the_line() {
    let text = "define void @f() {\n  %x = frobnicate i32 1\n  ret void\n}\n";
    let error = rejection(ptx(text, GpuArch::Sm80, 83, &Opt::gpu()));
    assert_eq!((error.phase, error.line), (Phase::Parse, Some(2)), "{error}");
    let shown = error.to_string();
    assert!(shown.contains("frobnicate") && shown.contains("internal compiler error"), "{shown}");
}

#[test]
fn verifier_error_names_the_line() {
    let text = "define i32 @f(i32 %x) {\n  %y = add i32 %z, 1\n  %z = add i32 %x, 1\n  ret i32 %y\n}\n";
    let error = rejection(ptx(text, GpuArch::Sm80, 83, &Opt::gpu()));
    assert_eq!(error.phase, Phase::Verify, "{error}");
    assert!(matches!(error.line, Some(2 | 3)), "{error:?}");
}

#[test]
fn errors_of_the_code_generator_are_returned() {
    let text = "define void @f() {\n  call void asm sideeffect \"no such instruction\", \"\"()\n  ret void\n}\n";
    let error = rejection(object(text, &HostCpu::native(), &Opt::host()));
    assert_eq!(error.phase, Phase::Codegen, "{error}");
    assert!(error.message.contains("no such instruction") || error.message.contains("mnemonic"), "{error}");
}

#[test]
fn optimized_ir_is_optimized() {
    let text = "define i32 @f(i32 %x) {\n  %a = add i32 %x, 1\n  %b = sub i32 %a, 1\n  ret i32 %b\n}\n";
    let cpu = HostCpu::native();
    let ir = optimized_ir(text, Machine::Host(&cpu), &Opt::host()).unwrap().code;
    assert!(ir.contains("ret i32 %x"), "{ir}");
    assert!(ir.contains(&format!("target triple = \"{}\"", cpu.triple)), "{ir}");
}

#[test]
fn host_loops_become_vector_loops() {
    let text = r#"
define void @scale(ptr noalias %out, ptr noalias %in) {
head:
  br label %body
body:
  %i = phi i64 [ 0, %head ], [ %next, %body ]
  %src = getelementptr float, ptr %in, i64 %i
  %v = load float, ptr %src
  %s = fmul float %v, 3.0
  %dst = getelementptr float, ptr %out, i64 %i
  store float %s, ptr %dst
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, 4096
  br i1 %more, label %body, label %done
done:
  ret void
}
"#;
    let ir = optimized_ir(text, Machine::Host(&HostCpu::native()), &Opt::host()).unwrap().code;
    assert!(ir.contains("x float> "), "no vector of floats in:\n{ir}");
}

/// Runs a linked entry as the runtime does.
fn call(module: &JitModule, out: &mut [f32; 64], input: &[f32; 64], pid: i32) -> i32 {
    unsafe extern "C" fn print(_: *const std::ffi::c_char, _: *const f64, _: u64, _: *const [i32; 3]) {}
    unsafe extern "C" fn assert_failed(_: *const std::ffi::c_char, _: *const [i32; 3]) {}
    let hooks = HostHooks { print, assert_failed };
    let mut arena = [0_u8; 256];
    let (out, input) = (out.as_mut_ptr(), input.as_ptr());
    let args = [&raw const out as *const c_void, &raw const input as *const c_void];
    // SAFETY: HOST_ENTRY reads 64 floats from its second argument, writes 64 to its first and 256 bytes to the arena.
    unsafe { (module.entry())(args.as_ptr(), &[pid, 0, 0], &[1, 1, 1], arena.as_mut_ptr(), &hooks) }
}

#[test]
fn linked_object_runs_and_calls_libm() {
    let object = object(HOST_ENTRY, &HostCpu::native(), &Opt::host()).unwrap().code;
    let module = JitModule::load(&object, "entry").unwrap();
    let input: [f32; 64] = std::array::from_fn(|i| i as f32 / 16.0);
    let mut out = [f32::NAN; 64];
    assert_eq!(call(&module, &mut out, &input, 5), 0);
    for (x, y) in input.iter().zip(out) {
        let want = (*x as f64).exp() + 5.0;
        assert!((y as f64 - want).abs() <= 1e-6 * want, "exp({x}) + 5 = {want}, got {y}");
    }
}

/// `args[0][0..5] = f16(x), bf16(x), f16(d), bf16(d), f16(x) back as f32 bits` for `x = args[1][0]`,
/// `d` the f64 that starts at the same address.
const HALF_ENTRY: &str = r#"
define i32 @entry(ptr %args, ptr %pid, ptr %num, ptr %arena, ptr %hooks) {
  %out_slot = load ptr, ptr %args
  %out = load ptr, ptr %out_slot
  %in_arg = getelementptr ptr, ptr %args, i64 1
  %in_slot = load ptr, ptr %in_arg
  %in = load ptr, ptr %in_slot
  %x = load volatile float, ptr %in
  %d = load volatile double, ptr %in
  %h = fptrunc float %x to half
  %b = fptrunc float %x to bfloat
  %dh = fptrunc double %d to half
  %db = fptrunc double %d to bfloat
  store half %h, ptr %out
  %p1 = getelementptr float, ptr %out, i64 1
  store bfloat %b, ptr %p1
  %p2 = getelementptr float, ptr %out, i64 2
  store half %dh, ptr %p2
  %p3 = getelementptr float, ptr %out, i64 3
  store bfloat %db, ptr %p3
  %p4 = getelementptr float, ptr %out, i64 4
  %again = load volatile half, ptr %out
  %back = fpext half %again to float
  store float %back, ptr %p4
  ret i32 0
}
"#;

#[test]
fn sixteen_bit_floats_work_on_any_cpu() {
    let oldest = HostCpu { cpu: String::new(), features: String::new(), ..HostCpu::native() };
    for cpu in [oldest, HostCpu::native()] {
        let object = object(HALF_ENTRY, &cpu, &Opt::host()).unwrap().code;
        let module = JitModule::load(&object, "entry").unwrap();
        let value = 0.123_456_789_f64;
        let low_word = f32::from_bits(value.to_bits() as u32);
        let mut input = [0.0; 64];
        (input[0], input[1]) = (low_word, f32::from_bits((value.to_bits() >> 32) as u32));
        let mut out = [0.0_f32; 64];
        assert_eq!(call(&module, &mut out, &input, 0), 0);
        let found: Vec<u16> = out[..4].iter().map(|x| x.to_bits() as u16).collect();
        let (x, d) = (low_word, value as f32);
        let expected = [
            half::f16::from_f32_const(x).to_bits(),
            half::bf16::from_f32_const(x).to_bits(),
            half::f16::from_f32_const(d).to_bits(),
            half::bf16::from_f32_const(d).to_bits(),
        ];
        assert_eq!(found, expected, "{cpu:?}");
        assert_eq!(out[4], half::f16::from_f32_const(x).to_f32_const(), "{cpu:?}");
    }
}

#[test]
fn missing_symbols_and_entries_are_named() {
    let text =
        "declare i32 @nobody_has_this()\ndefine i32 @entry() {\n  %x = call i32 @nobody_has_this()\n  ret i32 %x\n}\n";
    let bytes = object(text, &HostCpu::native(), &Opt::host()).unwrap().code;
    let error = JitModule::load(&bytes, "entry").err().unwrap();
    assert!(error.to_string().contains("nobody_has_this"), "{error}");
    let bytes = object(HOST_ENTRY, &HostCpu::native(), &Opt::host()).unwrap().code;
    let error = JitModule::load(&bytes, "other").err().unwrap();
    assert!(error.to_string().contains("other"), "{error}");
}

#[test]
fn invalid_objects_are_rejected() {
    assert!(JitModule::load(b"not an object", "entry").is_err());
    assert!(JitModule::load(&[], "entry").is_err());
}

#[test]
fn threads_compile_and_load_concurrently() {
    let cpu = HostCpu::native();
    let expected = ptx(ADD_KERNEL, GpuArch::Sm90a, 83, &Opt::gpu()).unwrap().code;
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (cpu, expected) = (&cpu, &expected);
            scope.spawn(move || {
                for _ in 0..4 {
                    assert_eq!(&ptx(ADD_KERNEL, GpuArch::Sm90a, 83, &Opt::gpu()).unwrap().code, expected);
                    let object = object(HOST_ENTRY, cpu, &Opt::host()).unwrap().code;
                    let module = JitModule::load(&object, "entry").unwrap();
                    let mut out = [0.0; 64];
                    call(&module, &mut out, &[0.0; 64], thread);
                    assert_eq!(out, [1.0 + thread as f32; 64]);
                }
            });
        }
    });
}

#[test]
fn linked_llvm_is_22() {
    assert_eq!(version().unwrap().major, 22);
}

/// LLVM 22's pass against blocked store forwarding aborts on this IR; see `disable_store_forwarding_pass`.
#[cfg(target_arch = "x86_64")]
#[test]
fn masked_loads_compile_without_avx512() {
    let text = r#"
declare <8 x double> @llvm.masked.load.v8f64.p0(ptr, <8 x i1>, <8 x double>)
define void @f(ptr %p, i64 %x, ptr %o) {
  %c = icmp eq i64 %x, 0
  %a = insertelement <8 x i1> poison, i1 %c, i64 0
  %b = shufflevector <8 x i1> %a, <8 x i1> poison, <8 x i32> zeroinitializer
  %m = and <8 x i1> %b, <i1 false, i1 false, i1 true, i1 false, i1 false, i1 false, i1 false, i1 false>
  %v = call <8 x double> @llvm.masked.load.v8f64.p0(ptr align 8 %p, <8 x i1> %m, <8 x double> zeroinitializer)
  store <8 x double> %v, ptr %o, align 8
  ret void
}
"#;
    let cpu = HostCpu { cpu: "x86-64-v3".into(), features: "+avx2,+fma".into(), ..HostCpu::native() };
    let assembly = asm(text, &cpu, &Opt::host()).unwrap().code;
    assert!(assembly.contains("vmaskmovpd"), "{assembly}");
}

/// sm_80 has no proxy fence: LLVM cannot select it, which would end the process without the fatal-error handler.
#[test]
fn fatal_errors_of_llvm_are_errors() {
    let text = r#"
declare void @llvm.nvvm.fence.proxy.async.shared_cta()
define ptx_kernel void @f() {
  call void @llvm.nvvm.fence.proxy.async.shared_cta()
  ret void
}
"#;
    for _ in 0..3 {
        let error = rejection(ptx(text, GpuArch::Sm80, 83, &Opt::gpu()));
        assert!(error.message.contains("Cannot select"), "{error}");
    }
    assert!(ptx(text, GpuArch::Sm90a, 83, &Opt::gpu()).is_ok());
    assert!(ptx(ADD_KERNEL, GpuArch::Sm80, 83, &Opt::gpu()).is_ok());
}
