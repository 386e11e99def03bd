//! Dots of tiles that are loaded through pointers: the loops prefetch them, against sums in f64. The simulated GPU
//! reports races, reads of buffers that were not filled, misaligned accesses and accesses out of bounds.

use rayon::prelude::*;
use tilewright::LaunchArg;
use tilewright::prelude::*;
use tilewright_codegen::ir::{DType, Func, Op};
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef};
use tilewright_codegen::passes::assume_ranges;
use tilewright_codegen::target::{Code, CompileOptions, GpuArch, Schedule, Target};
use tilewright_tests::configurations::well_aligned;
use tilewright_tests::interpret::{self, Arg, Form, interpret, record};
use tilewright_tests::numerics::{HostTensor, Random, tolerance};
use tilewright_tests::pointer_loads::{
    CHOSEN_MATMUL, GATHERED_MATMUL, INDIRECT_MATMUL, PAGED_BLOCK_MATMUL, PAGED_MATMUL, POINTER_MATMUL, PointerMatmul,
    ROTATED, Rotated, WIDENED_MATMUL,
};
use tilewright_tests::{consts, notes};

/// The forms of all tests: each architecture with two and with more stages, and the requests that a loop of pointer
/// loads cannot honor.
fn forms() -> Vec<Form> {
    let simulated = |arch, num_warps, num_stages| Form::Simulated { arch, num_warps, num_stages };
    let mut forms = interpret::forms();
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

/// The page table reverses the rows of b; the ends are those of the loop.
#[test]
fn page_tables_and_bounds_from_memory_change_nothing() {
    const PAGE: usize = 16;
    let mut random = Random::new(3);
    let [m, n, count] = [64usize, 24, 4];
    let k = count * PAGE;
    let a = HostTensor::random(DType::F16, &[m, k], &[k, 1], &mut random);
    let b = HostTensor::random(DType::F16, &[k, n], &[n, 1], &mut random);
    let programs = m.div_ceil(64) * n.div_ceil(16);
    let table = HostTensor::indices(&(0..count).rev().collect::<Vec<_>>());
    let ends = HostTensor::indices(&vec![count; programs]);
    for (paged, bounds) in [(true, false), (false, true)] {
        let row = |l: usize| if paged { (count - 1 - l / PAGE) * PAGE + l % PAGE } else { l };
        let rounded = b.values();
        let want = product(&a.values(), |l, j| rounded[row(l) * n + j], [m, n, k]);
        forms().into_par_iter().for_each(|form| {
            let mut c = HostTensor::poisoned(DType::F16, &[m, n], &[n, 1]);
            let args = &mut [Arg::In(&a), Arg::In(&b), Arg::In(&table), Arg::In(&ends), Arg::Out(&mut c)];
            let consts = consts! { m_tile = 64usize, n_tile = 16usize, page = PAGE, paged = paged, bounds = bounds };
            interpret(form, &INDIRECT_MATMUL, &[DType::F16], consts, [programs as u32, 1, 1], args);
            c.check(&format!("{paged} {bounds}, {form:?}"), &want, tolerance(DType::F16));
        });
    }
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
        let rounded = b.values();
        let want = product(&a.values(), |l, j| rounded[l * n + j], [m, n, k]);
        forms().into_par_iter().for_each(|form| {
            let mut c = HostTensor::poisoned(dtype, &[m, n], &[n, 1]);
            let numbers = [m, n, k, k, 1, n, 1, n, 1].map(Arg::from);
            let tensors = [Arg::In(&a), Arg::In(&b), Arg::Out(&mut c)];
            let args = &mut tensors.into_iter().chain(numbers).collect::<Vec<_>>();
            let consts = consts! { m_tile = 64usize, n_tile = 16usize, k_tile = 16usize, wrap = wrap, group = 2usize };
            let programs = m.div_ceil(64) * n.div_ceil(16);
            interpret(form, &POINTER_MATMUL, &[dtype], consts, [programs as u32, 1, 1], args);
            c.check(&format!("{dtype} {m} {n} {k}, {form:?}"), &want, tolerance(dtype));
        });
    }
}

/// Operands of fewer bits than the dot takes are prefetched as they are, and move to its layout before they get wider.
#[test]
fn operands_that_become_wider() {
    const K: usize = 96;
    let mut random = Random::new(5);
    let (m, n, k_tile) = (64usize, 32usize, 32usize);
    let a = HostTensor::random(DType::BF16, &[m, K], &[K, 1], &mut random);
    let b: Vec<f64> = (0..K * n).map(|_| (random.number() * 6.0).round()).collect();
    for (dtype, transposed) in [(DType::F8E4M3, true), (DType::F8E4M3, false), (DType::I8, true)] {
        let shape = if transposed { [n, K] } else { [K, n] };
        let b = HostTensor::of(dtype, &shape, &[shape[1], 1], &b);
        let rounded = b.values();
        let want = product(&a.values(), |l, j| rounded[if transposed { j * K + l } else { l * n + j }], [m, n, K]);
        let consts = consts! { m_tile = m, n_tile = n, k_tile = k_tile, transposed = transposed };
        forms().into_par_iter().for_each(|form| {
            let mut c = HostTensor::poisoned(DType::F32, &[m, n], &[n, 1]);
            let args = &mut [Arg::In(&a), Arg::In(&b), Arg::Out(&mut c), Arg::from(K)];
            interpret(form, &WIDENED_MATMUL, &[DType::BF16, dtype], consts, [1, 1, 1], args);
            c.check(&format!("{dtype}, transposed {transposed}, {form:?}"), &want, 1e-5);
        });
        let func = record(&WIDENED_MATMUL, &[DType::BF16, dtype], consts, &well_aligned(&WIDENED_MATMUL));
        let options = CompileOptions { num_stages: 3, ..CompileOptions::default() };
        let (func, notes) = notes::gpu_ir(&func, GpuArch::Sm80, &options);
        assert!(notes.is_empty(), "{notes:?}");
        let text = tilewright_codegen::text::print(&func);
        assert_eq!(
            count(&func, |op| matches!(op, Op::AsyncLoad { .. })),
            6,
            "{dtype}, transposed {transposed}\n{text}"
        );
        assert_eq!(count(&func, |op| matches!(op, Op::Load { .. })), 0, "{dtype}, transposed {transposed}\n{text}");
        let moved = func.walk().into_iter().filter(|&id| func.op(id).op == Op::ConvertLayout);
        let types = moved.map(|id| func.ty(func.result(id))).filter(|ty| ty.dtype() == Some(DType::BF16));
        assert_eq!(types.count(), 0, "{dtype}, transposed {transposed}: moved after they are wider\n{text}");
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
        let (pages_of, row_list) = (HostTensor::indices(&table), HostTensor::indices(&rows));
        let rounded = pages.values();
        let want = product(&a.values(), |l, j| rounded[rows[l] * N + j], [M, N, k]);
        forms().into_par_iter().for_each(|form| {
            let mut c = HostTensor::poisoned(DType::F32, &[M, N], &[N, 1]);
            let args = &mut [Arg::In(&a), Arg::In(&pages), Arg::In(&pages_of), Arg::Out(&mut c), Arg::from(count)];
            let consts = consts! { m_tile = M, n_tile = N, page = PAGE };
            interpret(form, &PAGED_MATMUL, &[dtype], consts, [1, 1, 1], args);
            c.check(&format!("{count} pages, {form:?}"), &want, 1e-5);
        });
        let with_and_without = forms().into_par_iter().flat_map(|form| [(form, false), (form, true)]);
        with_and_without.for_each(|(form, add)| {
            let more = |indices: &[usize]| if add { indices.iter().sum::<usize>() as f64 } else { 0.0 };
            let plus = |x: f64| want.iter().map(|y| y + x).collect::<Vec<f64>>();

            let mut c = HostTensor::poisoned(DType::F32, &[M, N], &[N, 1]);
            let tensors = [Arg::In(&a), Arg::In(&pages), Arg::In(&pages_of), Arg::Out(&mut c)];
            let args = &mut tensors.into_iter().chain([k, 7 * PAGE].map(Arg::from)).collect::<Vec<Arg>>();
            let consts = consts! { m_tile = M, n_tile = N, page = PAGE, add = add };
            interpret(form, &PAGED_BLOCK_MATMUL, &[dtype], consts, [1, 1, 1], args);
            c.check(&format!("{count} pages through block pointers, {form:?}, {add}"), &plus(more(&table)), 1e-5);

            let mut c = HostTensor::poisoned(DType::F32, &[M, N], &[N, 1]);
            let args = &mut [Arg::In(&a), Arg::In(&pages), Arg::In(&row_list), Arg::Out(&mut c), Arg::from(k)];
            let consts = consts! { m_tile = M, n_tile = N, k_tile = PAGE, add = add };
            interpret(form, &GATHERED_MATMUL, &[dtype], consts, [1, 1, 1], args);
            c.check(&format!("{k} rows, {form:?}, {add}"), &plus(more(&rows)), 1e-5);
        });
    }
}

/// A kernel's Tile IR as recorded for well-aligned row-major matrices.
fn recorded(def: &KernelDef, consts: &[(&str, ConstValue)]) -> Func {
    let mut specialization = well_aligned(def);
    for (param, spec) in def.params.iter().zip(&mut specialization.args) {
        if ["stride_ak", "stride_bn", "stride_cn"].contains(&param.name) {
            spec.equal_to = Some(1);
        }
    }
    record(def, &[DType::BF16], consts, &specialization)
}

fn count(func: &Func, is: impl Fn(&Op) -> bool) -> usize {
    func.walk().into_iter().filter(|&id| is(&func.op(id).op)).count()
}

/// The producer loads the page table: once per iteration in its own loop, and nobody else does.
#[test]
fn a_producer_loads_scalars() {
    let func =
        recorded(&PAGED_BLOCK_MATMUL, consts! { m_tile = 64usize, n_tile = 64usize, page = 64usize, add = false });
    let schedule = Schedule { warp_specialize: Some(true), ..Schedule::default() };
    let options = CompileOptions { num_warps: 4, num_stages: 3, schedule, ..CompileOptions::default() };
    let (gpu_func, notes) = notes::gpu_ir(&func, GpuArch::Sm90a, &options);
    assert_eq!(notes, Vec::<String>::new());
    assert_eq!(count(&gpu_func, |op| matches!(op, Op::WarpSpecialize { .. })), 1);
    let loads: Vec<_> =
        gpu_func.walk().into_iter().filter(|&id| matches!(gpu_func.op(id).op, Op::Load { .. })).collect();
    assert_eq!(loads.len(), 1);
    let tma = |op: &Op| matches!(op, Op::TmaLoad { .. });
    let producer_loop = gpu_func.walk_from(gpu_func.parent_block(loads[0]));
    assert_eq!(producer_loop.into_iter().filter(|&id| tma(&gpu_func.op(id).op)).count(), 2);
}

/// Two copies per iteration of the loop, and of each iteration in the prologue; the index of a gather is loaded once per
/// iteration, ahead.
#[test]
fn loops_prefetch_loads_through_pointers() {
    let options = CompileOptions { num_stages: 3, ..CompileOptions::default() };
    let matmul = consts! { m_tile = 64usize, n_tile = 64usize, k_tile = 64usize, wrap = false, group = 8usize };
    let paged = consts! { m_tile = 64usize, n_tile = 64usize, page = 64usize };
    let gathered = consts! { m_tile = 64usize, n_tile = 64usize, k_tile = 64usize, add = false };
    for (def, consts, indices) in
        [(&POINTER_MATMUL, matmul, 0), (&PAGED_MATMUL, paged, 4), (&GATHERED_MATMUL, gathered, 4)]
    {
        let (func, notes) = notes::gpu_ir(&recorded(def, consts), GpuArch::Sm90a, &options);
        assert_eq!(notes, Vec::<String>::new(), "{}", def.name);
        let wide = count(&func, |op| matches!(op, Op::AsyncLoad { vector: 8 }));
        assert_eq!(wide, 6, "{}: copies of 16 bytes\n{}", def.name, tilewright_codegen::text::print(&func));
        assert_eq!(count(&func, |op| matches!(op, Op::Load { .. })), indices, "{}: loads of indices", def.name);
    }
}

/// Rows and columns that wrap around are runs if the launch checks the signs of dividend and divisor. It need not check
/// those of the rows: they are not contiguous in memory.
#[test]
fn loops_prefetch_wrapped_loads_of_launches() {
    let options = CompileOptions { num_stages: 3, ..CompileOptions::default() };
    let consts = consts! { m_tile = 64usize, n_tile = 64usize, k_tile = 64usize, wrap = true, group = 8usize };
    let mut assumed = recorded(&POINTER_MATMUL, consts);
    assert!(assume_ranges::run(&mut assumed) && !assume_ranges::run(&mut assumed));
    assert_eq!(count(&assumed, |op| matches!(op, Op::Hint { at_least: Some(_), .. })), 2);
    for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
        let (func, notes) = notes::gpu_ir(&assumed, arch, &options);
        assert_eq!(notes, Vec::<String>::new(), "{arch:?}");
        let wide = count(&func, |op| matches!(op, Op::AsyncLoad { vector: 8 }));
        assert_eq!(wide, 6, "{arch:?}: copies of 16 bytes\n{}", tilewright_codegen::text::print(&func));
        assert_eq!(count(&func, |op| matches!(op, Op::Load { .. })), 0, "{arch:?}");
    }
    // Launches of the other kernels have nothing to check.
    for (def, consts) in [
        (&PAGED_MATMUL, consts! { m_tile = 64usize, n_tile = 64usize, page = 64usize }),
        (&GATHERED_MATMUL, consts! { m_tile = 64usize, n_tile = 64usize, k_tile = 64usize, add = false }),
    ] {
        assert!(!assume_ranges::run(&mut recorded(def, consts)), "{}", def.name);
    }
}

/// The matmul of the tutorial, launched; the last rows and columns wrap around.
#[test]
fn launches_of_the_tutorial() {
    let (m, n, k) = (80usize, 48usize, 64usize);
    let wave = |len: usize, f: f32| -> Vec<f16> { (0..len).map(|i| f16::from_f32((i as f32 * f).sin())).collect() };
    let (a, b) = (wave(m * k, 0.7), wave(k * n, 0.3));
    let values = |list: &[f16]| -> Vec<f64> { list.iter().map(|x| x.to_f64()).collect() };
    let (a_values, b_values) = (values(&a), values(&b));
    let want = product(&a_values, |l, j| b_values[l * n + j], [m, n, k]);
    for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
        let device = Device::simulated(arch);
        let (a, b) = (Buffer::from_slice(&device, &a).unwrap(), Buffer::from_slice(&device, &b).unwrap());
        let mut c = Buffer::<f16>::poisoned(&device, m * n).unwrap();
        let mut kernel = PointerMatmul {
            a: &a,
            b: &b,
            c: &mut c,
            m: m as i32,
            n: n as i32,
            k: k as i32,
            stride_am: k as i32,
            stride_ak: 1,
            stride_bk: n as i32,
            stride_bn: 1,
            stride_cm: n as i32,
            stride_cn: 1,
            m_tile: 64,
            n_tile: 32,
            k_tile: 16,
            wrap: true,
            group: 2,
        };
        let programs = m.div_ceil(64) * n.div_ceil(32);
        let config = |programs: usize| LaunchConfig::new(programs).num_stages(3);
        kernel.launch_with(&device, &config(programs)).unwrap();
        let mut shared = |programs| kernel.compile(&device, &config(programs)).unwrap().manifest().shared_bytes;
        // With more programs than tiles, columns may be negative.
        assert!(shared(programs) > shared(1000), "{arch:?}: buffers of b");
        for (i, (got, want)) in c.to_vec().unwrap().into_iter().zip(&want).enumerate() {
            assert!((got.to_f64() - want).abs() < 1e-2, "{arch:?}: element {i} is {got}, expected {want}");
        }
    }
}

/// Launches whose dividends or divisors have another sign than the code assumes use other code.
#[test]
fn launches_check_the_assumed_signs() {
    const TILE: usize = 64;
    const PROGRAMS: usize = 3;
    const FIRST: i32 = 48;
    let x: Vec<f32> = (0..2 * FIRST).map(|i| i as f32).collect();
    let config = LaunchConfig::new(PROGRAMS);
    for device in [Device::simulated(GpuArch::Sm80), Device::simulated(GpuArch::Sm90a), Device::cpu()] {
        let on_gpu = device.to_string().contains("GPU");
        let x = Buffer::from_slice(&device, &x).unwrap();
        for (n, step, shift, holds) in [
            (48, 64, 0, true),
            (48, 64, -16, true),
            (48, 0, 0, true),
            // Dividends that are negative, in some or all programs, and that wrap.
            (48, 64, 16, false),
            (48, 64, 1024, false),
            (48, -64, 0, false),
            (48, i32::MAX - 15, 0, false),
            (48, 64, i32::MIN, false),
            // Divisors.
            (0, 64, 0, false),
            (-48, 64, 0, false),
            (i32::MIN, 0, 0, false),
        ] {
            let case = format!("{device}: n {n}, step {step}, shift {shift}");
            let element = |at: usize| {
                let (i, l) = ((at / TILE) as i32, (at % TILE) as i32);
                let dividend = i.wrapping_mul(step).wrapping_add(l).wrapping_sub(shift);
                (dividend.checked_rem(n).unwrap_or(0) + FIRST) as f32
            };
            // Remainders by i32::MIN reach beyond x.
            let fits = n != i32::MIN;
            let want: Vec<f32> = (0..PROGRAMS * TILE).map(element).collect();
            let mut y = Buffer::<f32>::poisoned(&device, PROGRAMS * TILE).unwrap();
            let mut kernel = Rotated { x: &x, y: &mut y, n, step, shift, first: FIRST, tile: TILE };
            let result = kernel.launch_with(&device, &config);
            let compiled = kernel.compile(&device, &config).unwrap();
            match result {
                Ok(()) => assert!(fits && y.to_vec().unwrap() == want, "{case}: {:?}", y.to_vec().unwrap()),
                Err(error) => {
                    assert!(!fits && error.to_string().contains("out of bounds"), "{case}: {error}");
                    continue;
                }
            }
            // The bounds of a launch are unchecked only on request; its assumptions are always checked.
            let mut y = Buffer::<f32>::poisoned(&device, PROGRAMS * TILE).unwrap();
            let mut kernel = Rotated { x: &x, y: &mut y, n, step, shift, first: FIRST, tile: TILE };
            // SAFETY: the launch above was in bounds.
            kernel.launch_with(&device, &unsafe { LaunchConfig::new(PROGRAMS).unchecked() }).unwrap();
            assert_eq!(y.to_vec().unwrap(), want, "{case}, unchecked");

            // What `compile` returns fits this launch, and it refuses others that it does not fit.
            let launch = |y: &mut Buffer<f32>, shift: i32| {
                let (x, y) = (LaunchArg::from(&x), LaunchArg::from(y));
                let args = [x, y, n.into(), step.into(), shift.into(), FIRST.into()];
                // SAFETY: both buffers outlive the launch, and remainders by ±48 or 0 are in bounds.
                unsafe { compiled.launch([PROGRAMS as u32, 1, 1], &args) }
            };
            let mut y = Buffer::<f32>::poisoned(&device, PROGRAMS * TILE).unwrap();
            launch(&mut y, shift).unwrap();
            assert_eq!(y.to_vec().unwrap(), want, "{case}, compiled");
            let other = launch(&mut y, 1 << 20).map_err(|error| error.to_string());
            match other {
                Ok(()) => assert!(!holds || !on_gpu, "{case}"),
                Err(message) => {
                    assert!(holds && on_gpu, "{case}: {message}");
                    let line = "kernel `rotated`";
                    assert!(message.contains(line) && message.contains("at least 0"), "{message}");
                }
            }
        }
    }
}

/// Ahead of time, no launch checks anything, so the code assumes nothing.
#[test]
fn code_ahead_of_time_assumes_no_signs() {
    let consts = consts! { tile = 256usize };
    let spec = well_aligned(&ROTATED);
    let target = Target::Nvptx(GpuArch::Sm90a);
    let artifact =
        tilewright::kernel::compile(&ROTATED, &[DType::F32], consts, &spec, &target, &CompileOptions::default());
    let Code::Ptx(ptx) = artifact.unwrap().code else { panic!("PTX") };
    let loads: Vec<&str> = ptx.lines().filter(|line| line.trim_start().starts_with("ld.global")).collect();
    assert!(!loads.is_empty() && loads.iter().all(|load| !load.contains(".v4")), "{loads:?}");
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
    let cases =
        [(&POINTER_MATMUL, wrapped, &options), (&PAGED_MATMUL, paged, &specialize), (&PAGED_MATMUL, large, &six)];
    let notes = cases.map(|(def, consts, options)| notes::gpu_ir(&recorded(def, consts), GpuArch::Sm90a, options).1);
    let expected = [
        "the load at tests/src/pointer_loads.rs:45:18 is not prefetched by the loop at tests/src/pointer_loads.rs:42:5: \
         accesses that are known to be contiguous and aligned have 2 bytes, and `cp.async` copies at least 4",
        "warp specialization is requested but not applied: no loop has a load that a producer can issue: the load at \
         tests/src/pointer_loads.rs:81:18 goes through pointers; the load at tests/src/pointer_loads.rs:82:18 goes through \
         pointers",
        "the loop at tests/src/pointer_loads.rs:79:5 has 3 of the 6 pipeline stages that are requested: a stage takes \
         49152 bytes of shared memory, and a block of sm_90a has 232448",
    ];
    assert_eq!(notes.concat(), expected);
}

/// Notes say why TMA does not perform a load of a specialized loop.
#[test]
fn notes_name_what_tma_refuses() {
    let schedule = Schedule { warp_specialize: Some(true), ..Schedule::default() };
    let options = CompileOptions { num_warps: 4, num_stages: 3, schedule, ..CompileOptions::default() };
    let consts = |checked| {
        let number = |name, n| (name, ConstValue::Int(n));
        [number("m_tile", 64), number("n_tile", 64), number("k_tile", 64), ("checked", ConstValue::Bool(checked))]
    };
    let of = |func: &Func| {
        let (ir, notes) = notes::gpu_ir(func, GpuArch::Sm90a, &options);
        (count(&ir, |op| matches!(op, Op::TmaLoad { .. })), notes.concat())
    };
    let refused = "warp specialization is requested but not applied: TMA cannot load the operand of a dot at \
                   tests/src/pointer_loads.rs:";
    assert_eq!(of(&recorded(&CHOSEN_MATMUL, &consts(true))), (2, String::new()));
    let negative = "211:18: an index in the base at tests/src/pointer_loads.rs:205:23 may be negative as far as is known: write \
                    `maximum(index, 0)` where it cannot be";
    assert_eq!(of(&recorded(&CHOSEN_MATMUL, &consts(false))), (0, format!("{refused}{negative}")));
    // Rows of a of four elements, eight bytes.
    let mut narrow = well_aligned(&CHOSEN_MATMUL);
    narrow.args[3].divisible_by = 4;
    let narrow = record(&CHOSEN_MATMUL, &[DType::BF16], &consts(true), &narrow);
    let stride = "210:18: the stride of axis 0 is not known to be a multiple of 16 bytes";
    assert_eq!(of(&narrow), (0, format!("{refused}{stride}")));
    let by_all = CompileOptions { schedule: Schedule { tma: Some(true), ..Schedule::default() }, ..options.clone() };
    let (ir, notes) = notes::gpu_ir(&narrow, GpuArch::Sm90a, &by_all);
    let note = format!("TMA does not perform the load at tests/src/pointer_loads.rs:{stride}");
    assert_eq!((count(&ir, |op| matches!(op, Op::TmaLoad { .. })) > 0, notes), (true, vec![note]));
}
