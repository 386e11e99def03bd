//! Hints, printing, assertions and inline assembly.

use super::dtype::Dtype;
use super::handle::{Data, Ptr, PtrTile, Scalar, Tile};
use super::index::{Extent, check_powers_of_two};
use super::operand::{Operand, broadcast, common_shape, materialize};
use super::record::{emit, error_here, fail, print_line, shape};
use crate::ir::{DType, Op, Type, Value};

/// States that a condition holds, for example `assume(n > 0)`. A launch whose arguments violate it is rejected.
/// Conditions on anything but arguments, constants and grid extents do not affect code generation; they are checked in
/// builds with assertions and by the interpreter.
#[track_caller]
pub fn assume(condition: impl Operand<bool>) {
    let v = materialize(condition.raw(), DType::Bool);
    super::operand::expect_scalar(v, "the condition of `assume`");
    emit(|b| b.op(Op::Assume, &[v], &[]));
}

/// Values that take hints: integers and pointers.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not take this hint",
    label = "expected an integer or a pointer"
)]
pub trait Hintable: Copy {
    #[doc(hidden)]
    #[track_caller]
    fn hinted(self, divisible: Option<i64>, contiguous: Option<i64>) -> Self;
}

#[track_caller]
fn hint(v: Value, divisible: Option<i64>, contiguous: Option<i64>) -> Value {
    emit(|b| {
        let ty = b.func.ty(v).clone();
        let id = b.op(Op::Hint { divisible, contiguous, at_least: None }, &[v], &[ty]);
        b.func.result(id)
    })
}

impl<X: Data> Hintable for X {
    #[track_caller]
    fn hinted(self, divisible: Option<i64>, contiguous: Option<i64>) -> X {
        X::from_value(hint(self.value(), divisible, contiguous))
    }
}

macro_rules! pointer_hints {
    ($($handle:ident),*) => { $(
        impl<T: Dtype> Hintable for $handle<T> {
            #[track_caller]
            fn hinted(self, divisible: Option<i64>, contiguous: Option<i64>) -> Self {
                $handle::new(hint(self.v, divisible, contiguous), self.writable)
            }
        }
    )* };
}
pointer_hints!(Ptr, PtrTile);

#[track_caller]
fn positive(n: impl Extent, what: &str) -> i64 {
    match i64::try_from(n.extent()) {
        Ok(n) if n > 0 => n,
        _ => fail(error_here(format!("`{what}` requires a positive number")).label("not positive")),
    }
}

/// States that `x` (for pointers: the byte address) is a multiple of `n`. For a tile: the first element of each
/// contiguous run along the last dimension. Where that dimension has extent 1, each element is such a run, so a tile of
/// arbitrary numbers is stated as `multiple_of(rows.expand_dims(1), n)`.
///
/// A launch checks this hint and is rejected unless the hint provably holds. On values that no launch can check (e.g.
/// loaded from memory) the hint has no effect.
#[track_caller]
pub fn multiple_of<X: Hintable>(x: X, n: impl Extent) -> X {
    x.hinted(Some(positive(n, "multiple_of")), None)
}

/// States that each group of `n` elements along the last dimension of `x` is contiguous (each is the one before plus
/// one). No launch can check this, so it does not affect code generation, which derives contiguity itself. The
/// interpreter reports violations.
#[track_caller]
pub fn max_contiguous<X: Hintable>(x: X, n: impl Extent) -> X {
    x.hinted(None, Some(positive(n, "max_contiguous")))
}

/// The values of a `device_print`: a tuple of tiles and scalars.
pub trait PrintArgs {
    #[doc(hidden)]
    fn print_values(self) -> Vec<Value>;
}

macro_rules! print_args {
    ($($X:ident $i:tt),*) => {
        impl<$($X: Data),*> PrintArgs for ($($X,)*) {
            fn print_values(self) -> Vec<Value> {
                vec![$(self.$i.value()),*]
            }
        }
    };
}
print_args!();
print_args!(A 0);
print_args!(A 0, B 1);
print_args!(A 0, B 1, C 2);
print_args!(A 0, B 1, C 2, D 3);
print_args!(A 0, B 1, C 2, D 3, E 4);
print_args!(A 0, B 1, C 2, D 3, E 4, F 5);
print_args!(A 0, B 1, C 2, D 3, E 4, F 5, G 6);
print_args!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);

/// Prints a text and the elements of tiles and scalars while the kernel runs: `device_print("x", x, i)`.
#[track_caller]
pub fn device_print(prefix: impl AsRef<str>, values: impl PrintArgs) {
    let values = values.print_values();
    emit(|b| b.op(Op::DevicePrint { prefix: prefix.as_ref().to_string() }, &values, &[]));
}

/// Traps with a message unless all elements of the condition are true. In the combining function of a reduction or scan,
/// the trap comes after it.
#[track_caller]
pub fn device_assert(condition: impl Operand<bool>, message: impl AsRef<str>) {
    let v = materialize(condition.raw(), DType::Bool);
    let message = match message.as_ref() {
        "" => "assertion failed",
        text => text,
    };
    emit(|b| b.op(Op::DeviceAssert { message: message.to_string() }, &[v], &[]));
}

/// Prints Rust values at specialization: `static_print("tile", rows_tile)`.
pub fn static_print(prefix: impl AsRef<str>, values: impl StaticArgs) {
    let mut line = prefix.as_ref().to_string();
    for value in values.texts() {
        line.push(' ');
        line.push_str(&value);
    }
    print_line(line);
}

/// The values of a `static_print`: a tuple of Rust values. Tiles and scalars are printed as type and shape.
pub trait StaticArgs {
    #[doc(hidden)]
    fn texts(self) -> Vec<String>;
}

/// One value of a `static_print`.
#[diagnostic::on_unimplemented(message = "`{Self}` cannot be printed")]
pub trait StaticText {
    #[doc(hidden)]
    fn text(self) -> String;
}

impl<X: std::fmt::Display> StaticText for X {
    fn text(self) -> String {
        self.to_string()
    }
}

impl<T: Dtype> StaticText for Tile<T> {
    fn text(self) -> String {
        super::diag_text::ty(&super::record::ty(self.value()))
    }
}

impl<T: Dtype> StaticText for Scalar<T> {
    fn text(self) -> String {
        super::diag_text::ty(&super::record::ty(self.value()))
    }
}

macro_rules! static_args {
    ($($X:ident $i:tt),*) => {
        impl<$($X: StaticText),*> StaticArgs for ($($X,)*) {
            fn texts(self) -> Vec<String> {
                vec![$(self.$i.text()),*]
            }
        }
    };
}
static_args!();
static_args!(A 0);
static_args!(A 0, B 1);
static_args!(A 0, B 1, C 2);
static_args!(A 0, B 1, C 2, D 3);
static_args!(A 0, B 1, C 2, D 3, E 4);
static_args!(A 0, B 1, C 2, D 3, E 4, F 5);

/// An operand of inline assembly: a tile, a scalar, or pointers.
#[diagnostic::on_unimplemented(message = "`{Self}` cannot be an operand of inline assembly")]
pub trait AsmOperand: Copy {
    #[doc(hidden)]
    fn asm_value(self) -> Value;
}

impl<X: Data> AsmOperand for X {
    fn asm_value(self) -> Value {
        self.value()
    }
}

impl<T: Dtype> AsmOperand for Ptr<T> {
    fn asm_value(self) -> Value {
        self.v
    }
}

impl<T: Dtype> AsmOperand for PtrTile<T> {
    fn asm_value(self) -> Value {
        self.v
    }
}

/// The operands of inline assembly: a tuple.
pub trait AsmArgs {
    #[doc(hidden)]
    fn asm_values(self) -> Vec<Value>;
}

macro_rules! asm_args {
    ($($X:ident $i:tt),*) => {
        impl<$($X: AsmOperand),*> AsmArgs for ($($X,)*) {
            fn asm_values(self) -> Vec<Value> {
                vec![$(self.$i.asm_value()),*]
            }
        }
    };
}
asm_args!();
asm_args!(A 0);
asm_args!(A 0, B 1);
asm_args!(A 0, B 1, C 2);
asm_args!(A 0, B 1, C 2, D 3);
asm_args!(A 0, B 1, C 2, D 3, E 4);
asm_args!(A 0, B 1, C 2, D 3, E 4, F 5);
asm_args!(A 0, B 1, C 2, D 3, E 4, F 5, G 6);
asm_args!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);

/// The element types of the results of inline assembly: one type, or a tuple of types.
pub trait AsmResults {
    type Tiles;
    #[doc(hidden)]
    fn dtypes() -> Vec<DType>;
    #[doc(hidden)]
    fn tiles(values: &[Value]) -> Self::Tiles;
}

impl<T: Dtype> AsmResults for T {
    type Tiles = Tile<T>;
    fn dtypes() -> Vec<DType> {
        vec![T::dtype()]
    }
    fn tiles(values: &[Value]) -> Tile<T> {
        Tile::from_value(values[0])
    }
}

macro_rules! asm_results {
    ($($T:ident $i:tt),*) => {
        impl<$($T: Dtype),*> AsmResults for ($($T,)*) {
            type Tiles = ($(Tile<$T>,)*);
            fn dtypes() -> Vec<DType> {
                vec![$($T::dtype()),*]
            }
            fn tiles(values: &[Value]) -> Self::Tiles {
                ($(Tile::<$T>::from_value(values[$i]),)*)
            }
        }
    };
}
asm_results!(A 0, B 1);
asm_results!(A 0, B 1, C 2);
asm_results!(A 0, B 1, C 2, D 3);

/// One inline PTX sequence per `pack` elements of the operands, in LLVM's syntax: `$0` is the result, `$1` … are the
/// operands; of several results, as in `inline_asm_elementwise::<(f32, i32)>(…)`, `$0` and `$1` are the results, and so
/// on. GPU only. No launch can check accesses through pointers that are operands: it has to be unchecked.
#[track_caller]
pub fn inline_asm_elementwise<R: AsmResults>(
    asm: impl AsRef<str>,
    constraints: impl AsRef<str>,
    args: impl AsmArgs,
    is_pure: bool,
    pack: impl Extent,
) -> R::Tiles {
    let args = args.asm_values();
    let pack = pack.extent();
    if args.is_empty() {
        fail(
            error_here("`inline_asm_elementwise` needs at least one operand")
                .label("determines the shape of the result"),
        );
    }
    if pack == 0 {
        fail(error_here("`pack` is 0").label("expected at least 1 element per instruction"));
    }
    let shapes: Vec<Vec<usize>> = args.iter().map(|&v| shape(v)).collect();
    let common = common_shape(&shapes, "`inline_asm_elementwise`");
    if pack > 1 {
        check_powers_of_two(&common, "`pack` of `inline_asm_elementwise`");
    }
    let args: Vec<Value> = args.into_iter().map(|v| broadcast(v, &common)).collect();
    let op = Op::InlineAsm {
        asm: asm.as_ref().to_string(),
        constraints: constraints.as_ref().to_string(),
        pack,
        pure: is_pure,
    };
    let results: Vec<Type> = R::dtypes().into_iter().map(|dtype| Type::tensor(&common, dtype)).collect();
    R::tiles(&emit(|b| {
        let id = b.op(op, &args, &results);
        b.func.op(id).results.clone()
    }))
}
