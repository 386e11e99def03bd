//! The recorder: a thread-local function under construction, to which every operation of the language appends.

use crate::diag::Diagnostic;
use crate::ir::{BlockId, Builder, DType, Func, Loc, Op, Type, Value};
use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, Location, catch_unwind, resume_unwind};

struct Recorder {
    func: Func,
    /// Stack of open regions, innermost last: insertion points.
    blocks: Vec<BlockId>,
    /// Output lines of `static_print`.
    prints: Vec<String>,
    /// Whether the open region is a combining function, which has no control flow.
    combining: bool,
    /// Number of calls of [`emit`].
    emitted: usize,
    /// Number of calls of device functions.
    calls: usize,
}

/// Limit on the number of ops of a function, approximate. Loops over constants are unrolled, and passes take time and
/// stack proportional to the length of def-use chains.
const MAX_OPS: usize = 1 << 15;

thread_local! {
    static CURRENT: RefCell<Option<Recorder>> = const { RefCell::new(None) };
    /// The element type of each type parameter of the kernel. Not part of the recorder, because it is read while ops
    /// are being appended.
    static GENERICS: RefCell<Vec<DType>> = const { RefCell::new(Vec::new()) };
    /// The names of the device functions whose calls are in progress.
    static CALLS: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
}

/// A recorded kernel.
#[derive(Clone, Debug)]
pub struct Recording {
    pub func: Func,
    /// Output of `static_print`, one entry per line.
    pub prints: Vec<String>,
}

/// Runs `body`, which calls the language, and returns the recorded function.
///
/// # Errors
/// The first error in `body`. Other panics propagate.
#[track_caller]
pub fn record(name: &str, body: impl FnOnce()) -> Result<Func, Diagnostic> {
    record_generic(name, &[], body).map(|r| r.func)
}

/// As [`record`], with the element types that type parameters (see [`super::dtype`]) are bound to.
///
/// # Errors
/// The first error in `body`. Other panics propagate.
#[track_caller]
pub fn record_generic(name: &str, generics: &[DType], body: impl FnOnce()) -> Result<Recording, Diagnostic> {
    let mut func = Func::new(name);
    func.loc = Location::caller().into();
    let blocks = vec![func.body];
    let mine = Recorder { func, blocks, prints: Vec::new(), combining: false, emitted: 0, calls: 0 };
    // Recording a kernel inside the recording of another (a host function called from it) does not disturb the outer
    // one.
    let outer = CURRENT.with(|c| c.borrow_mut().replace(mine));
    let outer_generics = GENERICS.replace(generics.to_vec());
    let outer_calls = CALLS.take();
    let outcome = catch_unwind(AssertUnwindSafe(body));
    GENERICS.set(outer_generics);
    CALLS.set(outer_calls);
    let mine = CURRENT.with(|c| std::mem::replace(&mut *c.borrow_mut(), outer));
    let Some(mut mine) = mine else { panic!("internal compiler error: the recorder is gone; please report this") };
    match outcome {
        Ok(()) => {
            let loc = mine.func.loc.clone();
            let body = mine.func.body;
            Builder::new(&mut mine.func, body, loc).ret();
            Ok(Recording { func: mine.func, prints: mine.prints })
        }
        Err(payload) => match payload.downcast::<Diagnostic>() {
            Ok(diagnostic) => Err(*diagnostic),
            Err(other) => resume_unwind(other),
        },
    }
}

/// Limit on the nesting of calls of device functions, far below what overflows the stack of a thread.
const MAX_DEPTH: usize = 100;

/// Limit on the calls of device functions of a kernel, which a recursion that records nothing would exceed after minutes.
const MAX_CALLS: usize = 1 << 17;

/// A call of a device function in progress.
#[doc(hidden)]
#[must_use]
pub struct FunctionCall(());

impl Drop for FunctionCall {
    fn drop(&mut self) {
        CALLS.with_borrow_mut(|calls| calls.pop());
    }
}

/// Enters the device function `name`; fails where too many calls are nested, as in a recursion without end, or have been made.
#[doc(hidden)]
#[track_caller]
pub fn enter_function(name: &'static str) -> FunctionCall {
    let depth = CALLS.with_borrow_mut(|calls| {
        calls.push(name);
        calls.len()
    });
    let call = FunctionCall(());
    let total = CURRENT.with_borrow_mut(|recorder| {
        recorder.as_mut().map_or(0, |recorder| {
            recorder.calls += 1;
            recorder.calls
        })
    });
    if total > MAX_CALLS {
        fail(
            error_here(format!("the kernel calls device functions more than {MAX_CALLS} times"))
                .label("this call is one too many")
                .help("each call is recorded: let a recursion call itself once, or use smaller constants"),
        );
    }
    if depth > MAX_DEPTH && total > 0 {
        let last = CALLS.with_borrow(|calls| calls[depth - 5..].join("`, `"));
        fail(
            error_here(format!("more than {MAX_DEPTH} calls of device functions are nested"))
                .label("this call is one too many")
                .note(format!("the last calls are those of `{last}`"))
                .help(
                    "a call is recorded when the kernel is specialized, in both arms of a run-time `if`: end a recursion with a condition on \
                     constexpr values, or write a loop with `range` or `while`",
                ),
        );
    }
    call
}

fn with<R>(f: impl FnOnce(&mut Recorder) -> R) -> R {
    CURRENT.with(|c| match &mut *c.borrow_mut() {
        Some(recorder) => f(recorder),
        None => panic!("operations on tiles can be used only while a #[kernel] is recorded"),
    })
}

/// Appends ops, with the caller's source location.
#[track_caller]
pub(crate) fn emit<R>(f: impl FnOnce(&mut Builder) -> R) -> R {
    let loc = here();
    let emitted = with(|r| {
        r.emitted += 1;
        r.emitted
    });
    if emitted > MAX_OPS {
        let diagnostic = Diagnostic::new(format!("the kernel has more than {MAX_OPS} operations"), loc);
        fail(
            diagnostic
                .label("this one exceeds the limit")
                .help("a Rust loop is unrolled: use `range`, or smaller constants"),
        );
    }
    with(|r| {
        let Some(&block) = r.blocks.last() else {
            panic!("internal compiler error: no open region; please report this")
        };
        f(&mut Builder::new(&mut r.func, block, loc))
    })
}

/// The caller's source location.
#[track_caller]
pub(crate) fn here() -> Loc {
    Location::caller().into()
}

pub(crate) fn ty(v: Value) -> Type {
    with(|r| r.func.ty(v).clone())
}

pub(crate) fn shape(v: Value) -> Vec<usize> {
    with(|r| r.func.ty(v).shape().to_vec())
}

pub(crate) fn constant_int(v: Value) -> Option<i64> {
    with(|r| r.func.constant_int(v))
}

pub(crate) fn generic(index: usize) -> DType {
    match GENERICS.with_borrow(|generics| generics.get(index).copied()) {
        Some(dtype) => dtype,
        None => panic!("internal compiler error: type parameter {index} has no type; please report this"),
    }
}

pub(crate) fn print_line(line: String) {
    with(|r| r.prints.push(line));
}

pub(crate) fn add_arg(arg: crate::ir::Arg, ty: Type) -> Value {
    with(|r| r.func.add_arg(arg, ty))
}

/// Records the ops of `body` into a new region with parameters of the given types.
pub(crate) fn region<R>(params: &[Type], body: impl FnOnce(&[Value]) -> R) -> (BlockId, R) {
    let (block, values) = with(|r| {
        let block = r.func.add_block();
        let values: Vec<Value> = params.iter().map(|t| r.func.add_param(block, t.clone())).collect();
        r.blocks.push(block);
        (block, values)
    });
    let result = body(&values);
    with(|r| r.blocks.pop());
    (block, result)
}

/// As [`region`], for a combining function.
pub(crate) fn combining<R>(params: &[Type], body: impl FnOnce(&[Value]) -> R) -> (BlockId, R) {
    let outer = with(|r| std::mem::replace(&mut r.combining, true));
    let result = region(params, body);
    with(|r| r.combining = outer);
    result
}

/// Records ops into the current region, as those of a combining function. Also returns these ops.
pub(crate) fn combining_here<R>(body: impl FnOnce() -> R) -> (R, Vec<(Op, Loc)>) {
    let current = with(|r| match r.blocks.last() {
        Some(&block) => block,
        None => panic!("internal compiler error: no open region; please report this"),
    });
    let before = with(|r| r.func.block(current).ops.len());
    let outer = with(|r| std::mem::replace(&mut r.combining, true));
    let result = body();
    with(|r| r.combining = outer);
    (result, ops_since(current, before))
}

/// Whether a combining function is being recorded.
pub(crate) fn in_combine() -> bool {
    with(|r| r.combining)
}

/// A condition of a `device_assert` in a combining function, with the message and the line.
pub(crate) struct CombineAssert {
    pub(crate) condition: Value,
    pub(crate) message: String,
    pub(crate) loc: Loc,
}

/// Removes the `device_assert`s from a region.
pub(crate) fn take_asserts(block: BlockId) -> Vec<CombineAssert> {
    with(|r| {
        let mut asserts = Vec::new();
        for id in r.func.block(block).ops.clone() {
            let data = r.func.op(id);
            if let Op::DeviceAssert { message } = &data.op {
                let (condition, loc) = (data.operands[0], data.loc.clone());
                asserts.push(CombineAssert { condition, message: message.clone(), loc });
                r.func.erase(id);
            }
        }
        asserts
    })
}

/// Adds `n` bool parameters for each of the two elements of a combining function, after the other parameters of each.
pub(crate) fn add_combine_flags(block: BlockId, n: usize) -> (Vec<Value>, Vec<Value>) {
    with(|r| {
        let params = r.func.block(block).params.clone();
        let (left, right) = params.split_at(params.len() / 2);
        let mut flags =
            |_| -> Vec<Value> { (0..n).map(|_| r.func.add_param(block, Type::scalar(DType::Bool))).collect() };
        let (of_left, of_right) = (flags(left), flags(right));
        r.func.set_params(block, [left, &of_left, right, &of_right].concat());
        (of_left, of_right)
    })
}

/// Appends ops with another source location than the caller's.
pub(crate) fn emit_at<R>(loc: Loc, f: impl FnOnce(&mut Builder) -> R) -> R {
    with(|r| {
        let Some(&block) = r.blocks.last() else {
            panic!("internal compiler error: no open region; please report this")
        };
        f(&mut Builder::new(&mut r.func, block, loc))
    })
}

/// Moves the ops of a region, which has no parameters, to the end of the current one.
pub(crate) fn inline(block: BlockId) {
    with(|r| {
        let Some(&current) = r.blocks.last() else {
            panic!("internal compiler error: no open region; please report this")
        };
        let ops = r.func.take_ops(block);
        r.func.insert(current, r.func.block(current).ops.len(), &ops);
    });
}

/// The ops of a region.
pub(crate) fn ops_of(block: BlockId) -> Vec<(Op, Loc)> {
    ops_since(block, 0)
}

/// The ops of a region after the first `before` of them.
fn ops_since(block: BlockId, before: usize) -> Vec<(Op, Loc)> {
    with(|r| {
        let ops = &r.func.block(block).ops[before..];
        ops.iter().map(|&id| (r.func.op(id).op.clone(), r.func.op(id).loc.clone())).collect()
    })
}

/// Appends ops to the end of an already recorded region.
#[track_caller]
pub(crate) fn emit_in<R>(block: BlockId, f: impl FnOnce(&mut Builder) -> R) -> R {
    let loc = here();
    with(|r| f(&mut Builder::new(&mut r.func, block, loc)))
}

/// Terminates a region with the values that it yields.
#[track_caller]
pub(crate) fn yield_in(block: BlockId, values: &[Value]) {
    emit_in(block, |b| b.op(Op::Yield, values, &[]));
}

/// Aborts the recording with a diagnostic. Unwinds without invoking the panic hook; [`record`] catches it.
pub(crate) fn fail(diagnostic: Diagnostic) -> ! {
    let payload: Box<dyn Any + Send> = Box::new(diagnostic);
    resume_unwind(payload)
}

/// Starts a diagnostic at the caller's source location.
#[track_caller]
pub(crate) fn error_here(message: impl Into<String>) -> Diagnostic {
    Diagnostic::new(message, here())
}
