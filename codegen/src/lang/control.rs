//! Loops and branches. `#[kernel]` rewrites those of Rust into calls of this module, with the assigned variables as
//! loop-carried state.

pub use super::carried::Carried;
use super::diag_text;
use super::dtype::Int;
use super::handle::{Data, Ptr, Scalar, Tile, describe};
use super::index::{Extent, Unset};
use super::memory::check_writable;
use super::operand::{IntegerLiteral, Operand, expect_scalar, materialize};
use super::record::{constant_int, emit, emit_in, error_here, fail, here, in_combine, region, ty, yield_in};
use crate::diag::Diagnostic;
use crate::ir::{BinaryOp, BlockId, CmpOp, DType, Def, Func, Loc, Op, Type, Value};
use crate::num::int_range;
use crate::verify::{MAX_REPLICAS, MAX_STAGES, MAX_UNROLL};
use std::collections::HashSet;

/// A counted loop's bounds and hints: the result of [`range`].
#[derive(Clone, Copy, Debug)]
pub struct Range<T: Int> {
    start: Scalar<T>,
    end: Scalar<T>,
    step: Scalar<T>,
    num_stages: Option<u32>,
    unroll: Option<u32>,
    warp_specialize: Option<bool>,
    overlap: Option<bool>,
    split: Option<bool>,
    replicas: Option<u32>,
    /// Pointer to the counter of taken iterations.
    dynamic: Option<Value>,
}

/// A loop bound: an i32 or i64 scalar (also as a rank-0 tile), or a Rust integer, which becomes an i32 scalar (`i64`:
/// an i64 scalar).
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be a loop bound",
    label = "expected an integer scalar or a Rust integer"
)]
pub trait Bound: Copy {
    type Elem: Int;
    #[doc(hidden)]
    #[track_caller]
    fn bound<T: Int>(self) -> Scalar<T>;
}

macro_rules! scalar_bounds {
    ($($handle:ident<$elem:ty>),*) => { $(
        impl Bound for $handle<$elem> {
            type Elem = $elem;
            #[track_caller]
            fn bound<T: Int>(self) -> Scalar<T> {
                expect_scalar(self.value(), "a loop bound");
                Scalar::<$elem>::from_value(self.value()).to::<T>()
            }
        }
    )* };
}
scalar_bounds!(Scalar<i32>, Scalar<i64>, Tile<i32>, Tile<i64>);

macro_rules! host_bounds {
    ($($ty:ty => $elem:ty),*) => { $(
        impl Bound for $ty {
            type Elem = $elem;
            #[track_caller]
            fn bound<T: Int>(self) -> Scalar<T> {
                Scalar::from_value(materialize(Operand::<$elem>::raw(self), T::dtype()))
            }
        }
    )* };
}
host_bounds!(i32 => i32, u32 => i32, usize => i32, i64 => i64, IntegerLiteral => i32);

/// The wider of two index types.
pub trait Widen<B: Int>: Int {
    type Wide: Int;
}
impl Widen<i32> for i32 {
    type Wide = i32;
}
impl Widen<i64> for i32 {
    type Wide = i64;
}
impl Widen<i32> for i64 {
    type Wide = i64;
}
impl Widen<i64> for i64 {
    type Wide = i64;
}

/// An optional hint.
pub trait Hint<T> {
    #[doc(hidden)]
    #[track_caller]
    fn hint(self) -> Option<T>;
}
impl<T> Hint<T> for super::index::Unset {
    fn hint(self) -> Option<T> {
        None
    }
}
impl Hint<bool> for bool {
    fn hint(self) -> Option<bool> {
        Some(self)
    }
}
impl Hint<bool> for Option<bool> {
    fn hint(self) -> Option<bool> {
        self
    }
}
macro_rules! count_hints {
    ($($ty:ty),*) => { $(
        impl Hint<u32> for $ty {
            #[track_caller]
            fn hint(self) -> Option<u32> {
                Some(u32::try_from(self.extent()).unwrap_or(u32::MAX))
            }
        }
    )* };
}
count_hints!(usize, i32, u32, IntegerLiteral);

/// A counter of taken iterations: a pointer to i32, or no value.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the counter of a `dynamic` loop",
    label = "expected an argument `InOut<i32>`"
)]
pub trait Counter: Copy {
    #[doc(hidden)]
    fn counter(self) -> Option<Value>;
}
impl Counter for Ptr<i32> {
    fn counter(self) -> Option<Value> {
        check_writable(self.writable, "dynamic");
        Some(self.v)
    }
}
impl<T: Counter> Counter for Option<T> {
    fn counter(self) -> Option<Value> {
        self.and_then(Counter::counter)
    }
}
impl Counter for Unset {
    fn counter(self) -> Option<Value> {
        None
    }
}

type Wide3<A, B, C> = <<<A as Bound>::Elem as Widen<<B as Bound>::Elem>>::Wide as Widen<<C as Bound>::Elem>>::Wide;

/// The integers from `start` to `end` (exclusive) in steps of `step` > 0, over which a `for` loop runs.
///
/// - `num_stages`: number of stages of the software pipeline.
/// - `unroll`: unroll factor.
/// - `warp_specialize`: whether dedicated producer warps do the loads.
/// - `overlap`: whether the dots of one iteration overlap the arithmetic of the next.
/// - `split`: whether a loop is split where the outcome of a mask, or of a bounds check, becomes known.
/// - `replicas`: with warp specialization, this many programs of axis 0 share a block, each with a warpgroup
///   (`num_warps = 4`), and a producer loads for all of them. The extent of axis 0 of the grid is a multiple of it. Either
///   the loop's loads and bounds depend on `program_id(0)` only by `program_id(0) / replicas`, and programs that follow
///   each other share the loads; or the loop is `range(program_id(0), end, num_programs(0))`, and the programs take turns
///   in the loops inside, whose bounds are the same in each iteration.
/// - `dynamic`: with warp specialization, blocks take the iterations of the outermost loop `range(program_id(0), end,
///   num_programs(0))` as they become free, by this counter: one i32 of memory, 0 before and after a launch. `end` is the
///   same for all programs, and axes 1 and 2 of the grid have extent 1. Iterations do not depend on each other. With
///   `replicas` that share loads, program id and number are divided by it.
///
/// The compiler chooses each hint that is not given.
#[track_caller]
pub fn range<A, B, C>(
    start: A,
    end: B,
    step: C,
    num_stages: impl Hint<u32>,
    unroll: impl Hint<u32>,
    warp_specialize: impl Hint<bool>,
    overlap: impl Hint<bool>,
    split: impl Hint<bool>,
    replicas: impl Hint<u32>,
    dynamic: impl Counter,
) -> Range<Wide3<A, B, C>>
where
    A: Bound,
    B: Bound,
    C: Bound,
    A::Elem: Widen<B::Elem>,
    <A::Elem as Widen<B::Elem>>::Wide: Widen<C::Elem>,
{
    let step = step.bound();
    if let Some(n) = constant_int(step.value())
        && n <= 0
    {
        fail(
            error_here(format!("the step of `range` must be positive, found {n}"))
                .label("not positive")
                .help("count up, and compute the descending index as `end - 1 - i`"),
        );
    }
    let (num_stages, unroll, replicas) = (num_stages.hint(), unroll.hint(), replicas.hint());
    for (name, hint, most) in
        [("num_stages", num_stages, MAX_STAGES), ("unroll", unroll, MAX_UNROLL), ("replicas", replicas, MAX_REPLICAS)]
    {
        if let Some(found) = hint
            && !(1..=most).contains(&found)
        {
            fail(
                error_here(format!("`{name}` of `range` is {found}"))
                    .label(format!("1 to {most}"))
                    .help(format!("give `{name}` a value in this range, or leave it out")),
            );
        }
    }
    Range {
        start: start.bound(),
        end: end.bound(),
        step,
        num_stages,
        unroll,
        warp_specialize: warp_specialize.hint(),
        overlap: overlap.hint(),
        split: split.hint(),
        replicas: replicas.filter(|&count| count > 1),
        dynamic: dynamic.counter(),
    }
}

/// Like [`range`], for loops that are unrolled at specialization: the index is a Rust number and can be used in shapes.
#[track_caller]
pub fn static_range(
    start: impl Extent,
    end: impl Extent,
    step: impl Extent,
) -> std::iter::StepBy<std::ops::Range<usize>> {
    let (start, end, step) = (start.extent(), end.extent(), step.extent());
    if step == 0 {
        fail(error_here("the step of `static_range` is 0").label("never ends"));
    }
    (start..end).step_by(step)
}

pub(super) fn types_of(values: &[Value]) -> Vec<Type> {
    values.iter().map(|&v| ty(v)).collect()
}

/// A carried variable or a field of one, in messages. Without a name of a variable, it is the result of an `if`.
fn described(name: &str) -> String {
    match name.strip_prefix('.') {
        _ if name.is_empty() => "the value of this `if`".to_string(),
        Some(field) => format!("`{field}` of the value of this `if`"),
        None => format!("`{name}`"),
    }
}

/// Fails with a message if a carried variable changes its type. A value without a name is the result of an `if`.
pub(super) fn check_same(loc: &Loc, names: &[String], expected: &[Type], found: &[Value], before: &str, after: &str) {
    for (i, (want, &v)) in expected.iter().zip(found).enumerate() {
        let have = ty(v);
        if *want != have {
            let name = described(names.get(i).map_or("", String::as_str));
            let (want, have) =
                (diag_text::with_article(&diag_text::ty(want)), diag_text::with_article(&diag_text::ty(&have)));
            fail(
                Diagnostic::new(format!("{name} must have the same shape {before} and {after}"), loc.clone())
                    .label(format!("{name} is {want} {before}, {have} {after}"))
                    .help(
                        "give it the same shape on every path, for example with `.broadcast_to([…])` or `zeros([…])`",
                    ),
            );
        }
    }
}

/// Fails with a message if a constant of an aggregate differs between two paths.
pub(super) fn check_constants<S: Carried>(
    loc: &Loc,
    names: &[&str],
    [first, second]: [&S::Handle; 2],
    before: &str,
    after: &str,
) {
    let (mut a, mut b) = (Vec::new(), Vec::new());
    S::member_constants(first, names, &mut a);
    S::member_constants(second, names, &mut b);
    if let Some(((name, _), _)) = a.iter().zip(&b).find(|(a, b)| a != b) {
        let name = described(name);
        fail(
            Diagnostic::new(format!("the constant {name} must be the same {before} and {after}"), loc.clone())
                .label(format!("{name} is known at specialization, and differs {after}"))
                .help("make the field a run-time value, such as `Scalar<i32>`"),
        );
    }
}

/// Fails with a message where iterations cannot run in any order, or their counter cannot count them.
fn check_dynamic<T: Int>(loc: &Loc, range: &Range<T>, carried: &[Type]) {
    if range.dynamic.is_none() {
        return;
    }
    let message = |text: &str, label: &str, help: &str| {
        fail(Diagnostic::new(text.to_string(), loc.clone()).label(label.to_string()).help(help.to_string()))
    };
    if T::dtype() != DType::I32 {
        message(
            "the index of a `dynamic` loop is an i32",
            "this one is an i64",
            "give it bounds and a step of type i32",
        );
    }
    if !carried.is_empty() {
        message(
            "a `dynamic` loop carries no values: its iterations run in any order",
            "variables are assigned inside that live outside",
            "compute them from the index",
        );
    }
}

/// `for i in range(…)`: records `body` once, with `state` as the loop-carried values.
#[doc(hidden)]
#[track_caller]
pub fn for_range<T: Int, S: Carried, R: Carried<Handle = S::Handle>>(
    range: Range<T>,
    state: S,
    names: &[&str],
    body: impl FnOnce(Scalar<T>, S::Handle) -> R,
) -> S::Handle {
    let loc = here();
    let state = state.into_handle();
    let mut init = Vec::new();
    S::values(&state, &mut init);
    let carried = types_of(&init);
    let mut params = vec![Type::scalar(T::dtype())];
    params.extend(carried.iter().cloned());
    let step = range.step.value();
    let end = clamped_end(range.end.value(), step);
    check_dynamic::<T>(&loc, &range, &carried);
    if range.dynamic.is_some() {
        // The counter counts for all programs of the launch.
        for axis in [1, 2] {
            emit(|b| {
                let (count, one) = (b.num_programs(axis), b.int(1, DType::I32));
                let is_one = b.cmp(CmpOp::Eq, count, one);
                b.op(Op::Assume, &[is_one], &[]);
            });
        }
    }
    let (block, next) = region(&params, |values| {
        let inner = S::rebuild(&state, &mut values[1..].iter().copied());
        let index = match range.dynamic {
            Some(counter) => {
                let index =
                    emit(|b| b.op(Op::DynamicIndex, &[counter, values[0], step, end], &[Type::scalar(DType::I32)]));
                emit(|b| {
                    b.func.set_loc(index, loc.clone());
                    b.func.result(index)
                })
            }
            None => values[0],
        };
        body(Scalar::from_value(index), inner).into_handle()
    });
    let mut results = Vec::new();
    S::values(&next, &mut results);
    let mut leaves = Vec::new();
    S::member_names(&state, names, &mut leaves);
    check_same(&loc, &leaves, &carried, &results, "before the loop", "after one iteration");
    check_constants::<S>(&loc, names, [&state, &next], "before the loop", "after one iteration");
    yield_in(block, &results);
    let mut operands = vec![range.start.value(), end, step];
    operands.extend(&init);
    let Range { num_stages, unroll, warp_specialize, overlap, split, replicas, .. } = range;
    let op = Op::For { num_stages, unroll, warp_specialize, overlap, split, replicas };
    let values = emit(|b| {
        let id = b.op_with_regions(op, &operands, &carried, &[block]);
        b.func.op(id).results.clone()
    });
    S::rebuild(&state, &mut values.into_iter())
}

/// The minimum distance between the end of a loop and the maximum of its index type, in steps: a pipelined loop
/// computes indices of later iterations, which must not overflow. A launch checks the distance for ends computed from
/// its arguments ([`crate::analysis::bounds`]).
pub(crate) const PREFETCH_MARGIN_STEPS: i128 = 16;

/// The end of a loop. If the step is constant, an end that no launch can check (loaded from memory) is clamped, so
/// that it is at least [`PREFETCH_MARGIN_STEPS`] steps below the maximum of its type.
fn clamped_end(end: Value, step: Value) -> Value {
    emit(|b| {
        let (dtype, step) = (b.func.ty(end).dtype(), b.func.constant_int(step));
        let (Some(dtype), Some(step), false) = (dtype, step, derives_from_launch_values(b.func, end)) else {
            return end;
        };
        let last = (int_range(dtype).1 - PREFETCH_MARGIN_STEPS * i128::from(step)).min(i64::MAX.into());
        let Ok(last) = i64::try_from(last) else { return end };
        let last = b.int(last, dtype);
        b.binary(BinaryOp::Min, end, last)
    })
}

/// Whether a scalar is computed from arguments, program ids, grid extents, loop indices and constants.
fn derives_from_launch_values(func: &Func, v: Value) -> bool {
    let (mut seen, mut rest) = (HashSet::from([v]), vec![v]);
    while let Some(v) = rest.pop() {
        let data = match func.value(v).def {
            Def::Param(block, i) if block == func.body || (i == 0 && is_for_body(func, block)) => continue,
            Def::Param(..) => return false,
            Def::Result(id, _) => func.op(id),
        };
        match data.op {
            Op::Constant { .. } | Op::ProgramId { .. } | Op::NumPrograms { .. } | Op::CtaRank { .. } => {}
            Op::Binary(_) | Op::Unary(_) | Op::Cast | Op::Cmp(_) | Op::Select | Op::Hint { .. } => {
                rest.extend(data.operands.iter().filter(|&&operand| seen.insert(operand)));
            }
            _ => return false,
        }
    }
    true
}

/// Whether a block is the body of a `for`, whose first parameter is the index.
fn is_for_body(func: &Func, block: BlockId) -> bool {
    func.owner(block).is_some_and(|id| matches!(func.op(id).op, Op::For { .. }))
}

/// The condition of a `while` loop, tested before each iteration.
#[diagnostic::on_unimplemented(
    message = "the condition of a `while` loop must be a run-time value, found `{Self}`",
    label = "expected a comparison of scalars",
    note = "for a loop over values known at specialization, write `for i in static_range(…)`"
)]
pub trait LoopCondition {
    #[doc(hidden)]
    #[track_caller]
    fn condition(self) -> Value;
}

impl LoopCondition for Scalar<bool> {
    #[track_caller]
    fn condition(self) -> Value {
        check_condition(self.value())
    }
}

impl LoopCondition for Tile<bool> {
    fn condition(self) -> Value {
        self.value()
    }
}

#[track_caller]
pub(super) fn check_condition(v: Value) -> Value {
    if !ty(v).shape().is_empty() {
        fail(
            error_here(format!("a condition must be a scalar bool, found {}", describe(v)))
                .label("one value per element")
                .help("choose elementwise with `where_(condition, a, b)`, or reduce the tile first"),
        );
    }
    v
}

/// `while condition { body }`.
#[doc(hidden)]
#[track_caller]
pub fn while_loop<S: Carried, C: LoopCondition, R: Carried<Handle = S::Handle>>(
    state: S,
    names: &[&str],
    condition: impl FnOnce(S::Handle) -> C,
    body: impl FnOnce(S::Handle) -> R,
) -> S::Handle {
    let loc = here();
    if in_combine() {
        fail(
            error_here("a function of scalars has no loops over run-time values")
                .label("the number of iterations would differ between elements")
                .help("use `for i in static_range(…)`, and choose with `if` in each iteration"),
        );
    }
    let state = state.into_handle();
    let mut init = Vec::new();
    S::values(&state, &mut init);
    let carried = types_of(&init);
    let (before, flag) = region(&carried, |values| {
        let inner = S::rebuild(&state, &mut values.iter().copied());
        condition(inner).condition()
    });
    check_condition(flag);
    emit_in(before, |b| {
        let mut operands = vec![flag];
        operands.extend(b.func.block(before).params.clone());
        b.op(Op::Condition, &operands, &[]);
    });
    let (after, next) = region(&carried, |values| {
        let inner = S::rebuild(&state, &mut values.iter().copied());
        body(inner).into_handle()
    });
    let mut results = Vec::new();
    S::values(&next, &mut results);
    let mut leaves = Vec::new();
    S::member_names(&state, names, &mut leaves);
    check_same(&loc, &leaves, &carried, &results, "before the loop", "after one iteration");
    check_constants::<S>(&loc, names, [&state, &next], "before the loop", "after one iteration");
    yield_in(after, &results);
    let values = emit(|b| {
        let id = b.op_with_regions(Op::While, &init, &carried, &[before, after]);
        b.func.op(id).results.clone()
    });
    S::rebuild(&state, &mut values.into_iter())
}

/// The value itself: an assignment of it to its variable is none for the compiler's lints.
#[doc(hidden)]
pub fn same<X>(value: X) -> X {
    value
}

/// The last expression of a block without a value.
#[diagnostic::on_unimplemented(
    message = "this value is not used: the block has no value",
    label = "expected `()`, found `{Self}`",
    note = "assign it, as in `x = …`, or end it with `;`"
)]
pub trait NoValue {}
impl NoValue for () {}

/// Checks that the last expression of a block without a value has none either.
#[doc(hidden)]
pub fn no_value<X: NoValue>(_value: X) {}

/// Checks a condition at specialization.
#[track_caller]
pub fn static_assert(condition: bool, message: impl AsRef<str>) {
    if !condition {
        let message = message.as_ref();
        let text = if message.is_empty() { "this must be true" } else { message };
        fail(error_here(format!("static assertion failed: {text}")).label("false for these parameters"));
    }
}
