//! Elementwise functions that are composed of ops (Triton's `libdevice`). They are computed in f32 for f16 and bf16.

use super::arith::Combine;
use super::carried::Carried;
use super::dtype::{Dtype, Float};
use super::handle::{Data, FloatData};
use super::operand::{Operand, broadcast_operands};
use super::record::{emit, ty};
use crate::functions::{E, Formula, composed};
use crate::ir::{BinaryOp, DType, UnaryOp, Value};

/// Records `f` of the operands; f16 and bf16 are converted to f32 and back.
#[track_caller]
fn in_f32<const N: usize>(
    operands: [Value; N],
    f: impl for<'c> FnOnce(&'c Formula<'_, '_>, [E<'c>; N]) -> E<'c>,
) -> Value {
    let dtype = ty(operands[0]).dtype();
    let narrow = dtype.filter(|d| d.bits() < 32);
    emit(|b| {
        let operands = operands.map(|v| if narrow.is_some() { b.cast(v, DType::F32) } else { v });
        let result = {
            let formula = Formula::new(b);
            let operands = operands.map(|v| formula.value(v));
            f(&formula, operands).v
        };
        match narrow {
            Some(dtype) if b.func.ty(result).dtype() == Some(DType::F32) => b.cast(result, dtype),
            _ => result,
        }
    })
}

macro_rules! composed_functions {
    ($($(#[$meta:meta])* $name:ident;)*) => { $(
        $(#[$meta])*
        #[track_caller]
        pub fn $name<X: FloatData>(x: X) -> X where X::Elem: Float {
            X::from_value(in_f32([x.value()], |_, [x]| composed::$name(x)))
        }
    )* };
}
composed_functions! {
    /// Nearest integer; halves away from zero, as in C. For halves to even there is [`rint`].
    round;
    /// eˣ − 1, accurate near zero.
    expm1;
    /// ln(1 + x), accurate near zero.
    log1p;
    /// Logarithm to base 10.
    log10;
    /// 10ˣ.
    exp10;
    /// Tangent of an angle in radians.
    tan;
    /// Arc sine, in [−π/2, π/2]; NaN for |x| > 1.
    asin;
    /// Arc cosine, in [0, π]; NaN for |x| > 1.
    acos;
    /// Arc tangent, in [−π/2, π/2].
    atan;
    /// Hyperbolic sine.
    sinh;
    /// Hyperbolic cosine.
    cosh;
    /// Inverse hyperbolic sine.
    asinh;
    /// Inverse hyperbolic cosine; NaN for x < 1.
    acosh;
    /// Inverse hyperbolic tangent; NaN for |x| > 1.
    atanh;
    /// Cube root, also of negative numbers.
    cbrt;
}

macro_rules! single_ops {
    ($($(#[$meta:meta])* $name:ident, $op:ident;)*) => { $(
        $(#[$meta])*
        #[track_caller]
        pub fn $name<X: FloatData>(x: X) -> X where X::Elem: Float {
            super::handle::unary(UnaryOp::$op, x)
        }
    )* };
}
single_ops! {
    /// Rounds toward zero.
    trunc, Trunc;
    /// Nearest integer, ties to even.
    rint, Rint;
}

macro_rules! classifications {
    ($($(#[$meta:meta])* $name:ident, $x:ident => $e:expr;)*) => { $(
        $(#[$meta])*
        #[track_caller]
        pub fn $name<X: FloatData>(x: X) -> X::As<bool> where X::Elem: Float {
            let v = x.value();
            Data::from_value(emit(|b| {
                let formula = Formula::new(b);
                let $x = formula.value(v);
                $e.v
            }))
        }
    )* };
}
classifications! {
    /// Whether an element is NaN.
    isnan, x => x.is_nan();
    /// Whether an element is ∞ or −∞.
    isinf, x => x.abs().eq(f64::INFINITY);
    /// Whether an element is neither infinite nor NaN.
    isfinite, x => x.abs().lt(f64::INFINITY);
    /// Whether the sign bit of an element is set, also that of −0 and NaN.
    signbit, x => x.sign_bit();
}

/// The handle and the element type that combining `X` and `Y` gives.
type Combined<X, Y> = <<X as Combine<Y>>::Output as Carried>::Handle;
type ElemOf<X, Y> = <Combined<X, Y> as Data>::Elem;

macro_rules! composed_of_two {
    ($($(#[$meta:meta])* $name:ident($a:ident, $b:ident) => $e:expr;)*) => { $(
        $(#[$meta])*
        #[track_caller]
        pub fn $name<X, Y>($a: X, $b: Y) -> Combined<X, Y>
        where
            X: Combine<Y> + Operand<ElemOf<X, Y>>,
            Y: Operand<ElemOf<X, Y>>,
            <X as Combine<Y>>::Output: Carried<Handle: Data<Elem: Float>>,
        {
            let dtype = <ElemOf<X, Y>>::dtype();
            let operands = broadcast_operands([$a.raw(), $b.raw()], dtype, concat!("`", stringify!($name), "`"));
            Data::from_value(in_f32(operands, |_, [$a, $b]| $e))
        }
    )* };
}
composed_of_two! {
    /// xʸ, with the special cases of C's `pow`.
    pow(x, y) => composed::pow(x, y);
    /// The angle of the point (x, y), in [−π, π], with the special cases of C's `atan2`.
    atan2(y, x) => composed::atan2(y, x);
    /// √(x² + y²) without intermediate overflow.
    hypot(x, y) => composed::hypot(x, y);
    /// |x| with the sign of y.
    copysign(x, y) => x.abs().copysign(y);
    /// Remainder of x / y with the sign of x, as `%`.
    fmod(x, y) => x.binary(BinaryOp::Rem, y);
    /// x / y, correctly rounded. (`/` of f32 may be wrong by two units in the last place on a GPU.)
    div_rn(x, y) => composed::div_rn(x, y);
}

/// x · 2ⁿ with one rounding, for integers n.
#[track_caller]
pub fn ldexp<X: FloatData + Operand<X::Elem>>(x: X, n: impl Operand<i32>) -> X
where
    X::Elem: Float,
{
    // The exponents get the shape of x: those of a larger shape are an error of `check_result_shape`.
    let n = super::operand::materialize(n.raw(), DType::I32);
    let shapes = [super::record::shape(x.value()), super::record::shape(n)];
    let common = super::operand::common_shape(&shapes, "`ldexp`");
    let (v, n) = (super::operand::broadcast(x.value(), &common), super::operand::broadcast(n, &common));
    super::math::check_result_shape(x.value(), v, "ldexp");
    X::from_value(emit(|b| {
        let narrow = b.func.ty(v).dtype().filter(|d| d.bits() < 32);
        let wide = if narrow.is_some() { b.cast(v, DType::F32) } else { v };
        let result = {
            let formula = Formula::new(b);
            composed::ldexp(formula.value(wide), formula.value(n)).v
        };
        narrow.map_or(result, |dtype| b.cast(result, dtype))
    }))
}
