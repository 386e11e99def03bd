//! Gathers and scatters of rows through tensor descriptors: accesses through pointers, with masks of the descriptor's
//! shape. Copies are those of other gathers (`cp.async` in pipelined loops).

use super::control::Bound;
use super::diag_text;
use super::dtype::{Dtype, Int};
use super::handle::{BlockPtr, Data, Tile};
use super::memory::check_writable;
use super::record::{emit, error_here, fail, shape};
use crate::ir::{BinaryOp, Builder, CmpOp, DType, Eviction, Op, Value};

impl<T: Dtype> BlockPtr<T> {
    /// For tensor descriptors of blocks [1, n]: loads the rows at `rows`, from `column` on, as a tile [rows, n]. Elements
    /// out of bounds read as zero.
    #[track_caller]
    pub fn gather<I: Int>(self, rows: Tile<I>, column: impl Bound) -> Tile<T> {
        let (pointers, mask) = addresses(self.v, rows.value(), column.bound::<i64>().value(), "gather");
        Tile::from_value(emit(|b| b.load(pointers, Some(mask), None, Eviction::Normal)))
    }

    /// For tensor descriptors of blocks [1, n]: stores a tile [rows, n] to the rows at `rows`, from `column` on. Elements
    /// out of bounds are not written. Of rows that occur twice, either may remain.
    #[track_caller]
    pub fn scatter<I: Int>(self, value: Tile<T>, rows: Tile<I>, column: impl Bound) {
        check_writable(self.writable, "scatter");
        let (pointers, mask) = addresses(self.v, rows.value(), column.bound::<i64>().value(), "scatter");
        let (found, want) = (shape(value.value()), shape(pointers));
        if found != want {
            fail(
                error_here(format!("`scatter` of a tile of shape {}", diag_text::shape(&found)))
                    .label(format!("expected {}: a row for each index", diag_text::shape(&want))),
            );
        }
        emit(|b| b.store(pointers, value.value(), Some(mask), Eviction::Normal));
    }
}

/// Pointers to the elements of rows, [rows, n], and which of them are inside the tensor.
#[track_caller]
fn addresses(descriptor: Value, rows: Value, column: Value, what: &str) -> (Value, Value) {
    let block = shape(descriptor);
    if block.len() != 2 || block[0] != 1 {
        fail(
            error_here(format!("`{what}` through a descriptor of blocks {}", diag_text::shape(&block)))
                .label("expected blocks of one row: [1, n]"),
        );
    }
    let count = match shape(rows)[..] {
        [count] => count,
        _ => fail(
            error_here(format!("`{what}` of rows of shape {}", diag_text::shape(&shape(rows))))
                .label("expected a tile of one dimension"),
        ),
    };
    let parts = emit(|b| {
        let op = b.func.op(b.func.def_op(descriptor)?);
        matches!(op.op, Op::MakeView { .. }).then(|| op.operands.clone())
    });
    let Some(parts) = parts else {
        fail(
            error_here(format!("`{what}` through a block pointer that was advanced, or that a loop carries"))
                .label("expected a tensor descriptor")
                .help("make it with `x.descriptor([1, n])` or `make_tensor_descriptor(…)`"),
        );
    };
    // Base, shape, strides, offsets, which are those of a descriptor: 0.
    let (base, extents, strides, offsets) = (parts[0], &parts[1..3], &parts[3..5], &parts[5..7]);
    let to = [count, block[1]];
    emit(|b| {
        let rows = b.cast(rows, DType::I64);
        let rows = index(b, rows, 1, offsets[0]);
        let columns = b.arange(0, to[1] as i64);
        let columns = b.cast(columns, DType::I64);
        let columns = index(b, columns, 0, column);
        let columns = index_sum(b, columns, offsets[1]);
        let (row_inside, column_inside) = (inside(b, rows, extents[0]), inside(b, columns, extents[1]));
        let [row_inside, column_inside] = [row_inside, column_inside].map(|mask| b.broadcast(mask, &to));
        let mask = b.binary(BinaryOp::And, row_inside, column_inside);
        let [row, column] = [(rows, strides[0]), (columns, strides[1])].map(|(index, stride)| {
            let stride = like(b, stride, index);
            let offset = b.binary(BinaryOp::Mul, index, stride);
            b.broadcast(offset, &to)
        });
        let offset = b.binary(BinaryOp::Add, row, column);
        let base = b.splat(base, &to);
        (b.ptr_add(base, offset), mask)
    })
}

/// A scalar in every element of a tile of the shape of `tile`.
fn like(b: &mut Builder, scalar: Value, tile: Value) -> Value {
    let shape = b.ty(tile).shape().to_vec();
    b.splat(scalar, &shape)
}

/// `positions + start`, with a new dimension at `axis`.
fn index(b: &mut Builder, positions: Value, axis: usize, start: Value) -> Value {
    let positions = b.expand_dims(positions, axis);
    index_sum(b, positions, start)
}

fn index_sum(b: &mut Builder, positions: Value, start: Value) -> Value {
    let start = like(b, start, positions);
    b.binary(BinaryOp::Add, positions, start)
}

/// Whether indices are at least 0 and below the extent.
fn inside(b: &mut Builder, index: Value, extent: Value) -> Value {
    let zero = b.int(0, DType::I64);
    let (zero, extent) = (like(b, zero, index), like(b, extent, index));
    let (low, high) = (b.cmp(CmpOp::Ge, index, zero), b.cmp(CmpOp::Lt, index, extent));
    b.binary(BinaryOp::And, low, high)
}
