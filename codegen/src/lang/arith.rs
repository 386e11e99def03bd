//! Arithmetic: the operators in kernel code. Comparisons are in [`super::compare`].
//!
//! `#[kernel]` turns `a + b` into [`add`]`(a, b)` and so on, so that one rule ([`Combine`]) types them all: tile with
//! tile, scalar, or Rust number gives a tile; scalar with scalar or number gives a scalar; two Rust numbers stay a Rust
//! number. `i32` and `i64` may be mixed and promote to `i64`.

use super::dtype::{Dtype, Int};
use super::handle::{Data, Ptr, PtrTile, Scalar, Tile};
use super::operand::{
    FloatLiteral, HostNum, IntegerLiteral, Operand, Raw, broadcast, broadcast_operands, common_shape, materialize,
};
use super::record::{emit, error_here, fail, shape};
#[doc(hidden)]
pub use crate::ir::BinaryOp;
use crate::ir::{CmpOp, DType, Value};

/// Operand pairs that the arithmetic operators accept.
#[diagnostic::on_unimplemented(
    message = "`{Self}` and `{R}` cannot be combined",
    label = "incompatible operands `{Self}` and `{R}`",
    note = "element types are not converted implicitly: convert one side with `.to::<…>()`"
)]
pub trait Combine<R> {
    type Output;

    #[doc(hidden)]
    #[track_caller]
    fn combine(self, rhs: R, op: BinaryOp) -> Self::Output;

    /// As `combine` with `Min` or `Max`, but NaN if either operand is NaN.
    #[doc(hidden)]
    #[track_caller]
    fn extremum_or_nan(self, rhs: R, op: BinaryOp) -> Self::Output
    where
        Self: Sized,
    {
        self.combine(rhs, op)
    }
}

/// The operator as written in source, for messages.
fn symbol(op: BinaryOp) -> &'static str {
    match op {
        BinaryOp::Add => "+",
        BinaryOp::Sub => "-",
        BinaryOp::Mul => "*",
        BinaryOp::Div => "/",
        BinaryOp::CeilDiv => "cdiv",
        BinaryOp::Rem => "%",
        BinaryOp::Min => "minimum",
        BinaryOp::Max => "maximum",
        BinaryOp::And => "&",
        BinaryOp::Or => "|",
        BinaryOp::Xor => "^",
        BinaryOp::Shl => "<<",
        BinaryOp::Shr => ">>",
        BinaryOp::MulHi => "umulhi",
        BinaryOp::Rescale => "rescale",
    }
}

/// Fails with a message if the element type does not support the operation.
#[track_caller]
fn check_op(op: BinaryOp, dtype: DType) {
    let (legal, what) = match op {
        BinaryOp::Add
        | BinaryOp::Sub
        | BinaryOp::Mul
        | BinaryOp::Div
        | BinaryOp::Rem
        | BinaryOp::Min
        | BinaryOp::Max => (dtype != DType::Bool, "numbers"),
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => (!dtype.is_float(), "integers or bool"),
        BinaryOp::CeilDiv | BinaryOp::Shl | BinaryOp::Shr | BinaryOp::MulHi => (dtype.is_int(), "integers"),
        BinaryOp::Rescale => (dtype.is_float(), "floats"),
    };
    let small = dtype.is_f8();
    if !legal {
        fail(
            error_here(format!("`{}` requires {what}, found {dtype}", symbol(op)))
                .label(format!("the elements are {dtype}")),
        );
    }
    if small {
        fail(
            error_here(format!("{dtype} is a storage type: `{}` is not supported on it", symbol(op)))
                .label(format!("the elements are {dtype}"))
                .help("compute in a wider type: `.to::<f32>()`"),
        );
    }
}

#[track_caller]
pub(crate) fn binary(op: BinaryOp, a: Raw, b: Raw, dtype: DType) -> Value {
    check_op(op, dtype);
    let [a, b] = broadcast_operands([a, b], dtype, &format!("`{}`", symbol(op)));
    emit(|builder| builder.binary(op, a, b))
}

/// The smaller or larger of two numbers, or NaN if either is NaN.
#[track_caller]
fn extremum_or_nan(op: BinaryOp, a: Raw, b: Raw, dtype: DType) -> Value {
    check_op(op, dtype);
    let [a, b] = broadcast_operands([a, b], dtype, &format!("`{}`", symbol(op)));
    emit(|builder| {
        let extremum = builder.binary(op, a, b);
        if !dtype.is_float() {
            return extremum;
        }
        [b, a].into_iter().fold(extremum, |result, operand| {
            let is_nan = builder.cmp(CmpOp::Ne, operand, operand);
            builder.select(is_nan, operand, result)
        })
    })
}

impl<T: Dtype, R: Operand<T>> Combine<R> for Tile<T> {
    type Output = Tile<T>;
    #[track_caller]
    fn combine(self, rhs: R, op: BinaryOp) -> Tile<T> {
        Tile::from_value(binary(op, self.raw(), rhs.raw(), T::dtype()))
    }
    #[track_caller]
    fn extremum_or_nan(self, rhs: R, op: BinaryOp) -> Tile<T> {
        Tile::from_value(extremum_or_nan(op, self.raw(), rhs.raw(), T::dtype()))
    }
}

impl<T: Dtype, R: Operand<T>> Combine<R> for Scalar<T> {
    type Output = R::WithScalar;
    #[track_caller]
    fn combine(self, rhs: R, op: BinaryOp) -> R::WithScalar {
        Data::from_value(binary(op, self.raw(), rhs.raw(), T::dtype()))
    }
    #[track_caller]
    fn extremum_or_nan(self, rhs: R, op: BinaryOp) -> R::WithScalar {
        Data::from_value(extremum_or_nan(op, self.raw(), rhs.raw(), T::dtype()))
    }
}

/// i32 with i64: the narrower operand is widened.
macro_rules! widening {
    ($($a:ident, $b:ident => $out:ident;)*) => { $(
        widening!(@pair $a<i32>, $b<i64>, $out);
        widening!(@pair $a<i64>, $b<i32>, $out);
    )* };
    (@pair $a:ty, $b:ty, $out:ident) => {
        impl Combine<$b> for $a {
            type Output = $out<i64>;
            #[track_caller]
            fn combine(self, rhs: $b, op: BinaryOp) -> $out<i64> {
                let (a, b) = (self.to::<i64>(), rhs.to::<i64>());
                $out::from_value(binary(op, a.raw(), b.raw(), DType::I64))
            }
        }
    };
}
widening! {
    Tile, Tile => Tile;
    Tile, Scalar => Tile;
    Scalar, Tile => Tile;
    Scalar, Scalar => Scalar;
}

/// Fails with a message: the operation on these Rust numbers has no result.
#[track_caller]
fn host_failure(op: BinaryOp, a: impl std::fmt::Display, b: impl std::fmt::Display) -> ! {
    fail(
        error_here(format!("`{a} {} {b}` cannot be evaluated", symbol(op)))
            .label("overflow, division by zero, or an operation that this type does not support"),
    )
}

macro_rules! host_int_operation {
    ($op:expr, $a:expr, $b:expr) => {
        match $op {
            BinaryOp::Add => $a.checked_add($b),
            BinaryOp::Sub => $a.checked_sub($b),
            BinaryOp::Mul => $a.checked_mul($b),
            BinaryOp::Div => $a.checked_div($b),
            BinaryOp::CeilDiv => $a.checked_div($b).zip($a.checked_rem($b)).and_then(|(quotient, rest)| {
                // `checked_div` truncates: it rounds down if the remainder is not 0 and has the divisor's sign.
                quotient.checked_add((rest != 0 && (rest > 0) == ($b > 0)).into())
            }),
            BinaryOp::Rem => $a.checked_rem($b),
            BinaryOp::Min => Some($a.min($b)),
            BinaryOp::Max => Some($a.max($b)),
            BinaryOp::And => Some($a & $b),
            BinaryOp::Or => Some($a | $b),
            BinaryOp::Xor => Some($a ^ $b),
            BinaryOp::Shl => u32::try_from($b).ok().and_then(|n| $a.checked_shl(n)),
            BinaryOp::Shr => u32::try_from($b).ok().and_then(|n| $a.checked_shr(n)),
            BinaryOp::MulHi | BinaryOp::Rescale => None,
        }
    };
}

/// A Rust number on the left of a tile or scalar.
macro_rules! host_left {
    ($($ty:ty),*) => { $(
        host_left!(@with $ty, Tile);
        host_left!(@with $ty, Scalar);
    )* };
    (@with $ty:ty, $data:ident) => {
        impl<T: Dtype> Combine<$data<T>> for $ty where $ty: HostNum<T> {
            type Output = $data<T>;
            #[track_caller]
            fn combine(self, rhs: $data<T>, op: BinaryOp) -> $data<T> {
                $data::from_value(binary(op, Operand::<T>::raw(self), rhs.raw(), T::dtype()))
            }
            #[track_caller]
            fn extremum_or_nan(self, rhs: $data<T>, op: BinaryOp) -> $data<T> {
                $data::from_value(extremum_or_nan(op, Operand::<T>::raw(self), rhs.raw(), T::dtype()))
            }
        }
    };
}
host_left!(bool, i8, i16, i32, i64, u8, u16, u32, u64, usize, f32, f64, IntegerLiteral, FloatLiteral);

/// Two Rust numbers: folded at specialization.
macro_rules! host_pair {
    ($($ty:ty, $a:ident: $left:ty = $left_value:expr, $b:ident: $right:ty = $right_value:expr, $kind:ident;)*) => { $(
        impl Combine<$right> for $left {
            type Output = $ty;
            #[track_caller]
            fn combine(self, rhs: $right, op: BinaryOp) -> $ty {
                let ($a, $b) = (self, rhs);
                let (a, b): ($ty, $ty) = ($left_value, $right_value);
                host_pair!(@$kind op, a, b)
            }
            #[track_caller]
            fn extremum_or_nan(self, rhs: $right, op: BinaryOp) -> $ty {
                let ($a, $b) = (self, rhs);
                let (a, b): ($ty, $ty) = ($left_value, $right_value);
                // Only NaN differs from itself.
                #[allow(clippy::eq_op)]
                let nan = [a, b].into_iter().find(|x| x != x);
                nan.unwrap_or_else(|| a.combine(b, op))
            }
        }
    )* };
    (@int $op:expr, $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        match host_int_operation!($op, a, b) {
            Some(result) => result,
            None => host_failure($op, a, b),
        }
    }};
    (@float $op:expr, $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        match $op {
            BinaryOp::Add => a + b,
            BinaryOp::Sub => a - b,
            BinaryOp::Mul | BinaryOp::Rescale => a * b,
            BinaryOp::Div => a / b,
            BinaryOp::Rem => a % b,
            BinaryOp::Min => a.min(b),
            BinaryOp::Max => a.max(b),
            BinaryOp::CeilDiv
            | BinaryOp::And
            | BinaryOp::Or
            | BinaryOp::Xor
            | BinaryOp::Shl
            | BinaryOp::Shr
            | BinaryOp::MulHi => {
                host_failure($op, a, b)
            }
        }
    }};
}

/// A literal as a number of the other operand's type.
#[track_caller]
fn literal_as<T: TryFrom<i128>>(lit: IntegerLiteral, type_name: &str) -> T {
    match T::try_from(lit.0) {
        Ok(n) => n,
        Err(_) => fail(error_here(format!("{} does not fit into {type_name}", lit.0)).label("out of range")),
    }
}

macro_rules! host_pairs {
    (int: $($ty:ident),*) => { $(
        host_pair! {
            $ty, a: $ty = a, b: $ty = b, int;
            $ty, a: $ty = a, b: IntegerLiteral = literal_as(b, stringify!($ty)), int;
            $ty, a: IntegerLiteral = literal_as(a, stringify!($ty)), b: $ty = b, int;
        }
    )* };
    (float: $($ty:ident),*) => { $(
        host_pair! {
            $ty, a: $ty = a, b: $ty = b, float;
            $ty, a: $ty = a, b: FloatLiteral = b.0 as $ty, float;
            $ty, a: FloatLiteral = a.0 as $ty, b: $ty = b, float;
        }
    )* };
}
host_pairs!(int: i8, i16, i32, i64, u8, u16, u32, u64, usize);
host_pairs!(float: f32, f64);
host_pair! { i128, a: i128 = a, b: i128 = b, int; }

impl Combine<bool> for bool {
    type Output = bool;
    #[track_caller]
    fn combine(self, rhs: bool, op: BinaryOp) -> bool {
        match op {
            BinaryOp::And => self & rhs,
            BinaryOp::Or => self | rhs,
            BinaryOp::Xor => self ^ rhs,
            _ => host_failure(op, self, rhs),
        }
    }
}

/// Two literals give a literal.
impl Combine<IntegerLiteral> for IntegerLiteral {
    type Output = IntegerLiteral;
    #[track_caller]
    fn combine(self, rhs: IntegerLiteral, op: BinaryOp) -> IntegerLiteral {
        IntegerLiteral(self.0.combine(rhs.0, op))
    }
}

impl std::ops::Neg for IntegerLiteral {
    type Output = IntegerLiteral;
    fn neg(self) -> IntegerLiteral {
        IntegerLiteral(-self.0)
    }
}

impl std::ops::Not for IntegerLiteral {
    type Output = IntegerLiteral;
    fn not(self) -> IntegerLiteral {
        IntegerLiteral(!self.0)
    }
}

impl std::ops::Neg for FloatLiteral {
    type Output = FloatLiteral;
    fn neg(self) -> FloatLiteral {
        FloatLiteral(-self.0)
    }
}

macro_rules! float_literals {
    ($($left:ident $a:expr, $right:ident $b:expr;)*) => { $(
        impl Combine<$right> for $left {
            type Output = FloatLiteral;
            #[track_caller]
            fn combine(self, rhs: $right, op: BinaryOp) -> FloatLiteral {
                FloatLiteral($a(self).combine($b(rhs), op))
            }
        }
    )* };
}
float_literals! {
    FloatLiteral |x: FloatLiteral| x.0, FloatLiteral |x: FloatLiteral| x.0;
    IntegerLiteral |x: IntegerLiteral| x.0 as f64, FloatLiteral |x: FloatLiteral| x.0;
    FloatLiteral |x: FloatLiteral| x.0, IntegerLiteral |x: IntegerLiteral| x.0 as f64;
}

/// Offsets that can be added to a pointer: integers, in elements.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be added to a pointer: offsets are integers, in elements",
    label = "expected an integer tile, scalar or number"
)]
pub trait Offset<T: Dtype> {
    /// The type of the moved pointer, for a scalar pointer.
    type Moved;
    #[doc(hidden)]
    fn raw_offset(self) -> Raw;
    #[doc(hidden)]
    fn offset_type() -> DType;
    #[doc(hidden)]
    fn moved(v: Value, writable: bool) -> Self::Moved;
}

impl<T: Dtype, I: Int> Offset<T> for Tile<I> {
    type Moved = PtrTile<T>;
    fn raw_offset(self) -> Raw {
        self.raw()
    }
    fn offset_type() -> DType {
        I::dtype()
    }
    fn moved(v: Value, writable: bool) -> PtrTile<T> {
        PtrTile::new(v, writable)
    }
}

impl<T: Dtype, I: Int> Offset<T> for Scalar<I> {
    type Moved = Ptr<T>;
    fn raw_offset(self) -> Raw {
        self.raw()
    }
    fn offset_type() -> DType {
        I::dtype()
    }
    fn moved(v: Value, writable: bool) -> Ptr<T> {
        Ptr::new(v, writable)
    }
}

macro_rules! host_offsets {
    ($($ty:ty),*) => { $(
        impl<T: Dtype> Offset<T> for $ty {
            type Moved = Ptr<T>;
            fn raw_offset(self) -> Raw {
                Operand::<i64>::raw(self)
            }
            fn offset_type() -> DType {
                DType::I64
            }
            fn moved(v: Value, writable: bool) -> Ptr<T> {
                Ptr::new(v, writable)
            }
        }
    )* };
}
host_offsets!(i32, i64, u32, usize, IntegerLiteral);

/// `ptr ± offset`, broadcast to their common shape. Converts offsets of other types to i32 or i64.
#[track_caller]
fn move_pointer<T: Dtype, I: Offset<T>>(ptr: Value, offset: I, op: BinaryOp) -> Value {
    if !matches!(op, BinaryOp::Add | BinaryOp::Sub) {
        let message = format!("`{}` is not supported on pointers", symbol(op));
        fail(error_here(message).label("pointers support only `+` and `-`"));
    }
    let dtype = I::offset_type();
    let mut offset = materialize(offset.raw_offset(), dtype);
    if !matches!(dtype, DType::I32 | DType::I64) {
        let wide = if matches!(dtype, DType::U32 | DType::U64) { DType::I64 } else { DType::I32 };
        offset = emit(|b| b.cast(offset, wide));
    }
    if op == BinaryOp::Sub {
        offset = emit(|b| b.unary(crate::ir::UnaryOp::Neg, offset));
    }
    let common = common_shape(&[shape(ptr), shape(offset)], "pointer arithmetic");
    let (ptr, offset) = (broadcast(ptr, &common), broadcast(offset, &common));
    emit(|b| b.ptr_add(ptr, offset))
}

impl<T: Dtype, I: Offset<T>> Combine<I> for Ptr<T> {
    type Output = I::Moved;
    #[track_caller]
    fn combine(self, rhs: I, op: BinaryOp) -> I::Moved {
        I::moved(move_pointer(self.v, rhs, op), self.writable)
    }
}

impl<T: Dtype, I: Offset<T>> Combine<I> for PtrTile<T> {
    type Output = PtrTile<T>;
    #[track_caller]
    fn combine(self, rhs: I, op: BinaryOp) -> PtrTile<T> {
        PtrTile::new(move_pointer(self.v, rhs, op), self.writable)
    }
}

macro_rules! operators {
    ($($(#[$meta:meta])* $name:ident, $op:ident;)*) => { $(
        $(#[$meta])*
        #[track_caller]
        pub fn $name<A: Combine<B>, B>(a: A, b: B) -> A::Output {
            a.combine(b, BinaryOp::$op)
        }
    )* };
}
operators! {
    /// `a + b`.
    add, Add;
    /// `a - b`.
    sub, Sub;
    /// `a * b`.
    mul, Mul;
    /// `a / b`: truncates toward zero for integers.
    div, Div;
    /// ⌈a / b⌉ for integers. No intermediate result wraps.
    cdiv, CeilDiv;
    /// `a % b`: has the sign of `a`, as in Rust.
    rem, Rem;
    /// `a & b`.
    bitand, And;
    /// `a | b`.
    bitor, Or;
    /// `a ^ b`.
    bitxor, Xor;
    /// `a << b`.
    shl, Shl;
    /// `a >> b`: arithmetic for signed integers.
    shr, Shr;
    /// High half of the full product of two integers.
    umulhi, MulHi;
    /// `x * factor` of floats, for factors that are mostly 1: a warp whose factors are all 1 may skip the multiplications. The
    /// product is rounded by itself, also where `*` would become a part of a fused multiply-add.
    rescale, Rescale;
}

macro_rules! extrema {
    ($($(#[$meta:meta])* $name:ident, $op:ident;)*) => { $(
        $(#[$meta])*
        #[track_caller]
        pub fn $name<A: Combine<B, Output = O>, B, O>(a: A, b: B, propagate_nan: bool) -> O {
            if propagate_nan { a.extremum_or_nan(b, BinaryOp::$op) } else { a.combine(b, BinaryOp::$op) }
        }
    )* };
}
extrema! {
    /// The smaller of two numbers, elementwise. If one is NaN, the other; with `propagate_nan`, NaN.
    minimum, Min;
    /// The larger of two numbers, elementwise. If one is NaN, the other; with `propagate_nan`, NaN.
    maximum, Max;
}

/// Rust's own operators, for code outside `#[kernel]` and `#[device_fn]`.
macro_rules! rust_operators {
    ($($trait:ident, $method:ident, $op:ident;)*) => { $(
        impl<T: Dtype, R: Operand<T>> std::ops::$trait<R> for Tile<T> {
            type Output = Tile<T>;
            #[track_caller]
            fn $method(self, rhs: R) -> Tile<T> {
                self.combine(rhs, BinaryOp::$op)
            }
        }
        impl<T: Dtype, R: Operand<T>> std::ops::$trait<R> for Scalar<T> {
            type Output = R::WithScalar;
            #[track_caller]
            fn $method(self, rhs: R) -> R::WithScalar {
                self.combine(rhs, BinaryOp::$op)
            }
        }
    )* };
}
rust_operators! {
    Add, add, Add;
    Sub, sub, Sub;
    Mul, mul, Mul;
    Div, div, Div;
    Rem, rem, Rem;
    BitAnd, bitand, And;
    BitOr, bitor, Or;
    BitXor, bitxor, Xor;
    Shl, shl, Shl;
    Shr, shr, Shr;
}
