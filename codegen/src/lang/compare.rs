//! Comparison and logical operators in kernel code (`==`, `<`, `&&`, …), typed like arithmetic.

use super::arith::binary;
use super::dtype::{Dtype, Num};
use super::handle::{Data, Scalar, Tile};
use super::operand::{FloatLiteral, HostNum, IntegerLiteral, Number, Operand, Raw, broadcast_operands, constant};
use super::record::{emit, in_combine, inline, ops_of, region, yield_in};
use crate::ir::{BinaryOp, CmpOp, DType, Effects, Op, Type, Value};

#[track_caller]
pub(crate) fn comparison(op: CmpOp, a: Raw, b: Raw, dtype: DType) -> Value {
    let [a, b] = broadcast_operands([a, b], dtype, "a comparison");
    emit(|builder| builder.cmp(op, a, b))
}

/// Operand pairs that `==` and `!=` accept.
#[diagnostic::on_unimplemented(
    message = "`{Self}` and `{R}` cannot be compared",
    label = "no comparison between `{Self}` and `{R}`",
    note = "element types are not converted implicitly: convert one side with `.to::<…>()`"
)]
pub trait CompareEq<R> {
    type Output;
    #[doc(hidden)]
    #[track_caller]
    fn compare_eq(self, rhs: R, op: CmpOp) -> Self::Output;
}

/// Operand pairs that `<`, `<=`, `>` and `>=` accept.
#[diagnostic::on_unimplemented(
    message = "`{Self}` and `{R}` cannot be compared",
    label = "no ordering between `{Self}` and `{R}`",
    note = "element types are not converted implicitly: convert one side with `.to::<…>()`"
)]
pub trait CompareOrd<R>: CompareEq<R> {
    #[doc(hidden)]
    #[track_caller]
    fn compare_ord(self, rhs: R, op: CmpOp) -> Self::Output;
}

impl<T: Dtype, R: Operand<T>> CompareEq<R> for Tile<T> {
    type Output = Tile<bool>;
    #[track_caller]
    fn compare_eq(self, rhs: R, op: CmpOp) -> Tile<bool> {
        Tile::from_value(comparison(op, self.raw(), rhs.raw(), T::dtype()))
    }
}

impl<T: Num, R: Operand<T>> CompareOrd<R> for Tile<T> {
    #[track_caller]
    fn compare_ord(self, rhs: R, op: CmpOp) -> Tile<bool> {
        self.compare_eq(rhs, op)
    }
}

impl<T: Dtype, R: Operand<T>> CompareEq<R> for Scalar<T> {
    type Output = <R::WithScalar as Data>::As<bool>;
    #[track_caller]
    fn compare_eq(self, rhs: R, op: CmpOp) -> Self::Output {
        Data::from_value(comparison(op, self.raw(), rhs.raw(), T::dtype()))
    }
}

impl<T: Num, R: Operand<T>> CompareOrd<R> for Scalar<T> {
    #[track_caller]
    fn compare_ord(self, rhs: R, op: CmpOp) -> Self::Output {
        self.compare_eq(rhs, op)
    }
}

/// A shape, as `x.shape()` gives it, with a list of extents.
impl<E: super::index::Extent, const N: usize> CompareEq<[E; N]> for Vec<usize> {
    type Output = bool;
    #[track_caller]
    fn compare_eq(self, rhs: [E; N], op: CmpOp) -> bool {
        let rhs: Vec<usize> = rhs.into_iter().map(super::index::Extent::extent).collect();
        (self == rhs) == (op == CmpOp::Eq)
    }
}

impl CompareEq<Vec<usize>> for Vec<usize> {
    type Output = bool;
    fn compare_eq(self, rhs: Vec<usize>, op: CmpOp) -> bool {
        (self == rhs) == (op == CmpOp::Eq)
    }
}

/// i32 with i64: the narrower operand is widened.
macro_rules! widening {
    ($($a:ty, $b:ty => $out:ident;)*) => { $(
        impl CompareEq<$b> for $a {
            type Output = $out<bool>;
            #[track_caller]
            fn compare_eq(self, rhs: $b, op: CmpOp) -> $out<bool> {
                let (a, b) = (self.to::<i64>(), rhs.to::<i64>());
                $out::from_value(comparison(op, a.raw(), b.raw(), DType::I64))
            }
        }
        impl CompareOrd<$b> for $a {
            #[track_caller]
            fn compare_ord(self, rhs: $b, op: CmpOp) -> $out<bool> {
                self.compare_eq(rhs, op)
            }
        }
    )* };
}
widening! {
    Tile<i32>, Tile<i64> => Tile;
    Tile<i64>, Tile<i32> => Tile;
    Tile<i32>, Scalar<i64> => Tile;
    Tile<i64>, Scalar<i32> => Tile;
    Scalar<i32>, Tile<i64> => Tile;
    Scalar<i64>, Tile<i32> => Tile;
    Scalar<i32>, Scalar<i64> => Scalar;
    Scalar<i64>, Scalar<i32> => Scalar;
}

/// A Rust number on the left of a tile or scalar.
macro_rules! host_left {
    ($handle:ident: $($ty:ty),*) => { $(
        impl<T: Dtype> CompareEq<$handle<T>> for $ty
        where
            $ty: HostNum<T>,
        {
            type Output = $handle<bool>;
            #[track_caller]
            fn compare_eq(self, rhs: $handle<T>, op: CmpOp) -> $handle<bool> {
                $handle::from_value(comparison(op, Operand::<T>::raw(self), rhs.raw(), T::dtype()))
            }
        }
        impl<T: Dtype> CompareOrd<$handle<T>> for $ty
        where
            $ty: HostNum<T>,
        {
            #[track_caller]
            fn compare_ord(self, rhs: $handle<T>, op: CmpOp) -> $handle<bool> {
                self.compare_eq(rhs, op)
            }
        }
    )* };
}
host_left!(Tile: bool, i8, i16, i32, i64, u8, u16, u32, u64, usize, f32, f64, IntegerLiteral, FloatLiteral);
host_left!(Scalar: bool, i8, i16, i32, i64, u8, u16, u32, u64, usize, f32, f64, IntegerLiteral, FloatLiteral);

/// Whether a comparison is true of an ordering. With `None` (a NaN operand) only `!=` is true.
fn holds(op: CmpOp, order: Option<std::cmp::Ordering>) -> bool {
    match op {
        CmpOp::Eq => order.is_some_and(|o| o.is_eq()),
        CmpOp::Ne => order.is_none_or(|o| o.is_ne()),
        CmpOp::Lt => order.is_some_and(|o| o.is_lt()),
        CmpOp::Le => order.is_some_and(|o| o.is_le()),
        CmpOp::Gt => order.is_some_and(|o| o.is_gt()),
        CmpOp::Ge => order.is_some_and(|o| o.is_ge()),
    }
}

/// A Rust number with a literal, which takes its type (integers compare exactly).
macro_rules! literals {
    ($lit:ident as $wide:ty: $($ty:ty),*) => { $(
        impl CompareEq<$lit> for $ty {
            type Output = bool;
            fn compare_eq(self, rhs: $lit, op: CmpOp) -> bool {
                holds(op, (self as $wide).partial_cmp(&(rhs.0 as $wide)))
            }
        }
        impl CompareOrd<$lit> for $ty {
            fn compare_ord(self, rhs: $lit, op: CmpOp) -> bool {
                self.compare_eq(rhs, op)
            }
        }
        impl CompareEq<$ty> for $lit {
            type Output = bool;
            fn compare_eq(self, rhs: $ty, op: CmpOp) -> bool {
                holds(op, (self.0 as $wide).partial_cmp(&(rhs as $wide)))
            }
        }
        impl CompareOrd<$ty> for $lit {
            fn compare_ord(self, rhs: $ty, op: CmpOp) -> bool {
                self.compare_eq(rhs, op)
            }
        }
    )* };
}
literals!(IntegerLiteral as i128: i8, i16, i32, i64, u8, u16, u32, u64, usize);
literals!(FloatLiteral as f32: f32);
literals!(FloatLiteral as f64: f64);

/// Implements the comparison of two Rust values, as in Rust.
#[doc(hidden)]
#[macro_export]
macro_rules! compare_host {
    (eq: $($ty:ty),*) => { $(
        impl $crate::lang::compare::CompareEq<$ty> for $ty {
            type Output = bool;
            fn compare_eq(self, rhs: $ty, op: $crate::ir::CmpOp) -> bool {
                if op == $crate::ir::CmpOp::Ne { self != rhs } else { self == rhs }
            }
        }
    )* };
    (ord: $($ty:ty),*) => { $(
        $crate::compare_host!(eq: $ty);
        impl $crate::lang::compare::CompareOrd<$ty> for $ty {
            fn compare_ord(self, rhs: $ty, op: $crate::ir::CmpOp) -> bool {
                match op {
                    CmpOp::Lt => self < rhs,
                    CmpOp::Le => self <= rhs,
                    CmpOp::Gt => self > rhs,
                    CmpOp::Ge => self >= rhs,
                    CmpOp::Eq => self == rhs,
                    CmpOp::Ne => self != rhs,
                }
            }
        }
    )* };
}
compare_host!(ord: i8, i16, i32, i64, u8, u16, u32, u64, usize, f32, f64);
compare_host!(ord: IntegerLiteral, FloatLiteral);
compare_host!(eq: bool, &str, DType, crate::ir::Precision);

macro_rules! comparisons {
    ($($name:ident, $trait:ident, $method:ident, $op:ident;)*) => { $(
        #[doc(hidden)]
        #[track_caller]
        pub fn $name<A: $trait<B>, B>(a: A, b: B) -> A::Output {
            a.$method(b, CmpOp::$op)
        }
    )* };
}
comparisons! {
    eq, CompareEq, compare_eq, Eq;
    ne, CompareEq, compare_eq, Ne;
    lt, CompareOrd, compare_ord, Lt;
    le, CompareOrd, compare_ord, Le;
    gt, CompareOrd, compare_ord, Gt;
    ge, CompareOrd, compare_ord, Ge;
}

/// Conditions that `&&` and `||` accept. Both sides are evaluated if either is a run-time value, unless both are scalars
/// and the right side accesses memory: then it is evaluated only where it decides the result.
#[diagnostic::on_unimplemented(message = "`&&` and `||` need conditions, found `{Self}` and `{R}`")]
pub trait Logic<R> {
    type Output;
    #[doc(hidden)]
    #[track_caller]
    fn logic(self, rhs: impl FnOnce() -> R, op: BinaryOp) -> Self::Output;
}

impl Logic<bool> for bool {
    type Output = bool;
    fn logic(self, rhs: impl FnOnce() -> bool, op: BinaryOp) -> bool {
        if op == BinaryOp::And { self && rhs() } else { self || rhs() }
    }
}

macro_rules! logic {
    ($($left:ty, $right:ty => $out:ty;)*) => { $(
        impl Logic<$right> for $left {
            type Output = $out;
            #[track_caller]
            fn logic(self, rhs: impl FnOnce() -> $right, op: BinaryOp) -> $out {
                <$out>::from_value(binary(op, Operand::<bool>::raw(self), Operand::<bool>::raw(rhs()), DType::Bool))
            }
        }
    )* };
}
logic! {
    bool, Scalar<bool> => Scalar<bool>;
    bool, Tile<bool> => Tile<bool>;
    Scalar<bool>, bool => Scalar<bool>;
    Scalar<bool>, Tile<bool> => Tile<bool>;
    Tile<bool>, bool => Tile<bool>;
    Tile<bool>, Scalar<bool> => Tile<bool>;
    Tile<bool>, Tile<bool> => Tile<bool>;
}

impl Logic<Scalar<bool>> for Scalar<bool> {
    type Output = Scalar<bool>;
    #[track_caller]
    fn logic(self, rhs: impl FnOnce() -> Scalar<bool>, op: BinaryOp) -> Scalar<bool> {
        let both = |right: Scalar<bool>| Scalar::from_value(binary(op, self.raw(), right.raw(), DType::Bool));
        if in_combine() {
            return both(rhs());
        }
        let (block, right) = region(&[], |_| rhs());
        if ops_of(block).iter().all(|(op, _)| op.effects() == Effects::Pure) {
            inline(block);
            return both(right);
        }
        let (other, decided) = region(&[], |_| constant(Number::Bool(op == BinaryOp::Or), DType::Bool, &[]));
        yield_in(block, &[right.value()]);
        yield_in(other, &[decided]);
        let regions = if op == BinaryOp::And { [block, other] } else { [other, block] };
        let condition = self.value();
        Scalar::from_value(emit(|b| {
            let id = b.op_with_regions(Op::If, &[condition], &[Type::scalar(DType::Bool)], &regions);
            b.func.result(id)
        }))
    }
}

#[doc(hidden)]
#[track_caller]
pub fn and<A: Logic<B>, B>(a: A, b: impl FnOnce() -> B) -> A::Output {
    a.logic(b, BinaryOp::And)
}

#[doc(hidden)]
#[track_caller]
pub fn or<A: Logic<B>, B>(a: A, b: impl FnOnce() -> B) -> A::Output {
    a.logic(b, BinaryOp::Or)
}
