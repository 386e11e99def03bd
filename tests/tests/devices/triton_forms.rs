//! Forms of Triton's tests of elementwise functions, branches, options and reductions, as native code and on simulated
//! GPUs (`docs/triton.md`).

use tilewright::codegen::lang::kernel::{ConstValue, KernelDef, Specialization};
use tilewright::codegen::pipeline::compile;
use tilewright::codegen::target::{Code, CompileOptions, Target};
use tilewright::prelude::*;
use tilewright_tests::numerics::Random;
use tilewright_tests::on_device::{devices, outputs};
use tilewright_tests::{consts, ptxas};

fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..n).map(|_| random.number() as f32).collect()
}

#[kernel]
fn absolute<T: Dtype>(x: In<T>, y: Out<T>) {
    let i = arange(0, 256);
    store(y + i, abs(load(x + i)));
}

/// Of every 8-bit float that is no NaN, also both infinities of E5M2.
#[test]
fn absolute_values_of_8_bit_floats() {
    fn check<T: Element + tilewright::codegen::lang::Dtype>(
        from: fn(u8) -> T,
        bits: fn(T) -> u8,
        is_nan: fn(u8) -> bool,
    ) {
        let x: Vec<u8> = (0..=255u8).map(|code| if is_nan(code) { 0 } else { code }).collect();
        let values: Vec<T> = x.iter().map(|code| from(*code)).collect();
        let want: Vec<u8> = x.iter().map(|code| code & 0x7f).collect();
        let found = outputs(devices(), 256, |device, y| {
            Absolute::<T> { x: &Buffer::from_slice(device, &values)?, y }.launch(device, 1)
        });
        for (device, y) in found {
            assert_eq!(y.into_iter().map(bits).collect::<Vec<u8>>(), want, "{device}");
        }
    }
    check(F8E4M3, |x| x.0, |code| code & 0x7f == 0x7f);
    check(F8E5M2, |x| x.0, |code| code & 0x7f > 0x7c);
}

constexpr_enum! {
    enum Policy { Normal, First, Last }
}

#[kernel]
fn stores_by_policy(x: In<f32>, y: Out<f32>, #[constexpr] policy: Policy) {
    let i = arange(0, 128);
    match policy {
        Policy::Normal => store(y + i, load(x + i)),
        Policy::First => store(y + i, load(x + i), eviction = evict_first),
        Policy::Last => store(y + i, load(x + i), eviction = evict_last),
    }
}

#[test]
fn eviction_policies_of_stores_are_in_the_instructions() {
    let x = numbers(128, 20);
    for (policy, name, there) in [
        (Policy::Normal, "Normal", [false, false]),
        (Policy::First, "First", [true, false]),
        (Policy::Last, "Last", [false, true]),
    ] {
        let found = outputs(devices(), 128, |device, y| {
            StoresByPolicy { x: &Buffer::from_slice(device, &x)?, y, policy }.launch(device, 1)
        });
        for (device, y) in found {
            assert_eq!(y, x, "{device}: {name}");
        }
        let ptx = ptx_of(&STORES_BY_POLICY, consts! { policy = policy }, &CompileOptions::default());
        assert_eq!(["evict_first", "evict_last"].map(|word| ptx.contains(word)), there, "{name}: {ptx}");
    }
}

#[kernel]
fn remainders(x: Out<i32>, s: i32) {
    let i = arange(0, 256);
    store(x + i, i % (256 / s));
}

#[test]
fn a_number_divides_a_constant() {
    for (device, x) in outputs(devices(), 256, |device, x| Remainders { x, s: 32 }.launch(device, 1)) {
        assert_eq!(x, (0..256).map(|i| i % 8).collect::<Vec<i32>>(), "{device}");
    }
}

#[kernel]
fn nested_returns(cond1: In<i32>, cond2: In<i32>, cond3: In<i32>, values: In<i32>, out: InOut<i32>) {
    let mut value = scalar::<i32>(0);
    if load(cond1) != 0 {
        if load(cond2) != 0 {
            value = load(values);
        } else {
            return;
        }
    } else {
        if load(cond3) != 0 {
            value = load(values + 1);
        } else {
            value = load(values + 2);
        }
    }
    store(out, value);
}

#[test]
fn a_nested_branch_returns_before_what_follows() {
    for case in 0..8 {
        let conditions = [case & 1, case >> 1 & 1, case >> 2 & 1];
        let want = match conditions {
            [1, 1, _] => 1,
            [1, 0, _] => -1,
            [_, _, 1] => 2,
            _ => 3,
        };
        for device in devices() {
            let one = |v: i32| Buffer::from_slice(&device, &[v]).unwrap();
            let [cond1, cond2, cond3] = conditions.map(one);
            let (values, mut out) = (Buffer::from_slice(&device, &[1, 2, 3]).unwrap(), one(-1));
            let mut launch =
                NestedReturns { cond1: &cond1, cond2: &cond2, cond3: &cond3, values: &values, out: &mut out };
            launch.launch(&device, 1).unwrap();
            assert_eq!(out.to_vec().unwrap(), [want], "{device}: {conditions:?}");
        }
    }
}

#[kernel]
fn divided(a: In<u32>, b: In<u32>, quotient: Out<u32>, rest: Out<u32>) {
    let i = arange(0, 512);
    let (a, b) = (load(a + i), load(b + i));
    let (c, d) = map_elementwise((a, b), |(a, b)| ([a[0] / b[0], a[1] / b[1]], [a[0] % b[0], a[1] % b[1]]), pack = 2);
    store(quotient + i, c);
    // The order of four neighbors is reversed.
    let reversed = map_elementwise(d, |d| [d[3], d[2], d[1], d[0]], pack = 4);
    store(rest + i, reversed);
}

#[test]
fn functions_of_packs_are_mapped() {
    let mut random = Random::new(17);
    let mut numbers =
        |least: u32| -> Vec<u32> { (0..512).map(|_| (random.number().to_bits() as u32).max(least)).collect() };
    let (a, b) = (numbers(0), numbers(1));
    for device in devices() {
        let (a_, b_) = (Buffer::from_slice(&device, &a).unwrap(), Buffer::from_slice(&device, &b).unwrap());
        let mut c = Buffer::<u32>::poisoned(&device, 512).unwrap();
        let mut d = Buffer::<u32>::poisoned(&device, 512).unwrap();
        Divided { a: &a_, b: &b_, quotient: &mut c, rest: &mut d }.launch(&device, 1).unwrap();
        let quotients: Vec<u32> = a.iter().zip(&b).map(|(a, b)| a / b).collect();
        let rests: Vec<u32> = (0..512usize).map(|i| i ^ 3).map(|i| a[i] % b[i]).collect();
        assert_eq!(c.to_vec().unwrap(), quotients, "{device}");
        assert_eq!(d.to_vec().unwrap(), rests, "{device}");
    }
}

#[kernel]
fn packs_of_a_short_tile(y: Out<f32>) {
    store(y + arange(0, 2), map_elementwise(zeros::<f32>([2]), |x| [x[0], x[1], x[2], x[3]], pack = 4));
}

#[kernel]
fn packs_of_another_size(y: Out<f32>) {
    store(y + arange(0, 4), map_elementwise(zeros::<f32>([4]), |x| [x[0] + x[1]], pack = 2));
}

#[test]
fn packs_fit_the_tile() {
    let message = |def: &KernelDef| def.record(&[], &[], &Specialization::default()).unwrap_err().to_string();
    let (short, other) = (message(&PACKS_OF_A_SHORT_TILE), message(&PACKS_OF_ANOTHER_SIZE));
    assert!(short.contains("`pack = 4` for tiles of shape [2]"), "{short}");
    assert!(other.contains("returns 1 elements") && other.contains("`pack` is 2"), "{other}");
}

/// The PTX of a kernel for `sm_80`.
fn ptx_of(def: &KernelDef, constants: &[(&str, ConstValue)], options: &CompileOptions) -> String {
    let func = def.record(&[], constants, &Specialization::default()).unwrap();
    let artifact = compile(&func, &Target::Nvptx(GpuArch::Sm80), options, &mut ()).unwrap();
    let Code::Ptx(ptx) = artifact.code else { panic!("no PTX") };
    if let Some(ptxas) = ptxas::find() {
        ptxas::assemble(&ptxas, &ptx, "sm_80").unwrap();
    }
    ptx
}

#[kernel]
fn multiply_add(x: InOut<f32>) {
    let i = arange(0, 128);
    store(x + i, load(x + i) * 1.5 + 1.0);
}

#[test]
fn products_and_sums_are_fused_if_the_options_say_so() {
    for fused in [true, false] {
        let options = CompileOptions { fp_fusion: fused, ..CompileOptions::default() };
        let ptx = ptx_of(&MULTIPLY_ADD, &[], &options);
        assert_eq!(ptx.contains("fma.rn.f32"), fused, "{ptx}");
    }
    // Numbers for which one rounding gives another result than two. (A simulated GPU never fuses.)
    let differ = |x: &f32| x.mul_add(1.5, 1.0) != x * 1.5 + 1.0;
    let x: Vec<f32> = numbers(10_000, 30).into_iter().filter(differ).take(128).collect();
    let want: Vec<f32> = x.iter().map(|x| x * 1.5 + 1.0).collect();
    for device in devices() {
        let mut y = Buffer::from_slice(&device, &x).unwrap();
        MultiplyAdd { x: &mut y }.launch_with(&device, &LaunchConfig::new(1).fp_fusion(false)).unwrap();
        assert_eq!(y.to_vec().unwrap(), want, "{device}");
    }
}

#[kernel]
fn extrema<T: Float>(a: In<T>, b: In<T>, c: Out<T>, #[constexpr] propagate: bool) {
    let (a, b) = (load(a), load(b));
    store(c, minimum(a, b, propagate_nan = propagate));
    store(c + 1, maximum(a, b, propagate_nan = propagate));
    store(c + 2, clamp(a, -b, b, propagate_nan = propagate));
    // A tile with a number.
    store(c + 3 + arange(0, 2), maximum(full::<T>([2], a), 1.0, propagate_nan = propagate));
}

#[test]
fn nan_is_propagated_if_asked_for() {
    fn check<T: Element + tilewright::codegen::lang::Float>(from: fn(f32) -> T, to: fn(T) -> f32) {
        for (a, b) in
            [(f32::NAN, 2.0), (0.5, f32::NAN), (f32::NAN, f32::NAN), (f32::INFINITY, f32::NEG_INFINITY), (3.0, 2.0)]
        {
            for propagate in [false, true] {
                let found = outputs(devices(), 5, |device, c| {
                    let one = |v: f32| Buffer::from_slice(device, &[from(v)]);
                    Extrema::<T> { a: &one(a)?, b: &one(b)?, c, propagate }.launch(device, 1)
                });
                let any = a.is_nan() || b.is_nan();
                for (device, c) in found {
                    let what =
                        format!("{device}: {a} {b} {propagate}: {:?}", c.iter().map(|x| to(*x)).collect::<Vec<_>>());
                    let [least, most] = [to(c[0]), to(c[1])];
                    if propagate && any {
                        assert!(least.is_nan() && most.is_nan(), "{what}");
                    } else {
                        assert!(least.total_cmp(&a.min(b)).is_eq() || a.is_nan() && b.is_nan(), "{what}");
                        assert!(most.total_cmp(&a.max(b)).is_eq() || a.is_nan() && b.is_nan(), "{what}");
                    }
                    // A clamp keeps a NaN of the clamped number; limits of NaN have no defined result.
                    if !b.is_nan() {
                        assert_eq!(to(c[2]).is_nan(), propagate && a.is_nan(), "{what}");
                    }
                    for c in &c[3..] {
                        assert_eq!(to(*c).is_nan(), propagate && a.is_nan(), "{what}");
                    }
                }
            }
        }
    }
    check::<f32>(|x| x, |x| x);
    check::<f16>(f16::from_f32, f16::to_f32);
}

/// Two tiles, by their number.
#[aggregate]
struct Pair {
    first: Tile<i32>,
    second: Tile<i32>,
}

impl std::ops::Index<usize> for Pair {
    type Output = Tile<i32>;
    fn index(&self, n: usize) -> &Tile<i32> {
        match n {
            0 => &self.first,
            _ => &self.second,
        }
    }
}

#[kernel]
fn items(y: Out<i32>) {
    let pair = Pair { first: arange(0, 4), second: full::<i32>([4], 11) };
    store(y + arange(0, 4), pair[1]);
    for n in static_range(0, 2) {
        store(y + 4 + 4 * n + arange(0, 4), pair[n]);
    }
}

#[test]
fn aggregates_may_be_indexed() {
    for (device, y) in outputs(devices(), 12, |device, y| Items { y }.launch(device, 1)) {
        assert_eq!(y, [11, 11, 11, 11, 0, 1, 2, 3, 11, 11, 11, 11], "{device}");
    }
}

/// The sum, which has to fit an i32.
#[device_fn]
fn checked_add(a: Scalar<i32>, b: Scalar<i32>) -> Scalar<i32> {
    let wide = a.to::<i64>() + b.to::<i64>();
    device_assert(wide >= -0x8000_0000 && wide <= 0x7fff_ffff, "the sum overflows");
    a + b
}

#[kernel]
fn checked_sums(x: In<i32>, total: Out<i32>, running: Out<i32>, #[constexpr] n: usize) {
    let v = load(x + arange(0, n));
    store(total, reduce(v, axis = 0, |a, b| checked_add(a, b)));
    store(running + arange(0, n), associative_scan(v, axis = 0, |a, b| checked_add(a, b)));
}

#[test]
fn reductions_and_scans_assert() {
    let x: Vec<i32> = (0..512).map(|i| if i < 300 { 32 } else { 0 }).collect();
    let sums: Vec<i32> = x
        .iter()
        .scan(0, |sum, x| {
            Some({
                *sum += x;
                *sum
            })
        })
        .collect();
    // A failed assertion takes the GPU from this process, and with it from other tests.
    for device in devices().into_iter().filter(|device| !device.is_cuda()) {
        let launch = |x: &[i32], config: &LaunchConfig| -> Result<(Vec<i32>, Vec<i32>)> {
            let x = Buffer::from_slice(&device, x)?;
            let (mut total, mut running) =
                (Buffer::<i32>::poisoned(&device, 1)?, Buffer::<i32>::poisoned(&device, 512)?);
            CheckedSums { x: &x, total: &mut total, running: &mut running, n: 512 }.launch_with(&device, config)?;
            Ok((total.to_vec()?, running.to_vec()?))
        };
        let config = LaunchConfig::new(1);
        assert_eq!(launch(&x, &config).unwrap(), (vec![9600], sums.clone()), "{device}");
        let mut large = x.clone();
        large[17] = i32::MAX - 100;
        let error = launch(&large, &config).unwrap_err().to_string();
        assert!(error.contains("the sum overflows") || error.contains("a device_assert failed"), "{device}: {error}");
        assert!(error.contains("triton_forms.rs:"), "{device}: {error}");
        let unchecked = LaunchConfig { debug_asserts: false, ..config };
        assert_eq!(launch(&large, &unchecked).unwrap().0, [9568i32.wrapping_add(i32::MAX - 100)], "{device}");
    }
}

/// Along each dimension of a matrix, of pairs.
#[kernel]
fn checked_lines(x: In<i32>, y: Out<i32>, #[constexpr] axis: usize, #[constexpr] rest: usize) {
    let v = load(x + arange(0, 16).expand_dims(1) * 32 + arange(0, 32).expand_dims(0));
    let (sums, counts) = reduce((v, full_like(v, 1)), axis = axis, |(a, n), (b, m)| {
        device_assert(n + m <= 32, "more elements than a line has");
        (checked_add(a, b), n + m)
    });
    store(y + arange(0, rest), sums);
    store(y + 32 + arange(0, rest), counts);
}

#[test]
fn reductions_of_lines_assert() {
    let x: Vec<i32> = (0..512).map(|i| i * 7 % 10).collect();
    for (axis, rest) in [(0usize, 32usize), (1, 16)] {
        let at = |line: usize, n: usize| if axis == 0 { n * 32 + line } else { line * 32 + n };
        let length = 512 / rest;
        let sums = (0..rest).map(|line| (0..length).map(|n| x[at(line, n)]).sum::<i32>());
        let want: Vec<i32> = sums.collect();
        let found = outputs(devices(), 64, |device, y| {
            CheckedLines { x: &Buffer::from_slice(device, &x)?, y, axis, rest }.launch(device, 1)
        });
        for (device, y) in found {
            assert_eq!(y[..rest], want, "{device}: {axis}");
            assert_eq!(y[32..32 + rest], vec![length as i32; rest], "{device}: {axis}");
        }
    }
}
