//! Values in kernel code: `Copy` handles to IR values of the function that is being recorded.

use super::diag_text;
use super::dtype::{Bits, Dtype, Float, Int, Num};
use super::record::{emit, error_here, shape, ty};
use crate::ir::{BinaryOp, DType, Literal, UnaryOp, Value};
use std::marker::PhantomData;

/// A tile: a block of elements whose shape is known at specialization. A rank-0 tile (a full reduction) can be used as
/// a scalar.
#[derive(Clone, Copy, Debug)]
pub struct Tile<T: Dtype> {
    v: Value,
    elem: PhantomData<fn() -> T>,
}

/// One run-time number, uniform across the program instance.
#[derive(Clone, Copy, Debug)]
pub struct Scalar<T: Dtype> {
    v: Value,
    elem: PhantomData<fn() -> T>,
}

/// A pointer to elements in global memory.
#[derive(Clone, Copy, Debug)]
pub struct Ptr<T: Dtype> {
    pub(crate) v: Value,
    pub(crate) writable: bool,
    elem: PhantomData<fn() -> T>,
}

/// A tile of pointers: the result of `ptr + offsets`.
#[derive(Clone, Copy, Debug)]
pub struct PtrTile<T: Dtype> {
    pub(crate) v: Value,
    pub(crate) writable: bool,
    elem: PhantomData<fn() -> T>,
}

/// A block of a tensor in memory: base, shape, strides, offsets and block shape. Block pointers and tensor descriptors
/// are both of this type.
#[derive(Clone, Copy, Debug)]
#[must_use = "a block pointer is a value: `p = p.advance([…])` moves `p`"]
pub struct BlockPtr<T: Dtype> {
    pub(crate) v: Value,
    pub(crate) writable: bool,
    elem: PhantomData<fn() -> T>,
}

macro_rules! memory_handle {
    ($($name:ident),*) => { $(
        impl<T: Dtype> $name<T> {
            pub(crate) fn new(v: Value, writable: bool) -> Self {
                $name { v, writable, elem: PhantomData }
            }
        }
    )* };
}
memory_handle!(Ptr, PtrTile, BlockPtr);

/// Tiles and scalars.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is neither a tile nor a run-time scalar",
    note = "create one with `scalar(…)` or `full([…], …)`"
)]
pub trait Data: Copy {
    /// Type of the elements.
    type Elem: Dtype;
    /// The same shape with another element type.
    type As<U: Dtype>: Data<Elem = U>;

    #[doc(hidden)]
    fn value(self) -> Value;
    #[doc(hidden)]
    fn from_value(v: Value) -> Self;

    /// Converts the elements to another type. Conversions to floats round to nearest even, float to integer truncates
    /// and saturates (NaN gives 0), integer to integer wraps, and to `bool` tests for ≠ 0.
    #[track_caller]
    fn to<U: Dtype>(self) -> Self::As<U> {
        // `dtype` reads the recorder's type parameters, which `emit` has borrowed: called before it.
        let (v, to) = (self.value(), U::dtype());
        Self::As::from_value(emit(|b| b.cast(v, to)))
    }

    /// Reinterprets the bits as another element type of the same width.
    #[track_caller]
    fn bitcast<U: Dtype>(self) -> Self::As<U> {
        let v = self.value();
        let (from, to) = (Self::Elem::dtype(), U::dtype());
        if from.bits() != to.bits() {
            let message = format!(
                "`bitcast` needs a type of the same width: {from} has {} bits, {to} has {}",
                from.bits(),
                to.bits()
            );
            super::record::fail(
                error_here(message).label("widths differ").help(format!("`.to::<{to}>()` converts the values")),
            );
        }
        Self::As::from_value(emit(|b| b.bitcast(v, to)))
    }

    /// |x|.
    #[track_caller]
    fn abs(self) -> Self {
        if !Self::Elem::dtype().is_f8() {
            return unary(UnaryOp::Abs, self);
        }
        // By its sign bit: a conversion to f32 and back would make infinity the largest number.
        let (v, to) = (self.value(), Self::Elem::dtype());
        Self::from_value(emit(|b| {
            let bits = b.bitcast(v, DType::U8);
            let ty = b.func.ty(bits).clone();
            let mask = b.constant(Literal::Int(0x7f), ty);
            let bits = b.binary(BinaryOp::And, bits, mask);
            b.bitcast(bits, to)
        }))
    }
}

/// Elementwise functions of floats, as methods.
pub trait FloatData: Data<Elem: Float> {
    /// eˣ.
    #[track_caller]
    fn exp(self) -> Self {
        unary(UnaryOp::Exp, self)
    }
    /// 2ˣ.
    #[track_caller]
    fn exp2(self) -> Self {
        unary(UnaryOp::Exp2, self)
    }
    /// Natural logarithm.
    #[track_caller]
    fn log(self) -> Self {
        unary(UnaryOp::Log, self)
    }
    /// Logarithm to base 2.
    #[track_caller]
    fn log2(self) -> Self {
        unary(UnaryOp::Log2, self)
    }
    /// √x.
    #[track_caller]
    fn sqrt(self) -> Self {
        unary(UnaryOp::Sqrt, self)
    }
    /// 1/√x.
    #[track_caller]
    fn rsqrt(self) -> Self {
        unary(UnaryOp::Rsqrt, self)
    }
    #[track_caller]
    fn sin(self) -> Self {
        unary(UnaryOp::Sin, self)
    }
    #[track_caller]
    fn cos(self) -> Self {
        unary(UnaryOp::Cos, self)
    }
    #[track_caller]
    fn tanh(self) -> Self {
        unary(UnaryOp::Tanh, self)
    }
    /// Gauss error function.
    #[track_caller]
    fn erf(self) -> Self {
        unary(UnaryOp::Erf, self)
    }
    #[track_caller]
    fn floor(self) -> Self {
        unary(UnaryOp::Floor, self)
    }
    #[track_caller]
    fn ceil(self) -> Self {
        unary(UnaryOp::Ceil, self)
    }
}

impl<X: Data<Elem: Float>> FloatData for X {}

#[track_caller]
pub(crate) fn unary<X: Data>(op: UnaryOp, x: X) -> X {
    let v = x.value();
    X::from_value(emit(|b| b.unary(op, v)))
}

impl<T: Dtype> Data for Tile<T> {
    type Elem = T;
    type As<U: Dtype> = Tile<U>;
    fn value(self) -> Value {
        self.v
    }
    fn from_value(v: Value) -> Self {
        Tile { v, elem: PhantomData }
    }
}

impl<T: Dtype> Data for Scalar<T> {
    type Elem = T;
    type As<U: Dtype> = Scalar<U>;
    fn value(self) -> Value {
        self.v
    }
    fn from_value(v: Value) -> Self {
        Scalar { v, elem: PhantomData }
    }
}

impl<T: Dtype> Tile<T> {
    /// Extent of each dimension.
    pub fn shape(self) -> Vec<usize> {
        shape(self.v)
    }

    /// Number of dimensions.
    pub fn rank(self) -> usize {
        shape(self.v).len()
    }

    /// Number of elements.
    pub fn numel(self) -> usize {
        shape(self.v).iter().product()
    }

    /// The element type.
    pub fn dtype(self) -> DType {
        T::dtype()
    }

    /// Converts a tile of one element to a scalar, which an `if` or an index on a reduced value needs.
    #[track_caller]
    pub fn scalar(self) -> Scalar<T> {
        let shape = shape(self.v);
        match shape.len() {
            0 => Scalar::from_value(self.v),
            n if shape.iter().product::<usize>() == 1 => {
                // A reduction over an axis of extent 1 extracts its only element; the combining function is never
                // applied.
                let v = (0..n).fold(self.v, |v, _| super::reduce::squeeze(v, 0));
                Scalar::from_value(v)
            }
            _ => super::record::fail(
                error_here(format!("expected one element, found a tile of shape {}", diag_text::shape(&shape)))
                    .label("not a scalar")
                    .help("reduce the tile first, as in `sum(x)`, or work elementwise with `where_`"),
            ),
        }
    }
}

impl<T: Dtype> BlockPtr<T> {
    /// Shape of the block.
    pub fn block_shape(self) -> Vec<usize> {
        shape(self.v)
    }
}

impl<T: Dtype> PtrTile<T> {
    /// Extent of each dimension.
    pub fn shape(self) -> Vec<usize> {
        shape(self.v)
    }
}

macro_rules! rust_unary {
    ($($handle:ident),*) => { $(
        impl<T: Num> std::ops::Neg for $handle<T> {
            type Output = Self;
            #[track_caller]
            fn neg(self) -> Self {
                unary(UnaryOp::Neg, self)
            }
        }
        impl<T: Bits> std::ops::Not for $handle<T> {
            type Output = Self;
            #[track_caller]
            fn not(self) -> Self {
                unary(UnaryOp::Not, self)
            }
        }
    )* };
}
rust_unary!(Tile, Scalar);

/// Tiles and scalars of integers: a bound for device functions.
pub trait IntData: Data<Elem: Int> {}
impl<X: Data<Elem: Int>> IntData for X {}

/// Type and shape of a value for messages: "an f32 tile of shape [64]".
pub(crate) fn describe(v: Value) -> String {
    diag_text::with_article(&diag_text::ty(&ty(v)))
}
