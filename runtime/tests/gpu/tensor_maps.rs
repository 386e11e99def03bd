//! Tensor maps, used by TMA copies.

use tilewright_codegen::target::{ArgType, Artifact, HostExpr, TensorMapDesc};
use tilewright_runtime::{Buffer, CompiledKernel, Device, LaunchArg};

use crate::{arg, artifact, hopper};

/// Block b copies the 8 × 16 tile of f32 at row 8 b, column 4, to `out[b]`, one row of 16 after the other.
const TMA_PTX: &str = "
.visible .entry entry(.param .u64 x, .param .u32 columns, .param .u64 stride, .param .u64 out,
                      .param .align 64 .b8 map[128]) {
  .reg .pred %p;
  .reg .b32 %r<12>;
  .reg .b64 %d<8>;
  .reg .f32 %f;
  .shared .align 128 .b8 tile[512];
  .shared .align 8 .b64 barrier;
  mov.u32 %r0, %tid.x;
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, tile;
  mov.u32 %r3, barrier;
  setp.ne.u32 %p, %r0, 0;
  @%p bra started;
  mbarrier.init.shared.b64 [%r3], 1;
  fence.proxy.async;
  mbarrier.arrive.expect_tx.shared.b64 %d0, [%r3], 512;
  mov.b64 %d1, map;
  cvta.param.u64 %d1, %d1;
  mov.u32 %r4, 4;
  shl.b32 %r5, %r1, 3;
  cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%d1, {%r4, %r5}], [%r3];
started:
  bar.sync 0;
wait:
  mbarrier.try_wait.parity.shared.b64 %p, [%r3], 0;
  @!%p bra wait;
  shl.b32 %r6, %r0, 2;
  add.u32 %r7, %r2, %r6;
  ld.shared.f32 %f, [%r7];
  ld.param.u64 %d2, [out];
  shl.b32 %r8, %r1, 9;
  add.u32 %r9, %r8, %r6;
  cvt.u64.u32 %d3, %r9;
  add.u64 %d4, %d2, %d3;
  st.global.f32 [%d4], %f;
  ret;
}
";

const ROWS: usize = 13;

fn tma_artifact() -> Artifact {
    let args = vec![
        arg("x", ArgType::Ptr),
        arg("columns", ArgType::I32),
        arg("stride", ArgType::I64),
        arg("out", ArgType::Ptr),
        arg("map", ArgType::TensorMap),
    ];
    let mut artifact = artifact(TMA_PTX, "sm_90a", 128, args);
    artifact.manifest.tensor_maps = vec![TensorMapDesc {
        arg: 4,
        base: 0,
        elem: "f32".to_string(),
        shape: vec![HostExpr::Arg(1), HostExpr::Const(ROWS as i64)],
        strides: vec![HostExpr::Arg(2)],
        block: vec![16, 8],
        swizzle_bytes: 0,
    }];
    artifact
}

/// Launches with rows of `columns` elements, `stride` apart, and compares both tiles, including zeros outside.
fn check(device: &Device, kernel: &CompiledKernel, columns: usize, stride: usize) {
    let values: Vec<f32> = (0..ROWS * stride).map(|i| i as f32 + 1.0).collect();
    let x = Buffer::from_slice(device, &values).unwrap();
    let mut out = Buffer::<f32>::poisoned(device, 2 * 128).unwrap();
    let args =
        [LaunchArg::from(&x), LaunchArg::I32(columns as i32), LaunchArg::I64(stride as i64), LaunchArg::from(&mut out)];
    // SAFETY: the map covers `x`, and two blocks write 128 floats each.
    unsafe { kernel.launch([2, 1, 1], &args) }.unwrap();
    let expected: Vec<f32> = (0..256)
        .map(|i| {
            let (row, column) = (i / 16, i % 16 + 4);
            if row < ROWS && column < columns { values[row * stride + column] } else { 0.0 }
        })
        .collect();
    assert_eq!(out.to_vec().unwrap(), expected, "{columns} columns, stride {stride}");
}

#[test]
fn out_of_bounds_elements_are_zero() {
    let Some(device) = hopper() else { return };
    let kernel = device.load(&tma_artifact()).unwrap();
    // Repeated shapes use cached maps; all live buffers and shapes together exceed the cache.
    for _ in 0..3 {
        for columns in 5..40 {
            check(&device, &kernel, columns, 40);
        }
        check(&device, &kernel, 30, 64);
    }
}

#[test]
fn a_remembered_map_keeps_launches_cheap() {
    let Some(device) = hopper() else { return };
    let kernel = device.load(&tma_artifact()).unwrap();
    let x = Buffer::<f32>::zeros(&device, 16 * ROWS).unwrap();
    let mut out = Buffer::<f32>::zeros(&device, 256).unwrap();
    let args = [LaunchArg::from(&x), LaunchArg::I32(16), LaunchArg::I64(16), LaunchArg::from(&mut out)];
    // SAFETY: the map covers `x`, and two blocks write 128 floats each.
    let median = crate::timing::median_launch_time(&device, || unsafe { kernel.launch([2, 1, 1], &args) }.unwrap());
    println!("launch with a tensor map: {median:?}");
    assert!(cfg!(debug_assertions) || median < std::time::Duration::from_micros(5), "{median:?}");
}

#[test]
fn unsupported_tensors_are_named_in_errors() {
    let Some(device) = hopper() else { return };
    let kernel = device.load(&tma_artifact()).unwrap();
    let x = Buffer::<f32>::zeros(&device, 1000).unwrap();
    let mut out = Buffer::<f32>::zeros(&device, 256).unwrap();
    let mut message = |x: LaunchArg, stride: i64| {
        let args = [x, LaunchArg::I32(16), LaunchArg::I64(stride), LaunchArg::from(&mut out)];
        // SAFETY: the launch is rejected.
        unsafe { kernel.launch([1, 1, 1], &args) }.unwrap_err().to_string()
    };
    let odd_stride = message(LaunchArg::from(&x), 17);
    assert!(odd_stride.contains("`x`") && odd_stride.contains("68 bytes"), "{odd_stride}");
    let odd_base = message(LaunchArg::from(x.slice(1..).unwrap()), 16);
    assert!(odd_base.contains("multiple of 16"), "{odd_base}");
}
