//! Loops of matrix programs in the forms that people write: a loop carries and advances the pointers or views that it
//! loads through, or carries a sum of rows in addition to the accumulator; loops in branches; trip counts that depend
//! on branches.

use super::generate::{region, with_regions};
use super::matrix::{Gen, Matrix};
use crate::ir::{BinaryOp, Builder, CmpOp, DType, Literal, Op, Type, Value};

/// How a loop addresses the next block of a matrix.
#[derive(Clone, Copy)]
enum Carried {
    /// A block pointer.
    View,
    /// A tile of pointers.
    Pointers,
    /// Indices along the dimension in which it advances.
    Indices,
}

/// A matrix that a loop loads block by block: blocks of `shape`, along dimension `along`.
struct OperandLoop {
    matrix: Matrix,
    shape: [usize; 2],
    along: usize,
    carried: Carried,
    /// Initial value of the carried view, pointers or indices.
    start: Value,
    /// Dimensions of a view with boundary checks.
    boundary: Vec<usize>,
    /// For the dimension that stays: the index of each element, and the mask of those in bounds, as tiles of the whole
    /// shape.
    across: Option<(Value, Option<Value>)>,
}

impl Gen {
    /// Broadcasts a tile of one dimension along the other one.
    fn spread(b: &mut Builder, v: Value, d: usize, shape: [usize; 2]) -> Value {
        let v = b.expand_dims(v, 1 - d);
        b.broadcast(v, &shape)
    }

    /// `index · stride` of dimension `d`, in elements, i64.
    fn scaled(b: &mut Builder, m: &Matrix, index: Value, d: usize) -> Value {
        let shape = b.func.ty(index).shape().to_vec();
        let (index, stride) = (b.cast(index, DType::I64), b.splat(m.strides[d], &shape));
        b.binary(BinaryOp::Mul, index, stride)
    }

    /// Sets up the loads of a matrix, at index `first` (i32) of the dimension that stays.
    fn begin_operand_loop(
        &mut self,
        b: &mut Builder,
        m: Matrix,
        shape: [usize; 2],
        along: usize,
        first: Value,
    ) -> OperandLoop {
        let carried = match self.rng.below(3) {
            0 if !self.tma_compatible => Carried::Pointers,
            1 if !self.tma_compatible => Carried::Indices,
            _ => Carried::View,
        };
        let zero = b.int(0, DType::I32);
        let mut at = [first; 2];
        at[along] = zero;
        if let Carried::View = carried {
            let (start, boundary) = self.view(b, &m, shape, at);
            return OperandLoop { matrix: m, shape, along, carried, start, boundary, across: None };
        }
        let across = self.indices(b, &m, shape, at, 1 - along, false);
        let range = b.arange(0, shape[along] as i64);
        let start = match carried {
            Carried::Indices => range,
            _ => {
                let moving = Self::spread(b, range, along, shape);
                let base = b.splat(m.pointer, &shape);
                let (still, moving) = (Self::scaled(b, &m, across.0, 1 - along), Self::scaled(b, &m, moving, along));
                let row = b.ptr_add(base, still);
                b.ptr_add(row, moving)
            }
        };
        OperandLoop { matrix: m, shape, along, carried, start, boundary: Vec::new(), across: Some(across) }
    }

    /// Loads the block of step `k` (i32); returns it, and the carried value of the next step.
    fn step(&mut self, b: &mut Builder, operand: &OperandLoop, place: Value, k: Value) -> (Value, Value) {
        let OperandLoop { matrix: m, shape, along, .. } = operand;
        let by = shape[*along] as i64;
        let Some((still, across)) = operand.across else {
            let tile = self.load_view(b, place, &operand.boundary);
            let deltas = [0, 1].map(|d| b.int(if d == *along { by } else { 0 }, DType::I64));
            return (tile, b.advance(place, &deltas));
        };
        let (pointers, inside, next) = match operand.carried {
            Carried::Indices => {
                let size = b.splat(m.sizes[*along], &[shape[*along]]);
                let inside = b.cmp(CmpOp::Lt, place, size);
                let moving = Self::spread(b, place, *along, *shape);
                let base = b.splat(m.pointer, shape);
                let (still, moving) = (Self::scaled(b, m, still, 1 - along), Self::scaled(b, m, moving, *along));
                let offset = b.binary(BinaryOp::Add, still, moving);
                let step = b.constant(Literal::Int(by), Type::tensor(&[shape[*along]], DType::I32));
                (b.ptr_add(base, offset), inside, b.binary(BinaryOp::Add, place, step))
            }
            _ => {
                // As in Triton's matmul: the remaining extent is compared with indices within the block.
                let done = self.times(b, k, shape[*along]);
                let left = b.binary(BinaryOp::Sub, m.sizes[*along], done);
                let (range, left) = (b.arange(0, by), b.splat(left, &[shape[*along]]));
                let inside = b.cmp(CmpOp::Lt, range, left);
                let size = b.int(by, DType::I64);
                let step = b.binary(BinaryOp::Mul, m.strides[*along], size);
                let step = b.splat(step, shape);
                (place, inside, b.ptr_add(place, step))
            }
        };
        let inside = Self::spread(b, inside, *along, *shape);
        let mask = match across {
            Some(across) => b.binary(BinaryOp::And, inside, across),
            None => inside,
        };
        let eviction = self.eviction();
        (b.load(pointers, Some(mask), None, eviction), next)
    }

    /// Adds the dots of a few steps to one of the accumulators, by a loop that advances what it loads through.
    /// Sometimes also sums rows or columns of the result.
    pub fn block_loop(&mut self, b: &mut Builder, acc: &[Value]) -> Vec<Value> {
        self.dots = self.dots.saturating_sub(1);
        let [m, n, inner] = self.tile;
        let steps = if self.depth == 0 { self.rng.range(0, 4) } else { self.rng.range(1, 2) } as usize;
        let whole = inner * steps.max(1);
        let depth = if self.rng.one_in(2) { whole } else { whole - self.rng.below(inner) };
        let operand_loops = [0, 1].map(|side| {
            let (shape, extents, along) =
                [([m, inner], [self.extents[0], depth], 1), ([inner, n], [depth, self.extents[1]], 0)][side];
            let first = self.times(b, self.program[side], shape[1 - along]);
            let stored = self.stored(side);
            let matrix = self.matrix(b, stored, extents, false);
            self.begin_operand_loop(b, matrix, shape, along, first)
        });
        let which = self.rng.below(acc.len());
        let mut init = vec![acc[which], operand_loops[0].start, operand_loops[1].start];
        // The axis of an additional sum, if there is one.
        let axis = self.rng.one_in(3).then(|| self.rng.below(2));
        if let Some(axis) = axis {
            init.push(b.zero(Type::tensor(&[[m, n][1 - axis]], self.acc)));
        }
        let results = self.counted_loop(b, &init, steps, |g, b, k, carried| {
            let (x, next_x) = g.step(b, &operand_loops[0], carried[1], k);
            let (y, next_y) = g.step(b, &operand_loops[1], carried[2], k);
            let (x, y) = (g.as_operand(b, x, 0), g.as_operand(b, y, 1));
            let mut next = vec![b.dot(x, y, carried[0], g.precision), next_x, next_y];
            if let Some(axis) = axis {
                let small = g.clamped(b, next[0]);
                let small = b.cast(small, g.acc);
                let sum = b.reduce_with(BinaryOp::Add, small, axis);
                next.push(b.binary(BinaryOp::Add, carried[3], sum));
            }
            next
        });
        let mut acc = acc.to_vec();
        acc[which] = results[0];
        if let Some(axis) = axis {
            let sum = Self::spread(b, results[3], 1 - axis, [m, n]);
            acc[which] = b.binary(BinaryOp::Sub, acc[which], sum);
        }
        acc
    }

    /// A condition that holds in some programs of the grid: whether the first coordinate is even.
    fn some_programs(&self, b: &mut Builder) -> Value {
        let (two, zero) = (b.int(2, DType::I32), b.int(0, DType::I32));
        let parity = b.binary(BinaryOp::Rem, self.program[0], two);
        b.cmp(CmpOp::Eq, parity, zero)
    }

    /// The trip count of a loop with at most `steps` iterations: `steps`, or one less in some programs.
    pub fn upper(&mut self, b: &mut Builder, steps: usize) -> Value {
        let upper = self.number(b, steps as i64, DType::I32);
        if !self.rng.one_in(6) {
            return upper;
        }
        let condition = self.some_programs(b);
        let all = region(b, &[], Op::Yield, |_, _| vec![upper]);
        let fewer = region(b, &[], Op::Yield, |b, _| {
            let one = b.int(1, DType::I32);
            vec![b.binary(BinaryOp::Sub, upper, one)]
        });
        with_regions(b, Op::If, &[condition], &[Type::scalar(DType::I32)], &[all, fewer])[0]
    }

    /// A loop in some programs, and arithmetic or another loop in the others.
    pub fn loop_in_branch(&mut self, b: &mut Builder, acc: &[Value]) -> Vec<Value> {
        let condition = self.some_programs(b);
        let types: Vec<Type> = acc.iter().map(|&v| b.func.ty(v).clone()).collect();
        let both = self.rng.one_in(3) && self.dots > 1;
        let sides = [true, both].map(|has_loop| {
            region(b, &[], Op::Yield, |b, _| match has_loop {
                true if self.rng.one_in(2) => self.block_loop(b, acc),
                true => self.loop_of(b, acc),
                false => acc.iter().map(|&v| self.elementwise(b, v)).collect(),
            })
        });
        with_regions(b, Op::If, &[condition], &types, &sides)
    }
}
