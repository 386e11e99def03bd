//! Ops that create tiles and rearrange elements.

use super::value::{Tile, indices, position};
use crate::ir::DType;
use crate::num;

pub(super) fn arange(start: i64, end: i64) -> Tile {
    let bits: Vec<u64> = (start..end).map(|i| num::encode_int(DType::I32, i as i128)).collect();
    Tile { shape: vec![bits.len()], elem: DType::I32.into(), bits }
}

pub(super) fn splat(scalar: &Tile, shape: &[usize]) -> Tile {
    Tile { shape: shape.to_vec(), elem: scalar.elem, bits: vec![scalar.bits[0]; shape.iter().product()] }
}

/// `reshape` and `expand_dims`: the same elements in row-major order under another shape.
pub(super) fn reshape(tile: &Tile, shape: &[usize]) -> Tile {
    Tile { shape: shape.to_vec(), ..tile.clone() }
}

/// A tile whose element at each index is the operand's element at `source(index)`.
fn gather(tile: &Tile, shape: &[usize], source: impl Fn(&[usize]) -> Vec<usize>) -> Tile {
    let bits = indices(shape).map(|index| tile.bits[position(&source(&index), &tile.shape)]).collect();
    Tile { shape: shape.to_vec(), elem: tile.elem, bits }
}

pub(super) fn broadcast(tile: &Tile, shape: &[usize]) -> Tile {
    gather(tile, shape, |index| index.iter().zip(&tile.shape).map(|(&i, &n)| if n == 1 { 0 } else { i }).collect())
}

pub(super) fn trans(tile: &Tile, perm: &[usize]) -> Tile {
    let shape: Vec<usize> = perm.iter().map(|&d| tile.shape[d]).collect();
    gather(tile, &shape, |index| {
        let mut source = vec![0; perm.len()];
        for (&d, &i) in perm.iter().zip(index) {
            source[d] = i;
        }
        source
    })
}

pub(super) fn join(a: &Tile, b: &Tile) -> Tile {
    let bits = a.bits.iter().zip(&b.bits).flat_map(|(&x, &y)| [x, y]).collect();
    Tile { shape: [a.shape.as_slice(), &[2]].concat(), elem: a.elem, bits }
}

/// Picks elements along `axis` by the elements of `index`, modulo the extent.
pub(super) fn gather_along(tile: &Tile, index: &Tile, axis: usize) -> Tile {
    let at = |place: &[usize]| {
        let picked = crate::num::decode_int(DType::I32, index.bits[position(place, &index.shape)]);
        let mut source = place.to_vec();
        source[axis] = picked.rem_euclid(tile.shape[axis] as i128) as usize;
        source
    };
    gather(tile, &index.shape, at)
}

pub(super) fn split(tile: &Tile) -> [Tile; 2] {
    let shape = &tile.shape[..tile.shape.len() - 1];
    [0, 1].map(|half| Tile {
        shape: shape.to_vec(),
        elem: tile.elem,
        bits: tile.bits.chunks(2).map(|pair| pair[half]).collect(),
    })
}
