//! Matrix multiplication (`dot`).

use super::dtype::{Dtype, Num};
use super::handle::{Data, Tile};
use super::index::{Unset, check_powers_of_two, check_shape};
use super::record::{emit, error_here, fail, shape};
use crate::diag::Diagnostic;
pub use crate::ir::Precision;
use crate::ir::{Builder, DType, Op, Type, Value};

/// The accumulator of a [`dot`]: a tile, or zeros if not given.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the accumulator of this `dot`",
    label = "expected a tile",
    note = "dots of floats accumulate in f32, of f64 also in f64, of f16 and 8-bit floats also in f16; of 8-bit integers in i32"
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

/// How many products of 8-bit floats a [`dot`] may sum at less than the precision of f32: a number, or any if not given.
#[diagnostic::on_unimplemented(
    message = "`max_num_imprecise_acc` must be known when the kernel is specialized",
    label = "expected a number or a `#[constexpr]`, found `{Self}`"
)]
pub trait ImpreciseSums {
    #[doc(hidden)]
    fn most(self) -> Option<u32>;
}

impl ImpreciseSums for Unset {
    fn most(self) -> Option<u32> {
        None
    }
}

impl ImpreciseSums for usize {
    fn most(self) -> Option<u32> {
        Some(u32::try_from(self).unwrap_or(u32::MAX))
    }
}

impl ImpreciseSums for i32 {
    #[track_caller]
    fn most(self) -> Option<u32> {
        let most = u32::try_from(self);
        if most.is_err() {
            fail(
                error_here(format!("`max_num_imprecise_acc` is a number of products, found {self}"))
                    .help("write 0 for sums in f32, or leave it out for the precision of the hardware"),
            );
        }
        most.ok()
    }
}

/// `acc + a × b` for a [M, K], b [K, N], acc [M, N]. Without `acc`, the product in f32 for floats and i32 for integers.
/// An accumulator of f16, for operands of f16 or 8-bit floats, has sums that are rounded to f16: by `mma.sync` of f16 in
/// each of its steps of 16 products, elsewhere, where sums are in f32, at the end of each dot. On Hopper, dots with sums in
/// f32 take less time.
///
/// Dimensions before the last two are those of a batch: [B, M, K] × [B, K, N] is B dots, whose code is repeated B times.
/// `input_precision` selects how f32 operands are multiplied: `ieee` (in f32, the default), `tf32` or `tf32x3`.
///
/// `max_num_imprecise_acc` limits how many products of 8-bit floats tensor cores sum before the sum is added in f32:
/// those of Hopper keep about 14 bits of a sum. Below K, and with 0, operands are widened to f16, and sums are in f32.
#[track_caller]
pub fn dot<T: Dtype, A: Accumulator<T>>(
    a: Tile<T>,
    b: Tile<T>,
    acc: A,
    input_precision: Precision,
    max_num_imprecise_acc: impl ImpreciseSums,
) -> Tile<A::Elem> {
    let types = [T::dtype(), A::Elem::dtype()];
    let max_imprecise = max_num_imprecise_acc.most().filter(|_| types[0].is_f8());
    let k = shape(a.value()).last().copied().unwrap_or(1);
    if let Some(most) = max_imprecise.filter(|&most| most as usize > k) {
        fail(
            error_here(format!("`max_num_imprecise_acc` is {most}, and K is {k}"))
                .label("more products than a sum has")
                .help(format!("write at most {k}, or leave it out for the precision of the hardware")),
        );
    }
    let op = Op::Dot { precision: input_precision, max_imprecise };
    let call = Call { name: "dot", note: None };
    Tile::from_value(accumulate(&call, [a.value(), b.value()], types, acc.accumulator(), &op))
}

/// A call of [`dot`] or of a function that is made of it, in messages.
pub(super) struct Call {
    pub(super) name: &'static str,
    pub(super) note: Option<&'static str>,
}

impl Call {
    #[track_caller]
    fn error(&self, message: String) -> Diagnostic {
        match self.note {
            Some(note) => error_here(message).note(note),
            None => error_here(message),
        }
    }
}

/// The dot of two tiles, with the types of their elements and of the result.
#[track_caller]
pub(super) fn accumulate(
    call: &Call,
    [a, b]: [Value; 2],
    [from, to]: [DType; 2],
    acc: Option<Value>,
    dot: &Op,
) -> Value {
    let (sa, sb) = (shape(a), shape(b));
    check_operands(call, &sa, &sb);
    let result = [&sa[..sa.len() - 1], &sb[sb.len() - 1..]].concat();
    check_shape(&result);
    check_powers_of_two(&result[..result.len() - 2], &format!("the batch of `{}`", call.name));
    if let Some(acc) = acc {
        let found = shape(acc);
        if found != result {
            fail(
                call.error(format!("the accumulator of `{}` has shape {found:?}, the product {result:?}", call.name))
                    .label(format!("{sa:?} × {sb:?} gives {result:?}"))
                    .help(format!("start with `zeros({result:?})`")),
            );
        }
    }
    check_types(call, from, to);
    // f64 operands accumulate in f64, whatever the result type.
    let inner = if from == DType::F64 { DType::F64 } else { to };
    emit(|builder| {
        let start = match acc {
            Some(acc) if inner == to => acc,
            _ => builder.zero(Type::tensor(&result, inner)),
        };
        let product = batched(builder, [a, b, start], dot);
        let product = builder.cast(product, to);
        match acc {
            Some(acc) if inner != to => builder.binary(crate::ir::BinaryOp::Add, acc, product),
            _ => product,
        }
    })
}

/// The dot of a, b and the accumulator, whose leading dimensions, those of the batch, are equal.
fn batched(builder: &mut Builder, operands: [Value; 3], dot: &Op) -> Value {
    let result = builder.ty(operands[2]).shape().to_vec();
    let rank = result.len();
    let count: usize = result[..rank - 2].iter().product();
    if count == 1 {
        return one_matrix(builder, operands, rank - 2, dot);
    }
    // The dimension of the batch is split as the last one.
    let batch_last = operands.map(|v| {
        let matrix = builder.ty(v).shape()[rank - 2..].to_vec();
        let flat = builder.reshape(v, &[count, matrix[0], matrix[1]]);
        builder.trans(flat, &[1, 2, 0])
    });
    let product = split_batch(builder, batch_last, dot);
    let product = builder.trans(product, &[2, 0, 1]);
    builder.reshape(product, &result)
}

/// [M, K, B] × [K, N, B] → [M, N, B]: the dots of even and of odd positions of the batch.
fn split_batch(builder: &mut Builder, operands: [Value; 3], dot: &Op) -> Value {
    let result = builder.ty(operands[2]).shape().to_vec();
    if result[2] == 1 {
        return one_matrix(builder, operands, 0, dot);
    }
    let halves = operands.map(|v| {
        let shape = builder.ty(v).shape().to_vec();
        let pairs = builder.reshape(v, &[shape[0], shape[1], shape[2] / 2, 2]);
        builder.split(pairs)
    });
    let even = split_batch(builder, halves.map(|half| half.0), dot);
    let odd = split_batch(builder, halves.map(|half| half.1), dot);
    let pairs = builder.join(even, odd);
    builder.reshape(pairs, &result)
}

/// A dot of operands whose dimensions, but those at `axis` and `axis + 1`, have extent 1.
fn one_matrix(builder: &mut Builder, operands: [Value; 3], axis: usize, dot: &Op) -> Value {
    let result = builder.ty(operands[2]).shape().to_vec();
    if result.len() == 2 {
        let ty = builder.ty(operands[2]).clone();
        let id = builder.op(dot.clone(), &operands, &[ty]);
        return builder.func.result(id);
    }
    let matrices = operands.map(|v| {
        let matrix = builder.ty(v).shape()[axis..axis + 2].to_vec();
        builder.reshape(v, &matrix)
    });
    let product = one_matrix(builder, matrices, 0, dot);
    builder.reshape(product, &result)
}

/// Largest number of matrices of a batch: the code of a dot is repeated as often.
const MAX_BATCH: usize = 64;

#[track_caller]
fn check_operands(call: &Call, sa: &[usize], sb: &[usize]) {
    let name = call.name;
    let expected = "expected [M, K] and [K, N], or [B, M, K] and [B, K, N]";
    if sa.len() < 2 || sa.len() != sb.len() {
        fail(
            call.error(format!(
                "`{name}` requires two tiles of one rank of at least 2, found shapes {sa:?} and {sb:?}"
            ))
            .label(expected)
            .help(
                "insert a dimension with `.expand_dims(…)`, or use `sum(a * b, axis = …)` for dot products of vectors",
            ),
        );
    }
    let ((batch, a), (batch_b, b)) = (sa.split_at(sa.len() - 2), sb.split_at(sb.len() - 2));
    if batch != batch_b {
        fail(
            call.error(format!("`{name}` of shapes {sa:?} and {sb:?}: batches {batch:?} and {batch_b:?} differ"))
                .label(expected)
                .help("repeat the smaller one: `.broadcast_to([…])`"),
        );
    }
    if batch.iter().product::<usize>() > MAX_BATCH {
        fail(
            call.error(format!("`{name}` of shapes {sa:?} and {sb:?}: a batch has at most {MAX_BATCH} matrices"))
                .label("the code of the dot would be repeated for each of them")
                .help("give each program fewer of them, with another axis of the grid or a loop"),
        );
    }
    if a[1] != b[0] {
        let diagnostic = call
            .error(format!("`{name}` of shapes {sa:?} and {sb:?}: inner dimensions {} and {} differ", a[1], b[0]))
            .label(expected);
        fail(if a[1] == b[1] { diagnostic.help("transpose the second one: `.trans()`") } else { diagnostic });
    }
}

#[track_caller]
fn check_types(call: &Call, from: DType, to: DType) {
    let legal = match from {
        DType::F8E4M3 | DType::F8E5M2 | DType::F16 => to == DType::F32 || to == DType::F16,
        DType::BF16 | DType::F32 => to == DType::F32,
        DType::F64 => to == DType::F64 || to == DType::F32,
        DType::I8 | DType::U8 => to == DType::I32,
        DType::Bool | DType::I16 | DType::I32 | DType::I64 | DType::U16 | DType::U32 | DType::U64 => false,
    };
    if !legal {
        let diagnostic = call
            .error(format!("`{}` of {from} with accumulator {to} is not supported", call.name))
            .label(format!("{from} × {from} → {to}"));
        let help = match from {
            DType::F64 => "accumulate in f64 or f32: `acc = zeros::<f64>([…])`",
            DType::F16 | DType::F8E4M3 | DType::F8E5M2 => "accumulate in f32 or f16: `acc = zeros::<f32>([…])`",
            d if d.is_float() => "accumulate in f32: `acc = zeros::<f32>([…])`",
            DType::I8 | DType::U8 => "accumulate in i32: `acc = zeros::<i32>([…])`",
            _ => "convert the operands: `.to::<f32>()`, or `.to::<i8>()` for small integers",
        };
        fail(diagnostic.help(help));
    }
}
