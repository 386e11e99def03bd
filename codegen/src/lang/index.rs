//! Indices, extents and axes.

use super::dtype::Dtype;
use super::handle::{Data, Scalar, Tile};
use super::operand::{IntegerLiteral, expect_scalar, to_i64};
use super::record::{emit, error_here, fail};
use crate::ir::{DType, Value, parts};
use crate::layout::MAX_RANK;

/// Maximum number of elements of a tile.
pub const MAX_TILE_ELEMENTS: usize = 1 << 20;

/// A position along a dimension: an i32, u32 or i64 scalar (also as a rank-0 tile), or a Rust integer. Converted to
/// i64.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not an index",
    label = "expected an integer scalar or a Rust integer",
    note = "convert with `.to::<i64>()`; a tile cannot be an index"
)]
pub trait Index {
    #[doc(hidden)]
    #[track_caller]
    fn index(self) -> Value;

    /// The index as a member of a list: an i64 scalar is used without a conversion.
    #[doc(hidden)]
    #[track_caller]
    fn list_item(self) -> Value
    where
        Self: Sized,
    {
        self.index()
    }
}

impl Index for Scalar<i64> {
    #[track_caller]
    fn index(self) -> Value {
        to_i64(self.value())
    }
    fn list_item(self) -> Value {
        self.value()
    }
}

macro_rules! scalar_index {
    ($($elem:ty),*) => { $(
        impl Index for Scalar<$elem> {
            #[track_caller]
            fn index(self) -> Value {
                to_i64(self.value())
            }
        }
    )* };
}
scalar_index!(i32, u32);

macro_rules! tile_index {
    ($($elem:ty),*) => { $(
        impl Index for Tile<$elem> {
            #[track_caller]
            fn index(self) -> Value {
                to_i64(expect_scalar(self.value(), "an index"))
            }
        }
    )* };
}
tile_index!(i32, i64, u32);

macro_rules! host_index {
    ($($ty:ty),*) => { $(
        impl Index for $ty {
            #[track_caller]
            fn index(self) -> Value {
                IntegerLiteral(self as i128).index()
            }
        }
    )* };
}
host_index!(i32, i64, u32, u64, usize);

impl Index for IntegerLiteral {
    #[track_caller]
    fn index(self) -> Value {
        let Ok(n) = i64::try_from(self.0) else {
            fail(error_here(format!("the index {} does not fit into i64", self.0)).label("out of range"))
        };
        emit(|b| b.int(n, DType::I64))
    }
}

/// An index as an i64 scalar: how `#[kernel]` converts the elements of `shape`, `strides` and `offsets`.
#[doc(hidden)]
#[track_caller]
pub fn index(i: impl Index) -> Scalar<i64> {
    Scalar::from_value(i.index())
}

/// A number that is known at specialization: part of a tile's shape.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be an extent of a tile",
    label = "expected a number known at specialization",
    note = "declare the parameter as `#[constexpr] name: usize`"
)]
pub trait Extent {
    #[doc(hidden)]
    #[track_caller]
    fn extent(self) -> usize;
}

macro_rules! extents {
    ($($ty:ty),*) => { $(
        impl Extent for $ty {
            #[track_caller]
            fn extent(self) -> usize {
                match usize::try_from(self) {
                    Ok(n) => n,
                    Err(_) => fail(error_here(format!("an extent cannot be {self}")).label("negative or too large")),
                }
            }
        }
    )* };
}
extents!(usize, i32, i64, u32);

impl Extent for IntegerLiteral {
    #[track_caller]
    fn extent(self) -> usize {
        match usize::try_from(self.0) {
            Ok(n) => n,
            Err(_) => fail(error_here(format!("an extent cannot be {}", self.0)).label("negative or too large")),
        }
    }
}

#[doc(hidden)]
#[track_caller]
pub fn extent(n: impl Extent) -> usize {
    n.extent()
}

/// Fails with a message unless a tile of this shape has elements in each dimension, at most [`MAX_TILE_ELEMENTS`] in all,
/// and at most [`MAX_PARTS`](parts::MAX_PARTS) parts.
#[track_caller]
pub(crate) fn check_shape(shape: &[usize]) {
    if shape.len() > MAX_RANK {
        fail(
            error_here(format!("a tile of shape {shape:?} has {} dimensions, the limit is {MAX_RANK}", shape.len()))
                .label("too many dimensions")
                .help("combine dimensions: `.reshape([…])`"),
        );
    }
    if let Some(axis) = shape.iter().position(|&n| n == 0) {
        fail(
            error_here(format!("a tile of shape {shape:?} has no elements"))
                .label(format!("dimension {axis} is 0"))
                .help("a tile has at least one element in each dimension"),
        );
    }
    let elements = shape.iter().fold(1, |product: usize, &n| product.saturating_mul(n));
    if elements > MAX_TILE_ELEMENTS {
        fail(
            error_here(format!("a tile of shape {shape:?} has {elements} elements, the limit is {MAX_TILE_ELEMENTS}"))
                .label("too large for one program instance")
                .help("loop over smaller tiles"),
        );
    }
    let count = parts::count(shape);
    if count > parts::MAX_PARTS {
        let next: Vec<usize> = shape.iter().map(|n| n.checked_next_power_of_two().unwrap_or(*n)).collect();
        fail(
            error_here(format!("a tile of shape {shape:?} consists of {count} parts, the limit is {}", parts::MAX_PARTS))
                .label("each part is the product of powers of two")
                .note("extents are split into powers of two, 96 into 64 and 32; the code of an operation is repeated for each part")
                .help(format!("use {next:?} and mask the elements beyond: `boundary_check` or `mask`")),
        );
    }
}

/// Fails with a message unless a number, which `what` gives a name, is a power of two.
#[track_caller]
pub(crate) fn check_power_of_two(n: usize, what: &str) {
    if !n.is_power_of_two() {
        fail(
            error_here(format!("{what} must be a power of two, found {n}"))
                .label("not a power of two")
                .help(format!("use {}, and ignore the elements beyond {n}", n.next_power_of_two())),
        );
    }
}

/// Fails with a message unless all extents are powers of two, which `what` needs.
#[track_caller]
pub(crate) fn check_powers_of_two(shape: &[usize], what: &str) {
    if let Some(axis) = shape.iter().position(|n| !n.is_power_of_two()) {
        let next: Vec<usize> = shape.iter().map(|n| n.next_power_of_two()).collect();
        fail(
            error_here(format!("{what} needs extents that are powers of two, found {shape:?}"))
                .label(format!("dimension {axis} is {}", shape[axis]))
                .help(format!("use {next:?} and fill the elements beyond, as with `where_`")),
        );
    }
}

/// The dimension that `axis` selects in a tile of that rank; negative numbers count from the end. Fails with a message
/// if `axis` is out of range.
#[track_caller]
pub(crate) fn check_axis(axis: i32, rank: usize, what: &str) -> usize {
    let wrapped = if axis < 0 { axis + rank as i32 } else { axis };
    if wrapped < 0 || wrapped as usize >= rank {
        let found = match rank {
            0 => "a scalar, which has no dimensions".to_string(),
            1 => "a tile of one dimension".to_string(),
            n => format!("a tile of {n} dimensions"),
        };
        let diagnostic = error_here(format!("`{what}` along axis {axis} of {found}")).label("no such axis");
        fail(match rank {
            0 => diagnostic,
            1 => diagnostic.help("the only axis is 0"),
            n => diagnostic.help(format!("axes are 0 to {}, or -1 for the last one", n - 1)),
        });
    }
    wrapped as usize
}

/// A dimension that an argument selects; negative numbers count from the end.
#[diagnostic::on_unimplemented(
    message = "an axis is an `i32` or `usize` known at specialization, found `{Self}`",
    label = "expected an axis",
    note = "declare the parameter as `#[constexpr] axis: usize`"
)]
pub trait AxisIndex {
    #[doc(hidden)]
    #[track_caller]
    fn axis_index(self) -> i32;
}

impl AxisIndex for i32 {
    fn axis_index(self) -> i32 {
        self
    }
}

impl AxisIndex for usize {
    /// Numbers that do not fit count as an axis that no tile has.
    fn axis_index(self) -> i32 {
        i32::try_from(self).unwrap_or(i32::MAX)
    }
}

/// An optional argument that is not given.
#[derive(Clone, Copy, Debug)]
pub struct Unset;

/// The axis of a reduction; all axes if not given.
#[diagnostic::on_unimplemented(
    message = "an axis is an `i32` or `usize` known at specialization, found `{Self}`",
    label = "expected an axis",
    note = "for the extremum of two values, use `maximum(a, b)` or `minimum(a, b)`"
)]
pub trait AxisArg {
    /// A tile for one axis, a scalar for all.
    type Reduced<T: Dtype>: Data<Elem = T>;
    #[doc(hidden)]
    fn axis(self) -> Option<i32>;
}

impl AxisArg for Unset {
    type Reduced<T: Dtype> = Scalar<T>;
    fn axis(self) -> Option<i32> {
        None
    }
}

impl AxisArg for i32 {
    type Reduced<T: Dtype> = Tile<T>;
    fn axis(self) -> Option<i32> {
        Some(self)
    }
}

impl AxisArg for usize {
    type Reduced<T: Dtype> = Tile<T>;
    fn axis(self) -> Option<i32> {
        Some(self.axis_index())
    }
}

/// A list of indices that is not a literal in the call: an array, or a tuple whose members differ in type.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a list of indices",
    label = "expected an array or a tuple of integers",
    note = "for a list in a variable, write `let offsets = (row * tile, 0)`, or an array if all members have the same type"
)]
pub trait IndexList {
    #[doc(hidden)]
    #[track_caller]
    fn indices(self) -> Vec<Scalar<i64>>;
}

impl<I: Index, const N: usize> IndexList for [I; N] {
    #[track_caller]
    fn indices(self) -> Vec<Scalar<i64>> {
        let mut indices = Vec::with_capacity(N);
        for i in self {
            indices.push(Scalar::from_value(i.list_item()));
        }
        indices
    }
}

impl IndexList for Vec<Scalar<i64>> {
    fn indices(self) -> Vec<Scalar<i64>> {
        self
    }
}

#[doc(hidden)]
#[track_caller]
pub fn index_list(list: impl IndexList) -> Vec<Scalar<i64>> {
    list.indices()
}

/// A shape that is not a literal in the call: an array or a tuple of extents, or another tile's shape.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a shape",
    label = "expected an array or a tuple of extents",
    note = "extents are numbers known at specialization: declare them as `#[constexpr] name: usize`"
)]
pub trait ExtentList {
    #[doc(hidden)]
    #[track_caller]
    fn extents(self) -> Vec<usize>;
}

impl<E: Extent, const N: usize> ExtentList for [E; N] {
    #[track_caller]
    fn extents(self) -> Vec<usize> {
        let mut extents = Vec::with_capacity(N);
        for n in self {
            extents.push(n.extent());
        }
        extents
    }
}

impl ExtentList for Vec<usize> {
    fn extents(self) -> Vec<usize> {
        self
    }
}

macro_rules! tuple_lists {
    ($($T:ident $i:tt),*) => {
        impl<$($T: Index),*> IndexList for ($($T,)*) {
            #[track_caller]
            fn indices(self) -> Vec<Scalar<i64>> {
                vec![$(index(self.$i)),*]
            }
        }
        impl<$($T: Extent),*> ExtentList for ($($T,)*) {
            #[track_caller]
            fn extents(self) -> Vec<usize> {
                vec![$(self.$i.extent()),*]
            }
        }
    };
}
tuple_lists!(A 0);
tuple_lists!(A 0, B 1);
tuple_lists!(A 0, B 1, C 2);
tuple_lists!(A 0, B 1, C 2, D 3);
tuple_lists!(A 0, B 1, C 2, D 3, E 4);
tuple_lists!(A 0, B 1, C 2, D 3, E 4, F 5);

#[doc(hidden)]
#[track_caller]
pub fn extent_list(list: impl ExtentList) -> Vec<usize> {
    list.extents()
}
