//! Dots of tiles that are loaded through pointers: the loops prefetch them, against sums in f64. The simulated GPU
//! reports races, reads of buffers that were not filled, misaligned accesses and accesses out of bounds.

use tilewright_codegen::ir::{DType, Func, Op, Stage};
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef};
use tilewright_codegen::pipeline::{self, Observer};
use tilewright_codegen::target::{CompileOptions, GpuArch, Schedule};
use tilewright_tests::configurations::well_aligned;
use tilewright_tests::consts;
use tilewright_tests::interpret::{Arg, FORMS, Form, interpret, record};
use tilewright_tests::numerics::{HostTensor, Random, tolerance};
use tilewright_tests::pointer_loads::{GATHERED_MATMUL, PAGED_MATMUL, POINTER_MATMUL};

/// The forms of all tests: each architecture with two and with more stages, and the requests that a loop of pointer
/// loads cannot honor.
fn forms() -> Vec<Form> {
    let simulated = |arch, num_warps, num_stages| Form::Simulated { arch, num_warps, num_stages };
    let mut forms = FORMS.to_vec();
    forms.extend([
        simulated(GpuArch::Sm80, 2, 3),
        simulated(GpuArch::Sm90a, 4, 2),
        simulated(GpuArch::Sm90a, 4, 4),
        Form::WarpSpecialized { num_warps: 4, num_stages: 3 },
    ]);
    forms
}

/// Σ over l of a[i, l] · b[l, j].
fn product(a: &[f64], b: impl Fn(usize, usize) -> f64, [m, n, k]: [usize; 3]) -> Vec<f64> {
    let element = |at: usize| (0..k).map(|l| a[at / n * k + l] * b(l, at % n)).sum();
    (0..m * n).map(element).collect()
}

#[test]
fn matmul_of_the_tutorial() {
    let mut random = Random::new(1);
    // Whole tiles, none along k, fewer than stages, and ends that tiles and vectors do not divide.
    for ([m, n, k], wrap, dtype) in [
        ([64, 16, 96], false, DType::F16),
        ([64, 16, 0], false, DType::F16),
        ([64, 16, 16], true, DType::F16),
        ([80, 32, 48], false, DType::F16),
        ([80, 16, 48], true, DType::F32),
        ([37, 21, 27], false, DType::F32),
    ] {
        let a = HostTensor::random(dtype, &[m, k], &[k, 1], &mut random);
        let b = HostTensor::random(dtype, &[k, n], &[n, 1], &mut random);
        let want = product(&a.values(), |l, j| b.values()[l * n + j], [m, n, k]);
        for form in forms() {
            let mut c = HostTensor::poisoned(dtype, &[m, n], &[n, 1]);
            let numbers = [m, n, k, k, 1, n, 1, n, 1].map(Arg::from);
            let tensors = [Arg::In(&a), Arg::In(&b), Arg::Out(&mut c)];
            let args = &mut tensors.into_iter().chain(numbers).collect::<Vec<_>>();
            let consts = consts! { m_tile = 64usize, n_tile = 16usize, k_tile = 16usize, wrap = wrap, group = 2usize };
            let programs = m.div_ceil(64) * n.div_ceil(16);
            interpret(form, &POINTER_MATMUL, &[dtype], consts, [programs as u32, 1, 1], args);
            c.check(&format!("{dtype} {m} {n} {k}, {form:?}"), &want, tolerance(dtype));
        }
    }
}

#[test]
fn pages_and_rows_are_gathered() {
    const M: usize = 64;
    const N: usize = 16;
    const PAGE: usize = 16;
    let mut random = Random::new(2);
    let dtype = DType::BF16;
    for count in [0usize, 1, 2, 5] {
        let k = count * PAGE;
        let table: Vec<usize> = (0..count).map(|l| (l * 3 + 1) % 7).collect();
        let rows: Vec<usize> = (0..k).map(|l| table[l / PAGE] * PAGE + l % PAGE).collect();
        let a = HostTensor::random(dtype, &[M, k], &[k, 1], &mut random);
        let pages = HostTensor::random(dtype, &[7 * PAGE, N], &[N, 1], &mut random);
        let (table, row_list) = (HostTensor::indices(&table), HostTensor::indices(&rows));
        let want = product(&a.values(), |l, j| pages.values()[rows[l] * N + j], [M, N, k]);
        for form in forms() {
            let mut c = HostTensor::poisoned(DType::F32, &[M, N], &[N, 1]);
            let args = &mut [Arg::In(&a), Arg::In(&pages), Arg::In(&table), Arg::Out(&mut c), Arg::from(count)];
            let consts = consts! { m_tile = M, n_tile = N, page = PAGE };
            interpret(form, &PAGED_MATMUL, &[dtype], consts, [1, 1, 1], args);
            c.check(&format!("{count} pages, {form:?}"), &want, 1e-5);

            let mut c = HostTensor::poisoned(DType::F32, &[M, N], &[N, 1]);
            let args = &mut [Arg::In(&a), Arg::In(&pages), Arg::In(&row_list), Arg::Out(&mut c), Arg::from(k)];
            let consts = consts! { m_tile = M, n_tile = N, k_tile = PAGE };
            interpret(form, &GATHERED_MATMUL, &[dtype], consts, [1, 1, 1], args);
            c.check(&format!("{k} rows, {form:?}"), &want, 1e-5);
        }
    }
}

/// What a compilation says.
#[derive(Default)]
struct Notes(Vec<String>);

impl Observer for Notes {
    fn after(&mut self, _: &'static str, _: Stage, _: &Func) {}
    fn llvm_ir(&mut self, _: &str) {}
    fn note(&mut self, note: &str) {
        self.0.push(note.to_string());
    }
}

/// The last stage of a kernel's Tile IR for well-aligned row-major matrices, and the notes.
fn compiled(def: &KernelDef, consts: &[(&str, ConstValue)], options: &CompileOptions) -> (Func, Vec<String>) {
    let mut specialization = well_aligned(def);
    for (param, spec) in def.params.iter().zip(&mut specialization.args) {
        if ["stride_ak", "stride_bn", "stride_cn"].contains(&param.name) {
            spec.equal_to = Some(1);
        }
    }
    let func = record(def, &[DType::BF16], consts, &specialization);
    let mut notes = Notes::default();
    (pipeline::gpu_ir(&func, GpuArch::Sm90a, options, &mut notes), notes.0)
}

fn count(func: &Func, is: impl Fn(&Op) -> bool) -> usize {
    func.walk().into_iter().filter(|&id| is(&func.op(id).op)).count()
}

/// Two copies per iteration of the loop, and of each iteration in the prologue; the index of a gather is loaded once per
/// iteration, ahead.
#[test]
fn loops_prefetch_loads_through_pointers() {
    let options = CompileOptions { num_stages: 3, ..CompileOptions::default() };
    let matmul = consts! { m_tile = 64usize, n_tile = 64usize, k_tile = 64usize, wrap = false, group = 8usize };
    let paged = consts! { m_tile = 64usize, n_tile = 64usize, page = 64usize };
    let gathered = consts! { m_tile = 64usize, n_tile = 64usize, k_tile = 64usize };
    for (def, consts, indices) in
        [(&POINTER_MATMUL, matmul, 0), (&PAGED_MATMUL, paged, 4), (&GATHERED_MATMUL, gathered, 4)]
    {
        let (func, notes) = compiled(def, consts, &options);
        assert_eq!(notes, Vec::<String>::new(), "{}", def.name);
        let wide = count(&func, |op| matches!(op, Op::AsyncLoad { vector: 8 }));
        assert_eq!(wide, 6, "{}: copies of 16 bytes\n{}", def.name, tilewright_codegen::text::print(&func));
        assert_eq!(count(&func, |op| matches!(op, Op::Load { .. })), indices, "{}: loads of indices", def.name);
    }
}

/// Each load that stays and each request that is not followed is named, with its line and the reason.
#[test]
fn notes_name_what_is_not_pipelined() {
    let options = CompileOptions { num_stages: 3, ..CompileOptions::default() };
    let wrapped = consts! { m_tile = 64usize, n_tile = 64usize, k_tile = 64usize, wrap = true, group = 8usize };
    let specialize = Schedule { warp_specialize: Some(true), ..Schedule::default() };
    let specialize = CompileOptions { schedule: specialize, ..options.clone() };
    let paged = consts! { m_tile = 64usize, n_tile = 64usize, page = 64usize };
    let six = CompileOptions { num_stages: 6, num_warps: 8, ..options.clone() };
    let large = consts! { m_tile = 128usize, n_tile = 256usize, page = 64usize };
    let notes = [
        compiled(&POINTER_MATMUL, wrapped, &options).1,
        compiled(&PAGED_MATMUL, paged, &specialize).1,
        compiled(&PAGED_MATMUL, large, &six).1,
    ];
    let expected = [
        "the load at tests/src/pointer_loads.rs:45:18 is not prefetched by the loop at tests/src/pointer_loads.rs:42:5: \
         accesses that are known to be contiguous and aligned have 2 bytes, and `cp.async` copies at least 4",
        "warp specialization is requested but not applied: no loop loads operands of dots through block pointers or \
         descriptors",
        "the loop at tests/src/pointer_loads.rs:71:5 has 3 of the 6 pipeline stages that are requested: a stage takes \
         49152 bytes of shared memory, and a block of sm_90a has 232448",
    ];
    assert_eq!(notes.concat(), expected);
}
