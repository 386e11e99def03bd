//! Atomics of every type and order, as native code and on a simulated GPU, against plain Rust; their PTX.

use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::Num;
use tilewright::codegen::lang::kernel::{ConstValue, KernelDef, Specialization};
use tilewright::codegen::pipeline;
use tilewright::codegen::target::{Code, CompileOptions, Target};
use tilewright::prelude::*;
use tilewright::{Element, LaunchConfig};
use tilewright_tests::on_device::devices;
use tilewright_tests::ptxas;

/// Four counters: elements i and i + 4 of `x` fall on the same one. `old` gets the value before each exchange.
#[kernel]
fn counters<T: Num>(x: In<T>, sums: InOut<T>, least: InOut<T>, most: InOut<T>, last: InOut<T>, old: Out<T>, n: i32) {
    let i = arange(0, 16);
    let (v, mask) = (load(x + i), i < n);
    let at = i % 4;
    atomic_add(sums + at, v, mask = mask, sem = acq_rel);
    atomic_min(least + at, v, mask = mask, sem = release, scope = sys);
    atomic_max(most + at, v, mask = mask, sem = acquire, scope = cta);
    let before = atomic_xchg(last + i, v, mask = mask);
    store(old + i, before);
}

fn check_counters<T: Element + Num>(of: fn(f64) -> T, wide: fn(T) -> f64) {
    const N: usize = 13;
    let x: Vec<f64> = (0..16).map(|i| f64::from((i * 7) % 11) - if wide(of(-1.0)) < 0.0 { 5.0 } else { 0.0 }).collect();
    let fold = |first: f64, f: fn(f64, f64) -> f64| -> Vec<f64> {
        (0..4).map(|k| x[..N].iter().skip(k).step_by(4).fold(first, |a, &b| f(a, b))).collect()
    };
    let want = [fold(3.0, |a, b| a + b), fold(4.0, f64::min), fold(4.0, f64::max)];
    for device in devices() {
        let at = Buffer::from_slice(&device, &x.iter().map(|&x| of(x)).collect::<Vec<T>>()).unwrap();
        let fill = |n: usize, v: f64| Buffer::from_slice(&device, &vec![of(v); n]).unwrap();
        let (mut sums, mut least, mut most, mut last) = (fill(4, 3.0), fill(4, 4.0), fill(4, 4.0), fill(16, 9.0));
        let mut old = Buffer::<T>::poisoned(&device, 16).unwrap();
        #[rustfmt::skip]
        Counters {
            x: &at, sums: &mut sums, least: &mut least, most: &mut most, last: &mut last, old: &mut old, n: N as i32,
        }
        .launch(&device, 1)
        .unwrap();
        let numbers = |b: &Buffer<T>| -> Vec<f64> { b.to_vec().unwrap().into_iter().map(wide).collect() };
        for (found, want) in [&sums, &least, &most].into_iter().zip(&want) {
            assert_eq!(&numbers(found), want, "{device}");
        }
        let exchanged: Vec<f64> = (0..16).map(|i| if i < N { x[i] } else { 9.0 }).collect();
        assert_eq!(numbers(&last), exchanged, "{device}");
        let before: Vec<f64> = (0..16).map(|i| if i < N { 9.0 } else { 0.0 }).collect();
        assert_eq!(numbers(&old), before, "{device}");
    }
}

#[test]
fn atomics_of_16_to_64_bits_agree_with_plain_rust() {
    check_counters(|x| x as i16, f64::from);
    check_counters(|x| x as u16, f64::from);
    check_counters(|x| x as i32, f64::from);
    check_counters(|x| x as u64, |x| x as f64);
    check_counters(f16::from_f64, f16::to_f64);
    check_counters(bf16::from_f64, bf16::to_f64);
    check_counters(|x| x as f32, f64::from);
    check_counters(|x| x, |x| x);
}

/// Sets bits, and swaps where `expected` is found.
#[kernel]
fn bits<T: Int>(words: InOut<T>, swapped: InOut<T>, n: i32) {
    let i = arange(0, 8);
    let one = (i * 0 + 1).to::<T>();
    atomic_or(words + i / 2, one << i.to::<T>());
    atomic_xor(words + 4 + i / 4, one << i.to::<T>());
    atomic_cas(swapped + i, i.to::<T>(), one * 50, mask = i < n, sem = acquire);
}

#[test]
fn bitwise_atomics_and_compare_and_swap_of_all_widths() {
    fn check<T: Element + Int>(of: fn(i64) -> T) {
        for device in devices() {
            let mut words = Buffer::from_slice(&device, &[of(0); 6]).unwrap();
            // Every other element has the expected value.
            let mut swapped = Buffer::from_slice(&device, &(0..8).map(|i| of(i + i % 2)).collect::<Vec<T>>()).unwrap();
            Bits { words: &mut words, swapped: &mut swapped, n: 5 }.launch(&device, 1).unwrap();
            let want = [0x03, 0x0c, 0x30, 0xc0 - if of(-1) == of(255) { 256 } else { 0 }, 0x0f, 0xf0].map(of);
            assert_eq!(words.to_vec().unwrap(), want, "{device}");
            let want: Vec<T> = (0..8).map(|i| of(if i % 2 == 0 && i < 5 { 50 } else { i + i % 2 })).collect();
            assert_eq!(swapped.to_vec().unwrap(), want, "{device}");
        }
    }
    check(|x| x as i16);
    check(|x| x as u16);
    check(|x| x as i32);
    check(|x| x as u64);
}

/// Each program adds to the total that the program before it has published.
#[kernel]
fn in_turn(x: In<f32>, total: InOut<f32>, flag: InOut<i32>, #[constexpr] tile: usize) {
    let turn = program_id(0);
    while atomic_add(flag, 0, sem = acquire) != turn {}
    store(total, load(total) + sum(load(x + turn * tile + arange(0, tile))));
    atomic_add(flag, 1, sem = release);
}

#[test]
fn programs_are_ordered_by_acquire_and_release() {
    let (programs, tile) = (5, 256);
    let x: Vec<f32> = (0..programs * tile).map(|i| (i % 7) as f32).collect();
    for device in devices() {
        let at = Buffer::from_slice(&device, &x).unwrap();
        let (mut total, mut flag) =
            (Buffer::<f32>::zeros(&device, 1).unwrap(), Buffer::<i32>::zeros(&device, 1).unwrap());
        InTurn { x: &at, total: &mut total, flag: &mut flag, tile }
            .launch_with(&device, &LaunchConfig::new(programs).num_warps(2))
            .unwrap();
        assert_eq!(total.to_vec().unwrap(), [x.iter().sum::<f32>()], "{device}");
    }
}

/// The PTX of a kernel of one type parameter.
fn ptx(def: &KernelDef, dtype: DType, consts: &[(&str, ConstValue)], arch: GpuArch) -> String {
    let types = [dtype];
    let types = if def.generics.is_empty() { &[][..] } else { &types };
    let func = def.record(types, consts, &Specialization::default()).unwrap_or_else(|d| panic!("{d}"));
    let artifact = pipeline::compile(&func, &Target::Nvptx(arch), &CompileOptions::default(), &mut ())
        .unwrap_or_else(|e| panic!("{} of {dtype}: {e}", def.name));
    match artifact.code {
        Code::Ptx(text) => text,
        _ => panic!("expected PTX"),
    }
}

#[test]
fn ptxas_accepts_atomics_of_all_types() {
    let Some(ptxas) = ptxas::find() else { return };
    for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
        for dtype in [DType::I16, DType::U16, DType::I32, DType::U64, DType::F16, DType::BF16, DType::F32, DType::F64] {
            let text = ptx(&COUNTERS, dtype, &[], arch);
            ptxas::assemble(&ptxas, &text, arch.name()).unwrap_or_else(|e| panic!("{dtype}: {e}\n{text}"));
            if dtype.is_int() {
                let text = ptx(&BITS, dtype, &[], arch);
                ptxas::assemble(&ptxas, &text, arch.name()).unwrap_or_else(|e| panic!("{dtype}: {e}\n{text}"));
            }
        }
    }
}

#[test]
fn orders_and_scopes_reach_ptx() {
    let text = ptx(&COUNTERS, DType::F32, &[], GpuArch::Sm90a);
    assert!(text.contains("atom.global.gpu.acq_rel.add.f32"), "{text}");
    let text = ptx(&IN_TURN, DType::F32, &[("tile", ConstValue::Int(256))], GpuArch::Sm90a);
    assert!(text.contains("atom.global.gpu.acquire.add.u32"), "{text}");
    assert!(text.contains("atom.global.gpu.release.add.u32"), "{text}");
    let text = ptx(&COUNTERS, DType::I32, &[], GpuArch::Sm90a);
    assert!(text.contains("atom.global.sys.release.min.s32"), "{text}");
    assert!(text.contains("atom.global.cta.acquire.max.s32"), "{text}");
    // 16-bit integers by a compare-and-swap of the word.
    let text = ptx(&COUNTERS, DType::I16, &[], GpuArch::Sm90a);
    for wanted in ["fence.acq_rel.gpu", "fence.acq_rel.sys", "atom.relaxed.sys.global.cas.b32"] {
        assert!(text.contains(wanted), "no `{wanted}` in {text}");
    }
}

constexpr_enum! {
    enum Reduction { Add, Min, Max, And, Or, Xor }
}

#[kernel]
fn reduced_blocks<T: Num>(
    x: In<T>,
    y: TensorInOut<T, (m, n)>,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] kind: Reduction,
) {
    let (first_row, first_column) = (program_id(0) * m_tile, program_id(1) * n_tile);
    let rows = first_row + arange(0, m_tile).expand_dims(1);
    let columns = first_column + arange(0, n_tile).expand_dims(0);
    let inside = rows < m && columns < n;
    let v = load(x + rows * n + columns, mask = inside);
    let block = y.descriptor([m_tile, n_tile]);
    match kind {
        Reduction::Add => block.atomic_add([first_row, first_column], v),
        Reduction::Min => block.atomic_min([first_row, first_column], v),
        Reduction::Max => block.atomic_max([first_row, first_column], v),
        Reduction::And => block.atomic_and([first_row, first_column], v),
        Reduction::Or => block.atomic_or([first_row, first_column], v),
        Reduction::Xor => block.atomic_xor([first_row, first_column], v),
    }
}

fn check_reduced_blocks<T: Element + Num>(
    [m_tile, n_tile]: [usize; 2],
    kinds: &[Reduction],
    of: fn(f64) -> T,
    wide: fn(T) -> f64,
) {
    // The last blocks extend beyond the tensor.
    let (m, n) = (2 * m_tile - 1, 2 * n_tile - 3);
    let least = if wide(of(-1.0)) < 0.0 { -20.0 } else { 0.0 };
    let numbers = |step: usize| -> Vec<f64> { (0..m * n).map(|i| ((i * step) % 61) as f64 + least).collect() };
    let (x, y) = (numbers(7), numbers(11));
    for &kind in kinds {
        let combine = |(&x, &y): (&f64, &f64)| match kind {
            Reduction::Add => x + y,
            Reduction::Min => x.min(y),
            Reduction::Max => x.max(y),
            Reduction::And => (x as i64 & y as i64) as f64,
            Reduction::Or => (x as i64 | y as i64) as f64,
            Reduction::Xor => (x as i64 ^ y as i64) as f64,
        };
        let want: Vec<f64> = x.iter().zip(&y).map(combine).map(|v| wide(of(v))).collect();
        for device in devices() {
            let on_device =
                |v: &[f64]| Buffer::from_slice(&device, &v.iter().map(|&v| of(v)).collect::<Vec<T>>()).unwrap();
            let (x, mut y) = (on_device(&x), on_device(&y));
            let mut tensor = y.tensor_mut([m, n]).unwrap();
            ReducedBlocks { x: &x, y: &mut tensor, m_tile, n_tile, kind }.launch(&device, (2, 2)).unwrap();
            let found: Vec<f64> = y.to_vec().unwrap().into_iter().map(wide).collect();
            assert_eq!(found, want, "{device}: {kind:?} of {}", T::dtype());
        }
    }
}

#[test]
fn descriptors_reduce_into_their_blocks() {
    use Reduction::*;
    for shape in [[2, 16], [8, 32], [1, 128]] {
        check_reduced_blocks::<f32>(shape, &[Add, Min, Max], |x| x as f32, f64::from);
        check_reduced_blocks::<f16>(shape, &[Add, Min, Max], f16::from_f64, f16::to_f64);
        check_reduced_blocks::<bf16>(shape, &[Add, Min, Max], bf16::from_f64, bf16::to_f64);
        check_reduced_blocks::<i32>(shape, &[Add, Min, Max, And, Or, Xor], |x| x as i32, f64::from);
        check_reduced_blocks::<u32>(shape, &[Add, Min, Max, And, Or, Xor], |x| x as u32, f64::from);
        check_reduced_blocks::<i64>(shape, &[Add, Min, Max, And, Or, Xor], |x| x as i64, |x| x as f64);
        check_reduced_blocks::<u64>(shape, &[Add, Min, Max, And, Or, Xor], |x| x as u64, |x| x as f64);
        check_reduced_blocks::<i16>(shape, &[Add, Min, Max, And, Or, Xor], |x| x as i16, f64::from);
    }
}

#[kernel]
fn reduced_bytes(y: TensorInOut<i8, (m, n)>) {
    y.descriptor([8, 16]).atomic_max([0, 0], zeros::<i8>([8, 16]));
}

#[kernel]
fn combined_bits_of_floats(y: TensorInOut<f32, (m, n)>) {
    y.descriptor([8, 16]).atomic_xor([0, 0], zeros::<f32>([8, 16]));
}

#[test]
fn descriptors_reduce_what_atomics_have() {
    let message = |def: &KernelDef| def.record(&[], &[], &Specialization::default()).unwrap_err().to_string();
    let (bytes, floats) = (message(&REDUCED_BYTES), message(&COMBINED_BITS_OF_FLOATS));
    assert!(bytes.contains("`atomic_max` is not supported for i8"), "{bytes}");
    assert!(floats.contains("`atomic_xor` is not supported for f32"), "{floats}");
}

/// Programs add one after the other to a number and to a tile, by plain loads and stores. A rounded sum depends on the order.
#[kernel]
fn chained(x: In<f32>, total: InOut<f32>, before: Out<f32>, counts: InOut<i32>, after: Out<i32>, counter: InOut<i32>) {
    let p = program_id(0);
    let i = arange(0, 64);
    semaphore_wait(counter, p);
    let sum = load(total);
    store(before + p, sum);
    store(total, sum + load(x + p));
    store(counts + i, load(counts + i) + 1);
    // Read before the release, stored after it.
    let counted = load(counts + i);
    semaphore_release(counter, p + 1);
    store(after + p * 64 + i, counted);
}

#[test]
fn programs_are_ordered_by_semaphores() {
    const N: usize = 150;
    let x: Vec<f32> = (0..N).map(|i| (1.0 + i as f32 * 0.37) * if i % 3 == 0 { 1e6 } else { 1e-3 }).collect();
    let mut sum = 0.0_f32;
    let mut want: Vec<f32> = Vec::new();
    for x in &x {
        want.push(sum);
        sum += x;
    }
    for device in devices() {
        let at = Buffer::from_slice(&device, &x).unwrap();
        let mut total = Buffer::<f32>::zeros(&device, 1).unwrap();
        let [mut counts, mut counter] = [64, 1].map(|n| Buffer::<i32>::zeros(&device, n).unwrap());
        let mut before = Buffer::<f32>::poisoned(&device, N).unwrap();
        let mut after = Buffer::<i32>::poisoned(&device, 64 * N).unwrap();
        #[rustfmt::skip]
        Chained {
            x: &at, total: &mut total, before: &mut before, counts: &mut counts, after: &mut after, counter: &mut counter,
        }
        .launch(&device, N)
        .unwrap();
        assert_eq!((before.to_vec().unwrap(), total.to_vec().unwrap()), (want.clone(), vec![sum]), "{device}");
        let counted: Vec<i32> = (0..64 * N).map(|i| i as i32 / 64 + 1).collect();
        assert_eq!((after.to_vec().unwrap(), counter.to_vec().unwrap()), (counted, vec![N as i32]), "{device}");
    }
}
