//! Launches, their checks, and the driver's report on the code.

use tilewright_codegen::llvm::{Opt, ptx};
use tilewright_codegen::target::{ArgType, Artifact, Code};
use tilewright_runtime::{Buffer, Device, LaunchArg, Stream};

use crate::{arg, artifact, gpu};

/// `out[i] = a[i] + b[i] + bias` for i < n, compiled by our LLVM.
const ADD_IR: &str = r#"
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
define ptx_kernel void @entry(ptr addrspace(1) %a, ptr addrspace(1) %b, ptr addrspace(1) %out, i32 %n, float %bias) {
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %block = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %first = mul i32 %block, 128
  %i = add i32 %first, %tid
  %inside = icmp slt i32 %i, %n
  br i1 %inside, label %body, label %done
body:
  %i64 = sext i32 %i to i64
  %pa = getelementptr float, ptr addrspace(1) %a, i64 %i64
  %pb = getelementptr float, ptr addrspace(1) %b, i64 %i64
  %po = getelementptr float, ptr addrspace(1) %out, i64 %i64
  %x = load float, ptr addrspace(1) %pa
  %y = load float, ptr addrspace(1) %pb
  %s = fadd float %x, %y
  %t = fadd float %s, %bias
  store float %t, ptr addrspace(1) %po
  br label %done
done:
  ret void
}
"#;

fn add_artifact(device: &Device) -> Artifact {
    let arch = device.gpu_arch().unwrap();
    let args = vec![
        arg("a", ArgType::Ptr),
        arg("b", ArgType::Ptr),
        arg("out", ArgType::Ptr),
        arg("n", ArgType::I32),
        arg("bias", ArgType::F32),
    ];
    let mut artifact = artifact("", arch.name(), 128, args);
    let version = device.max_ptx_version().unwrap();
    artifact.code = Code::Ptx(ptx(ADD_IR, arch, version, &Opt::gpu()).unwrap().code);
    artifact
}

#[test]
fn a_kernel_computes() {
    let Some(device) = gpu() else { return };
    let kernel = device.load(&add_artifact(&device)).unwrap();
    println!("{kernel:?}: {:?}", kernel.resources());
    assert!(kernel.resources().unwrap().blocks_per_sm > 0);
    assert_eq!(kernel.resources().unwrap().local_bytes, 0);
    let n = 1000;
    let a: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let b: Vec<f32> = (0..n).map(|i| 0.5 * i as f32).collect();
    let (x, y) = (Buffer::from_slice(&device, &a).unwrap(), Buffer::from_slice(&device, &b).unwrap());
    let mut out = Buffer::<f32>::poisoned(&device, n).unwrap();
    let args = [
        LaunchArg::from(&x),
        LaunchArg::from(&y),
        LaunchArg::from(&mut out),
        LaunchArg::I32(n as i32),
        LaunchArg::F32(0.25),
    ];
    // SAFETY: three buffers of n floats, guarded by n.
    unsafe { kernel.launch([8, 1, 1], &args) }.unwrap();
    let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b + 0.25).collect();
    assert_eq!(out.to_vec().unwrap(), expected);
}

#[test]
fn streams_are_ordered_by_events() {
    let Some(device) = gpu() else { return };
    let kernel = device.load(&add_artifact(&device)).unwrap();
    let n = 1 << 22;
    let (first, second) = (device.new_stream().unwrap(), device.new_stream().unwrap());
    let ones = Buffer::from_slice(&device, &vec![1.0_f32; n]).unwrap();
    let mut sums: [Buffer<f32>; 2] = [(); 2].map(|()| Buffer::zeros(&device, n).unwrap());
    device.synchronize().unwrap();
    let launch = |stream: &Stream, from: &Buffer<f32>, to: LaunchArg| {
        let args = [LaunchArg::from(from), LaunchArg::from(&ones), to, LaunchArg::I32(n as i32), LaunchArg::F32(0.0)];
        // SAFETY: three buffers of n floats; the streams are ordered by the event below.
        unsafe { kernel.launch_on(stream, [n as u32 / 128, 1, 1], &args) }.unwrap();
    };
    let start = first.record().unwrap();
    let [one, two] = &mut sums;
    launch(&first, &ones, LaunchArg::from(&mut *one));
    let done = first.record().unwrap();
    second.wait(&done).unwrap();
    launch(&second, one, LaunchArg::from(&mut *two));
    second.synchronize().unwrap();
    assert!(two.to_vec().unwrap().iter().all(|&x| x == 3.0));
    let elapsed = done.elapsed_since(&start).unwrap();
    assert!(elapsed.as_nanos() > 0 && elapsed.as_millis() < 100, "{elapsed:?}");
}

#[test]
fn a_device_on_a_borrowed_stream_shares_its_order() {
    let Some(device) = gpu() else { return };
    let stream = device.stream().cuda_stream().unwrap().clone();
    let borrowed = Device::from_cuda_stream(stream).unwrap();
    assert_eq!(borrowed, *device);
    assert_ne!(Device::cuda(0).unwrap(), *device);
    let buffer = Buffer::from_slice(&borrowed, &[1_u8, 2, 3]).unwrap();
    let mut copy = Buffer::<u8>::zeros(&device, 3).unwrap();
    copy.copy_from(buffer.view()).unwrap();
    assert_eq!(copy.to_vec().unwrap(), [1, 2, 3]);
}

#[test]
fn the_drivers_log_reaches_the_user() {
    let Some(device) = gpu() else { return };
    let broken = artifact(".visible .entry entry() {\n  no.such.instruction;\n}\n", "sm_80", 32, vec![]);
    let message = device.load(&broken).unwrap_err().to_string();
    println!("{message}");
    for part in ["`probe` (probe.rs:7)", "line 5", ".such", "CUDA_ERROR_INVALID_PTX"] {
        assert!(message.contains(part), "`{part}` is missing in: {message}");
    }
    let mut nameless = artifact(".visible .entry other() { ret; }\n", "sm_80", 32, vec![]);
    nameless.manifest.entry = "entry".to_string();
    assert!(device.load(&nameless).unwrap_err().to_string().contains("`entry`"));
}

/// Writes its block's last shared byte and reads it back.
const SHARED_PTX: &str = "
.extern .shared .align 16 .b8 memory[];
.visible .entry entry(.param .u64 out, .param .u32 last) {
  .reg .b64 %d<4>;
  .reg .b32 %r<4>;
  ld.param.u64 %d0, [out];
  ld.param.u32 %r0, [last];
  mov.u32 %r1, memory;
  add.u32 %r1, %r1, %r0;
  mov.u32 %r2, 77;
  st.shared.u8 [%r1], %r2;
  ld.shared.u8 %r3, [%r1];
  st.global.u8 [%d0], %r3;
  ret;
}
";

#[test]
fn shared_memory_up_to_the_limit_works_and_beyond_is_refused() {
    let Some(device) = gpu() else { return };
    let limit = device.info().max_shared_bytes;
    let mut artifact = artifact(SHARED_PTX, "sm_80", 1, vec![arg("out", ArgType::Ptr), arg("last", ArgType::I32)]);
    artifact.manifest.shared_bytes = limit;
    let kernel = device.load(&artifact).unwrap();
    let mut out = Buffer::<u8>::zeros(&device, 1).unwrap();
    // SAFETY: the kernel writes one byte to `out` and its own shared memory.
    unsafe { kernel.launch([1, 1, 1], &[LaunchArg::from(&mut out), LaunchArg::I32(limit as i32 - 1)]) }.unwrap();
    assert_eq!(out.to_vec().unwrap(), [77]);
    artifact.manifest.shared_bytes = limit + 16;
    let message = device.load(&artifact).unwrap_err().to_string();
    assert!(message.contains(&format!("{}", limit + 16)) && message.contains(&format!("has {limit}")), "{message}");
}

#[test]
fn too_many_threads_are_refused() {
    let Some(device) = gpu() else { return };
    let ptx = ".visible .entry entry() .maxntid 64, 1, 1 { ret; }\n";
    let message = device.load(&artifact(ptx, "sm_80", 128, vec![])).unwrap_err().to_string();
    assert!(message.contains("needs 128 threads") && message.contains("64"), "{message}");
}

#[test]
fn code_for_a_newer_gpu_is_refused() {
    let Some(device) = gpu() else { return };
    let artifact = artifact(".visible .entry entry() { ret; }\n", "sm_123", 32, vec![]);
    let message = device.load(&artifact).unwrap_err().to_string();
    assert!(message.contains("sm_123") && message.contains(device.gpu_arch().unwrap().name()), "{message}");
}
