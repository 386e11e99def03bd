//! `map_elementwise`: a function of scalars, applied to the elements of tiles.

use super::dtype::Dtype;
use super::handle::{Data, Scalar, Tile};
use super::operand::broadcast;
use super::record::{combining_here, emit, error_here, fail, shape};
use super::reduce::{Reducible, check_pure, require_same_shape};
use crate::ir::Value;

/// One result of the function of a [`map_elementwise`]: a scalar, or an array of those of neighboring elements.
pub trait MappedOne {
    type Elem: Dtype;
    #[doc(hidden)]
    fn values(self) -> Vec<Value>;
}

impl<T: Dtype> MappedOne for Scalar<T> {
    type Elem = T;
    fn values(self) -> Vec<Value> {
        vec![self.value()]
    }
}

impl<T: Dtype, const N: usize> MappedOne for [Scalar<T>; N] {
    type Elem = T;
    fn values(self) -> Vec<Value> {
        self.map(|element| element.value()).to_vec()
    }
}

/// What the function of a [`map_elementwise`] returns: a scalar or a tuple of scalars; with `pack`, arrays of scalars.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the result of the function of `map_elementwise`",
    label = "expected a scalar or a tuple of scalars, or with `pack` arrays of scalars",
    note = "a number has to be made a scalar: `scalar::<f32>(1.0)`"
)]
pub trait Mapped {
    /// A tile for each result.
    type Tiles;
    /// The elements of each result.
    #[doc(hidden)]
    fn elements(self) -> Vec<Vec<Value>>;
    #[doc(hidden)]
    fn tiles(values: &[Value]) -> Self::Tiles;
}

impl<T: Dtype> Mapped for Scalar<T> {
    type Tiles = Tile<T>;
    fn elements(self) -> Vec<Vec<Value>> {
        vec![self.values()]
    }
    fn tiles(values: &[Value]) -> Tile<T> {
        Tile::from_value(values[0])
    }
}

impl<T: Dtype, const N: usize> Mapped for [Scalar<T>; N] {
    type Tiles = Tile<T>;
    fn elements(self) -> Vec<Vec<Value>> {
        vec![self.values()]
    }
    fn tiles(values: &[Value]) -> Tile<T> {
        Tile::from_value(values[0])
    }
}

macro_rules! tuple_mapped {
    ($($T:ident $i:tt),*) => {
        impl<$($T: MappedOne),*> Mapped for ($($T,)*) {
            type Tiles = ($(Tile<$T::Elem>,)*);
            fn elements(self) -> Vec<Vec<Value>> {
                vec![$(self.$i.values()),*]
            }
            fn tiles(values: &[Value]) -> Self::Tiles {
                ($(Tile::<$T::Elem>::from_value(values[$i]),)*)
            }
        }
    };
}
tuple_mapped!(T 0);
tuple_mapped!(T 0, U 1);
tuple_mapped!(T 0, U 1, V 2);
tuple_mapped!(T 0, U 1, V 2, W 3);

/// How many neighboring elements a call of the function of a [`map_elementwise`] computes: the argument `pack`.
#[derive(Clone, Copy, Debug)]
pub struct Pack<const N: usize>;

/// The argument of the function of a [`map_elementwise`] for a [`Pack`].
pub trait Packing<R: Reducible> {
    type Elements;
    /// The elements of each tile, in parts of the tile; `to` is the shape of the tiles.
    #[doc(hidden)]
    #[track_caller]
    fn elements(tiles: &[Value], to: &[usize]) -> Self::Elements;
    #[doc(hidden)]
    const N: usize;
}

impl<R: Reducible> Packing<R> for Pack<1> {
    type Elements = R::Element;
    const N: usize = 1;
    fn elements(tiles: &[Value], _to: &[usize]) -> R::Element {
        R::element(tiles)
    }
}

macro_rules! packs {
    ($($n:literal),*) => { $(
        impl<R: Reducible> Packing<R> for Pack<$n> {
            type Elements = R::Pack<$n>;
            const N: usize = $n;
            #[track_caller]
            fn elements(tiles: &[Value], to: &[usize]) -> R::Pack<$n> {
                if !to.last().is_some_and(|n| n.is_multiple_of($n)) {
                    fail(
                        error_here(format!("`pack = {}` for tiles of shape {to:?}", $n))
                            .label("the last extent is not a multiple of `pack`")
                            .help("leave `pack` out"),
                    );
                }
                let packs: Vec<[Value; $n]> = tiles.iter().map(|&tile| neighbors(tile)).collect();
                R::pack(&packs)
            }
        }
    )* };
}
packs!(2, 4, 8);

/// For each of N positions along the last dimension, the tile of the elements at that position of each N.
#[track_caller]
fn neighbors<const N: usize>(tile: Value) -> [Value; N] {
    let mut packs = shape(tile);
    let last = packs.len() - 1;
    packs[last] /= N;
    packs.push(N);
    let mut parts = vec![emit(|b| b.reshape(tile, &packs))];
    while parts.len() < N {
        // Halves of each part: the elements whose position has the next lower bit unset, and those that have it set.
        packs[last + 1] /= 2;
        let pairs = [&packs[..], &[2]].concat();
        let halves = parts.iter().map(|&part| {
            emit(|b| {
                let part = b.reshape(part, &pairs);
                b.split(part)
            })
        });
        let (even, odd): (Vec<Value>, Vec<Value>) = halves.unzip();
        parts = [even, odd].concat();
    }
    std::array::from_fn(|n| emit(|b| b.reshape(parts[n], &packs[..=last])))
}

/// The inverse of [`neighbors`], for tiles of shape `to`.
#[track_caller]
fn interleaved(mut parts: Vec<Value>, to: &[usize]) -> Value {
    while parts.len() > 1 {
        let half = parts.len() / 2;
        parts = (0..half)
            .map(|n| {
                emit(|b| {
                    let both = b.join(parts[n], parts[n + half]);
                    let mut shape = b.func.ty(both).shape().to_vec();
                    shape.pop();
                    if let Some(last) = shape.last_mut() {
                        *last *= 2;
                    }
                    b.reshape(both, &shape)
                })
            })
            .collect();
    }
    broadcast(parts[0], to)
}

/// Applies a function of scalars to each element of a tile, `map_elementwise(x, |x| …)`, or of several tiles of one
/// shape, `map_elementwise((x, y), |(x, y)| …)`; it returns a scalar or a tuple of scalars. Both sides of its branches
/// are computed. It has no loops over run-time values and accesses no memory.
///
/// With `pack = 2`, 4 or 8, the function takes and returns arrays of that many neighbors along the last dimension.
#[track_caller]
pub fn map_elementwise<R: Reducible, E: Mapped<Tiles = O>, P: Packing<R>, O>(
    x: R,
    function: impl FnOnce(P::Elements) -> E,
    _pack: P,
) -> O {
    let tiles = x.tiles();
    let to = require_same_shape(&tiles, "map_elementwise");
    let elements = P::elements(&tiles, &to);
    let (results, ops) = combining_here(|| function(elements).elements());
    check_pure(&ops, "the function of `map_elementwise`");
    let mut of_one = to.clone();
    if let Some(last) = of_one.last_mut() {
        *last /= P::N;
    }
    let results = results.into_iter().map(|result| {
        if result.len() != P::N {
            fail(
                error_here(format!("the function of `map_elementwise` returns {} elements", result.len()))
                    .label(format!("`pack` is {}", P::N))
                    .help("return arrays of as many scalars as those that the function takes"),
            );
        }
        let parts = result.into_iter().map(|v| {
            let found = shape(v);
            if !found.is_empty() && found != of_one {
                fail(
                    error_here(format!("the function of `map_elementwise` gives a value of shape {found:?}"))
                        .label("expected a scalar of each element"),
                );
            }
            broadcast(v, &of_one)
        });
        interleaved(parts.collect(), &to)
    });
    E::tiles(&results.collect::<Vec<_>>())
}
