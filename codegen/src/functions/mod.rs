//! Elementwise functions composed of ops: those of libdevice that are no ops themselves ([`composed`]), and the f64
//! forms of the ops that GPUs have in f32 only ([`double`]).
//!
//! A function gets and returns values of f32 or f64, tiles or scalars. It has no branches: every case is computed, and
//! `select` chooses per element. Formulas are written with [`E`], a value with arithmetic operators. Sources of the
//! coefficients: FreeBSD's msun (Sun Microsystems, fdlibm 5.3) and S. L. Moshier's Cephes. Maximum errors are in
//! `tests/tests/devices/functions.rs`, which checks them on every target.

pub mod composed;
pub mod double;

use crate::ir::{BinaryOp, Builder, CmpOp, DType, Literal, UnaryOp, Value};
use std::cell::RefCell;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// Where the ops of a formula go.
pub struct Formula<'b, 'f>(RefCell<&'b mut Builder<'f>>);

impl<'b, 'f> Formula<'b, 'f> {
    pub fn new(builder: &'b mut Builder<'f>) -> Self {
        Formula(RefCell::new(builder))
    }

    /// A value of the function as an operand of the formula.
    pub fn value(&self, v: Value) -> E<'_> {
        E { at: self, v }
    }
}

/// The recorder of a formula without its lifetimes.
trait Emit {
    fn emit(&self, f: &mut dyn FnMut(&mut Builder) -> Value) -> Value;
    fn dtype(&self, v: Value) -> DType;
}

impl Emit for Formula<'_, '_> {
    fn emit(&self, f: &mut dyn FnMut(&mut Builder) -> Value) -> Value {
        f(*self.0.borrow_mut())
    }
    fn dtype(&self, v: Value) -> DType {
        match self.0.borrow().func.ty(v).dtype() {
            Some(dtype) => dtype,
            None => panic!("internal compiler error: a formula of a value without elements; please report this"),
        }
    }
}

/// A value in a formula.
#[derive(Clone, Copy)]
pub struct E<'c> {
    at: &'c dyn Emit,
    pub v: Value,
}

/// The second operand of an operator: a value, or a number that takes the type of the first.
pub trait Rhs<'c>: Copy {
    fn like(self, first: E<'c>) -> Value;
}

impl<'c> Rhs<'c> for E<'c> {
    fn like(self, _: E<'c>) -> Value {
        self.v
    }
}

impl<'c> Rhs<'c> for f64 {
    fn like(self, first: E<'c>) -> Value {
        first.number(self).v
    }
}

impl<'c> Rhs<'c> for i64 {
    fn like(self, first: E<'c>) -> Value {
        first.integer(self).v
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident;)*) => { $(
        impl<'c, R: Rhs<'c>> $trait<R> for E<'c> {
            type Output = E<'c>;
            fn $method(self, rhs: R) -> E<'c> {
                self.binary(BinaryOp::$trait, rhs)
            }
        }
    )* };
}
operators! {
    Add add;
    Sub sub;
    Mul mul;
    Div div;
}

impl<'c> Neg for E<'c> {
    type Output = E<'c>;
    fn neg(self) -> E<'c> {
        self.unary(UnaryOp::Neg)
    }
}

impl<'c> std::ops::Not for E<'c> {
    type Output = E<'c>;
    fn not(self) -> E<'c> {
        self.unary(UnaryOp::Not)
    }
}

impl<'c> E<'c> {
    fn emit(self, mut f: impl FnMut(&mut Builder) -> Value) -> E<'c> {
        E { at: self.at, v: self.at.emit(&mut f) }
    }

    pub fn dtype(self) -> DType {
        self.at.dtype(self.v)
    }

    /// A number with the type and shape of this value.
    pub fn number(self, x: f64) -> E<'c> {
        self.emit(|b| b.number(x, b.func.ty(self.v).clone()))
    }

    /// An integer with the type and shape of this value.
    pub fn integer(self, n: i64) -> E<'c> {
        self.emit(|b| b.constant(Literal::Int(n), b.func.ty(self.v).clone()))
    }

    pub fn unary(self, op: UnaryOp) -> E<'c> {
        self.emit(|b| b.unary(op, self.v))
    }

    pub fn binary(self, op: BinaryOp, rhs: impl Rhs<'c>) -> E<'c> {
        let rhs = rhs.like(self);
        self.emit(|b| b.binary(op, self.v, rhs))
    }

    pub fn cmp(self, op: CmpOp, rhs: impl Rhs<'c>) -> E<'c> {
        let rhs = rhs.like(self);
        self.emit(|b| b.cmp(op, self.v, rhs))
    }

    pub fn lt(self, rhs: impl Rhs<'c>) -> E<'c> {
        self.cmp(CmpOp::Lt, rhs)
    }

    pub fn gt(self, rhs: impl Rhs<'c>) -> E<'c> {
        self.cmp(CmpOp::Gt, rhs)
    }

    pub fn eq(self, rhs: impl Rhs<'c>) -> E<'c> {
        self.cmp(CmpOp::Eq, rhs)
    }

    pub fn and(self, rhs: E<'c>) -> E<'c> {
        self.binary(BinaryOp::And, rhs)
    }

    pub fn or(self, rhs: E<'c>) -> E<'c> {
        self.binary(BinaryOp::Or, rhs)
    }

    /// Where this condition holds `yes`, elsewhere `no`.
    pub fn select(self, yes: impl Rhs<'c>, no: E<'c>) -> E<'c> {
        let yes = yes.like(no);
        self.emit(|b| b.select(self.v, yes, no.v))
    }

    /// `self · b + c` with one rounding.
    pub fn fma(self, b: impl Rhs<'c>, c: impl Rhs<'c>) -> E<'c> {
        let (x, y) = (b.like(self), c.like(self));
        self.emit(|b| b.fma(self.v, x, y))
    }

    /// `self · b`, rounded on its own: compilers contract `a * b + c` to a multiply-add, which would change the
    /// difference of a product and its rounded value.
    pub fn times(self, b: impl Rhs<'c>) -> E<'c> {
        self.fma(b, -0.0)
    }

    /// Horner's rule, with coefficients from the highest power down.
    pub fn polynomial(self, coefficients: &[f64]) -> E<'c> {
        let first = self.number(coefficients[0]);
        coefficients[1..].iter().fold(first, |sum, &c| sum.fma(self, c))
    }

    pub fn abs(self) -> E<'c> {
        self.unary(UnaryOp::Abs)
    }

    pub fn sqrt(self) -> E<'c> {
        self.unary(UnaryOp::Sqrt)
    }

    pub fn rint(self) -> E<'c> {
        self.unary(UnaryOp::Rint)
    }

    pub fn is_nan(self) -> E<'c> {
        self.cmp(CmpOp::Ne, self)
    }

    pub fn cast(self, to: DType) -> E<'c> {
        self.emit(|b| b.cast(self.v, to))
    }

    pub fn bitcast(self, to: DType) -> E<'c> {
        self.emit(|b| b.bitcast(self.v, to))
    }

    /// The bits of a float as a signed integer of its width.
    pub fn bits(self) -> E<'c> {
        self.bitcast(integer_of(self.dtype()))
    }

    /// Whether the sign bit is set.
    pub fn sign_bit(self) -> E<'c> {
        self.bits().lt(0i64)
    }

    /// |self| with the sign of `sign`.
    pub fn copysign(self, sign: E<'c>) -> E<'c> {
        let dtype = self.dtype();
        let most = i64::MAX >> (64 - dtype.bits());
        let (magnitude, sign) = (self.bits(), sign.bits());
        let magnitude = magnitude.and(magnitude.integer(most));
        magnitude.or(sign.and(sign.integer(-most - 1))).bitcast(dtype)
    }

    /// self · 2ⁿ with one rounding, for an integer n of self's width and half of n an exponent of a normal number.
    pub fn scale(self, n: E<'c>) -> E<'c> {
        let half = n.binary(BinaryOp::Shr, 1i64);
        self * power_of_two(half, self.dtype()) * power_of_two(n - half, self.dtype())
    }
}

/// The signed integer type of the same width.
pub fn integer_of(float: DType) -> DType {
    match float.bits() {
        16 => DType::I16,
        32 => DType::I32,
        _ => DType::I64,
    }
}

/// Number of fraction bits and bias of the exponent of f32 or f64.
fn format_of(float: DType) -> (i64, i64) {
    if float == DType::F32 { (23, 127) } else { (52, 1023) }
}

/// 2ⁿ for an integer that is an exponent of a normal number.
fn power_of_two(n: E, float: DType) -> E {
    let (fraction, bias) = format_of(float);
    (n + bias).binary(BinaryOp::Shl, fraction).bitcast(float)
}
