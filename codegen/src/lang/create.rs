//! Program ids, constants and `arange`.

use super::dtype::{Dtype, Num};
use super::handle::{Data, Scalar, Tile};
use super::index::{Extent, check_shape};
use super::operand::{Operand, Raw, broadcast, constant, expect_scalar, materialize};
use super::record::{emit, error_here, fail, shape};
use super::{HostNum, operand};
use crate::ir::Type;

#[track_caller]
fn check_grid_axis(axis: u32, what: &str) {
    if axis > 2 {
        fail(
            error_here(format!("`{what}({axis})`: a grid has the axes 0, 1 and 2"))
                .label("no such axis")
                .help("combine further dimensions into one axis, and split it with `/` and `%`"),
        );
    }
}

/// Coordinate of this program instance along a grid axis (0, 1 or 2).
#[track_caller]
pub fn program_id(axis: u32) -> Scalar<i32> {
    check_grid_axis(axis, "program_id");
    Scalar::from_value(emit(|b| b.program_id(axis)))
}

/// Extent of the grid along an axis (0, 1 or 2).
#[track_caller]
pub fn num_programs(axis: u32) -> Scalar<i32> {
    check_grid_axis(axis, "num_programs");
    Scalar::from_value(emit(|b| b.num_programs(axis)))
}

/// `start, start + 1, …, end − 1` as an i32 tile of shape [end − start].
#[track_caller]
pub fn arange(start: impl Extent, end: impl Extent) -> Tile<i32> {
    let (start, end) = (start.extent(), end.extent());
    if start >= end {
        fail(error_here(format!("`arange({start}, {end})` is empty")).label("the end must be larger than the start"));
    }
    check_shape(&[end - start]);
    Tile::from_value(emit(|b| b.arange(start as i64, end as i64)))
}

/// A tile of zeros (`false` for bool).
#[track_caller]
pub fn zeros<T: Dtype>(shape: impl AsRef<[usize]>) -> Tile<T> {
    let shape = shape.as_ref();
    check_shape(shape);
    let ty = Type::tensor(shape, T::dtype());
    Tile::from_value(emit(|b| b.zero(ty)))
}

/// A tile of ones.
#[track_caller]
pub fn ones<T: Num>(shape: impl AsRef<[usize]>) -> Tile<T> {
    full(shape, operand::IntegerLiteral(1))
}

/// A tile with the same number in every element.
#[track_caller]
pub fn full<T: Dtype>(to: impl AsRef<[usize]>, value: impl Operand<T>) -> Tile<T> {
    let to = to.as_ref();
    check_shape(to);
    Tile::from_value(match value.raw() {
        Raw::Number(n) => constant(n, T::dtype(), to),
        Raw::Value(v) => broadcast(expect_scalar(v, "the value of `full`"), to),
    })
}

/// Zeros of the shape and type of another tile.
#[track_caller]
pub fn zeros_like<X: Data>(x: X) -> X {
    let like = shape(x.value());
    let ty = Type::tensor(&like, X::Elem::dtype());
    X::from_value(emit(|b| b.zero(ty)))
}

/// `value` in every element, in the shape and type of another tile.
#[track_caller]
pub fn full_like<X: Data>(x: X, value: impl Operand<X::Elem>) -> X {
    let like = shape(x.value());
    X::from_value(match value.raw() {
        Raw::Number(n) => constant(n, X::Elem::dtype(), &like),
        Raw::Value(v) => broadcast(expect_scalar(v, "the value of `full_like`"), &like),
    })
}

/// A Rust number as a run-time scalar of type `T`.
#[track_caller]
pub fn scalar<T: Dtype>(value: impl HostNum<T> + Operand<T>) -> Scalar<T> {
    Scalar::from_value(materialize(value.raw(), T::dtype()))
}
