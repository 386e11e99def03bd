//! Shared memory, by logical element. Layouts determine only the address of an element, so they are ignored.

use super::value::{Shared, Tile, indices};
use crate::ir::DType;

/// The allocations of one program; `None` for uninitialized elements.
#[derive(Default)]
pub(super) struct SharedMemory {
    allocations: Vec<Vec<Option<u64>>>,
}

fn row_major(shape: &[usize]) -> Vec<usize> {
    (0..shape.len()).map(|d| shape[d + 1..].iter().product()).collect()
}

impl SharedMemory {
    /// Allocates a buffer, initialized from a tile if given.
    pub fn alloc(&mut self, shape: &[usize], elem: DType, initial: Option<&Tile>) -> Shared {
        self.allocations.push(vec![None; shape.iter().product()]);
        let allocation = self.allocations.len() - 1;
        let buffer = Shared { allocation, start: 0, elem, shape: shape.to_vec(), strides: row_major(shape) };
        if let Some(tile) = initial {
            self.store(&buffer, tile);
        }
        buffer
    }

    pub fn load(&self, buffer: &Shared) -> Result<Tile, String> {
        let memory = &self.allocations[buffer.allocation];
        let read = |p: usize| memory[p].ok_or("reads uninitialized shared memory");
        let bits = buffer.places().map(read).collect::<Result<_, _>>()?;
        Ok(Tile { shape: buffer.shape.clone(), elem: buffer.elem.into(), bits })
    }

    /// Makes the buffer uninitialized.
    pub fn clear(&mut self, buffer: &Shared) {
        let memory = &mut self.allocations[buffer.allocation];
        buffer.places().for_each(|place| memory[place] = None);
    }

    pub fn store(&mut self, buffer: &Shared, tile: &Tile) {
        let memory = &mut self.allocations[buffer.allocation];
        for (place, &bits) in buffer.places().zip(&tile.bits) {
            memory[place] = Some(bits);
        }
    }
}

impl Shared {
    /// Index in the allocation of each element, in row-major order.
    fn places(&self) -> impl Iterator<Item = usize> + '_ {
        indices(&self.shape)
            .map(|index| self.start + index.iter().zip(&self.strides).map(|(i, s)| i * s).sum::<usize>())
    }

    /// One buffer of a ring.
    pub fn slot(&self, index: i128) -> Result<Shared, String> {
        let count = self.shape[0];
        let Some(i) = usize::try_from(index).ok().filter(|&i| i < count) else {
            return Err(format!("buffer index {index} is out of range: the ring has {count} buffers"));
        };
        Ok(Shared {
            start: self.start + i * self.strides[0],
            shape: self.shape[1..].to_vec(),
            strides: self.strides[1..].to_vec(),
            ..*self
        })
    }

    pub fn trans(&self, perm: &[usize]) -> Shared {
        let permuted = |list: &[usize]| perm.iter().map(|&d| list[d]).collect();
        Shared { shape: permuted(&self.shape), strides: permuted(&self.strides), ..*self }
    }
}
