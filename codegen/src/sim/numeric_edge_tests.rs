//! Values at the limits of their ranges, for which the host, the interpreter and the GPU must agree.

use crate::ir::DType;
use crate::lower::nvptx::lower;
use crate::num;
use crate::pipeline::gpu_ir;
use crate::target::{CompileOptions, GpuArch};
use crate::testgen::{Argument, Program, Rng, check::simulate};

const ARCHS: [GpuArch; 2] = [GpuArch::Sm80, GpuArch::Sm90a];

fn bytes_of(dtype: DType, bits: &[u64]) -> Vec<u8> {
    bits.iter().flat_map(|b| b.to_le_bytes()[..dtype.bytes()].to_vec()).collect()
}

fn bits_of(dtype: DType, bytes: &[u8]) -> Vec<u64> {
    bytes.chunks(dtype.bytes()).map(|c| c.iter().rev().fold(0, |all, &b| all << 8 | u64::from(b))).collect()
}

/// Runs a kernel; returns its only output.
fn output(text: &str, args: Vec<Argument>, arch: GpuArch) -> Vec<u8> {
    let func = crate::text::parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let program = Program { func, args, grid: [1; 3] };
    let options = CompileOptions { num_warps: 1, ..CompileOptions::default() };
    let gpu_func = gpu_ir(&program.func, arch, &options, &mut ());
    let module =
        lower(&gpu_func, arch, &options).unwrap_or_else(|e| panic!("{} does not take\n{text}\n{e}", arch.name()));
    let found =
        simulate(&program, &program.func, &module, 0).unwrap_or_else(|e| panic!("{}: {e}\n{text}", arch.name()));
    found[0].clone()
}

/// Computes `y[i] = body(x[i])`, 1024 elements at a time.
fn elementwise(from: DType, to: DType, body: &str, x: &[u64], arch: GpuArch) -> Vec<u64> {
    let n = 1024;
    let text = format!(
        "kernel @k(%x: ptr<{from}>, %y: ptr<{to}>) {{
  %i = arange {{start = 0, end = {n}}} : tensor<{n}xi32>
  %xs = splat %x : tensor<{n}xptr<{from}>>
  %xp = ptr_add %xs, %i : tensor<{n}xptr<{from}>>
  %v = load %xp {{eviction = normal}} : tensor<{n}x{from}>
  %r = {body} %v : tensor<{n}x{to}>
  %ys = splat %y : tensor<{n}xptr<{to}>>
  %yp = ptr_add %ys, %i : tensor<{n}xptr<{to}>>
  store %yp, %r {{eviction = normal}}
  return
}}"
    );
    let mut all = Vec::new();
    for chunk in x.chunks(n) {
        let mut chunk = chunk.to_vec();
        let count = chunk.len();
        chunk.resize(n, 0);
        let input = Argument::Input { dtype: from, bytes: bytes_of(from, &chunk) };
        let out = Argument::Output { dtype: to, bytes: vec![0x55; n * to.bytes()] };
        all.extend(&bits_of(to, &output(&text, vec![input, out], arch))[..count]);
    }
    all
}

#[test]
fn empty_views_access_no_memory() {
    let text = "kernel @k(%x: ptr<f32>, %y: ptr<f32>, %extents: ptr<i64>, %s: i64, %o: i64, %p: i64) {
  %one = constant {value = 1} : i64
  %n = load %extents {eviction = normal} : i64
  %second = ptr_add %extents, %one : ptr<i64>
  %m = load %second {eviction = normal} : i64
  %zero = constant {value = 0} : i64
  %r = constant {value = 16} : i64
  %v = make_view %x, %n, %m, %s, %one, %o, %p {order = [1, 0]} : view<16x32xf32>
  %t = load_view %v {boundary = [0, 1], padding = zero, eviction = normal} : tensor<16x32xf32>
  %c = constant {value = 1.0} : tensor<16x32xf32>
  %u = add %t, %c : tensor<16x32xf32>
  %d = constant {value = 32} : i64
  %w = make_view %y, %r, %d, %d, %one, %zero, %zero {order = [1, 0]} : view<16x32xf32>
  store_view %w, %u {boundary = [], eviction = normal}
  store_view %v, %u {boundary = [0, 1], eviction = normal}
  return
}";
    for arch in ARCHS {
        for [n, m, o, p] in [
            [-1, 32, 0, 0],
            [16, -1, 0, 0],
            [i64::MIN, i64::MIN, 0, 0],
            [i64::MIN + 3, 32, i64::MAX, 0],
            [16, 32, i64::MAX - 7, 0],
            [16, 32, 0, i64::MAX - 7],
            [16, 32, i64::MIN, i64::MIN],
        ] {
            let input = Argument::Input { dtype: DType::F32, bytes: vec![0; 4] };
            let out = Argument::Output { dtype: DType::F32, bytes: vec![0; 16 * 32 * 4] };
            // Loaded from memory: a launch rejects negative extents in arguments.
            let bytes = [n, m].iter().flat_map(|n| n.to_le_bytes()).collect();
            let extents = Argument::Input { dtype: DType::I64, bytes };
            let numbers = [32, o, p].map(Argument::Int);
            let got = output(text, [input, out, extents].into_iter().chain(numbers).collect(), arch);
            assert_eq!(got, 1f32.to_le_bytes().repeat(16 * 32), "{} with {n}, {m}, {o}, {p}", arch.name());
        }
    }
}

#[test]
fn integer_division_and_shifts_match_interpreter() {
    let mut rng = Rng::new(1);
    for d in [DType::I8, DType::U8, DType::I32, DType::U32, DType::I64, DType::U64] {
        let (low, high) = num::int_range(d);
        let edges: Vec<u64> = [low, low + 1, -1, 0, 1, 2, 7, d.bits() as i128 - 1, d.bits() as i128, high]
            .into_iter()
            .map(|n| num::encode_int(d, n))
            .collect();
        let mut pairs: Vec<[u64; 2]> = edges.iter().flat_map(|&a| edges.iter().map(move |&b| [a, b])).collect();
        pairs.resize_with(128, || [0; 2].map(|_| num::encode_int(d, rng.next_u64() as i64 as i128)));
        for op in ["div", "rem", "shl", "shr"] {
            let n = pairs.len();
            let text = format!(
                "kernel @k(%a: ptr<{d}>, %b: ptr<{d}>, %y: ptr<{d}>) {{
  %i = arange {{start = 0, end = {n}}} : tensor<{n}xi32>
  %as = splat %a : tensor<{n}xptr<{d}>>
  %ap = ptr_add %as, %i : tensor<{n}xptr<{d}>>
  %bs = splat %b : tensor<{n}xptr<{d}>>
  %bp = ptr_add %bs, %i : tensor<{n}xptr<{d}>>
  %ys = splat %y : tensor<{n}xptr<{d}>>
  %yp = ptr_add %ys, %i : tensor<{n}xptr<{d}>>
  %av = load %ap {{eviction = normal}} : tensor<{n}x{d}>
  %bv = load %bp {{eviction = normal}} : tensor<{n}x{d}>
  %r = {op} %av, %bv : tensor<{n}x{d}>
  store %yp, %r {{eviction = normal}}
  return
}}"
            );
            let of = |k: usize| pairs.iter().map(|pair| pair[k]).collect::<Vec<_>>();
            let args = vec![
                Argument::Input { dtype: d, bytes: bytes_of(d, &of(0)) },
                Argument::Input { dtype: d, bytes: bytes_of(d, &of(1)) },
                Argument::Output { dtype: d, bytes: vec![0x55; n * d.bytes()] },
            ];
            let program = Program {
                func: crate::text::parse(&text).unwrap_or_else(|e| panic!("{e}")),
                args: args.clone(),
                grid: [1; 3],
            };
            let expected = program.interpret().unwrap_or_else(|e| panic!("{e}")).remove(0);
            assert_eq!(output(&text, args, GpuArch::Sm80), expected, "{op} of {d}");
        }
    }
}

#[test]
fn fp8_rounding_and_saturation_match_interpreter() {
    let mut rng = Rng::new(2);
    let edges =
        [0.0, 447.9, 448.0, 463.9, 464.0, 480.0, 57344.0, 61439.9, 61440.0, 65536.0, 1e30, f64::INFINITY, f64::NAN];
    for to in [DType::F8E4M3, DType::F8E5M2] {
        for from in [DType::F16, DType::BF16, DType::F32, DType::F64] {
            let mut x: Vec<u64> = match from {
                DType::F16 | DType::BF16 => (0..1 << 16).collect(),
                _ => edges.iter().flat_map(|&x| [x, -x]).map(|x| num::encode(from, x)).collect(),
            };
            // Near ties between adjacent values, where double rounding shows.
            let ties = (0..0x100u64).map(|bits| (num::decode(to, bits) + num::decode(to, bits ^ 1)) / 2.0);
            for tie in ties.filter(|tie| tie.is_finite()) {
                let bits = num::encode(from, tie);
                x.extend([bits, bits.wrapping_add(1), bits.saturating_sub(1)]);
            }
            x.extend((0..2000).map(|_| rng.next_u64() >> (64 - from.bits())));
            let expected: Vec<u64> = x.iter().map(|&bits| num::convert(from, to, bits)).collect();
            for arch in ARCHS {
                let got = elementwise(from, to, "cast", &x, arch);
                for ((x, got), expected) in x.iter().zip(got).zip(&expected) {
                    let value = num::decode(from, *x);
                    assert_eq!(got, *expected, "{}: {from} {x:#x} = {value} to {to}", arch.name());
                }
            }
        }
    }
}

#[test]
fn sin_and_cos_reduce_large_arguments() {
    let mut rng = Rng::new(3);
    let mut x: Vec<f32> = vec![1e18, -1e18, f32::MAX, f32::MIN, 0.0, 1.073_741_8e9, 1.073_742e9, 1e-40];
    x.extend([f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
    x.extend((0..4000).map(|_| f32::from_bits(rng.next_u64() as u32)));
    x.extend((0..4000).map(|_| ((rng.next_u64() % (1 << 40)) as f64 * std::f64::consts::FRAC_PI_2) as f32));
    let bits: Vec<u64> = x.iter().map(|x| u64::from(x.to_bits())).collect();
    for (op, exact) in [("sin", libm::sin as fn(f64) -> f64), ("cos", libm::cos)] {
        let got = elementwise(DType::F32, DType::F32, op, &bits, GpuArch::Sm80);
        for (&x, got) in x.iter().zip(got) {
            let (y, exact) = (f64::from(f32::from_bits(got as u32)), exact(f64::from(x)));
            let rounded = exact as f32;
            let ulp = f64::from(f32::from_bits(rounded.abs().max(f32::MIN_POSITIVE).to_bits() & 0x7f80_0000))
                * 2f64.powi(-23);
            let same = exact.is_nan() && y.is_nan();
            assert!(same || (y - exact).abs() <= 1.7 * ulp, "{op}({x:e}) = {exact:e}, found {y:e}");
        }
    }
}
