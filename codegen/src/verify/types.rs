//! Rules on single types.

use super::{Check, Rule, require};
use crate::ir::{Func, Stage, Type, parts};
use crate::layout::MAX_RANK;

/// Maximum number of elements of a tile.
const MAX_ELEMENTS: usize = 1 << 20;

/// Checks the extents and layout of a type, and that it is legal at this stage.
pub(super) fn well_formed(func: &Func, ty: &Type, stage: Stage) -> Check {
    match ty {
        Type::Scalar(_) => Ok(()),
        Type::Tensor { shape, elem: _, layout: _ } => {
            extents(ty, shape, stage)?;
            layout(func, ty, stage)
        }
        Type::View { block, elem: _ } => extents(ty, block, stage),
        Type::Shared { shape, elem: _, layout: _ } => {
            requires_layout_stage(ty, stage)?;
            require(shape.first().is_some_and(|&n| n >= 1), Rule::Extents, || {
                format!("the first extent should be at least 1, found {ty}")
            })?;
            extents(ty, &shape[1..], stage)?;
            layout(func, ty, stage)
        }
        Type::Barrier { count } => {
            requires_layout_stage(ty, stage)?;
            require(*count >= 1, Rule::Extents, || format!("the number of mbarriers should be at least 1, found {ty}"))
        }
    }
}

fn requires_layout_stage(ty: &Type, stage: Stage) -> Check {
    require(stage > Stage::Tile, Rule::StageLegal, || format!("{ty} is not legal at stage Tile"))
}

fn extents(ty: &Type, shape: &[usize], stage: Stage) -> Check {
    require(shape.len() <= MAX_RANK, Rule::Extents, || format!("at most {MAX_RANK} dimensions expected, found {ty}"))?;
    for &n in shape {
        let whole = stage == Stage::Tile || n.is_power_of_two();
        require(whole && n > 0, Rule::Extents, || match n {
            0 => format!("extents should be at least 1, found {ty}"),
            n => format!("extents should be powers of two after stage Tile, found {n} in {ty}: run `split_tiles`"),
        })?;
    }
    let count = parts::count(shape);
    require(count <= parts::MAX_PARTS, Rule::Extents, || {
        format!(
            "a tile should have at most {} parts of extents that are powers of two, found {count} in {ty}",
            parts::MAX_PARTS
        )
    })?;
    let elements = shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
    require(elements.is_some_and(|n| n <= MAX_ELEMENTS), Rule::Extents, || {
        format!("a tile should have at most {MAX_ELEMENTS} elements, found {ty}")
    })
}

/// Requires that tensors and shared buffers have layouts of their kind from stage layout on, and none before.
fn layout(func: &Func, ty: &Type, stage: Stage) -> Check {
    let violation = |message: String| require(false, Rule::Layouts, || message);
    let id = match (ty.layout(), stage) {
        (None, Stage::Tile) => return Ok(()),
        (Some(_), Stage::Tile) => return violation(format!("{ty} has a layout at stage Tile")),
        (None, Stage::Layout | Stage::Schedule | Stage::Async) => {
            return violation(format!("{ty} has no layout at stage {stage:?}"));
        }
        (Some(id), Stage::Layout | Stage::Schedule | Stage::Async) => id,
    };
    let Some(layout) = func.layouts.get(id.0 as usize) else {
        return violation(format!("the function has no layout #l{}", id.0));
    };
    let covers = |shape: &[usize]| layout.shape().iter().map(|&n| n as usize).eq(shape.iter().copied());
    let has_room = |shape: &[usize]| {
        let room = layout.shape().iter().map(|&n| n as usize);
        shape.len() == room.len() && shape.iter().zip(room).all(|(&n, room)| n <= room)
    };
    let fits = match ty {
        Type::Shared { shape, .. } => layout.is_shared() && (has_room(shape) || has_room(&shape[1..])),
        _ => layout.is_distributed() && covers(ty.shape()),
    };
    require(fits && layout.is_surjective(), Rule::Layouts, || format!("{layout} is not a layout of {ty}"))
}
