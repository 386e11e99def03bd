//! The solver's schedules of the kernels that ship: intervals, proofs, and that they assemble.

use tilewright::kernels::attention::backward::FLASH_ATTENTION_BWD_DKDV;
use tilewright::kernels::attention::forward::FLASH_ATTENTION_FWD;
use tilewright::kernels::matmul::MATMUL;
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::KernelDef;
use tilewright_codegen::target::{CompileOptions, GpuArch, Schedule};
use tilewright_tests::configurations::{Configuration, PTX_VERSION, well_aligned};
use tilewright_tests::consts;
use tilewright_tests::solved::solve_loops;

/// Tiles of queries and keys of attention, or of rows and columns of a matmul; `k_tile` is that of keys or of the sum.
fn configuration(def: &'static KernelDef, d: usize, [q, n, k]: [usize; 3], num_stages: u32) -> Configuration {
    let all = consts! {
        d = d, d_tile = d, d_v = d, d_v_tile = d, q_tile = q, k_tile = k, causal = false, even_keys = true, even_queries = true,
        m_tile = q, n_tile = n,
    };
    let is_of = |name: &str| def.params.iter().any(|p| p.name == name);
    let consts = all.iter().filter(|(name, _)| is_of(name)).cloned().collect();
    let dtypes = vec![DType::BF16; def.generics.len()];
    let schedule = Schedule { warp_specialize: Some(true), ..Schedule::default() };
    let options = CompileOptions { num_warps: 8, num_stages, schedule, ptx_version: PTX_VERSION, ..Default::default() };
    Configuration { def, dtypes, consts, options }
}

/// The intervals of the tiles that ship for an H200, in cycles: the solver's, its bound, and the compiler's own schedule.
/// The bounds by hand, for two groups of 64 rows. Attention with d 128: 2 products × 64 × 128 × 128 / 2048 = 1024 cycles of
/// the tensor cores per group. With d 64 half of that, less than 64 × 128 exponentials at 16 per cycle, 512, and 128 of the
/// rescaling at 8 warps, 16. dK/dV: four products of 256. The matmul: 48 KB per iteration at 5120 / 108 bytes per cycle.
#[test]
fn schedules_of_attention_and_matmul_are_optimal() {
    let cases = [
        (configuration(&FLASH_ATTENTION_FWD, 128, [128, 0, 128], 2), [2048, 2048, 2048]),
        (configuration(&FLASH_ATTENTION_FWD, 64, [128, 0, 128], 2), [1056, 1056, 1406]),
        // Two products for 128 and 64 columns of S, which continue one sum, and two for those of O.
        (configuration(&FLASH_ATTENTION_FWD, 192, [128, 0, 64], 2), [1536, 1536, 1600]),
        (configuration(&FLASH_ATTENTION_BWD_DKDV, 128, [64, 0, 128], 3), [2048, 2048, 2048]),
        (configuration(&FLASH_ATTENTION_BWD_DKDV, 64, [128, 0, 128], 2), [2048, 2048, 2048]),
        (configuration(&MATMUL, 0, [128, 256, 64], 3), [1038, 1038, 1038]),
    ];
    for (case, expected) in cases {
        let func = case.record(&well_aligned(case.def));
        let (schedules, found) =
            solve_loops(&func, GpuArch::Sm90a, &case.options).unwrap_or_else(|e| panic!("{}: {e}", case.def.name));
        let [of_loop] = &found[..] else { panic!("{}: {} loops", case.def.name, found.len()) };
        println!("{}: {:.2} s, loops={schedules}", case.def.name, of_loop.time.as_secs_f64());
        let intervals = [of_loop.solution.interval, of_loop.bound, of_loop.before.unwrap_or(0)];
        assert_eq!(intervals, expected, "{} {:?}", case.def.name, case.consts);
    }
}
