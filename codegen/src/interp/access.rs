//! Accesses to global memory through pointers and views.

use super::arith;
use super::memory::Memory;
use super::value::{Tile, Val, View, indices};
use crate::ir::{AtomicOp, DType, Elem, MemScope, MemSem, Padding};
use crate::num;

/// The view from the operands of `make_view`.
pub(super) fn make_view(operands: &[Val], block: &[usize], elem: DType) -> View {
    let rank = block.len();
    let part = |k: usize| operands[1 + k * rank..1 + (k + 1) * rank].iter().map(|v| v.int() as i64).collect();
    View { base: operands[0].bits(), elem, block: block.to_vec(), shape: part(0), strides: part(1), offsets: part(2) }
}

pub(super) fn advance(view: &View, deltas: &[Val]) -> View {
    let mut moved = view.clone();
    for (offset, delta) in moved.offsets.iter_mut().zip(deltas) {
        *offset = offset.wrapping_add(delta.int() as i64);
    }
    moved
}

impl View {
    /// Addresses of the block's elements in row-major order; `None` for elements beyond the shape in a dimension of
    /// `boundary`.
    pub fn addresses(&self, boundary: &[usize]) -> Result<Vec<Option<u64>>, String> {
        indices(&self.block).map(|index| self.address(&index, boundary)).collect()
    }

    fn address(&self, index: &[usize], boundary: &[usize]) -> Result<Option<u64>, String> {
        let at: Vec<i64> = index.iter().zip(&self.offsets).map(|(&i, &o)| o.wrapping_add(i as i64)).collect();
        let inside = |d: usize| (0..self.shape[d]).contains(&at[d]);
        if boundary.iter().any(|&d| !inside(d)) {
            return Ok(None);
        }
        if let Some(d) = (0..at.len()).find(|&d| !inside(d)) {
            return Err(format!(
                "accesses index {} of dimension {d}, which has {} elements, and `boundary` does not list it",
                at[d], self.shape[d]
            ));
        }
        let elements = at.iter().zip(&self.strides).fold(0i64, |sum, (&i, &s)| sum.wrapping_add(i.wrapping_mul(s)));
        Ok(Some(self.base.wrapping_add_signed(elements.wrapping_mul(self.elem.bytes() as i64))))
    }

    /// Loads the block; elements without an address read as padding.
    pub fn load(&self, memory: &mut Memory, boundary: &[usize], padding: Padding) -> Result<Tile, String> {
        let pad = match padding {
            Padding::Zero => 0,
            Padding::Nan => num::encode(self.elem, f64::NAN),
        };
        let read = |address: Option<u64>| address.map_or(Ok(pad), |a| memory.load(a, self.elem.bytes()));
        let bits = self.addresses(boundary)?.into_iter().map(read).collect::<Result<_, _>>()?;
        Ok(Tile { shape: self.block.clone(), elem: self.elem.into(), bits })
    }

    pub fn store(&self, memory: &mut Memory, tile: &Tile, boundary: &[usize]) -> Result<(), String> {
        for (address, &bits) in self.addresses(boundary)?.into_iter().zip(&tile.bits) {
            if let Some(address) = address {
                memory.store(address, self.elem.bytes(), bits)?;
            }
        }
        Ok(())
    }

    pub fn atomic(&self, memory: &mut Memory, op: AtomicOp, tile: &Tile, boundary: &[usize]) -> Result<(), String> {
        for (address, &bits) in self.addresses(boundary)?.into_iter().zip(&tile.bits) {
            if let Some(address) = address {
                memory.update(address, self.elem.bytes(), |old| arith::atomic(op, self.elem, old, bits))?;
            }
        }
        Ok(())
    }
}

/// Element type that the pointers refer to.
fn pointee(pointers: &Tile) -> DType {
    pointers
        .elem
        .pointee()
        .expect("internal compiler error: access through numbers passed the verifier; please report this")
}

pub(super) fn ptr_add(pointers: &Tile, offsets: &Tile) -> Tile {
    let (size, dtype) = (pointee(pointers).bytes() as i64, offsets.dtype());
    pointers.zip(offsets, pointers.elem, |address, offset| {
        let elements = num::decode_int(dtype, offset) as i64;
        address.wrapping_add_signed(elements.wrapping_mul(size))
    })
}

fn enabled(mask: Option<&Tile>, i: usize) -> bool {
    mask.is_none_or(|m| m.bits[i] != 0)
}

pub(super) fn load(
    memory: &mut Memory,
    pointers: &Tile,
    mask: Option<&Tile>,
    other: Option<&Tile>,
) -> Result<Tile, String> {
    let elem = pointee(pointers);
    let mut bits = Vec::with_capacity(pointers.bits.len());
    for (i, &address) in pointers.bits.iter().enumerate() {
        bits.push(if enabled(mask, i) {
            memory.load(address, elem.bytes())?
        } else {
            other.map_or(0, |tile| tile.bits[i])
        });
    }
    Ok(Tile { shape: pointers.shape.clone(), elem: Elem::Num(elem), bits })
}

pub(super) fn store(memory: &mut Memory, pointers: &Tile, value: &Tile, mask: Option<&Tile>) -> Result<(), String> {
    let elem = pointee(pointers);
    for (i, &address) in pointers.bits.iter().enumerate() {
        if enabled(mask, i) {
            memory.store(address, elem.bytes(), value.bits[i])?;
        }
    }
    Ok(())
}

/// What an atomic orders between programs: nothing at the scope of one program.
pub(super) fn order(sem: MemSem, scope: Option<MemScope>) -> MemSem {
    if scope == Some(MemScope::Cta) { MemSem::Relaxed } else { sem }
}

pub(super) fn atomic_rmw(
    memory: &mut Memory,
    op: AtomicOp,
    pointers: &Tile,
    value: &Tile,
    mask: Option<&Tile>,
    order: MemSem,
) -> Result<Tile, String> {
    let elem = pointee(pointers);
    let mut bits = vec![0; value.bits.len()];
    for (i, &address) in pointers.bits.iter().enumerate() {
        if enabled(mask, i) {
            bits[i] = memory.update(address, elem.bytes(), |old| arith::atomic(op, elem, old, value.bits[i]))?;
            memory.synchronize(address, order);
        }
    }
    Ok(Tile { bits, ..value.clone() })
}

/// Operands: pointers, expected, new. Compares bits, not numbers: −0 differs from +0, and a NaN equals itself.
pub(super) fn atomic_cas(
    memory: &mut Memory,
    [pointers, expected, new]: [&Tile; 3],
    mask: Option<&Tile>,
    order: MemSem,
) -> Result<Tile, String> {
    let elem = pointee(pointers);
    let mut bits = vec![0; new.bits.len()];
    for (i, &address) in pointers.bits.iter().enumerate() {
        if enabled(mask, i) {
            let swap = |old| if old == expected.bits[i] { new.bits[i] } else { old };
            bits[i] = memory.update(address, elem.bytes(), swap)?;
            memory.synchronize(address, order);
        }
    }
    Ok(Tile { bits, ..new.clone() })
}
