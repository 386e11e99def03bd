//! Operands that combine with a tile (tiles, scalars, Rust numbers), and broadcasting of their shapes.

use super::branch::Arm;
use super::carried::Carried;
use super::diag_text;
use super::dtype::{Dtype, Float, Num};
use super::handle::{Data, Scalar, Tile};
use super::record::{constant_int, emit, error_here, fail, shape};
use crate::ir::{DType, Literal, Type, Value};
use crate::num::{self, int_range};
use std::marker::PhantomData;

/// An integer literal in kernel source: takes the type of the other operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IntegerLiteral(pub i128);

/// A float literal in kernel source: takes the type of the other operand.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct FloatLiteral(pub f64);

/// A Rust number that is to become a constant.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub enum Number {
    Int(i128),
    Float(f64),
    Bool(bool),
}

/// A Rust number that converts to an element of type `T`: integers to every number type, floats to float types.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not convert to an element of type `{T}`",
    note = "element types are not converted implicitly: convert the other side, as in `.to::<f32>()`"
)]
pub trait HostNum<T: Dtype>: Copy {
    #[doc(hidden)]
    fn number(self) -> Number;
}

macro_rules! host_ints {
    ($($ty:ty),*) => { $(
        impl<T: Num> HostNum<T> for $ty {
            fn number(self) -> Number {
                Number::Int(self as i128)
            }
        }
    )* };
}
host_ints!(i8, i16, i32, i64, u8, u16, u32, u64, usize);

/// A Rust number, which `as` converts to `To`.
#[diagnostic::on_unimplemented(
    message = "`as` cannot convert a `{Self}`",
    label = "write `.to::<{To}>()`",
    note = "`as` converts only Rust numbers, which are known at specialization"
)]
pub trait RustNumber<To> {
    #[doc(hidden)]
    type This;
    #[doc(hidden)]
    fn this(self) -> Self::This;
}

/// Allows `as` on a type in kernels.
#[doc(hidden)]
#[macro_export]
macro_rules! rust_numbers {
    ($($ty:ty),*) => { $(
        // Keeps the list of number types out of messages.
        #[diagnostic::do_not_recommend]
        impl<To> $crate::lang::operand::RustNumber<To> for $ty {
            type This = $ty;
            fn this(self) -> $ty {
                self
            }
        }
    )* };
}
rust_numbers!(bool, char, i8, i16, i32, i64, i128, isize, u8, u16, u32, u64, u128, usize, f32, f64);

#[diagnostic::do_not_recommend]
impl<To> RustNumber<To> for IntegerLiteral {
    type This = i128;
    fn this(self) -> i128 {
        self.0
    }
}

#[diagnostic::do_not_recommend]
impl<To> RustNumber<To> for FloatLiteral {
    type This = f64;
    fn this(self) -> f64 {
        self.0
    }
}

/// The left side of `value as To`.
#[doc(hidden)]
pub fn rust_number<To, N: RustNumber<To>>(value: N) -> N::This {
    value.this()
}

impl<T: Num> HostNum<T> for IntegerLiteral {
    fn number(self) -> Number {
        Number::Int(self.0)
    }
}

impl<T: Float> HostNum<T> for f32 {
    fn number(self) -> Number {
        Number::Float(self as f64)
    }
}

impl<T: Float> HostNum<T> for f64 {
    fn number(self) -> Number {
        Number::Float(self)
    }
}

impl<T: Float> HostNum<T> for FloatLiteral {
    fn number(self) -> Number {
        Number::Float(self.0)
    }
}

impl HostNum<bool> for bool {
    fn number(self) -> Number {
        Number::Bool(self)
    }
}

/// An operand of an operation: an IR value or a number.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub enum Raw {
    Value(Value),
    Number(Number),
}

/// Operands that combine with elements of type `T`: tiles and scalars of `T`, and Rust numbers that convert to it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be combined with elements of type `{T}`",
    label = "not of element type `{T}`",
    note = "element types are not converted implicitly: convert with `.to::<{T}>()`, or the other side to this one's type"
)]
pub trait Operand<T: Dtype>: Copy {
    /// The result type of combining the operand with a scalar.
    type WithScalar: Data<Elem = T>;
    #[doc(hidden)]
    fn raw(self) -> Raw;
}

impl<T: Dtype> Operand<T> for Tile<T> {
    type WithScalar = Tile<T>;
    fn raw(self) -> Raw {
        Raw::Value(self.value())
    }
}

impl<T: Dtype> Operand<T> for Scalar<T> {
    type WithScalar = Scalar<T>;
    fn raw(self) -> Raw {
        Raw::Value(self.value())
    }
}

macro_rules! host_operands {
    ($($ty:ty),*) => { $(
        impl<T: Dtype> Operand<T> for $ty
        where
            $ty: HostNum<T>,
        {
            type WithScalar = Scalar<T>;
            fn raw(self) -> Raw {
                Raw::Number(HostNum::<T>::number(self))
            }
        }
    )* };
}
host_operands!(i8, i16, i32, i64, u8, u16, u32, u64, usize, f32, f64, bool, IntegerLiteral, FloatLiteral);

/// Variables that a number literal can be assigned to.
#[diagnostic::on_unimplemented(
    message = "a number literal cannot be assigned to a variable of type `{Self}`",
    note = "for a tile, write `full_like(tile, number)`"
)]
pub trait AssignLiteral<L> {
    #[doc(hidden)]
    #[track_caller]
    fn from_literal(literal: L) -> Self;
}

impl<T: Num> AssignLiteral<IntegerLiteral> for Scalar<T> {
    #[track_caller]
    fn from_literal(literal: IntegerLiteral) -> Self {
        Scalar::from_value(constant(Number::Int(literal.0), T::dtype(), &[]))
    }
}

impl<T: Float> AssignLiteral<FloatLiteral> for Scalar<T> {
    #[track_caller]
    fn from_literal(literal: FloatLiteral) -> Self {
        Scalar::from_value(constant(Number::Float(literal.0), T::dtype(), &[]))
    }
}

/// A type of arms beside which an arm may be a literal.
macro_rules! literal_arm {
    ([$($generics:tt)*] $lit:ident, $ty:ty) => {
        literal_arm!([$($generics)*] $lit, $ty, AssignLiteral::from_literal);
    };
    ([$($generics:tt)*] $lit:ident, $ty:ty, $from:expr) => {
        #[diagnostic::do_not_recommend]
        impl<$($generics)*> Arm<$lit> for $ty {
            type Output = $ty;
            fn first(self) -> $ty {
                self
            }
            #[track_caller]
            fn second(literal: $lit) -> $ty {
                ($from)(literal)
            }
        }
        #[diagnostic::do_not_recommend]
        impl<$($generics)*> Arm<$ty> for $lit {
            type Output = $ty;
            #[track_caller]
            fn first(self) -> $ty {
                ($from)(self)
            }
            fn second(other: $ty) -> $ty {
                other
            }
        }
    };
}
literal_arm!([T: Num] IntegerLiteral, Scalar<T>);
literal_arm!([T: Float] FloatLiteral, Scalar<T>);
literal_arm!([T: Num] IntegerLiteral, Tile<T>, literal_tile);
literal_arm!([T: Float] FloatLiteral, Tile<T>, literal_tile);
literal_arm!([] IntegerLiteral, FloatLiteral, |literal: IntegerLiteral| FloatLiteral(literal.0 as f64));
literal_arm!([] bool, Scalar<bool>, Carried::into_handle);

/// The value of an arm that is a literal, where another arm is a tile, and one is chosen at specialization. The shape of a tile in an
/// arm that is not recorded is unknown: the literal is a tile without dimensions, which broadcasts.
#[track_caller]
fn literal_tile<T: Dtype>(literal: impl HostNum<T>) -> Tile<T> {
    Tile::from_value(constant(literal.number(), T::dtype(), &[]))
}

macro_rules! assign_literals {
    ($lit:ident: $($ty:ty),*) => { $(
        impl AssignLiteral<$lit> for $ty {
            #[track_caller]
            fn from_literal(literal: $lit) -> Self {
                assign_literals!(@$lit literal, $ty)
            }
        }
        #[diagnostic::do_not_recommend]
        impl AssignableTo<$ty> for $lit {
            #[track_caller]
            fn into_assigned(self) -> $ty {
                AssignLiteral::from_literal(self)
            }
        }
        literal_arm!([] $lit, $ty);
    )* };
    (@IntegerLiteral $lit:ident, $ty:ty) => {
        match <$ty>::try_from($lit.0) {
            Ok(n) => n,
            Err(_) => fail(error_here(format!("{} does not fit into {}", $lit.0, stringify!($ty))).label("out of range")),
        }
    };
    (@FloatLiteral $lit:ident, $ty:ty) => { $lit.0 as $ty };
}
assign_literals!(IntegerLiteral: i8, i16, i32, i64, u8, u16, u32, u64, usize);
assign_literals!(FloatLiteral: f32, f64);

impl AssignLiteral<IntegerLiteral> for IntegerLiteral {
    fn from_literal(literal: IntegerLiteral) -> Self {
        literal
    }
}

impl AssignLiteral<FloatLiteral> for FloatLiteral {
    fn from_literal(literal: FloatLiteral) -> Self {
        literal
    }
}

/// A literal assigned to a variable that already has a type.
#[doc(hidden)]
#[track_caller]
pub fn literal_for<T: AssignLiteral<L>, L>(_variable: &T, literal: L) -> T {
    T::from_literal(literal)
}

/// A literal that is the result of a function.
#[doc(hidden)]
#[track_caller]
pub fn literal_of<T: AssignLiteral<L>, L>(literal: L) -> T {
    T::from_literal(literal)
}

/// What a run-time `if` yields, where its other arm is a number literal: a tile of that number, or a scalar.
#[diagnostic::on_unimplemented(
    message = "one arm is a number literal, another one is a `{Self}`",
    label = "expected a number, or a tile of numbers; `0.0` needs a float type"
)]
pub trait LikeArm<L>: Sized {
    /// The literal with the type and shape of the other arm.
    #[doc(hidden)]
    #[track_caller]
    fn like_arm(&self, literal: L) -> Self;
}

macro_rules! like_arms {
    ($($handle:ident),*) => { $(
        impl<T: Dtype, L: HostNum<T>> LikeArm<L> for $handle<T> {
            #[track_caller]
            fn like_arm(&self, literal: L) -> Self {
                Self::from_value(constant(literal.number(), T::dtype(), &shape(self.value())))
            }
        }
    )* };
}
like_arms!(Tile, Scalar);

/// Values that can be assigned to a variable of type `Variable`: those of the same type.
#[diagnostic::on_unimplemented(
    message = "cannot assign a `{Self}` to a variable of type `{Variable}`",
    label = "expected `{Variable}`",
    note = "a variable keeps its type and shape; one that starts with `0` or `0.0` is an i32 or f32 scalar in a `range` loop; \
            elsewhere write `scalar::<f32>(0.0)`; a tile of one element becomes a scalar by `.scalar()`",
    note = "initialize it with a value of its final type (`zeros::<f32>([n])` for a tile, `scalar::<i64>(0)` for another number, `let mut n: usize \
            = 0` for one known at specialization), or convert the new value with `.to::<…>()`"
)]
pub trait AssignableTo<Variable> {
    #[doc(hidden)]
    #[track_caller]
    fn into_assigned(self) -> Variable;
}

impl<X> AssignableTo<X> for X {
    fn into_assigned(self) -> X {
        self
    }
}

/// A Rust number assigned to a scalar.
macro_rules! assigned_numbers {
    ($($ty:ty),*) => { $(
        // Keeps the list of number types out of messages.
        #[diagnostic::do_not_recommend]
        impl<T: Dtype> AssignableTo<Scalar<T>> for $ty
        where
            $ty: HostNum<T>,
        {
            #[track_caller]
            fn into_assigned(self) -> Scalar<T> {
                Scalar::from_value(constant(self.number(), T::dtype(), &[]))
            }
        }
    )* };
}
assigned_numbers!(bool, i8, i16, i32, i64, u8, u16, u32, u64, usize, f32, f64, IntegerLiteral, FloatLiteral);

/// The type of a variable, without borrowing it.
#[doc(hidden)]
pub fn type_of<X>(_variable: &X) -> PhantomData<X> {
    PhantomData
}

/// The right side of `variable = value`.
#[doc(hidden)]
#[track_caller]
pub fn assigned<X, V: AssignableTo<X>>(_variable: PhantomData<X>, value: V) -> X {
    value.into_assigned()
}

/// The number in an element type. Fails with a message if it is out of range.
#[track_caller]
fn literal(number: Number, dtype: DType) -> Literal {
    match (number, dtype) {
        (Number::Int(n), d) if d.is_int() => {
            let (low, high) = int_range(d);
            if n < low || n > high {
                fail(
                    error_here(format!("{n} does not fit into {d}"))
                        .label(format!("{d} holds {low} to {high}"))
                        .help("convert the other side to a wider type, as in `.to::<i64>()`"),
                );
            }
            Literal::Int(n as i64)
        }
        (Number::Int(n), DType::Bool) => Literal::Bool(n != 0),
        (Number::Int(n), _) => float_literal(n as f64, dtype),
        (Number::Float(x), _) => float_literal(x, dtype),
        (Number::Bool(x), _) => Literal::Bool(x),
    }
}

#[track_caller]
fn float_literal(x: f64, dtype: DType) -> Literal {
    if x.is_finite() && num::decode(dtype, num::encode(dtype, x)).is_infinite() {
        fail(error_here(format!("{x:e} does not fit into {dtype}")).label("would be infinite").help(
            "write infinity as `f32::INFINITY`, or convert the other side to a wider type, as in `.to::<f32>()`",
        ));
    }
    Literal::Float(x)
}

/// A constant of the given element type and shape. Fails with a message if a number is out of range.
#[track_caller]
pub(crate) fn constant(number: Number, dtype: DType, shape: &[usize]) -> Value {
    let literal = literal(number, dtype);
    emit(|b| b.constant(literal, Type::tensor(shape, dtype)))
}

/// The operand as an IR value; a number becomes a scalar constant.
#[track_caller]
pub(crate) fn materialize(raw: Raw, dtype: DType) -> Value {
    match raw {
        Raw::Value(v) => v,
        Raw::Number(n) => constant(n, dtype, &[]),
    }
}

/// The common shape of two operands: equal, or one is a scalar, or per dimension equal extents or an extent of 1.
///
/// # Errors
/// The dimension in which they differ, or `None` if their ranks differ.
fn broadcast_shapes(a: &[usize], b: &[usize]) -> Result<Vec<usize>, Option<usize>> {
    match (a.len(), b.len()) {
        (_, 0) => Ok(a.to_vec()),
        (0, _) => Ok(b.to_vec()),
        (m, n) if m != n => Err(None),
        _ => a
            .iter()
            .zip(b)
            .enumerate()
            .map(|(i, (&m, &n))| match (m, n) {
                (m, n) if m == n => Ok(m),
                (1, n) => Ok(n),
                (m, 1) => Ok(m),
                _ => Err(Some(i)),
            })
            .collect(),
    }
}

/// The common shape of all operands of `what`.
#[track_caller]
pub(crate) fn common_shape(shapes: &[Vec<usize>], what: &str) -> Vec<usize> {
    let mut common: Vec<usize> = Vec::new();
    for next in shapes {
        common = match broadcast_shapes(&common, next) {
            Ok(shape) => shape,
            Err(where_) => shapes_differ(&common, next, where_, what),
        };
    }
    common
}

#[track_caller]
fn shapes_differ(a: &[usize], b: &[usize], axis: Option<usize>, what: &str) -> ! {
    let diagnostic = error_here(format!("shapes {a:?} and {b:?} cannot be broadcast together in {what}"));
    fail(match axis {
        Some(axis) => diagnostic
            .label(format!("dimension {axis} is {} on one side and {} on the other", a[axis], b[axis]))
            .note("two dimensions are compatible if they are equal or one of them is 1"),
        None => {
            let (low, high) = if a.len() < b.len() { (a, b) } else { (b, a) };
            // If the shorter shape matches part of the longer one, names the axis that is missing.
            let axis = (0..=low.len()).find(|&axis| {
                let mut wide = low.to_vec();
                wide.insert(axis, 1);
                wide.len() == high.len() && broadcast_shapes(&wide, high).is_ok()
            });
            let axis = axis.map_or("…".to_string(), |a| a.to_string());
            diagnostic
                .label(format!("ranks {} and {}", a.len(), b.len()))
                .note("tiles are not extended to a higher rank implicitly")
                .help(format!("add a dimension to the tile of shape {low:?}: `.expand_dims({axis})`"))
        }
    })
}

/// The value broadcast to the shape `to`, with which the value's shape must be compatible.
#[track_caller]
pub(crate) fn broadcast(v: Value, to: &[usize]) -> Value {
    let from = shape(v);
    if from.is_empty() { emit(|b| b.splat(v, to)) } else { emit(|b| b.broadcast(v, to)) }
}

/// Operands of one element type, broadcast to their common shape.
#[track_caller]
pub(crate) fn broadcast_operands<const N: usize>(raws: [Raw; N], dtype: DType, what: &str) -> [Value; N] {
    let shapes = raws.map(|raw| match raw {
        Raw::Value(v) => shape(v),
        Raw::Number(_) => Vec::new(),
    });
    let common = common_shape(&shapes, what);
    let mut values = Vec::with_capacity(N);
    // A closure would lose the caller's line.
    for raw in raws {
        values.push(match raw {
            Raw::Value(v) => broadcast(v, &common),
            Raw::Number(n) => constant(n, dtype, &common),
        });
    }
    values.try_into().expect("internal compiler error: another number of operands")
}

/// A scalar as i64, for indices: constants stay constants.
#[track_caller]
pub(crate) fn to_i64(v: Value) -> Value {
    match constant_int(v) {
        Some(n) => emit(|b| b.int(n, DType::I64)),
        None => emit(|b| b.cast(v, DType::I64)),
    }
}

/// Fails with a message if a tile is given for a scalar.
#[track_caller]
pub(crate) fn expect_scalar(v: Value, what: &str) -> Value {
    let found = shape(v);
    if !found.is_empty() {
        fail(
            error_here(format!("{what} must be a scalar, found a tile of shape {}", diag_text::shape(&found)))
                .label("not a scalar"),
        );
    }
    v
}
