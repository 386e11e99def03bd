//! `dot_scaled` on every device, against sums in f64.

use tilewright::prelude::*;
use tilewright_tests::numerics::Random;
use tilewright_tests::on_device::devices;

/// A row-major matrix of offsets.
#[device_fn]
fn matrix(rows: usize, columns: usize) -> Tile<i32> {
    arange(0, rows).expand_dims(1) * columns + arange(0, columns).expand_dims(0)
}

/// Extent along M or N, and along K, of a tile in memory: elements in 4 bits are packed.
fn stored(format: DotFormat, extent: usize, k: usize, k_pack: bool) -> [usize; 2] {
    match (format, k_pack) {
        (DotFormat::E2m1, true) => [extent, k / 2],
        (DotFormat::E2m1, false) => [extent / 2, k],
        _ => [extent, k],
    }
}

/// Each program multiplies matrices of its own: a [m, k] and b [k, n], with `groups` scales for a row of a and a column
/// of b. `scales`: 0 for those of a, 1 for those of b, 2 for both, which are multiplied twice.
#[kernel]
fn scaled<L: Dtype, R: Dtype, S: Dtype>(
    a: In<L>,
    a_scale: In<S>,
    b: In<R>,
    b_scale: In<S>,
    c: Out<f32>,
    #[constexpr] a_format: DotFormat,
    #[constexpr] b_format: DotFormat,
    #[constexpr] m: usize,
    #[constexpr] n: usize,
    #[constexpr] k: usize,
    #[constexpr] groups: usize,
    #[constexpr] k_pack: bool,
    #[constexpr] scales: usize,
) {
    let ([am, ak], [bn, bk]) = (stored(a_format, m, k, k_pack), stored(b_format, n, k, k_pack));
    let program = program_id(0);
    let a = load(a + program * (am * ak) + matrix(am, ak));
    let b = load(b + program * (bk * bn) + matrix(bk, bn));
    let a_scale = load(a_scale + program * (m * groups) + matrix(m, groups));
    let b_scale = load(b_scale + program * (n * groups) + matrix(n, groups));
    let at = c + program * (m * n) + matrix(m, n);
    if scales == 0 {
        store(at, dot_scaled(lhs = a, lhs_scale = a_scale, lhs_format = a_format, rhs = b, rhs_format = b_format));
    } else if scales == 1 {
        store(at, dot_scaled(lhs = a, lhs_format = a_format, rhs = b, rhs_scale = b_scale, rhs_format = b_format));
    } else {
        let mut acc = zeros::<f32>([m, n]);
        for _ in range(0, 2) {
            acc = dot_scaled(a, a_scale, a_format, b, b_scale, b_format, acc, lhs_k_pack = k_pack, rhs_k_pack = k_pack);
        }
        store(at, acc);
    }
}

/// The extents of a launch.
#[derive(Clone, Copy, Debug)]
struct Size {
    programs: usize,
    m: usize,
    n: usize,
    k: usize,
    /// Elements that share a scale.
    group: usize,
}

/// Elements or scales: their bits, and what these mean.
struct Codes<T> {
    codes: Vec<T>,
    value: fn(T) -> f64,
}

impl<T: Copy> Codes<T> {
    fn at(&self, index: usize) -> f64 {
        (self.value)(self.codes[index])
    }
}

/// 4-bit floats by their three low bits.
const E2M1: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

fn e2m1(code: u8) -> f64 {
    if code < 8 { E2M1[code as usize] } else { -E2M1[code as usize - 8] }
}

fn e8m0(code: u8) -> f64 {
    if code == 255 { f64::NAN } else { f64::from(i32::from(code) - 127).exp2() }
}

fn e4m3(code: F8E4M3) -> f64 {
    f64::from(code.to_f32())
}

fn e5m2(code: F8E5M2) -> f64 {
    f64::from(code.to_f32())
}

/// An operand in memory and in f64: of each program [extent, k], row-major.
struct Operand<T> {
    format: DotFormat,
    elements: Codes<T>,
}

/// Elements as they are in memory.
trait Bytes: Element + Dtype {
    /// Those in 4 bits, of which there is one in each byte, in pairs: see [`pairs`].
    fn memory(codes: &[Self], columns: usize, four_bits: bool, along_rows: bool) -> Vec<Self> {
        assert!(!four_bits);
        let _ = (columns, along_rows);
        codes.to_vec()
    }
}

impl Bytes for F8E4M3 {}
impl Bytes for F8E5M2 {}
impl Bytes for bf16 {}
impl Bytes for f16 {}

impl Bytes for u8 {
    fn memory(codes: &[u8], columns: usize, four_bits: bool, along_rows: bool) -> Vec<u8> {
        if four_bits { pairs(codes, columns, along_rows) } else { codes.to_vec() }
    }
}

/// Elements in 4 bits, of matrices [rows, columns], in pairs along their rows or along their columns.
fn pairs(codes: &[u8], columns: usize, along_rows: bool) -> Vec<u8> {
    if along_rows {
        return codes.chunks(2).map(|pair| pair[0] | pair[1] << 4).collect();
    }
    let two_rows = codes.chunks(2 * columns);
    two_rows.flat_map(|rows| (0..columns).map(|i| rows[i] | rows[columns + i] << 4)).collect()
}

/// Matrices [rows, columns] as [columns, rows].
fn transposed<T: Copy>(x: &[T], rows: usize, columns: usize) -> Vec<T> {
    let matrices = x.chunks(rows * columns);
    matrices.flat_map(|x| (0..x.len()).map(|at| x[at % rows * columns + at / rows])).collect()
}

/// Compares the products of a [m, k] and b [n, k] (in memory [k, n]) on every device with those in f64.
fn check<L: Bytes, R: Bytes, S: Element + Dtype>(
    size: Size,
    (a, b): (&Operand<L>, &Operand<R>),
    [a_scale, b_scale]: [&Codes<S>; 2],
    k_pack: bool,
    scales: usize,
) {
    let Size { programs, m, n, k, group } = size;
    let groups = k / group;
    let scale = |scale: &Codes<S>, used: bool, row: usize, l: usize| {
        if used { scale.at(row * groups + l / group) } else { 1.0 }
    };
    let want = |at: usize| {
        let (i, j) = (at / n, at / (m * n) * n + at % n);
        let terms = (0..k).map(|l| {
            let left = a.elements.at(i * k + l) * scale(a_scale, scales != 1, i, l);
            left * b.elements.at(j * k + l) * scale(b_scale, scales != 0, j, l)
        });
        let times = if scales == 2 { 2.0 } else { 1.0 };
        terms.fold([0.0, 0.0], |[sum, size]: [f64; 2], term| [sum + times * term, size + times * term.abs()])
    };
    let want: Vec<[f64; 2]> = (0..programs * m * n).map(want).collect();
    let a_memory = L::memory(&a.elements.codes, k, a.format == DotFormat::E2m1, k_pack);
    let b_memory = transposed(&b.elements.codes, n, k);
    let b_memory = R::memory(&b_memory, n, b.format == DotFormat::E2m1, !k_pack);
    for device in devices() {
        let mut c = Buffer::<f32>::poisoned(&device, want.len()).unwrap();
        Scaled {
            a: &Buffer::from_slice(&device, &a_memory).unwrap(),
            a_scale: &Buffer::from_slice(&device, &a_scale.codes).unwrap(),
            b: &Buffer::from_slice(&device, &b_memory).unwrap(),
            b_scale: &Buffer::from_slice(&device, &b_scale.codes).unwrap(),
            c: &mut c,
            a_format: a.format,
            b_format: b.format,
            m,
            n,
            k,
            groups,
            k_pack,
            scales,
        }
        .launch(&device, programs)
        .unwrap_or_else(|error| panic!("{device}: {error}"));
        for (at, (found, [want, size])) in c.to_vec().unwrap().into_iter().zip(&want).enumerate() {
            let found = f64::from(found);
            let same = found == *want || (found.is_nan() && want.is_nan()) || (found - want).abs() <= size * 1e-6;
            assert!(same, "{device}: element {at} is {found}, expected {want}: {:?} x {:?}", a.format, b.format);
        }
    }
}

/// Matrices with ones on the diagonal.
fn identity(programs: usize, n: usize) -> Operand<bf16> {
    let codes = (0..programs * n * n).map(|at| bf16::from_f32(f32::from(at / n % n == at % n))).collect();
    Operand { format: DotFormat::Bf16, elements: Codes { codes, value: f64::from } }
}

/// Rows of ones, but for one code in each.
fn rows<T: Copy>(format: DotFormat, value: fn(T) -> f64, codes: impl Iterator<Item = T>, one: T) -> Operand<T> {
    let codes = codes.enumerate().flat_map(|(i, code)| (0..32).map(move |l| if l == i % 32 { code } else { one }));
    Operand { format, elements: Codes { codes: codes.collect(), value } }
}

/// Every code of every format, as an element of a and of b.
fn every_code<T: Bytes>(codes: &Operand<T>) {
    let size = Size { programs: 8, m: 32, n: 32, k: 32, group: 32 };
    let scale = Codes { codes: (0..=255).map(|row: u32| 120 + (row % 15) as u8).collect(), value: e8m0 };
    check(size, (codes, &identity(8, 32)), [&scale, &scale], true, 0);
    check(size, (&identity(8, 32), codes), [&scale, &scale], true, 1);
}

#[test]
fn every_element_is_decoded() {
    every_code(&rows(DotFormat::E2m1, e2m1, (0..=255).map(|row: u8| row % 16), 2));
    every_code(&rows(DotFormat::E4m3, e4m3, (0..=255).map(F8E4M3), F8E4M3(0x38)));
    every_code(&rows(DotFormat::E5m2, e5m2, (0..=255).map(F8E5M2), F8E5M2(0x3c)));
    // The bits as u8.
    every_code(&rows(DotFormat::E5m2, |code| e5m2(F8E5M2(code)), 0..=255, 0x3c));
}

#[test]
fn every_scale_is_decoded() {
    let size = Size { programs: 8, m: 32, n: 32, k: 32, group: 32 };
    let a = rows(DotFormat::E2m1, e2m1, (0..=255).map(|row: u8| [0, 1, 2, 3, 9, 10, 11][row as usize % 7]), 1);
    let scale = Codes { codes: (0..=255).collect(), value: e8m0 };
    check(size, (&a, &identity(8, 32)), [&scale, &scale], true, 0);
    let size = Size { group: 16, ..size };
    let twice = Codes { codes: (0..512).map(|at| F8E4M3((at / 2) as u8)).collect(), value: e4m3 };
    check(size, (&a, &identity(8, 32)), [&twice, &twice], true, 0);
    // Elements with as many bits as a scale: their products have all bits of bf16.
    let a = rows(DotFormat::E4m3, e4m3, (0..=255).map(F8E4M3), F8E4M3(0x3f));
    check(size, (&a, &identity(8, 32)), [&twice, &twice], true, 0);
}

/// Numbers of which each is one of the first `count` codes.
fn random<T>(n: usize, count: u32, seed: u64, code: fn(u8) -> T) -> Vec<T> {
    let mut random = Random::new(seed);
    (0..n).map(|_| code(((random.number() + 1.0) / 2.0 * f64::from(count)).min(f64::from(count - 1)) as u8)).collect()
}

#[test]
fn scaled_matrices_are_multiplied() {
    let size = Size { programs: 1, m: 32, n: 16, k: 64, group: 32 };
    let operand = |extent: usize, seed| Operand {
        format: DotFormat::E2m1,
        elements: Codes { codes: random(extent * 64, 16, seed, |code| code), value: e2m1 },
    };
    let (a, b) = (operand(32, 1), operand(16, 2));
    let scale = |n: usize, seed| Codes { codes: random(n, 12, seed, |code| 121 + code), value: e8m0 };
    let (a_scale, b_scale) = (scale(64, 3), scale(32, 4));
    for k_pack in [false, true] {
        check(size, (&a, &b), [&a_scale, &b_scale], k_pack, 2);
    }
    // Finite numbers of both signs.
    let eight = |code: u8| F8E4M3((code / 2) | (code << 7));
    let b = Operand { format: DotFormat::E4m3, elements: Codes { codes: random(16 * 64, 250, 5, eight), value: e4m3 } };
    check(size, (&a, &b), [&a_scale, &b_scale], true, 2);
    // f16 has more bits than bf16, and less range than the scaled operand.
    let half = Operand {
        format: DotFormat::Fp16,
        elements: Codes {
            codes: random(16 * 64, 250, 6, |code| f16::from_f32(1.0 + f32::from(code) / 1024.0)),
            value: f64::from,
        },
    };
    let wide = Codes { codes: random(64, 60, 7, |code| 100 + code), value: e8m0 };
    check(size, (&a, &half), [&wide, &b_scale], true, 0);
    // Scales of 16 elements, in F8E4M3.
    let size = Size { group: 16, ..size };
    let scale = |n: usize, seed| Codes { codes: random(n, 126, seed, F8E4M3), value: e4m3 };
    let b = operand(16, 8);
    check(size, (&a, &b), [&scale(128, 9), &scale(64, 10)], true, 2);
}

/// c = a · b of `F8E5M2`, with scales in the order of the hardware's blocks: [⌈m / 128⌉, ⌈k / 128⌉, 32, 4, 4].
#[kernel]
fn blocked_scales(
    a: Tensor<F8E5M2, (m, k)>,
    b: Tensor<F8E5M2, (k, n)>,
    c: TensorMut<f32, (m, n)>,
    a_scale: Tensor<u8, (m_blocks, k_blocks, lines, groups, columns)>,
    b_scale: Tensor<u8, (n_blocks, k_blocks, lines, groups, columns)>,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr] stages: usize,
    #[constexpr] as_matrix: bool,
) {
    let m_programs = cdiv(m, m_tile);
    let (pid_m, pid_n) = (program_id(0) % m_programs, program_id(0) / m_programs);
    let (first_row, first_column) = (pid_m * m_tile, pid_n * n_tile);
    let (m_scales, n_scales, k_scales) = (m_tile / 128, n_tile / 128, k_tile / 128);
    let mut acc = zeros::<f32>([m_tile, n_tile]);
    for i in range(0, cdiv(k, k_tile), num_stages = stages) {
        let at = load(a.block([first_row, i * k_tile], [m_tile, k_tile]), boundary_check = [0], padding = zero);
        let bt = load(b.block([i * k_tile, first_column], [k_tile, n_tile]), boundary_check = [1], padding = zero);
        let (scale_a, scale_b) = if as_matrix {
            let inner = arange(0, k_scales * 512).expand_dims(0) + i * (k_scales * 512);
            let row = |first: Scalar<i32>, n: usize| (first * n + arange(0, n)).expand_dims(1);
            let (rows, columns) = (row(pid_m, m_scales), row(pid_n, n_scales));
            let (pa, pb) = (a_scale.ptr() + rows * a_scale.stride(0), b_scale.ptr() + columns * b_scale.stride(0));
            let (wa, wb) = (load(pa + inner, mask = rows < m_blocks), load(pb + inner, mask = columns < n_blocks));
            (wa.reshape([m_scales, k_scales, 32, 4, 4]), wb.reshape([n_scales, k_scales, 32, 4, 4]))
        } else {
            let block = |scales: TensorPtr<u8>, first: Scalar<i32>, n: usize| {
                scales.block([first * n, i * k_scales, 0, 0, 0], [n, k_scales, 32, 4, 4])
            };
            let (wa, wb) = (block(a_scale, pid_m, m_scales), block(b_scale, pid_n, n_scales));
            (load(wa, boundary_check = [0], padding = zero), load(wb, boundary_check = [0], padding = zero))
        };
        let scale_a = scale_a.permute([0, 3, 2, 1, 4]).reshape([m_tile, k_tile / 32]);
        let scale_b = scale_b.permute([0, 3, 2, 1, 4]).reshape([n_tile, k_tile / 32]);
        acc = dot_scaled(at, scale_a, e5m2, bt, scale_b, e5m2, acc);
    }
    store(c.block([first_row, first_column], [m_tile, n_tile]), acc, boundary_check = [0, 1]);
}

/// Products with scales in blocks, of the last of which only a part is in the matrices.
fn check_blocked_scales(device: &Device, [m, n, k]: [usize; 3], [m_tile, n_tile, k_tile]: [usize; 3], as_matrix: bool) {
    let mut random = Random::new(42);
    let mut bytes = |n: usize, from: f64, to: f64| -> Vec<u8> {
        (0..n).map(|_| (from + (random.number() + 1.0) / 2.0 * (to - from)) as u8).collect()
    };
    let (a, b) = (bytes(m * k, 20.0, 40.0), bytes(k * n, 20.0, 40.0));
    let (m_blocks, n_blocks, k_blocks) = (m.div_ceil(128), n.div_ceil(128), k / 128);
    let (a_scale, b_scale) =
        (bytes(m_blocks * k_blocks * 512, 120.0, 130.0), bytes(n_blocks * k_blocks * 512, 120.0, 130.0));
    let scale = |scales: &[u8], i: usize, j: usize| {
        let (block, group, line) = (i / 128, i % 128 / 32, i % 32);
        let at = (((block * k_blocks + j / 128) * 32 + line) * 4 + group) * 4 + j % 128 / 32;
        f64::exp2(f64::from(scales[at]) - 127.0)
    };
    let value = |code: u8| f64::from(F8E5M2(code).to_f32());
    let upload =
        |codes: &[u8]| Buffer::from_slice(device, &codes.iter().map(|c| F8E5M2(*c)).collect::<Vec<_>>()).unwrap();
    let (da, db) = (upload(&a), upload(&b));
    let (sa, sb) = (Buffer::from_slice(device, &a_scale).unwrap(), Buffer::from_slice(device, &b_scale).unwrap());
    let mut c = Buffer::<f32>::poisoned(device, m * n).unwrap();
    BlockedScales {
        a: &da.tensor([m, k]).unwrap(),
        b: &db.tensor([k, n]).unwrap(),
        c: &mut c.tensor_mut([m, n]).unwrap(),
        a_scale: &sa.tensor([m_blocks, k_blocks, 32, 4, 4]).unwrap(),
        b_scale: &sb.tensor([n_blocks, k_blocks, 32, 4, 4]).unwrap(),
        m_tile,
        n_tile,
        k_tile,
        stages: 2,
        as_matrix,
    }
    .launch(device, m.div_ceil(m_tile) * n.div_ceil(n_tile))
    .unwrap();
    let found = c.to_vec().unwrap();
    for i in 0..m {
        for j in 0..n {
            let product =
                |p: usize| value(a[i * k + p]) * scale(&a_scale, i, p) * value(b[p * n + j]) * scale(&b_scale, j, p);
            let (want, found) = ((0..k).map(product).sum::<f64>(), f64::from(found[i * n + j]));
            let magnitude: f64 = (0..k).map(|p| product(p).abs()).sum();
            assert!((found - want).abs() <= 1e-5 * magnitude, "{device} {as_matrix}: [{i}, {j}] {found} {want}");
        }
    }
}

#[test]
fn scales_in_blocks_are_permuted_in_the_kernel() {
    for as_matrix in [false, true] {
        check_blocked_scales(&Device::cpu(), [200, 111, 256], [128, 128, 128], as_matrix);
        check_blocked_scales(&Device::cpu(), [63, 128, 256], [128, 128, 256], as_matrix);
        check_blocked_scales(&Device::simulated(GpuArch::Sm90a), [63, 60, 128], [128, 128, 128], as_matrix);
    }
}
