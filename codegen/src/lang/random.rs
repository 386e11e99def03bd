//! Random numbers: Philox 4×32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11), a pure function
//! of seed and counter, so that the same offsets give the same numbers on every device and in every launch. The numbers
//! are those of Triton 3.6 (`triton/language/random.py`): integers and uniform floats bit for bit, normal ones up to
//! the accuracy of the device's log, sin and cos.

use super::arith::binary;
use super::control::Bound;
use super::dtype::Int;
use super::handle::{Data, FloatData, Scalar, Tile, unary};
use super::operand::{Number, Operand, Raw, broadcast_operands, constant};
use super::record::{emit, shape};
use crate::ir::{BinaryOp, DType, UnaryOp, Value};

/// A seed: an integer scalar of 32 or 64 bits, or a Rust integer.
#[diagnostic::on_unimplemented(message = "`{Self}` cannot be a seed", label = "expected i32, i64, u32 or u64")]
pub trait Seed: Copy {
    /// Low and high half, as u32 scalars.
    #[doc(hidden)]
    #[track_caller]
    fn halves(self) -> [Value; 2];
}

impl<B: Bound> Seed for B {
    #[track_caller]
    fn halves(self) -> [Value; 2] {
        halves_of(self.bound::<i64>().to::<u64>())
    }
}

macro_rules! unsigned_seeds {
    ($($elem:ty),*) => { $(
        impl Seed for Scalar<$elem> {
            #[track_caller]
            fn halves(self) -> [Value; 2] {
                halves_of(self.to::<u64>())
            }
        }
    )* };
}
unsigned_seeds!(u32, u64);

#[track_caller]
fn halves_of(seed: Scalar<u64>) -> [Value; 2] {
    let high = binary(BinaryOp::Shr, seed.raw(), Raw::Number(Number::Int(32)), DType::U64);
    [emit(|b| b.cast(seed.value(), DType::U32)), emit(|b| b.cast(high, DType::U32))]
}

fn u32_op(op: BinaryOp, a: Value, b: Value) -> Value {
    binary(op, Raw::Value(a), Raw::Value(b), DType::U32)
}

/// Applies `n_rounds` Philox rounds (10 by default) to a counter of four 32-bit words, with the two halves of the seed
/// as key.
#[track_caller]
fn rounds(seed: [Value; 2], counter: [Value; 4], n_rounds: usize) -> [Value; 4] {
    const MULTIPLIER: [i128; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [i128; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let word = |n: i128, like: &[usize]| constant(Number::Int(n), DType::U32, like);
    let like = shape(counter[0]);
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = seed;
    for _ in 0..n_rounds {
        let (a, b) = (word(MULTIPLIER[0], &like), word(MULTIPLIER[1], &like));
        let (high_a, low_a) = (u32_op(BinaryOp::MulHi, a, c0), u32_op(BinaryOp::Mul, a, c0));
        let (high_b, low_b) = (u32_op(BinaryOp::MulHi, b, c2), u32_op(BinaryOp::Mul, b, c2));
        c0 = u32_op(BinaryOp::Xor, u32_op(BinaryOp::Xor, high_b, c1), k0);
        c2 = u32_op(BinaryOp::Xor, u32_op(BinaryOp::Xor, high_a, c3), k1);
        (c1, c3) = (low_b, low_a);
        k0 = u32_op(BinaryOp::Add, k0, word(WEYL[0], &[]));
        k1 = u32_op(BinaryOp::Add, k1, word(WEYL[1], &[]));
    }
    [c0, c1, c2, c3]
}

/// Four random u32 tiles from a seed and a counter of four 32-bit words.
#[track_caller]
pub fn philox(
    seed: impl Seed,
    c0: Tile<u32>,
    c1: impl Operand<u32>,
    c2: impl Operand<u32>,
    c3: impl Operand<u32>,
    n_rounds: usize,
) -> (Tile<u32>, Tile<u32>, Tile<u32>, Tile<u32>) {
    let counter = broadcast_operands([c0.raw(), c1.raw(), c2.raw(), c3.raw()], DType::U32, "`philox`");
    let [a, b, c, d] = rounds(seed.halves(), counter, n_rounds).map(Tile::from_value);
    (a, b, c, d)
}

/// Four random u32 per element of `offset`.
#[track_caller]
pub fn randint4x<I: Int>(
    seed: impl Seed,
    offset: Tile<I>,
    n_rounds: usize,
) -> (Tile<u32>, Tile<u32>, Tile<u32>, Tile<u32>) {
    let like = shape(offset.value());
    let low = emit(|b| b.cast(offset.value(), DType::U32));
    let zero = constant(Number::Int(0), DType::U32, &like);
    let high = if I::dtype().bits() == 64 {
        let wide = emit(|b| b.cast(offset.value(), DType::U64));
        let shifted = binary(BinaryOp::Shr, Raw::Value(wide), Raw::Number(Number::Int(32)), DType::U64);
        emit(|b| b.cast(shifted, DType::U32))
    } else {
        zero
    };
    let [a, b, c, d] = rounds(seed.halves(), [low, high, zero, zero], n_rounds).map(Tile::from_value);
    (a, b, c, d)
}

/// One random u32 per element of `offset`.
#[track_caller]
pub fn randint<I: Int>(seed: impl Seed, offset: Tile<I>, n_rounds: usize) -> Tile<u32> {
    randint4x(seed, offset, n_rounds).0
}

/// Triton's `uint_to_uniform_float`: x, or its complement if the sign bit is set, as f32, times slightly less than
/// 2⁻³¹, so that every result is below 1.
#[track_caller]
fn uniform(bits: Tile<u32>) -> Tile<f32> {
    const SCALE: f64 = 4.6566127342e-10;
    let signed = emit(|b| b.bitcast(bits.value(), DType::I32));
    // x ^ (x ≫ 31), with an arithmetic shift: the complement −x − 1 if x is negative.
    let sign = binary(BinaryOp::Shr, Raw::Value(signed), Raw::Number(Number::Int(31)), DType::I32);
    let magnitude = binary(BinaryOp::Xor, Raw::Value(signed), Raw::Value(sign), DType::I32);
    let number = emit(|b| b.cast(magnitude, DType::F32));
    Tile::from_value(binary(BinaryOp::Mul, Raw::Value(number), Raw::Number(Number::Float(SCALE)), DType::F32))
}

/// One uniform f32 in [0, 1) per element of `offset`.
#[track_caller]
pub fn rand<I: Int>(seed: impl Seed, offset: Tile<I>, n_rounds: usize) -> Tile<f32> {
    uniform(randint(seed, offset, n_rounds))
}

/// Four uniform f32 in [0, 1) per element of `offset`.
#[track_caller]
pub fn rand4x<I: Int>(
    seed: impl Seed,
    offset: Tile<I>,
    n_rounds: usize,
) -> (Tile<f32>, Tile<f32>, Tile<f32>, Tile<f32>) {
    let (a, b, c, d) = randint4x(seed, offset, n_rounds);
    (uniform(a), uniform(b), uniform(c), uniform(d))
}

/// One normally distributed f32 (mean 0, variance 1) per element of `offset`, by the Box–Muller transform.
#[track_caller]
pub fn randn<I: Int>(seed: impl Seed, offset: Tile<I>, n_rounds: usize) -> Tile<f32> {
    let (a, b, _, _) = randint4x(seed, offset, n_rounds);
    normal(uniform(a), uniform(b)).0
}

/// Four normally distributed f32 per element of `offset`.
#[track_caller]
pub fn randn4x<I: Int>(
    seed: impl Seed,
    offset: Tile<I>,
    n_rounds: usize,
) -> (Tile<f32>, Tile<f32>, Tile<f32>, Tile<f32>) {
    let (a, b, c, d) = rand4x(seed, offset, n_rounds);
    let ((w, x), (y, z)) = (normal(a, b), normal(c, d));
    (w, x, y, z)
}

/// Triton's `pair_uniform_to_normal`.
#[track_caller]
fn normal(a: Tile<f32>, b: Tile<f32>) -> (Tile<f32>, Tile<f32>) {
    let op = |op, x: Tile<f32>, n: f64| -> Tile<f32> {
        Tile::from_value(binary(op, x.raw(), Raw::Number(Number::Float(n)), DType::F32))
    };
    // Keeps the logarithm finite.
    let a = op(BinaryOp::Max, a, 1.0e-7);
    let angle = op(BinaryOp::Mul, b, std::f64::consts::TAU);
    let radius = unary(UnaryOp::Sqrt, op(BinaryOp::Mul, a.log(), -2.0));
    let times = |y: Tile<f32>| Tile::from_value(binary(BinaryOp::Mul, radius.raw(), y.raw(), DType::F32));
    (times(angle.cos()), times(angle.sin()))
}
