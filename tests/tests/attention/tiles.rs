//! The default tiles, and code without TMA.

use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::Precision;
use tilewright::codegen::lang::kernel::{ArgSpec, KernelDef, ParamKind, Specialization};
use tilewright::codegen::lower::nvptx;
use tilewright::codegen::pipeline::gpu_ir;
use tilewright::codegen::target::{CompileOptions, GpuArch, Schedule, Target};
use tilewright::kernels::attention::backward::{FLASH_ATTENTION_BWD_DKDV, FLASH_ATTENTION_BWD_DQ};
use tilewright::kernels::attention::config::{Pass, adds_lanes_first, d_tile, default_tiles, one_pass_is_faster};
use tilewright::kernels::attention::forward::FLASH_ATTENTION_FWD;
use tilewright_tests::consts;

/// The specialization for dense tensors, which wide copies into shared memory need.
fn dense(def: &KernelDef) -> Specialization {
    let fact = |name: &str| match name.ends_with("_stride_d") {
        true => ArgSpec { divisible_by: 1, equal_to: Some(1) },
        false => ArgSpec { divisible_by: 16, equal_to: None },
    };
    let passed = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. }));
    let args = passed
        .map(|p| match p.kind {
            ParamKind::Scalar(_) if !p.name.contains("_stride_") => ArgSpec::default(),
            _ => fact(p.name),
        })
        .collect();
    Specialization { args }
}

#[test]
fn default_tiles_fit_into_the_shared_memory_of_every_target() {
    let kernels = [
        (Pass::Forward, &FLASH_ATTENTION_FWD),
        (Pass::Dkdv, &FLASH_ATTENTION_BWD_DKDV),
        (Pass::Dq, &FLASH_ATTENTION_BWD_DQ),
    ];
    for arch in [GpuArch::Sm80, GpuArch::Sm86, GpuArch::Sm89, GpuArch::Sm90a] {
        for (pass, def) in kernels {
            let bf16 = [64, 128, 256].map(|d| (DType::BF16, d));
            for (dtype, d) in bf16.into_iter().chain([(DType::F32, 128), (DType::F32, 256)]) {
                let target = Target::Nvptx(arch);
                let tiles = default_tiles(pass, d, dtype.bytes(), &target);
                let one_pass = pass == Pass::Dkdv && one_pass_is_faster(&target, dtype.bytes(), [1, 16, 8192, d]);
                let mut constants = consts! {
                    d = d, d_tile = d_tile(d), d_v = d, d_v_tile = d_tile(d), q_tile = tiles.q_tile, k_tile = tiles.k_tile, causal = true,
                    precision = Precision::Tf32x3,
                }
                .to_vec();
                if one_pass {
                    constants.extend_from_slice(consts! { one_pass = true, lanes_first = adds_lanes_first(&target) });
                }
                let constants = &constants;
                let func = def
                    .record(&vec![dtype; def.generics.len()], constants, &dense(def))
                    .unwrap_or_else(|e| panic!("{e}"));
                let options = CompileOptions {
                    num_warps: tiles.num_warps,
                    num_stages: tiles.num_stages,
                    ..CompileOptions::default()
                };
                let gpu_func = gpu_ir(&func, arch, &options, &mut ());
                let module = nvptx::lower(&gpu_func, arch, &options)
                    .unwrap_or_else(|e| panic!("{} of {dtype}, head dimension {d}: {e:?}", def.name));
                assert!(module.shared_bytes <= arch.max_shared_bytes());
                assert!(module.shared_bytes > 32 << 10, "{}: the tiles are not in shared memory", def.name);
                // Desktop GPUs have shared memory for a second stage only in the forward pass of bf16.
                let has_room = arch.max_shared_bytes() > 128 << 10 || (pass, dtype) == (Pass::Forward, DType::BF16);
                if d == 128 && has_room {
                    let what = format!("{} of {dtype} on {}", def.name, arch.name());
                    assert!(module.llvm_ir.contains("cp.async"), "{what}: no asynchronous loads");
                }
            }
        }
    }
}

/// A tensor that TMA does not support gets a variant whose threads load, whatever the schedule requests.
#[test]
fn code_without_tma_takes_no_tensor_map() {
    for warp_specialize in [None, Some(true)] {
        for (tma, takes) in [(Some(true), true), (Some(false), false)] {
            let constants = consts! {
                d = 128usize, d_tile = 128usize, d_v = 128usize, d_v_tile = 128usize, q_tile = 128usize,
                k_tile = 128usize, causal = true,
            };
            let func = FLASH_ATTENTION_FWD.record(&[DType::BF16; 3], constants, &dense(&FLASH_ATTENTION_FWD));
            let func = func.unwrap_or_else(|e| panic!("{e}"));
            let options = CompileOptions {
                num_warps: 8,
                num_stages: 2,
                schedule: Schedule { warp_specialize, tma, ..Schedule::default() },
                ..CompileOptions::default()
            };
            let gpu_func = gpu_ir(&func, GpuArch::Sm90a, &options, &mut ());
            let module = nvptx::lower(&gpu_func, GpuArch::Sm90a, &options).unwrap_or_else(|e| panic!("{e:?}"));
            assert_eq!(!module.tensor_maps.is_empty(), takes, "{warp_specialize:?}, {tma:?}");
            assert_eq!(module.llvm_ir.contains("cp.async.bulk"), takes, "{warp_specialize:?}, {tma:?}");
        }
    }
}
