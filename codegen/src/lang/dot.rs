//! Matrix multiplication (`dot`).

use super::dtype::{Dtype, Num};
use super::handle::{Data, Tile};
use super::index::Unset;
use super::record::{emit, error_here, fail, shape};
pub use crate::ir::Precision;
use crate::ir::{DType, Type, Value};

/// The accumulator of a [`dot`]: a tile, or zeros if not given.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the accumulator of this `dot`",
    label = "expected a tile",
    note = "dots of floats accumulate in f32, dots of 8-bit integers in i32"
)]
pub trait Accumulator<T: Dtype> {
    type Elem: Dtype;
    #[doc(hidden)]
    fn accumulator(self) -> Option<Value>;
}

impl<T: Dtype> Accumulator<T> for Unset {
    type Elem = T::Acc;
    fn accumulator(self) -> Option<Value> {
        None
    }
}

impl<T: Dtype, A: Num> Accumulator<T> for Tile<A> {
    type Elem = A;
    fn accumulator(self) -> Option<Value> {
        Some(self.value())
    }
}

/// `acc + a × b` for a [M, K], b [K, N], acc [M, N]. Without `acc`, the product in f32 for floats and i32 for integers.
/// `input_precision` selects how f32 operands are multiplied: `ieee` (in f32, the default), `tf32` or `tf32x3`.
#[track_caller]
pub fn dot<T: Dtype, A: Accumulator<T>>(a: Tile<T>, b: Tile<T>, acc: A, input_precision: Precision) -> Tile<A::Elem> {
    let (from, to) = (T::dtype(), A::Elem::dtype());
    let (sa, sb) = (shape(a.value()), shape(b.value()));
    check_operands(&sa, &sb);
    let result = [sa[0], sb[1]];
    let acc = acc.accumulator();
    if let Some(acc) = acc {
        let found = shape(acc);
        if found != result {
            fail(
                error_here(format!("the accumulator of `dot` has shape {found:?}, the product {result:?}"))
                    .label(format!("{sa:?} × {sb:?} gives {result:?}"))
                    .help(format!("start with `zeros([{}, {}])`", result[0], result[1])),
            );
        }
    }
    check_types(from, to);
    let (va, vb) = (a.value(), b.value());
    // f64 operands accumulate in f64, whatever the result type.
    let inner = if from == DType::F64 { DType::F64 } else { to };
    let v = emit(|builder| {
        let start = match acc {
            Some(acc) if inner == to => acc,
            _ => builder.zero(Type::tensor(&result, inner)),
        };
        let product = builder.dot(va, vb, start, input_precision);
        let product = builder.cast(product, to);
        match acc {
            Some(acc) if inner != to => builder.binary(crate::ir::BinaryOp::Add, acc, product),
            _ => product,
        }
    });
    Tile::from_value(v)
}

#[track_caller]
fn check_operands(sa: &[usize], sb: &[usize]) {
    if sa.len() != 2 || sb.len() != 2 {
        fail(
            error_here(format!("`dot` requires tiles of rank 2, found shapes {sa:?} and {sb:?}"))
                .label("expected [M, K] and [K, N]")
                .help(
                    "insert a dimension with `.expand_dims(…)`, or use `sum(a * b, axis = …)` for dot products of vectors",
                ),
        );
    }
    if sa[1] != sb[0] {
        let diagnostic =
            error_here(format!("`dot` of shapes {sa:?} and {sb:?}: inner dimensions {} and {} differ", sa[1], sb[0]))
                .label("expected [M, K] and [K, N]");
        fail(if sa[1] == sb[1] {
            diagnostic.help("transpose the second one: `dot(a, b.trans())`")
        } else {
            diagnostic
        });
    }
}

#[track_caller]
fn check_types(from: DType, to: DType) {
    let legal = match from {
        DType::F8E4M3 | DType::F8E5M2 | DType::F16 | DType::BF16 | DType::F32 => to == DType::F32,
        DType::F64 => to == DType::F64 || to == DType::F32,
        DType::I8 | DType::U8 => to == DType::I32,
        DType::Bool | DType::I16 | DType::I32 | DType::I64 | DType::U16 | DType::U32 | DType::U64 => false,
    };
    if !legal {
        let diagnostic = error_here(format!("`dot` of {from} with accumulator {to} is not supported"))
            .label(format!("{from} × {from} → {to}"));
        let help = match from {
            d if d.is_float() => "accumulate in f32: `acc = zeros::<f32>([…])`",
            DType::I8 | DType::U8 => "accumulate in i32: `acc = zeros::<i32>([…])`",
            _ => "convert the operands: `.to::<f32>()`, or `.to::<i8>()` for small integers",
        };
        fail(diagnostic.help(help));
    }
}
