//! Layouts of shape operations. None of them moves data between threads: each returns the layout of the result, and for
//! each register of the result the register of the operand that holds its value.
//!
//! The axes of a rank-`r` layout are `0..r`. An axis or shape out of range panics: it is a compiler bug, since the
//! verifier has checked the program.

use super::gf2::{self, Span};
use super::linear::{Basis, Dim, Index, LinearLayout, bug, unflatten};

/// Result of an operation that only renames registers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Renaming {
    /// The layout of the result.
    pub layout: LinearLayout,
    /// Result register `r` is register `registers[r]` of the operand.
    pub registers: Vec<usize>,
}

/// Result of splitting a last axis of extent two.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Split {
    /// The layout of both results.
    pub layout: LinearLayout,
    /// Register `r` of result `i` is register `registers[i][r]` of the operand.
    pub registers: [Vec<usize>; 2],
}

/// Result of joining two tensors along a new last axis of extent two.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Join {
    /// The layout of the result.
    pub layout: LinearLayout,
    /// Result register `r` is register `registers[r].1` of operand `registers[r].0`.
    pub registers: Vec<(usize, usize)>,
}

impl LinearLayout {
    fn unchanged(&self, layout: LinearLayout) -> Renaming {
        Renaming { layout, registers: (0..self.num_registers()).collect() }
    }

    /// For each register of `target`, the register of `self` that holds the same element in the same thread. The bases
    /// of lanes, warps and blocks must be the same in both layouts. `None` if some register has no counterpart.
    pub fn registers_of(&self, target: &LinearLayout) -> Option<Vec<usize>> {
        let span = Span::of_columns(&self.columns(Dim::Register));
        let sources: Option<Vec<u64>> =
            target.columns(Dim::Register).iter().map(|&column| span.solve(column)).collect();
        let sources = sources?;
        Some((0..target.num_registers()).map(|r| gf2::image(&sources, r as u64) as usize).collect())
    }

    /// Drops redundant register bits: those that depend on lower register bits of the same thread.
    pub fn without_redundant_registers(&self) -> Renaming {
        let free = gf2::dependent_columns(&self.columns(Dim::Register));
        let kept: Vec<usize> = (0..self.bits(Dim::Register)).filter(|bit| free >> bit & 1 == 0).collect();
        let list = kept.iter().map(|&bit| self.bases(Dim::Register)[bit].clone()).collect();
        Renaming { layout: self.with_bases(Dim::Register, list), registers: expand_bits(&kept) }
    }

    /// Drops the bits of `dim` with zero bases. For registers, the values stay where they are; for other dims, the
    /// result describes fewer lanes or warps.
    pub fn remove_zero_bases(&self, dim: Dim) -> Renaming {
        let kept: Vec<usize> =
            (0..self.bits(dim)).filter(|&bit| self.bases(dim)[bit].iter().any(|&coordinate| coordinate != 0)).collect();
        let list = kept.iter().map(|&bit| self.bases(dim)[bit].clone()).collect();
        let layout = self.with_bases(dim, list);
        if dim == Dim::Register { Renaming { layout, registers: expand_bits(&kept) } } else { self.unchanged(layout) }
    }

    /// Reorders register bits: bit `i` of the result is bit `order[i]` of the operand.
    pub fn permute_registers(&self, order: &[usize]) -> Renaming {
        check_permutation(order, self.bits(Dim::Register));
        let list = order.iter().map(|&bit| self.bases(Dim::Register)[bit].clone()).collect();
        Renaming { layout: self.with_bases(Dim::Register, list), registers: expand_bits(order) }
    }

    /// Axis `i` of the result is axis `permutation[i]` of the operand.
    pub fn transpose(&self, permutation: &[usize]) -> Renaming {
        check_permutation(permutation, self.rank());
        let pick = |list: &[u32]| -> Vec<u32> { permutation.iter().map(|&axis| list[axis]).collect() };
        self.unchanged(self.map_bases(&pick(self.shape()), |basis| pick(basis)))
    }

    /// The layout of a reduction over `axis`: drops that coordinate. Registers that become redundant are dropped (each
    /// result register names the first of the operand registers that it combines, see [`Self::reduction_registers`]).
    /// Lanes and warps along the axis remain and hold replicas.
    pub fn slice(&self, axis: usize) -> Renaming {
        self.check_axis(axis, self.rank());
        let drop = |list: &[u32]| without(list, axis);
        self.map_bases(&drop(self.shape()), |basis| drop(basis)).without_redundant_registers()
    }

    /// For each register of `self.slice(axis)`, the operand registers of the thread that it combines, each element
    /// once, in ascending order of the coordinate along `axis` relative to the first.
    pub fn reduction_registers(&self, axis: usize) -> Vec<Vec<usize>> {
        let sliced = self.slice(axis);
        let distinct = self.without_redundant_registers();
        let mut groups: Vec<Vec<usize>> = vec![Vec::new(); sliced.registers.len()];
        let operand = distinct.layout.map_bases(&without(self.shape(), axis), |basis| without(basis, axis));
        // `operand` may hold more registers than the slice. Each maps to the register of the slice with the same
        // coordinates, which exists because the slice spans the same coordinates.
        match sliced.layout.registers_of(&operand) {
            Some(targets) => {
                targets.iter().zip(&distinct.registers).for_each(|(&to, &from)| groups[to].push(from));
            }
            None => bug("a register of the operand has no counterpart in its slice"),
        }
        for group in &mut groups {
            group.sort_by_key(|&register| self.apply(Index::register(register as u32))[axis]);
        }
        groups
    }

    /// Inserts an axis of extent one before `axis` (`0..=rank`).
    pub fn expand_dims(&self, axis: usize) -> Renaming {
        self.check_axis(axis, self.rank() + 1);
        let insert = |list: &[u32], value| {
            let mut list = list.to_vec();
            list.insert(axis, value);
            list
        };
        self.unchanged(self.map_bases(&insert(self.shape(), 1), |basis| insert(basis, 0)))
    }

    /// The layout of a tensor of extent one along `axis` for which broadcasting along the axis gives `self` without
    /// moving data. Here `registers` maps from the result of the broadcast to the operand: register `r` of `self` is
    /// register `registers[r]` of the returned layout.
    pub fn unbroadcast(&self, axis: usize) -> Renaming {
        self.check_axis(axis, self.rank());
        let mut shape = self.shape().to_vec();
        shape[axis] = 1;
        let zeroed = self.map_bases(&shape, |basis| {
            let mut basis = basis.clone();
            basis[axis] = 0;
            basis
        });
        let layout = zeroed.without_redundant_registers().layout;
        match layout.registers_of(&zeroed) {
            Some(registers) => Renaming { layout, registers },
            None => bug("a register of the result has no counterpart in the operand of its broadcast"),
        }
    }

    /// Row-major reshape to another shape with the same number of elements.
    pub fn reshape(&self, shape: &[u32]) -> Renaming {
        let elements: usize = shape.iter().map(|&extent| extent as usize).product();
        if elements != self.num_elements() {
            bug(format!("reshape of {:?} to {shape:?}", self.shape()));
        }
        self.unchanged(self.map_bases(shape, |basis| unflatten(shape, self.flatten(basis))))
    }

    /// The layout of two tensors of this layout, joined along a new last axis of extent two: the lowest register bit
    /// selects the operand.
    pub fn join(&self) -> Join {
        let mut shape = self.shape().to_vec();
        shape.push(2);
        let push = |basis: &Basis, last| [basis.as_slice(), &[last]].concat();
        let mut list = vec![push(&vec![0; self.rank()], 1)];
        list.extend(self.bases(Dim::Register).iter().map(|basis| push(basis, 0)));
        let layout = self.map_bases(&shape, |basis| push(basis, 0)).with_bases(Dim::Register, list);
        let registers = (0..2 * self.num_registers()).map(|r| (r & 1, r >> 1)).collect();
        Join { layout, registers }
    }

    /// Splits a last axis of extent two, if each thread holds both halves of every pair. Otherwise `None`: the operand
    /// must first be converted (e.g. to [`Self::splittable`]).
    pub fn split(&self) -> Option<Split> {
        let last = self.rank().checked_sub(1)?;
        let threads = [Dim::Lane, Dim::Warp, Dim::Block, Dim::Offset];
        let thread_bases = threads.iter().flat_map(|&dim| self.bases(dim));
        if self.shape()[last] != 2 || thread_bases.into_iter().any(|basis| basis[last] != 0) {
            return None;
        }
        let layout = self.slice(last).layout;
        let half = |side: u64| {
            let span = Span::of_columns(&self.columns(Dim::Register));
            // The coordinates of the result, with the half appended as the last coordinate bit.
            let source = |r: usize| {
                let flat = gf2::image(&layout.columns(Dim::Register), r as u64);
                span.solve(flat << 1 | side).map(|register| register as usize)
            };
            (0..layout.num_registers()).map(source).collect::<Option<Vec<usize>>>()
        };
        let registers = [half(0)?, half(1)?];
        Some(Split { layout, registers })
    }

    /// A layout of the same tensor that [`Self::split`] accepts: each thread holds both halves of a pair in neighboring
    /// registers; otherwise as this layout.
    pub fn splittable(&self) -> LinearLayout {
        match self.shape() {
            [.., 2] => self.slice(self.rank() - 1).layout.join().layout,
            shape => bug(format!("split of a tensor of shape {shape:?}")),
        }
    }

    fn check_axis(&self, axis: usize, end: usize) {
        if axis >= end {
            bug(format!("axis {axis} of a layout of shape {:?}", self.shape()));
        }
    }
}

fn check_permutation(order: &[usize], length: usize) {
    let mut seen = order.to_vec();
    seen.sort_unstable();
    if seen != (0..length).collect::<Vec<_>>() {
        bug(format!("{order:?} is not a permutation of 0..{length}"));
    }
}

fn without(list: &[u32], axis: usize) -> Vec<u32> {
    let mut list = list.to_vec();
    list.remove(axis);
    list
}

/// All numbers below `2^bits.len()` with bit `i` moved to bit `bits[i]`.
fn expand_bits(bits: &[usize]) -> Vec<usize> {
    (0..1usize << bits.len())
        .map(|r| bits.iter().enumerate().fold(0, |sum, (i, &bit)| sum | (r >> i & 1) << bit))
        .collect()
}
