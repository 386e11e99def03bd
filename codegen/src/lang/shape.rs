//! Shape operations: they rearrange elements without changing their values.

use super::diag_text;
use super::dtype::Dtype;
use super::handle::{Data, PtrTile, Tile};
use super::index::{AxisIndex, ExtentList, check_axis, check_powers_of_two, check_shape};
use super::operand::{broadcast as broadcast_value, common_shape};
use super::record::{emit, error_here, fail, shape};
use crate::ir::{Value, parts};

/// Tiles of numbers and tiles of pointers, to which the operations of this module apply. For scalars, only
/// [`broadcast_to`] is supported.
#[diagnostic::on_unimplemented(message = "`{Self}` is not a tile", label = "expected a tile")]
pub trait Shaped: Copy {
    /// The corresponding tile type.
    type Tile;
    #[doc(hidden)]
    fn raw_value(self) -> Value;
    #[doc(hidden)]
    fn tile(self, v: Value) -> Self::Tile;
}

impl<X: Data> Shaped for X {
    type Tile = Tile<X::Elem>;
    fn raw_value(self) -> Value {
        self.value()
    }
    fn tile(self, v: Value) -> Tile<X::Elem> {
        Tile::from_value(v)
    }
}

impl<T: Dtype> Shaped for PtrTile<T> {
    type Tile = PtrTile<T>;
    fn raw_value(self) -> Value {
        self.v
    }
    fn tile(self, v: Value) -> PtrTile<T> {
        PtrTile::new(v, self.writable)
    }
}

/// Inserts a dimension of extent 1 before `axis`; `-1` appends one.
#[track_caller]
pub fn expand_dims<X: Shaped>(x: X, axis: impl AxisIndex) -> X::Tile {
    let v = x.raw_value();
    let from = shape(v);
    let axis = check_axis(axis.axis_index(), from.len() + 1, "expand_dims");
    x.tile(expand_raw(v, axis))
}

/// Inserts a dimension of extent 1 before `axis`; also for scalars.
#[track_caller]
pub(crate) fn expand_raw(v: Value, axis: usize) -> Value {
    let mut expanded = shape(v);
    expanded.insert(axis, 1);
    check_shape(&expanded);
    if shape(v).is_empty() { emit(|b| b.splat(v, &[1])) } else { emit(|b| b.expand_dims(v, axis)) }
}

/// Broadcasts a scalar, or a tile along its dimensions of extent 1, to a larger shape.
#[track_caller]
pub fn broadcast_to<X: Shaped>(x: X, to: impl AsRef<[usize]>) -> X::Tile {
    let (v, to) = (x.raw_value(), to.as_ref());
    check_shape(to);
    let from = shape(v);
    let fits = from.is_empty() || (from.len() == to.len() && from.iter().zip(to).all(|(&m, &n)| m == n || m == 1));
    if !fits {
        fail(
            error_here(format!("a tile of shape {from:?} cannot be broadcast to {to:?}"))
                .label("incompatible shapes")
                .note("only dimensions of extent 1 are broadcast, and the rank does not change")
                .help("insert dimensions first: `.expand_dims(…)`"),
        );
    }
    x.tile(broadcast_value(v, to))
}

/// Two tiles, broadcast to their common shape.
#[track_caller]
pub fn broadcast<A: Shaped, B: Shaped>(a: A, b: B) -> (A::Tile, B::Tile) {
    let (va, vb) = (a.raw_value(), b.raw_value());
    let common = common_shape(&[shape(va), shape(vb)], "`broadcast`");
    (a.tile(broadcast_value(va, &common)), b.tile(broadcast_value(vb, &common)))
}

#[track_caller]
fn permuted<X: Shaped>(x: X, dims: &[usize], what: &str) -> X::Tile {
    let v = x.raw_value();
    let rank = shape(v).len();
    let mut sorted = dims.to_vec();
    sorted.sort_unstable();
    if sorted != (0..rank).collect::<Vec<_>>() {
        fail(
            error_here(format!("`{what}` with dims {dims:?} of a tile of rank {rank}"))
                .label("not a permutation")
                .help(format!("name each dimension from 0 to {} once", rank.saturating_sub(1))),
        );
    }
    x.tile(emit(|b| b.trans(v, dims)))
}

/// Permutes the dimensions: dimension `i` of the result is `dims[i]` of `x`. Without `dims`, the last two are swapped.
#[track_caller]
pub fn trans<X: Shaped>(x: X, dims: &[usize]) -> X::Tile {
    if !dims.is_empty() {
        return permuted(x, dims, "trans");
    }
    let rank = shape(x.raw_value()).len();
    if rank < 2 {
        fail(error_here(format!("`trans` of a tile of {rank} dimensions")).label("expected at least two dimensions"));
    }
    let mut order: Vec<usize> = (0..rank).collect();
    order.swap(rank - 1, rank - 2);
    permuted(x, &order, "trans")
}

/// Permutes the dimensions, as [`trans`] with `dims`.
#[track_caller]
pub fn permute<X: Shaped>(x: X, dims: &[usize]) -> X::Tile {
    permuted(x, dims, "permute")
}

/// Reshapes to a shape with the same number of elements, in row-major order.
#[track_caller]
pub fn reshape<X: Shaped>(x: X, to: impl AsRef<[usize]>) -> X::Tile {
    let (v, to) = (x.raw_value(), to.as_ref());
    check_shape(to);
    let from = shape(v);
    let (m, n): (usize, usize) = (from.iter().product(), to.iter().product());
    if m != n {
        fail(
            error_here(format!("`reshape` from {} to {to:?}: {m} elements to {n}", diag_text::shape(&from)))
                .label("numbers of elements differ"),
        );
    }
    if !parts::reshapes(&from, to) {
        fail(
            error_here(format!("`reshape` from {from:?} to {to:?} divides an extent that is not a power of two"))
                .label("only the first of dimensions that are combined or divided may be another number")
                .help("keep the dimensions apart, or use extents that are powers of two"),
        );
    }
    x.tile(if from.is_empty() { emit(|b| b.splat(v, to)) } else { emit(|b| b.reshape(v, to)) })
}

/// As [`reshape`].
#[track_caller]
pub fn view<X: Shaped>(x: X, to: impl AsRef<[usize]>) -> X::Tile {
    reshape(x, to)
}

/// Removes a dimension of extent 1.
#[track_caller]
pub fn squeeze<X: Shaped>(x: X, axis: impl AxisIndex) -> X::Tile {
    let mut to = shape(x.raw_value());
    let axis = check_axis(axis.axis_index(), to.len(), "squeeze");
    if to[axis] != 1 {
        fail(
            error_here(format!("`squeeze` of dimension {axis} of a tile of shape {to:?}"))
                .label(format!("its extent is {}, not 1", to[axis]))
                .help("reduce it, as in `sum(x, axis)`, or combine dimensions: `.reshape([…])`"),
        );
    }
    to.remove(axis);
    reshape(x, to)
}

/// Flattens to one dimension.
#[track_caller]
pub fn ravel<X: Shaped>(x: X) -> X::Tile {
    let n: usize = shape(x.raw_value()).iter().product();
    reshape(x, [n])
}

#[track_caller]
fn same_shapes<T: Dtype>(a: impl Data<Elem = T>, b: impl Data<Elem = T>, what: &str) -> Vec<usize> {
    let (sa, sb) = (shape(a.value()), shape(b.value()));
    if sa != sb {
        let message = format!("`{what}` of tiles of shapes {} and {}", diag_text::shape(&sa), diag_text::shape(&sb));
        fail(error_here(message).label("expected equal shapes"));
    }
    sa
}

/// Stacks two tiles of the same shape, or two scalars, along a new last dimension: `[…] , […]` → `[…, 2]`.
#[track_caller]
pub fn join<T: Dtype>(a: impl Data<Elem = T>, b: impl Data<Elem = T>) -> Tile<T> {
    same_shapes(a, b, "join");
    let (va, vb) = (a.value(), b.value());
    check_shape(&[shape(va), vec![2]].concat());
    Tile::from_value(emit(|builder| builder.join(va, vb)))
}

/// The two halves along a last dimension of extent 2: the inverse of [`join`].
#[track_caller]
pub fn split<T: Dtype>(x: Tile<T>) -> (Tile<T>, Tile<T>) {
    let from = shape(x.value());
    if from.last() != Some(&2) {
        fail(
            error_here(format!("`split` needs a last dimension of extent 2, found {}", diag_text::shape(&from)))
                .label("cannot be split")
                .help("move the dimension to the end first: `.reshape([…, 2])` or `.permute([…])`"),
        );
    }
    let (a, b) = emit(|builder| builder.split(x.value()));
    (Tile::from_value(a), Tile::from_value(b))
}

/// Concatenates two tiles along an axis, by default the first: `[M, …], [M, …]` → `[2M, …]`.
#[track_caller]
pub fn cat<T: Dtype>(a: Tile<T>, b: Tile<T>, axis: impl AxisIndex) -> Tile<T> {
    let from = same_shapes(a, b, "cat");
    if from.is_empty() {
        fail(error_here("`cat` of two scalars").label("expected tiles").help("`join` puts two scalars into one tile"));
    }
    let (rank, mut to) = (from.len(), from);
    let axis = check_axis(axis.axis_index(), rank, "cat");
    check_powers_of_two(&to[axis..=axis], &format!("`cat` along dimension {axis}"));
    let mut order: Vec<usize> = (0..rank).collect();
    order.insert(axis, rank);
    to[axis] *= 2;
    reshape(permute(join(a, b), &order), to)
}

/// Interleaves two tiles along the last dimension: `[…, N], […, N]` → `[…, 2N]`; two scalars give a tile of 2.
#[track_caller]
pub fn interleave<T: Dtype>(a: impl Data<Elem = T>, b: impl Data<Elem = T>) -> Tile<T> {
    let mut to = same_shapes(a, b, "interleave");
    match to.last_mut() {
        Some(n) => *n *= 2,
        None => to = vec![2],
    }
    reshape(join(a, b), to)
}

/// The operations of this file as methods.
pub trait ShapeMethods: Shaped {
    /// See [`expand_dims`].
    #[track_caller]
    fn expand_dims(self, axis: impl AxisIndex) -> Self::Tile {
        expand_dims(self, axis)
    }
    /// See [`broadcast_to`].
    #[track_caller]
    fn broadcast_to(self, to: impl ExtentList) -> Self::Tile {
        broadcast_to(self, to.extents())
    }
    /// See [`permute`].
    #[track_caller]
    fn permute(self, dims: impl AsRef<[usize]>) -> Self::Tile {
        permute(self, dims.as_ref())
    }
    /// The last two dimensions swapped, as Triton's `.T`; see [`trans`].
    #[track_caller]
    fn trans(self) -> Self::Tile {
        trans(self, &[])
    }
    /// The last two dimensions swapped; see [`trans`].
    #[track_caller]
    fn t(self) -> Self::Tile {
        trans(self, &[])
    }
    /// See [`reshape`].
    #[track_caller]
    fn reshape(self, to: impl ExtentList) -> Self::Tile {
        reshape(self, to.extents())
    }
    /// See [`reshape`].
    #[track_caller]
    fn view(self, to: impl ExtentList) -> Self::Tile {
        reshape(self, to.extents())
    }
    /// See [`ravel`].
    #[track_caller]
    fn ravel(self) -> Self::Tile {
        ravel(self)
    }
}

impl<X: Shaped> ShapeMethods for X {}
