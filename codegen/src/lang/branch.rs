//! Branches: `if`, whose condition is known at specialization or at run time, and what `match` requires. `#[kernel]` rewrites
//! those of Rust into calls of this module, which yield the assigned variables.

use super::carried::Carried;
use super::control::{check_condition, check_constants, check_same, types_of};
use super::dtype::Dtype;
use super::handle::{Data, Scalar, Tile};
use super::operand::{LikeArm, broadcast, common_shape};
use super::record::{emit, here, in_combine, region, shape, yield_in};
use crate::ir::{BlockId, Op, Value};
use std::iter::zip;

/// What the branches of an `if` get for the variables `S` that they assign: for a Rust `bool`, which is decided at
/// specialization, the variables as they are; for a run-time condition, run-time values, so that a number can be
/// assigned one.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a condition for branches that assign variables of types `{S}`",
    label = "expected a comparison of scalars, or a constexpr `bool`"
)]
pub trait ArmState<S> {
    type State: Copy;
    #[doc(hidden)]
    #[track_caller]
    fn arm_state(&self, variables: S) -> Self::State;
}

impl<S: Copy> ArmState<S> for bool {
    type State = S;
    fn arm_state(&self, variables: S) -> S {
        variables
    }
}

macro_rules! run_time_state {
    ($($condition:ident),*) => { $(
        impl<S: Carried> ArmState<S> for $condition<bool> {
            type State = S::Handle;
            #[track_caller]
            fn arm_state(&self, variables: S) -> S::Handle {
                variables.into_handle()
            }
        }
    )* };
}
run_time_state!(Scalar, Tile);

/// Conditions of `if`. A Rust `bool` is decided at specialization, and only the taken branch is recorded; for a
/// run-time bool both are recorded.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a condition for branches of types `{A}` and `{B}`",
    label = "expected a comparison of scalars, or a constexpr `bool` with branches of the same type"
)]
pub trait Choose<A, B> {
    type Output;
    #[doc(hidden)]
    #[track_caller]
    fn choose(self, names: &[&str], then: impl FnOnce() -> A, otherwise: impl FnOnce() -> B) -> Self::Output;
}

impl<A: Arms<B>, B> Choose<A, B> for bool {
    type Output = A::Output;
    #[track_caller]
    fn choose(self, _names: &[&str], then: impl FnOnce() -> A, otherwise: impl FnOnce() -> B) -> A::Output {
        if self { then().firsts() } else { A::seconds(otherwise()) }
    }
}

/// A value, or a variable, with this type at the end of one arm of an `if` and with type `Other` at the end of the other arm. The
/// types are the same, or one arm has a number literal, which takes the type of the other arm.
#[diagnostic::on_unimplemented(
    message = "arms have different types: `{Self}` and `{Other}`",
    label = "each arm has the same type, or is a number literal",
    note = "convert one of them: `.to::<f32>()` for the element type, `.scalar()` for a tile of one element, `full_like(tile, number)` or \
            `full::<f32>([…], number)` for a number beside a tile; a literal `1.0` needs a float type",
    note = "an `if` without `else` has the value `()`, and so has a block that ends with `;`"
)]
pub trait Arm<Other> {
    type Output;
    #[doc(hidden)]
    #[track_caller]
    fn first(self) -> Self::Output;
    #[doc(hidden)]
    #[track_caller]
    fn second(other: Other) -> Self::Output;
}

impl<X> Arm<X> for X {
    type Output = X;
    fn first(self) -> X {
        self
    }
    fn second(other: X) -> X {
        other
    }
}

/// Tuples of what arms yield.
pub trait Arms<Other> {
    type Output;
    #[doc(hidden)]
    #[track_caller]
    fn firsts(self) -> Self::Output;
    #[doc(hidden)]
    #[track_caller]
    fn seconds(other: Other) -> Self::Output;
}

macro_rules! arms {
    ([$($A:ident $B:ident $i:tt)*]) => {
        impl<$($A: Arm<$B>, $B),*> Arms<($($B,)*)> for ($($A,)*) {
            type Output = ($($A::Output,)*);
            #[track_caller]
            #[allow(clippy::unused_unit)]
            fn firsts(self) -> Self::Output {
                ($(self.$i.first(),)*)
            }
            #[track_caller]
            #[allow(unused_variables, clippy::unused_unit)]
            fn seconds(other: ($($B,)*)) -> Self::Output {
                ($($A::second(other.$i),)*)
            }
        }
    };
    ([$($done:tt)*] $A:ident $B:ident $i:tt $($rest:tt)*) => {
        arms!([$($done)*]);
        arms!([$($done)* $A $B $i] $($rest)*);
    };
}
arms!([] A0 B0 0 A1 B1 1 A2 B2 2 A3 B3 3 A4 B4 4 A5 B5 5 A6 B6 6 A7 B7 7 A8 B8 8 A9 B9 9 A10 B10 10 A11 B11 11 A12 B12 12
    A13 B13 13 A14 B14 14 A15 B15 15 A16 B16 16 A17 B17 17 A18 B18 18 A19 B19 19);

impl<A: Carried, B: Carried> Choose<A, B> for Scalar<bool>
where
    A::Handle: Arms<B::Handle, Output = A::Handle>,
{
    type Output = A::Handle;
    #[track_caller]
    fn choose(self, names: &[&str], then: impl FnOnce() -> A, otherwise: impl FnOnce() -> B) -> A::Handle {
        let ((first, a), (second, b)) = (record_arm(then), record_arm(otherwise));
        // Rust numbers become constants before the `if`.
        choose_arm::<A>(self, names, [(first, a.into_handle()), (second, A::Handle::seconds(b.into_handle()))])
    }
}

impl<A: Carried, B: Carried> Choose<A, B> for Tile<bool>
where
    A::Handle: Arms<B::Handle, Output = A::Handle>,
{
    type Output = A::Handle;
    #[track_caller]
    fn choose(self, names: &[&str], then: impl FnOnce() -> A, otherwise: impl FnOnce() -> B) -> A::Handle {
        Scalar::<bool>::from_value(check_condition(self.value())).choose(names, then, otherwise)
    }
}

/// Records an arm in a block of its own, or with the ops around it in a combining function, which has no control flow.
fn record_arm<R>(arm: impl FnOnce() -> R) -> (Option<BlockId>, R) {
    if in_combine() {
        return (None, arm());
    }
    let (block, result) = region(&[], |_| arm());
    (Some(block), result)
}

/// The values of the arm that the condition chooses.
#[track_caller]
fn choose_arm<A: Carried>(
    condition: Scalar<bool>,
    names: &[&str],
    [(first, a), (second, b)]: [(Option<BlockId>, A::Handle); 2],
) -> A::Handle {
    let loc = here();
    let (mut va, mut vb, mut leaves) = (Vec::new(), Vec::new(), Vec::new());
    A::values(&a, &mut va);
    A::values(&b, &mut vb);
    A::member_names(&a, names, &mut leaves);
    let blocks = first.zip(second);
    // In the function of a `map_elementwise`, the scalars of an arm are tiles, or scalars from outside.
    let mut conditions = Vec::new();
    if blocks.is_none() {
        for (a, b) in va.iter_mut().zip(&mut vb) {
            let values = [condition.value(), *a, *b];
            let common = common_shape(&values.map(shape), "this `if`");
            let [condition, first, second] = values.map(|v| if shape(v) == common { v } else { broadcast(v, &common) });
            conditions.push(condition);
            (*a, *b) = (first, second);
        }
    }
    let types = types_of(&va);
    check_same(&loc, &leaves, &types, &vb, "in one branch", "in the other");
    check_constants::<A>(&loc, names, [&a, &b], "in one branch", "in the other");
    let Some((first, second)) = blocks else {
        let chosen: Vec<Value> =
            zip(conditions, zip(va, vb)).map(|(c, (a, b))| emit(|builder| builder.select(c, a, b))).collect();
        return A::rebuild(&a, &mut chosen.into_iter());
    };
    yield_in(first, &va);
    yield_in(second, &vb);
    let values = emit(|builder| {
        let id = builder.op_with_regions(Op::If, &[condition.value()], &types, &[first, second]);
        builder.func.op(id).results.clone()
    });
    A::rebuild(&a, &mut values.into_iter())
}

/// Conditions of an `if` with one arm that is a number literal, which takes the type of the other arm.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a condition for an arm of type `{A}` and a number literal",
    label = "expected a comparison of scalars, or a constexpr `bool`"
)]
pub trait ChooseLiteral<A, L> {
    type Output;
    #[doc(hidden)]
    #[track_caller]
    fn choose_literal(self, literal_first: bool, other: impl FnOnce() -> A, literal: L) -> Self::Output;
}

impl<A: Arm<L>, L> ChooseLiteral<A, L> for bool {
    type Output = A::Output;
    #[track_caller]
    fn choose_literal(self, literal_first: bool, other: impl FnOnce() -> A, literal: L) -> A::Output {
        if self == literal_first { A::second(literal) } else { other().first() }
    }
}

impl<A: Carried, L> ChooseLiteral<A, L> for Scalar<bool>
where
    A::Handle: LikeArm<L>,
{
    type Output = A::Handle;
    #[track_caller]
    fn choose_literal(self, literal_first: bool, other: impl FnOnce() -> A, literal: L) -> A::Handle {
        let (block, other) = record_arm(other);
        let other = other.into_handle();
        let literal = (record_arm(|| ()).0, other.like_arm(literal));
        let other = (block, other);
        let arms = if literal_first { [literal, other] } else { [other, literal] };
        choose_arm::<A>(self, &[""], arms)
    }
}

impl<A: Carried, L> ChooseLiteral<A, L> for Tile<bool>
where
    A::Handle: LikeArm<L>,
{
    type Output = A::Handle;
    #[track_caller]
    fn choose_literal(self, literal_first: bool, other: impl FnOnce() -> A, literal: L) -> A::Handle {
        Scalar::<bool>::from_value(check_condition(self.value())).choose_literal(literal_first, other, literal)
    }
}

/// `if condition { other } else { literal }`, or the other way around with `literal_first`.
#[doc(hidden)]
#[track_caller]
pub fn branch_literal<C: ChooseLiteral<A, L>, A, L>(
    condition: C,
    literal_first: bool,
    other: impl FnOnce() -> A,
    literal: L,
) -> C::Output {
    condition.choose_literal(literal_first, other, literal)
}

/// `if condition { then } else { otherwise }`.
#[doc(hidden)]
#[track_caller]
pub fn branch<C: Choose<A, B>, A, B>(
    condition: C,
    names: &[&str],
    then: impl FnOnce() -> A,
    otherwise: impl FnOnce() -> B,
) -> C::Output {
    condition.choose(names, then, otherwise)
}

/// What a `match` looks at.
#[doc(hidden)]
pub struct Scrutinee<'a, X>(pub &'a X);

/// Values that a `match` can look at.
#[diagnostic::on_unimplemented(
    message = "`match` needs a value that is known at specialization, found `{Self}`",
    label = "a run-time value",
    note = "write `if x == 0 {{ … }} else if x == 1 {{ … }} else {{ … }}`, or make the value `#[constexpr]`"
)]
pub trait Known {
    #[doc(hidden)]
    fn check(&self) {}
}

// Methods of a type come before those of traits: only these two have a condition, which does not hold.
impl<T: Dtype> Scrutinee<'_, Scalar<T>> {
    #[doc(hidden)]
    pub fn check(&self)
    where
        Scalar<T>: Known,
    {
    }
}

impl<T: Dtype> Scrutinee<'_, Tile<T>> {
    #[doc(hidden)]
    pub fn check(&self)
    where
        Tile<T>: Known,
    {
    }
}

impl<X> Known for Scrutinee<'_, X> {}

/// A condition of a guard of `match`, or of an arm that panics.
#[diagnostic::on_unimplemented(
    message = "this condition must be known at specialization, found `{Self}`",
    label = "a run-time value",
    note = "a guard of `match` can be an `if` in the arm; instead of a panic, use `device_assert(condition, \"text\")`"
)]
pub trait KnownCondition {
    #[doc(hidden)]
    fn known(self) -> bool;
}

impl KnownCondition for bool {
    fn known(self) -> bool {
        self
    }
}

/// A condition that is known at specialization.
#[doc(hidden)]
pub fn known(condition: impl KnownCondition) -> bool {
    condition.known()
}
