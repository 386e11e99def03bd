//! The default tiles of products: they fit whatever is added to a product, however its operands lie.

use tilewright::autotune::{KeyPart, KeyValue, Problem};
use tilewright::kernels::matmul::{Addend, MATMUL, MATMUL_AUTOTUNE};
use tilewright::prelude::*;
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ConstValue, Constexpr, Specialization};
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{GpuArch, Target};
use tilewright_tests::configurations::{compile_options, well_aligned};

#[test]
fn defaults_fit_with_every_addend() {
    for arch in [GpuArch::Sm80, GpuArch::Sm86, GpuArch::Sm90a] {
        for dtype in [DType::BF16, DType::F32] {
            for precision in [Precision::Ieee, Precision::Tf32x3] {
                for size in [64, 256, 2048] {
                    compile_with_every_addend(arch, dtype, precision, size);
                }
            }
        }
    }
}

fn compile_with_every_addend(arch: GpuArch, dtype: DType, precision: Precision, size: i64) {
    let target = Target::Nvptx(arch);
    let part = |name, value| KeyPart { name, value: KeyValue::Exact(value) };
    let mut parts: Vec<KeyPart> = ["m", "n", "k"].map(|name| part(name, ConstValue::Int(size))).into();
    parts.push(part("precision", precision.to_const()));
    let config =
        MATMUL_AUTOTUNE.default_config(&Problem { target: target.clone(), def: &MATMUL, dtypes: &[dtype], parts });
    for addend in [Addend::None, Addend::Itself, Addend::Other] {
        for specialization in [well_aligned(&MATMUL), Specialization::default()] {
            let mut constants = config.constants.clone();
            constants.extend([("precision", precision.to_const()), ("addend", addend.to_const())]);
            let options = compile_options(&config);
            let func = MATMUL.record(&[dtype], &constants, &specialization).unwrap_or_else(|e| panic!("{e}"));
            let compiled = pipeline::compile(&func, &target, &options, &mut ());
            let what = || format!("{arch:?} {dtype} {precision:?} {size} {addend:?} {config}");
            assert!(compiled.is_ok(), "{}: {}", what(), compiled.err().unwrap());
        }
    }
}
