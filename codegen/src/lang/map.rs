//! `map_elementwise`: a function of scalars, applied to the elements of tiles.

use super::dtype::Dtype;
use super::handle::{Data, Scalar, Tile};
use super::operand::broadcast;
use super::record::{combining_here, error_here, fail, shape};
use super::reduce::{Reducible, check_pure, require_same_shape};
use crate::ir::Value;

/// What the function of a [`map_elementwise`] returns: a scalar or a tuple of scalars.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the result of the function of `map_elementwise`",
    label = "expected a scalar or a tuple of scalars",
    note = "a number has to be made a scalar: `scalar::<f32>(1.0)`"
)]
pub trait Mapped {
    /// A tile for each scalar.
    type Tiles;
    #[doc(hidden)]
    fn elements(self) -> Vec<Value>;
    #[doc(hidden)]
    fn tiles(values: &[Value]) -> Self::Tiles;
}

impl<T: Dtype> Mapped for Scalar<T> {
    type Tiles = Tile<T>;
    fn elements(self) -> Vec<Value> {
        vec![self.value()]
    }
    fn tiles(values: &[Value]) -> Tile<T> {
        Tile::from_value(values[0])
    }
}

macro_rules! tuple_mapped {
    ($($T:ident $i:tt),*) => {
        impl<$($T: Dtype),*> Mapped for ($(Scalar<$T>,)*) {
            type Tiles = ($(Tile<$T>,)*);
            fn elements(self) -> Vec<Value> {
                vec![$(self.$i.value()),*]
            }
            fn tiles(values: &[Value]) -> Self::Tiles {
                ($(Tile::<$T>::from_value(values[$i]),)*)
            }
        }
    };
}
tuple_mapped!(T 0);
tuple_mapped!(T 0, U 1);
tuple_mapped!(T 0, U 1, V 2);
tuple_mapped!(T 0, U 1, V 2, W 3);

/// Applies a function of scalars to each element of a tile, `map_elementwise(x, |x| …)`, or of several tiles of one
/// shape, `map_elementwise((x, y), |(x, y)| …)`; it returns a scalar or a tuple of scalars. Both sides of its branches
/// are computed. It has no loops over run-time values and accesses no memory.
#[track_caller]
pub fn map_elementwise<R: Reducible, E: Mapped>(x: R, function: impl FnOnce(R::Element) -> E) -> E::Tiles {
    let tiles = x.tiles();
    let to = require_same_shape(&tiles, "map_elementwise");
    let (result, ops) = combining_here(|| function(R::element(&tiles)).elements());
    check_pure(&ops, "the function of `map_elementwise`");
    for &v in &result {
        let found = shape(v);
        if !found.is_empty() && found != to {
            fail(
                error_here(format!("the function of `map_elementwise` gives a value of shape {found:?}"))
                    .label("expected a scalar of each element"),
            );
        }
    }
    let results: Vec<Value> = result.into_iter().map(|v| broadcast(v, &to)).collect();
    E::tiles(&results)
}
