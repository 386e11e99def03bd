//! Elementwise functions.

use super::arith::{Combine, binary};
use super::control::Carried;
use super::dtype::{Dtype, Float};
use super::handle::{Data, FloatData, Scalar, Tile, unary};
use super::index::AxisIndex;
use super::operand::{FloatLiteral, Number, Operand, Raw, broadcast, broadcast_operands, common_shape};
use super::record::{emit, error_here, fail, shape};
use crate::ir::{BinaryOp, CmpOp, DType, UnaryOp};

macro_rules! float_functions {
    ($($(#[$meta:meta])* $name:ident, $op:ident;)*) => { $(
        $(#[$meta])*
        #[track_caller]
        pub fn $name<X: FloatData>(x: X) -> X where X::Elem: Float {
            unary(UnaryOp::$op, x)
        }
    )* };
}
float_functions! {
    /// eˣ, elementwise.
    exp, Exp;
    /// 2ˣ, elementwise.
    exp2, Exp2;
    /// Natural logarithm, elementwise.
    log, Log;
    /// Logarithm to base 2, elementwise.
    log2, Log2;
    /// √x, elementwise.
    sqrt, Sqrt;
    /// √x, correctly rounded; the same as [`sqrt`].
    sqrt_rn, Sqrt;
    /// 1/√x, elementwise.
    rsqrt, Rsqrt;
    /// Sine of an angle in radians.
    sin, Sin;
    /// Cosine of an angle in radians.
    cos, Cos;
    /// Hyperbolic tangent.
    tanh, Tanh;
    /// Gauss error function.
    erf, Erf;
    /// Largest integer ≤ x.
    floor, Floor;
    /// Smallest integer ≥ x.
    ceil, Ceil;
}

/// |x|, elementwise.
#[track_caller]
pub fn abs<X: Data>(x: X) -> X {
    x.abs()
}

/// As `.to::<U>()`.
#[track_caller]
pub fn cast<U: Dtype, X: Data>(x: X) -> X::As<U> {
    x.to::<U>()
}

/// 1 / (1 + e⁻ˣ), elementwise. Saturates to 0 and 1 for large |x|, without NaN.
#[track_caller]
pub fn sigmoid<X: FloatData>(x: X) -> X
where
    X::Elem: Float,
{
    let dtype = X::Elem::dtype();
    // As all functions of 16-bit floats: each step would round, and eˣ overflow.
    let wide = if dtype.bytes() < 4 { DType::F32 } else { dtype };
    let e = emit(|b| {
        let x = b.cast(x.value(), wide);
        let minus = b.unary(UnaryOp::Neg, x);
        b.unary(UnaryOp::Exp, minus)
    });
    let one = Raw::Number(Number::Int(1));
    let denominator = binary(BinaryOp::Add, Raw::Value(e), one, wide);
    let result = binary(BinaryOp::Div, one, Raw::Value(denominator), wide);
    X::from_value(emit(|b| b.cast(result, dtype)))
}

/// Softmax along an axis (by default the first, as in Triton), with the maximum subtracted for numerical stability. That of
/// 16-bit floats is computed in f32.
#[track_caller]
pub fn softmax<T: Float>(x: Tile<T>, axis: impl AxisIndex) -> Tile<T> {
    if T::dtype().bytes() < 4 {
        return softmax(x.to::<f32>(), axis).to::<T>();
    }
    let axis = super::index::check_axis(axis.axis_index(), x.rank(), "softmax") as i32;
    let largest = super::reduce::max(x, axis, true);
    let e = unary(UnaryOp::Exp, x.combine(largest, BinaryOp::Sub));
    let total = super::reduce::sum(e, axis, true);
    e.combine(total, BinaryOp::Div)
}

/// `a · b + c` with a single rounding (fused). All three have the element type of the first.
#[track_caller]
pub fn fma<T: Dtype, X: Data<Elem = T> + Operand<T>>(a: X, b: impl Operand<T>, c: impl Operand<T>) -> X {
    let [a_, b_, c_] = broadcast_operands([a.raw(), b.raw(), c.raw()], T::dtype(), "`fma`");
    check_result_shape(a.value(), a_, "fma");
    X::from_value(emit(|builder| builder.fma(a_, b_, c_)))
}

/// Fails if the first operand is a scalar and another a tile: the result type is that of the first.
#[track_caller]
pub(super) fn check_result_shape(before: crate::ir::Value, after: crate::ir::Value, what: &str) {
    if shape(before).is_empty() && !shape(after).is_empty() {
        fail(
            error_here(format!("the first operand of `{what}` is a scalar, another is a tile"))
                .label("expected a tile first")
                .help("broadcast the scalar: `full_like(tile, scalar)`"),
        );
    }
}

/// x clamped to [low, high], elementwise. NaN becomes `low`; with `propagate_nan`, it stays NaN.
#[track_caller]
pub fn clamp<T: Dtype, X: Data<Elem = T> + Operand<T>>(
    x: X,
    low: impl Operand<T>,
    high: impl Operand<T>,
    propagate_nan: bool,
) -> X {
    let at_least = binary(BinaryOp::Max, x.raw(), low.raw(), T::dtype());
    let result = binary(BinaryOp::Min, Raw::Value(at_least), high.raw(), T::dtype());
    check_result_shape(x.value(), result, "clamp");
    if !propagate_nan || !T::dtype().is_float() {
        return X::from_value(result);
    }
    X::from_value(emit(|b| {
        let to = b.func.ty(result).shape().to_vec();
        let x = b.broadcast(x.value(), &to);
        let is_nan = b.cmp(CmpOp::Ne, x, x);
        b.select(is_nan, x, result)
    }))
}

/// The result type of a selection between scalars by a condition of type `Self`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a condition",
    label = "expected a comparison: a bool tile or bool scalar"
)]
pub trait Condition<X: Data>: Operand<bool> {
    type Chosen: Data<Elem = X::Elem>;
}

impl<X: Data> Condition<X> for Tile<bool> {
    type Chosen = Tile<X::Elem>;
}

impl<X: Data> Condition<X> for Scalar<bool> {
    type Chosen = X;
}

impl<X: Data> Condition<X> for bool {
    type Chosen = X;
}

/// `condition ? x : y`, elementwise; all three are broadcast to their common shape. Both `x` and `y` are evaluated.
#[track_caller]
#[allow(clippy::type_complexity)]
pub fn where_<C, X, Y, Both, Chosen: Data>(condition: C, x: X, y: Y) -> Chosen
where
    X: Combine<Y, Output: Carried<Handle = Both>> + Operand<Both::Elem>,
    Y: Operand<Both::Elem>,
    Both: Data,
    C: Condition<Both, Chosen = Chosen>,
{
    let dtype = Both::Elem::dtype();
    let raws = [x.raw(), y.raw()];
    let condition = super::operand::materialize(condition.raw(), crate::ir::DType::Bool);
    let mut shapes = vec![shape(condition)];
    shapes.extend(raws.iter().filter_map(|raw| match raw {
        Raw::Value(v) => Some(shape(*v)),
        Raw::Number(_) => None,
    }));
    let common = common_shape(&shapes, "`where_`");
    let condition = broadcast(condition, &common);
    let [x, y] = raws.map(|raw| match raw {
        Raw::Value(v) => broadcast(v, &common),
        Raw::Number(n) => super::operand::constant(n, dtype, &common),
    });
    Data::from_value(emit(|b| b.select(condition, x, y)))
}

/// Group-major order of a `size_i` × `size_j` grid, for L2 reuse (Triton's `swizzle2d`): maps the row-major (i, j) to
/// the (i, j) that visits groups of `size_g` ≥ 1 rows column by column.
#[track_caller]
pub fn swizzle2d(
    i: Scalar<i32>,
    j: Scalar<i32>,
    size_i: impl Operand<i32>,
    size_j: impl Operand<i32>,
    size_g: impl Operand<i32>,
) -> (Scalar<i32>, Scalar<i32>) {
    let d = crate::ir::DType::I32;
    let op = |op, a, b| Raw::Value(binary(op, a, b, d));
    let (size_i, size_j, size_g) = (size_i.raw(), size_j.raw(), size_g.raw());
    let size_g = match size_g {
        Raw::Number(Number::Int(n)) if n < 1 => {
            fail(error_here(format!("`size_g` of `swizzle2d` is {n}")).label("a group has rows").help("use at least 1"))
        }
        Raw::Number(_) => size_g,
        // Without rows in a group, several programs would get the same place.
        Raw::Value(_) => op(BinaryOp::Max, size_g, Raw::Number(Number::Int(1))),
    };
    let linear = op(BinaryOp::Add, op(BinaryOp::Mul, i.raw(), size_j), j.raw());
    let per_group = op(BinaryOp::Mul, size_g, size_j);
    let group = op(BinaryOp::Div, linear, per_group);
    let first = op(BinaryOp::Mul, group, size_g);
    let rows = op(BinaryOp::Min, op(BinaryOp::Sub, size_i, first), size_g);
    let within = op(BinaryOp::Rem, linear, per_group);
    let new_i = op(BinaryOp::Add, first, op(BinaryOp::Rem, within, rows));
    let new_j = op(BinaryOp::Div, within, rows);
    let scalar = |raw| Scalar::from_value(super::operand::materialize(raw, d));
    (scalar(new_i), scalar(new_j))
}

/// −∞ where a literal is expected: `where_(mask, x, NEG_INF)`.
pub const NEG_INF: FloatLiteral = FloatLiteral(f64::NEG_INFINITY);

/// `maximum`, `minimum` and `sigmoid` as methods.
pub trait MathMethods: Data + Operand<Self::Elem> {
    /// See [`super::maximum`].
    #[track_caller]
    fn maximum<R>(self, rhs: R) -> <Self as Combine<R>>::Output
    where
        Self: Combine<R>,
    {
        self.combine(rhs, BinaryOp::Max)
    }
    /// See [`super::minimum`].
    #[track_caller]
    fn minimum<R>(self, rhs: R) -> <Self as Combine<R>>::Output
    where
        Self: Combine<R>,
    {
        self.combine(rhs, BinaryOp::Min)
    }
    /// See [`sigmoid`].
    #[track_caller]
    fn sigmoid(self) -> Self
    where
        Self: FloatData,
        Self::Elem: Float,
    {
        sigmoid(self)
    }
}

impl<X: Data + Operand<X::Elem>> MathMethods for X {}
