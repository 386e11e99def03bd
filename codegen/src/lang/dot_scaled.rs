//! Dots of microscaling (MX) operands, as in the "OCP Microscaling Formats (MX) Specification", version 1.0: elements of
//! few bits, and a scale for each block of them along K. No GPU that is supported here has instructions for them: the
//! operands are widened in registers, as in Triton's emulation, and multiplied by [`dot`](super::dot()).

use super::diag_text;
use super::dot::{Accumulator, Call, accumulate};
use super::dtype::Dtype;
use super::handle::{Data, Tile};
use super::index::Unset;
use super::record::{emit, error_here, fail, shape};
use crate::ir::{BinaryOp, Builder, CmpOp, DType, Literal, Op, Precision, Value};

crate::constexpr_enum! {
    /// The elements of an operand of [`dot_scaled`].
    pub enum DotFormat {
        /// 4-bit floats: sign, two bits of exponent, one of mantissa: ±{0, 0.5, 1, 1.5, 2, 3, 4, 6}. A tile of `u8` has
        /// two in each byte, the first in the low bits.
        E2m1,
        /// `F8E4M3`, or their bits as `u8`.
        E4m3,
        /// `F8E5M2`, or their bits as `u8`.
        E5m2,
        /// `bf16`.
        Bf16,
        /// `f16`.
        Fp16,
    }
}

/// The scales of an operand of [`dot_scaled`]; 1 if not given.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the scales of an operand",
    label = "expected a tile of u8 or F8E4M3",
    note = "scales are powers of two (E8M0, as `u8`) of 32 elements, or `F8E4M3` of 16 elements"
)]
pub trait BlockScale: Copy {
    #[doc(hidden)]
    fn scale(self) -> Option<Value>;
}

impl BlockScale for Unset {
    fn scale(self) -> Option<Value> {
        None
    }
}

impl<T: Dtype> BlockScale for Tile<T> {
    fn scale(self) -> Option<Value> {
        Some(self.value())
    }
}

/// An operand, with its name in messages.
struct Operand {
    name: &'static str,
    value: Value,
    dtype: DType,
    format: DotFormat,
    scale: Option<Value>,
    /// Whether packed elements are neighbors along K, and not along M or N.
    k_pack: bool,
    /// The dimension K, and the other one of the matrix.
    k: usize,
    other: usize,
}

/// `acc + (lhs · scales) × (rhs · scales)` in f32, for lhs [M, K] and rhs [K, N]; leading dimensions are a batch, as of
/// [`dot`](super::dot()). `lhs_scale` is [M, K / 32] and `rhs_scale` [N, K / 32] of `u8`: scale `s` is 2^(s − 127), and 255
/// is NaN (with `fast_math`, it need not be); or [M, K / 16] and [N, K / 16] of `F8E4M3`, for `e2m1`, `e4m3` and `e5m2`.
/// `k_pack = false` of a packed operand: its pairs are neighbors along M or N.
///
/// Scaled elements are bf16, or f32 (multiplied in TF32) if an operand is f16: exact, but for elements that are beyond the
/// range of bf16. A product of an element and a scale of `F8E4M3` has at most the 8 significant bits of bf16.
#[allow(clippy::too_many_arguments)] // Triton's parameters.
#[track_caller]
pub fn dot_scaled<L: Dtype, R: Dtype, A: Accumulator<f32>>(
    lhs: Tile<L>,
    lhs_scale: impl BlockScale,
    lhs_format: DotFormat,
    rhs: Tile<R>,
    rhs_scale: impl BlockScale,
    rhs_format: DotFormat,
    acc: A,
    fast_math: bool,
    lhs_k_pack: bool,
    rhs_k_pack: bool,
) -> Tile<A::Elem> {
    let (lhs_rank, rhs_rank) = (shape(lhs.value()).len(), shape(rhs.value()).len());
    if lhs_rank < 2 || lhs_rank != rhs_rank {
        let (a, b) = (diag_text::shape(&shape(lhs.value())), diag_text::shape(&shape(rhs.value())));
        fail(
            error_here(format!("`dot_scaled` requires two tiles of one rank of at least 2, found shapes {a} and {b}"))
                .label("expected [M, K] and [K, N], or [B, M, K] and [B, K, N]")
                .help("insert a dimension: `.expand_dims(…)`"),
        );
    }
    let lhs = Operand {
        name: "lhs",
        value: lhs.value(),
        dtype: L::dtype(),
        format: lhs_format,
        scale: lhs_scale.scale(),
        k_pack: lhs_k_pack,
        k: lhs_rank - 1,
        other: lhs_rank - 2,
    };
    let rhs = Operand {
        name: "rhs",
        value: rhs.value(),
        dtype: R::dtype(),
        format: rhs_format,
        scale: rhs_scale.scale(),
        k_pack: rhs_k_pack,
        k: rhs_rank - 2,
        other: rhs_rank - 1,
    };
    check(&lhs);
    check(&rhs);
    let half = lhs_format == DotFormat::Fp16 || rhs_format == DotFormat::Fp16;
    let (to, precision) = if half { (DType::F32, Precision::Tf32) } else { (DType::BF16, Precision::Ieee) };
    let (a, b) = emit(|builder| (widen(builder, &lhs, to, fast_math), widen(builder, &rhs, to, fast_math)));
    let packed = lhs_format == DotFormat::E2m1 || rhs_format == DotFormat::E2m1;
    let note =
        packed.then_some("these are shapes of elements: each u8 of `e2m1` has two, along K unless `k_pack = false`");
    Tile::from_value(accumulate(
        &Call { name: "dot_scaled", note },
        [a, b],
        [to, A::Elem::dtype()],
        acc.accumulator(),
        &Op::Dot { precision, max_imprecise: None },
    ))
}

/// The shape of the unpacked operand.
fn unpacked(operand: &Operand) -> Vec<usize> {
    let mut unpacked = shape(operand.value);
    if operand.format == DotFormat::E2m1 {
        unpacked[if operand.k_pack { operand.k } else { operand.other }] *= 2;
    }
    unpacked
}

#[track_caller]
fn check(operand: &Operand) {
    let Operand { name, dtype, format, .. } = operand;
    let (word, expected) = match format {
        DotFormat::E2m1 => ("e2m1", DType::U8),
        DotFormat::E4m3 => ("e4m3", DType::F8E4M3),
        DotFormat::E5m2 => ("e5m2", DType::F8E5M2),
        DotFormat::Bf16 => ("bf16", DType::BF16),
        DotFormat::Fp16 => ("fp16", DType::F16),
    };
    let bits = *dtype == DType::U8 && expected.bits() == 8;
    if *dtype != expected && !bits {
        fail(
            error_here(format!("`{name}` of `dot_scaled` has elements of type {dtype}, with `{name}_format = {word}`"))
                .label(format!("expected a tile of {expected}"))
                .note("formats: e2m1 (two in each u8), e4m3, e5m2, bf16, fp16"),
        );
    }
    super::index::check_powers_of_two(&unpacked(operand), &format!("`{name}` of `dot_scaled`"));
    super::index::check_shape(&unpacked(operand));
    let Some(scale) = operand.scale else { return };
    if !matches!(dtype_of(scale), DType::U8 | DType::F8E4M3) {
        fail(
            error_here(format!("`{name}_scale` of `dot_scaled` has elements of type {}", dtype_of(scale)))
                .label("expected u8 or f8e4m3")
                .note("scales are powers of two, 2^(s − 127) of `u8`, or `F8E4M3`"),
        );
    }
    if dtype_of(scale) == DType::F8E4M3 && matches!(format, DotFormat::Bf16 | DotFormat::Fp16) {
        fail(
            error_here(format!("`{name}_scale` of `dot_scaled` is f8e4m3, with `{name}_format = {word}`"))
                .label("expected scales of u8, which are powers of two")
                .note(format!("products of {word} and f8e4m3 have more bits than the dot multiplies"))
                .help("use elements of e2m1, e4m3 or e5m2, or multiply by the scales in f32 before a `dot`"),
        );
    }
    let (found, group) = (shape(scale), group(scale));
    let tile = unpacked(operand);
    if tile[operand.k] < group {
        fail(
            error_here(format!(
                "`{name}` of `dot_scaled` has K = {}, fewer elements than the {group} of a scale",
                tile[operand.k]
            ))
            .label(format!("shape {}: expected K of at least {group}", diag_text::shape(&tile)))
            .note("scales of `u8` belong to 32 elements, scales of `F8E4M3` to 16"),
        );
    }
    let mut want = tile[..tile.len() - 2].to_vec();
    want.extend([tile[operand.other], tile[operand.k] / group]);
    if found != want {
        let letter = if operand.k > operand.other { "M" } else { "N" };
        fail(
            error_here(format!(
                "`{name}_scale` of `dot_scaled` has shape {}, for elements of shape {}",
                diag_text::shape(&found),
                diag_text::shape(&tile)
            ))
            .label(format!("expected [{letter}, K / {group}]: one for each {group} elements along K"))
            .note("scales of `u8` belong to 32 elements, scales of `F8E4M3` to 16"),
        );
    }
}

/// Number of elements that share a scale.
fn group(scale: Value) -> usize {
    if dtype_of(scale) == DType::U8 { 32 } else { 16 }
}

fn dtype_of(v: Value) -> DType {
    super::record::ty(v).dtype().expect("internal compiler error: a tile without element type; please report this")
}

/// The elements of the operand, unpacked and scaled.
fn widen(b: &mut Builder, operand: &Operand, to: DType, fast_math: bool) -> Value {
    let mut x = operand.value;
    x = match operand.format {
        DotFormat::E2m1 => {
            let codes = unpack(b, x, if operand.k_pack { operand.k } else { operand.other });
            decode_e2m1(b, codes)
        }
        DotFormat::E4m3 => b.bitcast(x, DType::F8E4M3),
        DotFormat::E5m2 => b.bitcast(x, DType::F8E5M2),
        DotFormat::Bf16 | DotFormat::Fp16 => x,
    };
    let Some(scale) = operand.scale else { return b.cast(x, to) };
    let x = b.cast(x, DType::F32);
    let wide = b.ty(x).shape().to_vec();
    let scale = decode_scale(b, scale, fast_math);
    // [M, K / 32] → [M, K / 32, 32] → [M, K].
    let mut groups = b.ty(scale).shape().to_vec();
    let rank = groups.len();
    groups.push(wide[operand.k] / groups[rank - 1]);
    let scale = b.expand_dims(scale, rank);
    let scale = b.broadcast(scale, &groups);
    groups.truncate(rank);
    groups[rank - 1] = wide[operand.k];
    let mut scale = b.reshape(scale, &groups);
    if operand.k < operand.other {
        scale = b.trans(scale, &swap_last(rank, operand.k));
    }
    let scaled = b.binary(BinaryOp::Mul, x, scale);
    b.cast(scaled, to)
}

/// The permutation that swaps dimension `axis` with the last one.
fn swap_last(rank: usize, axis: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..rank).collect();
    order.swap(axis, rank - 1);
    order
}

fn constant_like(b: &mut Builder, value: i64, like: Value) -> Value {
    let ty = b.ty(like);
    b.constant(Literal::Int(value), ty)
}

/// Pairs of 4-bit numbers, as u32, along `axis`: the low bits first.
fn unpack(b: &mut Builder, x: Value, axis: usize) -> Value {
    let rank = b.ty(x).shape().len();
    let order = swap_last(rank, axis);
    let x = b.trans(x, &order);
    let mut to = b.ty(x).shape().to_vec();
    to[rank - 1] *= 2;
    let (mask, four) = (constant_like(b, 15, x), constant_like(b, 4, x));
    let low = b.binary(BinaryOp::And, x, mask);
    let high = b.binary(BinaryOp::Shr, x, four);
    let pairs = b.join(low, high);
    let codes = b.reshape(pairs, &to);
    let codes = b.trans(codes, &order);
    b.cast(codes, DType::U32)
}

/// 4-bit floats of u32, as f32: their exponent and mantissa in the place of those of f32 are the number times 2⁻¹²⁶, also
/// of the subnormal one.
fn decode_e2m1(b: &mut Builder, codes: Value) -> Value {
    let shifted = |b: &mut Builder, mask: i64, by: i64| {
        let (mask, by) = (constant_like(b, mask, codes), constant_like(b, by, codes));
        let bits = b.binary(BinaryOp::And, codes, mask);
        b.binary(BinaryOp::Shl, bits, by)
    };
    let (magnitude, sign) = (shifted(b, 7, 22), shifted(b, 8, 28));
    let bits = b.binary(BinaryOp::Or, magnitude, sign);
    let number = b.bitcast(bits, DType::F32);
    let ty = b.ty(number);
    let scale = b.number(f64::powi(2.0, 126), ty);
    b.binary(BinaryOp::Mul, number, scale)
}

/// Scales as f32. Of E8M0, 0 is the subnormal 2⁻¹²⁷, and 255 NaN.
fn decode_scale(b: &mut Builder, scale: Value, fast_math: bool) -> Value {
    if b.ty(scale).dtype() != Some(DType::U8) {
        return b.cast(scale, DType::F32);
    }
    let wide = b.cast(scale, DType::U32);
    let by = constant_like(b, 23, wide);
    let mut bits = b.binary(BinaryOp::Shl, wide, by);
    let special = |b: &mut Builder, code: i64, as_bits: i64, bits: Value| {
        let (code, as_bits) = (constant_like(b, code, wide), constant_like(b, as_bits, wide));
        let is = b.cmp(CmpOp::Eq, wide, code);
        b.select(is, as_bits, bits)
    };
    bits = special(b, 0, 1 << 22, bits);
    if !fast_math {
        bits = special(b, 255, 0x7FC0_0000, bits);
    }
    b.bitcast(bits, DType::F32)
}
