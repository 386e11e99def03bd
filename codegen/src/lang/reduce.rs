//! Reductions and scans.

use super::arith::binary;
use super::control::Carried;
use super::dtype::{Dtype, Int, Num, Summed};
use super::handle::{Data, Scalar, Tile};
use super::index::{AxisArg, AxisIndex, check_axis, check_powers_of_two};
use super::operand::{Number, Raw, constant};
use super::record::{
    CombineAssert, add_combine_flags, combining, emit, emit_at, emit_in, error_here, fail, ops_of, region, shape,
    take_asserts, ty, yield_in,
};
use crate::diag::Diagnostic;
use crate::ir::nested::copy_region;
use crate::ir::{BinaryOp, CmpOp, DType, Effects, Loc, Op, Type, Value};
use crate::layout::MAX_RANK;
use std::collections::HashMap;

/// One tile, or several of the same shape that are reduced or scanned together.
#[diagnostic::on_unimplemented(message = "`{Self}` cannot be reduced", label = "expected a tile or a tuple of tiles")]
pub trait Reducible: Copy {
    /// One element of each tile: an argument of the combining function.
    type Element: Carried<Handle = Self::Element>;
    /// `N` elements of each tile.
    type Pack<const N: usize>;
    /// The result of reducing along one axis, or over all.
    type Reduced<A: AxisArg>;
    #[doc(hidden)]
    fn tiles(self) -> Vec<Value>;
    #[doc(hidden)]
    fn element(values: &[Value]) -> Self::Element;
    /// From those of each tile.
    #[doc(hidden)]
    fn pack<const N: usize>(values: &[[Value; N]]) -> Self::Pack<N>;
    #[doc(hidden)]
    fn reduced<A: AxisArg>(values: &[Value]) -> Self::Reduced<A>;
    #[doc(hidden)]
    fn scanned(values: &[Value]) -> Self;
}

impl<T: Dtype> Reducible for Tile<T> {
    type Element = Scalar<T>;
    type Pack<const N: usize> = [Scalar<T>; N];
    type Reduced<A: AxisArg> = A::Reduced<T>;
    fn tiles(self) -> Vec<Value> {
        vec![self.value()]
    }
    fn element(values: &[Value]) -> Scalar<T> {
        Scalar::from_value(values[0])
    }
    fn pack<const N: usize>(values: &[[Value; N]]) -> [Scalar<T>; N] {
        values[0].map(Scalar::from_value)
    }
    fn reduced<A: AxisArg>(values: &[Value]) -> A::Reduced<T> {
        Data::from_value(values[0])
    }
    fn scanned(values: &[Value]) -> Tile<T> {
        Tile::from_value(values[0])
    }
}

macro_rules! tuple_reducible {
    ($($T:ident $i:tt),*) => {
        impl<$($T: Dtype),*> Reducible for ($(Tile<$T>,)*) {
            type Element = ($(Scalar<$T>,)*);
            type Pack<const N: usize> = ($([Scalar<$T>; N],)*);
            type Reduced<Axis: AxisArg> = ($(Axis::Reduced<$T>,)*);
            fn tiles(self) -> Vec<Value> {
                vec![$(self.$i.value()),*]
            }
            fn element(values: &[Value]) -> Self::Element {
                ($(Scalar::<$T>::from_value(values[$i]),)*)
            }
            fn pack<const N: usize>(values: &[[Value; N]]) -> Self::Pack<N> {
                ($(values[$i].map(Scalar::<$T>::from_value),)*)
            }
            fn reduced<Axis: AxisArg>(values: &[Value]) -> Self::Reduced<Axis> {
                ($(<Axis::Reduced<$T> as Data>::from_value(values[$i]),)*)
            }
            fn scanned(values: &[Value]) -> Self {
                ($(Tile::<$T>::from_value(values[$i]),)*)
            }
        }
    };
}
tuple_reducible!(T 0);
tuple_reducible!(T 0, U 1);
tuple_reducible!(T 0, U 1, V 2);
tuple_reducible!(T 0, U 1, V 2, W 3);
tuple_reducible!(T 0, U 1, V 2, W 3, X 4);
tuple_reducible!(T 0, U 1, V 2, W 3, X 4, Y 5);

/// Checks that all operands have the same shape, and returns it.
#[track_caller]
pub(super) fn require_same_shape(tiles: &[Value], what: &str) -> Vec<usize> {
    let first = shape(tiles[0]);
    for &other in &tiles[1..] {
        let found = shape(other);
        if found != first {
            fail(
                error_here(format!("`{what}` over tiles of different shapes: {first:?} and {found:?}"))
                    .label("expected equal shapes")
                    .help("broadcast the smaller one: `.broadcast_to([…])`"),
            );
        }
    }
    first
}

/// Fails with a message if a function of scalars does more than compute with them: if it accesses memory, or has ops of
/// tiles.
pub(super) fn check_pure(ops: &[(Op, Loc)], what: &str) {
    for (op, loc) in ops {
        let of_scalars = match op {
            Op::Unary(_)
            | Op::Binary(_)
            | Op::Cmp(_)
            | Op::Fma
            | Op::Select
            | Op::Cast
            | Op::Bitcast
            | Op::PtrAdd
            | Op::Hint { .. }
            | Op::Constant { .. }
            | Op::Splat
            | Op::Broadcast
            | Op::ProgramId { .. }
            | Op::CtaRank { .. }
            | Op::NumPrograms { .. } => true,
            Op::InlineAsm { .. } => op.effects() == Effects::Pure,
            _ => false,
        };
        if !of_scalars {
            fail(
                Diagnostic::new(format!("{what} cannot contain `{}`", op.mnemonic()), loc.clone())
                    .label("not a computation with scalars")
                    .note("it may compute with its operands, and with scalars from outside"),
            );
        }
    }
}

/// The region that combines two elements, and what it asserts.
struct CombineRegion {
    block: crate::ir::BlockId,
    asserts: Vec<CombineAssert>,
}

/// Records the region that combines two elements. For each `device_assert` it has a further operand and result: whether
/// the conditions of all combinations so far were true.
#[track_caller]
fn combine_region<R: Reducible, E: Carried<Handle = R::Element>>(
    tiles: &[Value],
    combine: impl FnOnce(R::Element, R::Element) -> E,
) -> CombineRegion {
    let elements: Vec<Type> = tiles
        .iter()
        .map(|&v| match ty(v).elem() {
            Some(elem) => Type::Scalar(elem),
            None => panic!("internal compiler error: a tile without elements; please report this"),
        })
        .collect();
    let params: Vec<Type> = elements.iter().chain(&elements).cloned().collect();
    let (block, result) = combining(&params, |values| {
        let (left, right) = values.split_at(tiles.len());
        combine(R::element(left), R::element(right)).into_handle()
    });
    let asserts = take_asserts(block);
    check_pure(&ops_of(block), "a combining function");
    let mut results = Vec::new();
    <R::Element as Carried>::values(&result, &mut results);
    if results.iter().map(|&v| ty(v)).ne(elements.iter().cloned()) {
        fail(error_here("the combining function must return one element per operand").label("returns something else"));
    }
    let (left, right) = add_combine_flags(block, asserts.len());
    for (assert, (left, right)) in asserts.iter().zip(left.into_iter().zip(right)) {
        results.push(emit_in(block, |b| {
            let both = b.binary(BinaryOp::And, left, right);
            b.binary(BinaryOp::And, both, assert.condition)
        }));
    }
    yield_in(block, &results);
    CombineRegion { block, asserts }
}

impl CombineRegion {
    /// The operands, with a tile of `true` for each assertion.
    #[track_caller]
    fn operands(&self, mut tiles: Vec<Value>) -> Vec<Value> {
        let of = shape(tiles[0]);
        tiles.extend(self.asserts.iter().map(|_| constant(Number::Bool(true), DType::Bool, &of)));
        tiles
    }

    /// The results without those of the assertions, which are checked.
    fn checked(self, mut results: Vec<Value>) -> Vec<Value> {
        let holds = results.split_off(results.len() - self.asserts.len());
        for (CombineAssert { message, loc, .. }, holds) in self.asserts.into_iter().zip(holds) {
            emit_at(loc, |b| b.op(Op::DeviceAssert { message }, &[holds], &[]));
        }
        results
    }
}

/// A function with a name that combines two elements, in the forms that a closure does not have: parameters may be tiles
/// of one element, and for several tiles Triton's order, `fn(a0, a1, b0, b1)`. `Form` is its signature.
#[diagnostic::on_unimplemented(
    message = "this function cannot combine two elements of a tile",
    label = "has other parameters",
    note = "for a tile of `T`, it is an `fn(Scalar<T>, Scalar<T>) -> Scalar<T>`; for two tiles, one of \
            `fn((Scalar<T>, Scalar<U>), (Scalar<T>, Scalar<U>)) -> (Scalar<T>, Scalar<U>)` and \
            `fn(Scalar<T>, Scalar<U>, Scalar<T>, Scalar<U>) -> (Scalar<T>, Scalar<U>)`"
)]
pub trait CombineFunction<E, Form> {
    #[doc(hidden)]
    #[track_caller]
    fn call(self, left: E, right: E) -> E;
}

/// Parameters and results of a [`CombineFunction`] for elements of type `E`.
#[diagnostic::on_unimplemented(
    message = "this function combines `{Self}`, the elements are of type `{E}`",
    label = "another type of element"
)]
pub trait CombineValue<E> {
    #[doc(hidden)]
    fn of(element: E) -> Self;
    #[doc(hidden)]
    fn element(self) -> E;
}

impl<E> CombineValue<E> for E {
    fn of(element: E) -> E {
        element
    }
    fn element(self) -> E {
        self
    }
}

impl<T: Dtype> CombineValue<Scalar<T>> for Tile<T> {
    fn of(element: Scalar<T>) -> Tile<T> {
        Tile::from_value(element.value())
    }
    fn element(self) -> Scalar<T> {
        self.scalar()
    }
}

impl<E, P: CombineValue<E>, O: CombineValue<E>, F: FnOnce(P, P) -> O> CombineFunction<E, (P, O)> for F {
    #[track_caller]
    fn call(self, left: E, right: E) -> E {
        self(P::of(left), P::of(right)).element()
    }
}

macro_rules! flat_combine {
    ($($E:ident $P:ident $O:ident $i:tt),*) => {
        impl<$($E, $P: CombineValue<$E>, $O: CombineValue<$E>,)* F> CombineFunction<($($E,)*), ($($P,)* ($($O,)*))> for F
        where
            F: FnOnce($($P,)* $($P,)*) -> ($($O,)*),
        {
            #[track_caller]
            fn call(self, left: ($($E,)*), right: ($($E,)*)) -> ($($E,)*) {
                let result = self($($P::of(left.$i),)* $($P::of(right.$i),)*);
                ($(result.$i.element(),)*)
            }
        }
    };
}
flat_combine!(E P O 0, E2 P2 O2 1);
flat_combine!(E P O 0, E2 P2 O2 1, E3 P3 O3 2);
flat_combine!(E P O 0, E2 P2 O2 1, E3 P3 O3 2, E4 P4 O4 3);

/// The closure for a function by its name.
#[doc(hidden)]
pub fn combine_function<E, Form, F: CombineFunction<E, Form>>(function: F) -> impl FnOnce(E, E) -> E {
    move |left, right| function.call(left, right)
}

/// Reduces along one dimension.
#[track_caller]
fn reduce_axis(tiles: &[Value], axis: usize, region: crate::ir::BlockId) -> Vec<Value> {
    let results: Vec<Type> = tiles
        .iter()
        .map(|&v| {
            let t = ty(v);
            let mut to = t.shape().to_vec();
            to.remove(axis);
            match t.elem() {
                Some(elem) => Type::tensor(&to, elem),
                None => panic!("internal compiler error: a tile without elements; please report this"),
            }
        })
        .collect();
    emit(|b| {
        let id = b.op_with_regions(Op::Reduce { axis }, tiles, &results, &[region]);
        b.func.op(id).results.clone()
    })
}

/// Reduces a tile, or several together, with an associative and commutative combining function:
/// `reduce(x, axis = 1, |a, b| a + b)`, or `reduce((x, i), axis = 1, |(a, i), (b, j)| …)`. Without `axis`, over all
/// elements. With `keep_dims`, the reduced dimension is kept with extent 1.
#[track_caller]
pub fn reduce<R: Reducible, A: AxisArg, E: Carried<Handle = R::Element>>(
    x: R,
    axis: A,
    combine: impl FnOnce(R::Element, R::Element) -> E,
    keep_dims: bool,
) -> R::Reduced<A> {
    reduce_named::<R, A, E>("reduce", x, axis, combine, keep_dims)
}

#[track_caller]
fn reduce_named<R: Reducible, A: AxisArg, E: Carried<Handle = R::Element>>(
    what: &str,
    x: R,
    axis: A,
    combine: impl FnOnce(R::Element, R::Element) -> E,
    keep_dims: bool,
) -> R::Reduced<A> {
    let mut tiles = x.tiles();
    let from = require_same_shape(&tiles, what);
    let flat = from.iter().all(|n| n.is_power_of_two());
    let axis = axis.axis();
    let full = axis.is_none();
    let axis = match axis {
        Some(axis) => check_axis(axis, from.len(), what),
        None => {
            if keep_dims {
                fail(
                    error_here(format!("`{what}` with `keep_dims` needs an axis"))
                        .label("the result of a full reduction is a scalar")
                        .help("name the axis: `axis = 0`"),
                );
            }
            if from.is_empty() {
                return R::reduced::<A>(&tiles);
            }
            if from.len() > 1 && flat {
                let n: usize = from.iter().product();
                tiles = tiles.iter().map(|&v| emit(|b| b.reshape(v, &[n]))).collect();
            }
            0
        }
    };
    let region = combine_region::<R, E>(&tiles, combine);
    let mut operands = region.operands(tiles);
    if full && !flat {
        for last in (1..from.len()).rev() {
            let block = emit(|b| copy_region(b.func, region.block, &mut HashMap::new()));
            operands = reduce_axis(&operands, last, block);
        }
    }
    let results = reduce_axis(&operands, axis, region.block);
    let mut results = region.checked(results);
    if keep_dims {
        results = results.into_iter().map(|v| super::shape::expand_raw(v, axis)).collect();
    }
    R::reduced::<A>(&results)
}

/// The operand of a reduction: a tile.
#[diagnostic::on_unimplemented(
    message = "a reduction requires a tile, found `{Self}`",
    label = "expected a tile",
    note = "for the extremum of two values, use `maximum(a, b)` or `minimum(a, b)`"
)]
pub trait OneTile<T: Dtype> {
    #[doc(hidden)]
    fn tile(self) -> Tile<T>;
}

impl<T: Dtype> OneTile<T> for Tile<T> {
    fn tile(self) -> Tile<T> {
        self
    }
}

/// The elements converted to their result type.
#[track_caller]
fn widened<T: Dtype, U: Dtype>(x: Tile<T>) -> Tile<U> {
    match U::dtype() {
        to if to == T::dtype() => Tile::from_value(x.value()),
        to => Tile::from_value(emit(|b| b.cast(x.value(), to))),
    }
}

/// A combining function that applies `op`.
fn combine_by<T: Dtype>(op: BinaryOp) -> impl FnOnce(Scalar<T>, Scalar<T>) -> Scalar<T> {
    move |a, b| Scalar::from_value(binary(op, Raw::Value(a.value()), Raw::Value(b.value()), T::dtype()))
}

/// Sum along an axis, or of all elements. Integers narrower than 32 bits are summed in 32 bits, bools are counted.
#[track_caller]
pub fn sum<T: Summed, A: AxisArg>(x: impl OneTile<T>, axis: A, keep_dims: bool) -> A::Reduced<T::Sum> {
    let x = widened::<T, T::Sum>(x.tile());
    reduce_named::<Tile<T::Sum>, A, Scalar<T::Sum>>("sum", x, axis, combine_by(BinaryOp::Add), keep_dims)
}

macro_rules! simple_reductions {
    ($($(#[$meta:meta])* $name:ident, $op:ident, $class:ident;)*) => { $(
        $(#[$meta])*
        #[track_caller]
        pub fn $name<T: $class, A: AxisArg>(x: impl OneTile<T>, axis: A, keep_dims: bool) -> A::Reduced<T> {
            reduce_named::<Tile<T>, A, Scalar<T>>(stringify!($name), x.tile(), axis, combine_by(BinaryOp::$op), keep_dims)
        }
    )* };
}
simple_reductions! {
    /// Largest element along an axis, or of all. NaNs are ignored unless all are NaN.
    max, Max, Num;
    /// Smallest element along an axis, or of all. NaNs are ignored unless all are NaN.
    min, Min, Num;
    /// Exclusive or along an axis, or of all elements.
    xor_sum, Xor, Int;
    /// Bitwise or along an axis, or of all elements; of bools, see [`any`].
    reduce_or, Or, Int;
}

/// The extremum along `axis` and its index (the smallest index among equal elements).
#[track_caller]
fn arg_extremum<T: Num>(what: &str, x: Tile<T>, axis: i32, keep_dims: bool, better: CmpOp) -> (Tile<T>, Tile<i32>) {
    let from = shape(x.value());
    let along = check_axis(axis, from.len(), what);
    let mut line = vec![1; from.len()];
    line[along] = from[along];
    let index = emit(|b| {
        let numbers = b.arange(0, from[along] as i64);
        let numbers = b.reshape(numbers, &line);
        b.broadcast(numbers, &from)
    });
    let pair = (x, Tile::<i32>::from_value(index));
    let combine = |(a, i): (Scalar<T>, Scalar<i32>), (b, j): (Scalar<T>, Scalar<i32>)| -> (Scalar<T>, Scalar<i32>) {
        let [va, vb, vi, vj] = [a.value(), b.value(), i.value(), j.value()];
        let take_a = emit(|e| {
            // a, if it is better, or equal with the smaller index; any number is better than NaN.
            let better = e.cmp(better, va, vb);
            let equal = e.cmp(CmpOp::Eq, va, vb);
            let b_is_nan = e.cmp(CmpOp::Ne, vb, vb);
            let smaller = e.cmp(CmpOp::Lt, vi, vj);
            let tie = e.binary(BinaryOp::And, equal, smaller);
            let best = e.binary(BinaryOp::Or, better, tie);
            if T::dtype().is_float() { e.binary(BinaryOp::Or, best, b_is_nan) } else { best }
        });
        let (value, index) = emit(|e| (e.select(take_a, va, vb), e.select(take_a, vi, vj)));
        (Scalar::from_value(value), Scalar::from_value(index))
    };
    reduce_named::<_, i32, (Scalar<T>, Scalar<i32>)>(what, pair, axis, combine, keep_dims)
}

/// Index of the largest element along an axis; the smallest index among equal elements.
#[track_caller]
pub fn argmax<T: Num>(x: Tile<T>, axis: impl AxisIndex, keep_dims: bool) -> Tile<i32> {
    arg_extremum("argmax", x, axis.axis_index(), keep_dims, CmpOp::Gt).1
}

/// Index of the smallest element along an axis; the smallest index among equal elements.
#[track_caller]
pub fn argmin<T: Num>(x: Tile<T>, axis: impl AxisIndex, keep_dims: bool) -> Tile<i32> {
    arg_extremum("argmin", x, axis.axis_index(), keep_dims, CmpOp::Lt).1
}

/// The largest element along an axis and its index: Triton's `max(…, return_indices=True)`.
#[track_caller]
pub fn max_with_indices<T: Num>(x: Tile<T>, axis: impl AxisIndex, keep_dims: bool) -> (Tile<T>, Tile<i32>) {
    arg_extremum("max_with_indices", x, axis.axis_index(), keep_dims, CmpOp::Gt)
}

/// The smallest element along an axis and its index: Triton's `min(…, return_indices=True)`.
#[track_caller]
pub fn min_with_indices<T: Num>(x: Tile<T>, axis: impl AxisIndex, keep_dims: bool) -> (Tile<T>, Tile<i32>) {
    arg_extremum("min_with_indices", x, axis.axis_index(), keep_dims, CmpOp::Lt)
}

/// Inclusive scan along an axis with an associative function; from the end with `reverse`.
#[track_caller]
pub fn associative_scan<R: Reducible, E: Carried<Handle = R::Element>>(
    x: R,
    axis: impl AxisIndex,
    combine: impl FnOnce(R::Element, R::Element) -> E,
    reverse: bool,
) -> R {
    scan_named::<R, E>("associative_scan", x, axis.axis_index(), combine, reverse)
}

#[track_caller]
fn scan_named<R: Reducible, E: Carried<Handle = R::Element>>(
    what: &str,
    x: R,
    axis: i32,
    combine: impl FnOnce(R::Element, R::Element) -> E,
    reverse: bool,
) -> R {
    let tiles = x.tiles();
    let from = require_same_shape(&tiles, what);
    let axis = check_axis(axis, from.len(), what);
    if from.len() == MAX_RANK {
        // The results of two parts get a dimension more.
        check_powers_of_two(&from, &format!("`{what}` of {MAX_RANK} dimensions"));
    }
    let region = combine_region::<R, E>(&tiles, combine);
    let tiles = region.operands(tiles);
    let types: Vec<Type> = tiles.iter().map(|&v| ty(v)).collect();
    let results = emit(|b| {
        let id = b.op_with_regions(Op::Scan { axis, reverse }, &tiles, &types, &[region.block]);
        b.func.op(id).results.clone()
    });
    R::scanned(&region.checked(results))
}

/// Inclusive prefix sum along an axis: integers narrower than 32 bits in 32 bits, bf16 in f32.
#[track_caller]
pub fn cumsum<T: Summed>(x: Tile<T>, axis: impl AxisIndex, reverse: bool) -> Tile<T::RunningSum> {
    let x = widened::<T, T::RunningSum>(x);
    scan_named::<_, Scalar<T::RunningSum>>("cumsum", x, axis.axis_index(), combine_by(BinaryOp::Add), reverse)
}

/// Inclusive prefix product along an axis: bf16 in f32.
#[track_caller]
pub fn cumprod<T: Num>(x: Tile<T>, axis: impl AxisIndex, reverse: bool) -> Tile<T::RunningProduct> {
    let x = widened::<T, T::RunningProduct>(x);
    scan_named::<_, Scalar<T::RunningProduct>>("cumprod", x, axis.axis_index(), combine_by(BinaryOp::Mul), reverse)
}

/// Extracts the only element along an axis of extent 1.
#[track_caller]
pub(crate) fn squeeze(v: Value, axis: usize) -> Value {
    let elem = match ty(v).elem() {
        Some(elem) => Type::Scalar(elem),
        None => panic!("internal compiler error: a tile without elements; please report this"),
    };
    let (block, left) = region(&[elem.clone(), elem], |values| values[0]);
    yield_in(block, &[left]);
    reduce_axis(&[v], axis, block)[0]
}

impl<T: Summed> Tile<T> {
    /// See [`sum`].
    #[track_caller]
    pub fn sum(self, axis: impl AxisArg<Reduced<T::Sum> = Tile<T::Sum>>) -> Tile<T::Sum> {
        sum(self, axis, false)
    }
    /// See [`cumsum`].
    #[track_caller]
    pub fn cumsum(self, axis: impl AxisIndex) -> Tile<T::RunningSum> {
        cumsum(self, axis, false)
    }
}

impl<T: Num> Tile<T> {
    /// See [`max`].
    #[track_caller]
    pub fn max(self, axis: impl AxisArg<Reduced<T> = Tile<T>>) -> Tile<T> {
        max(self, axis, false)
    }
    /// See [`min`].
    #[track_caller]
    pub fn min(self, axis: impl AxisArg<Reduced<T> = Tile<T>>) -> Tile<T> {
        min(self, axis, false)
    }
    /// See [`argmax`].
    #[track_caller]
    pub fn argmax(self, axis: impl AxisIndex) -> Tile<i32> {
        argmax(self, axis, false)
    }
    /// See [`argmin`].
    #[track_caller]
    pub fn argmin(self, axis: impl AxisIndex) -> Tile<i32> {
        argmin(self, axis, false)
    }
}

/// Whether any element along the axis is true.
#[track_caller]
pub fn any<A: AxisArg>(x: Tile<bool>, axis: A) -> A::Reduced<bool> {
    logical(x, axis, BinaryOp::Or, "any")
}

/// Whether all elements along the axis are true.
#[track_caller]
pub fn all<A: AxisArg>(x: Tile<bool>, axis: A) -> A::Reduced<bool> {
    logical(x, axis, BinaryOp::And, "all")
}

#[track_caller]
fn logical<A: AxisArg>(x: Tile<bool>, axis: A, op: BinaryOp, what: &str) -> A::Reduced<bool> {
    let combine = |a: Scalar<bool>, b: Scalar<bool>| -> Scalar<bool> {
        Scalar::from_value(binary(op, Raw::Value(a.value()), Raw::Value(b.value()), DType::Bool))
    };
    reduce_named::<Tile<bool>, A, Scalar<bool>>(what, x, axis, combine, false)
}
