//! Programs with dots for tensor cores, and the code that kernels put around them.
//!
//! Matrices hold small integers, so that every sum is exact in the accumulator's type: the order of additions, which
//! depends on the instruction, does not matter, and every target must give the same bits. Operands are at most
//! [`OPERAND`] in magnitude, and a program adds at most 2^24 / [`OPERAND`]^2 products to one element. Sums in f16 are exact up to
//! 2^11: nothing bounds them but the random signs of their products.

use super::generate::{region, with_regions};
use super::{Argument, Case, Program, Rng};
use crate::ir::{
    Arg, AtomicOp, BinaryOp, Builder, CmpOp, DType, Elem, Eviction, Func, Loc, Op, Padding, Precision, Type, UnaryOp,
    Value,
};
use crate::mma::{self, Instruction, N_STEP};
use crate::num;
use crate::target::{CompileOptions, Schedule};

/// Largest magnitude of an element of a dot's operands.
const OPERAND: i64 = 2;
/// Maximum number of multiply-adds of all programs together: simulating them takes at most one or two seconds.
const MAX_WORK: usize = 3 << 20;

/// Random options of a GPU compilation.
pub(super) fn compile_options(rng: &mut Rng) -> CompileOptions {
    let mut choice = |yes: usize| match rng.below(8) {
        n if n < yes => Some(true),
        7 => Some(false),
        _ => None,
    };
    let schedule = Schedule {
        tma: choice(2),
        warp_specialize: choice(3),
        overlap: choice(2),
        pingpong: choice(2),
        wgmma_f32: choice(4),
        tma_stores: choice(4),
    };
    CompileOptions {
        num_warps: rng.pick(&[1, 2, 4, 4, 4, 4, 4, 8, 8, 8, 16, 32]),
        num_stages: rng.pick(&[1, 2, 2, 3, 3, 4]),
        max_registers: rng.one_in(6).then(|| rng.pick(&[64, 128, 168, 232, 255])),
        schedule,
        ..CompileOptions::default()
    }
}

/// A matrix in memory.
#[derive(Clone)]
pub(super) struct Matrix {
    pub pointer: Value,
    extents: [usize; 2],
    /// The extents as scalars, i32.
    pub sizes: [Value; 2],
    pub strides: [Value; 2],
    /// The contiguous dimension.
    inner: usize,
}

pub(super) struct Gen {
    pub rng: Rng,
    args: Vec<Argument>,
    /// M, N and K of the tiles of dots.
    pub tile: [usize; 3],
    /// Index of the program's tile along rows and columns, i32.
    pub program: [Value; 2],
    /// Rows and columns of the result.
    pub extents: [usize; 2],
    /// Element types of a and b.
    operands: [DType; 2],
    pub acc: DType,
    pub precision: Precision,
    /// Number of dots left to generate.
    pub dots: usize,
    pub depth: usize,
    /// Whether extents, strides and alignments meet the requirements of TMA, so that loads can be warp-specialized.
    pub tma_compatible: bool,
}

pub(super) fn case(mut rng: Rng) -> Case {
    let mut options = compile_options(&mut rng);
    let tma_compatible = rng.one_in(3);
    if tma_compatible {
        options.num_warps = rng.pick(&[4, 8, 8]);
        options.num_stages = rng.pick(&[2, 3, 4]);
        options.max_registers = None;
        options.schedule.tma = rng.pick(&[None, Some(true)]);
        options.schedule.warp_specialize = Some(true);
        options.schedule.pingpong = Some(rng.one_in(2));
    }
    loop {
        if let Some(program) = program(&mut rng, tma_compatible) {
            return Case { program, options, assembly: None };
        }
    }
}

/// Whether multiplying operands of this type takes much longer.
fn is_slow(operand: DType) -> bool {
    !matches!(operand, DType::F16 | DType::BF16 | DType::F32)
}

/// A program; `None` if it would take too long.
fn program(rng: &mut Rng, tma_compatible: bool) -> Option<Program> {
    let tma_compatible_only = |i: &&&Instruction| !tma_compatible || matches!(i.operands[0], DType::F16 | DType::BF16);
    let (operands, acc, mut tile) = if tma_compatible || rng.one_in(2) {
        // Operand types of an MMA instruction, and tiles that are multiples of its shape.
        let rows: Vec<&Instruction> = mma::TABLE.iter().filter(|i| tma_compatible_only(&i)).collect();
        let i = rng.pick(&rows);
        let times = |rng: &mut Rng, n: u32, most: u32| (n << rng.range(0, i64::from(most))) as usize;
        let most = if is_slow(i.operands[0]) { [1, 2, 1] } else { [2, 4, 3] };
        let n = times(rng, N_STEP, most[1]).min(i.n[1].max(64) as usize);
        let tile = [times(rng, i.m, most[0]), n, times(rng, i.k, most[2])];
        (i.operands, i.acc, tile)
    } else {
        let (a, b, acc) = rng.pick(&[
            (DType::F16, DType::F16, DType::F32),
            (DType::BF16, DType::BF16, DType::F32),
            (DType::F32, DType::F32, DType::F32),
            (DType::F8E4M3, DType::F8E4M3, DType::F32),
            (DType::F8E5M2, DType::F8E4M3, DType::F32),
            (DType::F16, DType::F16, DType::F16),
            (DType::F8E4M3, DType::F8E5M2, DType::F16),
            (DType::I8, DType::I8, DType::I32),
            (DType::I8, DType::U8, DType::I32),
            (DType::F64, DType::F64, DType::F64),
        ]);
        let tile = [
            rng.pick(&[16, 32, 64, 64, 64, 128]),
            rng.pick(&[8, 16, 32, 64, 64, 128, 24, 80]),
            rng.pick(&[8, 16, 32, 64]),
        ];
        ([a, b], acc, tile)
    };
    if tma_compatible {
        tile = [rng.pick(&[64, 128, 128]), rng.pick(&[8, 16, 32, 64, 24, 96]), rng.pick(&[16, 32, 64])];
    }
    let tiles = [rng.range(1, 2) as usize, rng.range(1, 2) as usize];
    let work = tile.iter().product::<usize>() * tiles[0] * tiles[1] * if is_slow(operands[0]) { 8 } else { 1 };
    // The number of dots that fit the work budget; each may run a few times.
    let most = MAX_WORK / work / 4;
    if most == 0 {
        return None;
    }
    let mut func = Func::new("generated");
    let body = func.body;
    let extents = [0, 1].map(|d| {
        let whole = tile[d] * tiles[d];
        if rng.one_in(2) { whole } else { whole - rng.below(tile[d].min(whole)) }
    });
    let mut b = Builder::new(&mut func, body, Loc::unknown());
    let split = rng.one_in(2);
    let grid = if split { [tiles[0] as u32, tiles[1] as u32, 1] } else { [(tiles[0] * tiles[1]) as u32, 1, 1] };
    let program = if split {
        [b.program_id(0), b.program_id(1)]
    } else {
        let (p, n) = (b.program_id(0), b.int(tiles[1] as i64, DType::I32));
        [b.binary(BinaryOp::Div, p, n), b.binary(BinaryOp::Rem, p, n)]
    };
    let precision = rng.pick(&[Precision::Tf32, Precision::Tf32x3, Precision::Ieee]);
    let mut g = Gen {
        rng: rng.clone(),
        args: Vec::new(),
        tile,
        program,
        extents,
        operands,
        acc,
        precision,
        dots: most.min(4),
        depth: 0,
        tma_compatible,
    };
    // `g` draws from a copy of the generator; this advances the original.
    rng.next_u64();
    g.body(&mut b);
    b.ret();
    let args = g.args;
    Some(Program { func, args, grid })
}

impl Gen {
    fn argument(&mut self, b: &mut Builder, ty: Type, divisible_by: u64, value: Argument) -> Value {
        self.args.push(value);
        let name = format!("arg{}", self.args.len());
        b.func.add_arg(Arg { name, divisible_by, equal_to: None }, ty)
    }

    /// A number as a constant, or as an argument.
    pub fn number(&mut self, b: &mut Builder, n: i64, dtype: DType) -> Value {
        if self.rng.one_in(2) {
            return b.int(n, dtype);
        }
        let divisible_by = if n % 16 == 0 && (self.tma_compatible || !self.rng.one_in(3)) { 16 } else { 1 };
        let v = self.argument(b, Type::scalar(dtype), divisible_by, Argument::Int(n));
        if self.rng.one_in(8) {
            let bound = b.int(n, dtype);
            let holds = b.cmp(self.rng.pick(&[CmpOp::Le, CmpOp::Ge, CmpOp::Eq]), v, bound);
            b.op(Op::Assume, &[holds], &[]);
        }
        if self.rng.one_in(8)
            && let Some(arg) = b.func.args.last_mut()
        {
            arg.equal_to = Some(n);
        }
        v
    }

    /// A matrix of small integers, or an output.
    pub fn matrix(&mut self, b: &mut Builder, dtype: DType, extents: [usize; 2], output: bool) -> Matrix {
        let inner = if !self.tma_compatible && self.rng.one_in(4) { 0 } else { 1 };
        let pad = if self.rng.one_in(3) { self.rng.range(0, 9) as usize } else { 0 };
        // Strides that are multiples of 16 bytes, as TMA requires, or any.
        let pitch = if !self.tma_compatible && self.rng.one_in(3) {
            extents[inner] + pad
        } else {
            (extents[inner] + pad).next_multiple_of(16)
        };
        let count = pitch * extents[1 - inner];
        let mut bytes = Vec::new();
        for _ in 0..count {
            let x = if output { 0 } else { self.rng.range(-OPERAND, OPERAND) };
            let bits = if dtype.is_float() { num::encode(dtype, x as f64) } else { num::encode_int(dtype, x as i128) };
            bytes.extend_from_slice(&bits.to_le_bytes()[..dtype.bytes()]);
        }
        let value = if output { Argument::Output { dtype, bytes } } else { Argument::Input { dtype, bytes } };
        let divisible_by = if !self.tma_compatible && self.rng.one_in(4) { 1 } else { 16 };
        let pointer = self.argument(b, Type::Scalar(Elem::Ptr(dtype)), divisible_by, value);
        let sizes = extents.map(|n| self.number(b, n as i64, DType::I32));
        let (one, stride) = (b.int(1, DType::I64), self.number(b, pitch as i64, DType::I64));
        let strides = if inner == 1 { [stride, one] } else { [one, stride] };
        Matrix { pointer, extents, sizes, strides, inner }
    }

    /// `index · n`, i32.
    pub fn times(&self, b: &mut Builder, index: Value, n: usize) -> Value {
        let n = b.int(n as i64, DType::I32);
        b.binary(BinaryOp::Mul, index, n)
    }

    /// A view of the block of this shape at these indices (i32), and the dimensions to check.
    pub fn view(&mut self, b: &mut Builder, m: &Matrix, shape: [usize; 2], at: [Value; 2]) -> (Value, Vec<usize>) {
        let sizes = m.sizes.map(|v| b.cast(v, DType::I64));
        let offsets = at.map(|v| b.cast(v, DType::I64));
        let view = b.make_view(m.pointer, &sizes, &m.strides, &offsets, &shape, &[m.inner, 1 - m.inner]);
        let boundary = (0..2).filter(|&d| !m.extents[d].is_multiple_of(shape[d]) || self.rng.one_in(2)).collect();
        (view, boundary)
    }

    /// Indices `first .. first + n` along a dimension, as a tile of this shape, and the mask of those in bounds.
    pub fn indices(
        &mut self,
        b: &mut Builder,
        m: &Matrix,
        shape: [usize; 2],
        at: [Value; 2],
        d: usize,
        write: bool,
    ) -> (Value, Option<Value>) {
        let n = shape[d];
        let (first, range) = (b.splat(at[d], &[n]), b.arange(0, n as i64));
        let mut index = b.binary(BinaryOp::Add, first, range);
        if self.rng.one_in(6) {
            // Blocks start at multiples of their extent.
            let promise = Op::Hint { divisible: Some(n as i64), contiguous: Some(n as i64), at_least: None };
            let ty = b.func.ty(index).clone();
            let id = b.op(promise, &[index], &[ty]);
            index = b.func.result(id);
        }
        let size = b.splat(m.sizes[d], &[n]);
        let mut mask = None;
        match self.rng.below(if write { 1 } else { 5 }) {
            0 | 1 => {
                mask = (write || !m.extents[d].is_multiple_of(n) || self.rng.one_in(2))
                    .then(|| b.cmp(CmpOp::Lt, index, size))
            }
            2 => index = b.binary(BinaryOp::Rem, index, size),
            3 => {
                let (inside, zero) = (b.cmp(CmpOp::Lt, index, size), b.zero(Type::tensor(&[n], DType::I32)));
                index = b.select(inside, index, zero);
            }
            _ => {
                let one = b.constant(crate::ir::Literal::Int(1), Type::tensor(&[n], DType::I32));
                let last = b.binary(BinaryOp::Sub, size, one);
                index = b.binary(BinaryOp::Min, index, last);
            }
        }
        if !write && d == 0 && self.rng.one_in(4) {
            index = self.gather_indices(b, m.extents[d], index, mask);
        }
        let mut spread = |v: Value| {
            let v = b.expand_dims(v, 1 - d);
            b.broadcast(v, &shape)
        };
        (spread(index), mask.map(&mut spread))
    }

    /// Indices loaded from memory (a gather).
    fn gather_indices(&mut self, b: &mut Builder, n: usize, index: Value, mask: Option<Value>) -> Value {
        let bytes = (0..n).flat_map(|_| (self.rng.below(n) as i32).to_le_bytes()).collect();
        let value = Argument::Input { dtype: DType::I32, bytes };
        let list = self.argument(b, Type::Scalar(Elem::Ptr(DType::I32)), 16, value);
        let list = b.splat(list, b.func.ty(index).shape().to_vec().as_slice());
        let pointers = b.ptr_add(list, index);
        b.load(pointers, mask, None, Eviction::Normal)
    }

    fn pointers(
        &mut self,
        b: &mut Builder,
        m: &Matrix,
        shape: [usize; 2],
        at: [Value; 2],
        write: bool,
    ) -> (Value, Option<Value>) {
        let wide = self.rng.one_in(2);
        let parts = [0, 1].map(|d| self.indices(b, m, shape, at, d, write));
        let offsets = [0, 1].map(|d| {
            let dtype = if wide { DType::I64 } else { DType::I32 };
            let (index, stride) = (b.cast(parts[d].0, dtype), b.cast(m.strides[d], dtype));
            let stride = b.splat(stride, &shape);
            b.binary(BinaryOp::Mul, index, stride)
        });
        let base = b.splat(m.pointer, &shape);
        let pointers = if self.rng.one_in(2) {
            let offset = b.binary(BinaryOp::Add, offsets[0], offsets[1]);
            b.ptr_add(base, offset)
        } else {
            let row = b.ptr_add(base, offsets[0]);
            b.ptr_add(row, offsets[1])
        };
        let mask = match (parts[0].1, parts[1].1) {
            (Some(x), Some(y)) => Some(b.binary(BinaryOp::And, x, y)),
            (x, y) => x.or(y),
        };
        (pointers, mask)
    }

    pub fn eviction(&mut self) -> Eviction {
        self.rng.pick(&[Eviction::Normal, Eviction::Normal, Eviction::Normal, Eviction::First, Eviction::Last])
    }

    pub fn load_view(&mut self, b: &mut Builder, view: Value, boundary: &[usize]) -> Value {
        let float = b.func.ty(view).elem().and_then(Elem::num).is_some_and(DType::is_float);
        let padding = if float && self.rng.one_in(12) { Padding::Nan } else { Padding::Zero };
        let eviction = self.eviction();
        b.load_view(view, boundary, padding, eviction)
    }

    /// Loads the block of this shape at these indices.
    fn read(&mut self, b: &mut Builder, m: &Matrix, shape: [usize; 2], at: [Value; 2]) -> Value {
        if self.tma_compatible || !self.rng.one_in(3) {
            let (view, boundary) = self.view(b, m, shape, at);
            return self.load_view(b, view, &boundary);
        }
        let (pointers, mask) = self.pointers(b, m, shape, at, false);
        let eviction = self.eviction();
        b.load(pointers, mask, None, eviction)
    }

    /// Element type in memory of operand a (0) or b (1) of a dot: the operand's type, or another one that is cast.
    pub fn stored(&mut self, side: usize) -> DType {
        if self.rng.one_in(5) { self.rng.pick(&[DType::F32, DType::BF16, DType::I8]) } else { self.operands[side] }
    }

    /// Converts a loaded tile to operand a (0) or b (1) of a dot.
    pub fn as_operand(&mut self, b: &mut Builder, tile: Value, side: usize) -> Value {
        let mut tile = b.cast(tile, self.operands[side]);
        if self.rng.one_in(if self.tma_compatible { 12 } else { 4 }) {
            tile = self.elementwise(b, tile);
        }
        tile
    }

    /// Loads operand a (0) or b (1) of a dot: the block of this shape, at these indices, of a new matrix with these
    /// extents.
    fn operand(
        &mut self,
        b: &mut Builder,
        side: usize,
        shape: [usize; 2],
        extents: [usize; 2],
        at: [Value; 2],
    ) -> Value {
        let stored = self.stored(side);
        let tile = if self.rng.one_in(3) {
            let m = self.matrix(b, stored, [extents[1], extents[0]], false);
            let tile = self.read(b, &m, [shape[1], shape[0]], [at[1], at[0]]);
            b.trans(tile, &[1, 0])
        } else {
            let m = self.matrix(b, stored, extents, false);
            self.read(b, &m, shape, at)
        };
        self.as_operand(b, tile, side)
    }

    /// Elementwise arithmetic that keeps values small integers.
    pub fn elementwise(&mut self, b: &mut Builder, x: Value) -> Value {
        let ty = b.func.ty(x).clone();
        let unsigned = ty.dtype().is_some_and(|d| d.is_int() && !d.is_signed_int());
        let small = self.rng.range(if unsigned { 0 } else { -1 }, 1) as f64;
        let narrow = ty.dtype().is_some_and(DType::is_f8);
        match self.rng.below(if narrow { 1 } else { 4 }) {
            0 => {
                let (c, zero) = (b.number(small, ty.clone()), b.zero(ty));
                let condition = b.cmp(CmpOp::Lt, x, c);
                b.select(condition, zero, x)
            }
            1 => b.unary(UnaryOp::Neg, x),
            2 => b.unary(UnaryOp::Abs, x),
            _ => {
                let c = b.number(small, ty);
                b.binary(if self.rng.one_in(2) { BinaryOp::Max } else { BinaryOp::Min }, x, c)
            }
        }
    }

    /// Clamps values to the range of operand a of a dot.
    pub fn clamped(&mut self, b: &mut Builder, v: Value) -> Value {
        let ty = b.func.ty(v).clone();
        let (low, high) = (b.number(-OPERAND as f64, ty.clone()), b.number(OPERAND as f64, ty));
        let v = b.binary(BinaryOp::Max, v, low);
        let v = b.binary(BinaryOp::Min, v, high);
        b.cast(v, self.operands[0])
    }

    /// `acc + a × b` at step `k` (i32) of a loop of `steps`.
    fn dot(&mut self, b: &mut Builder, acc: Value, k: Value, steps: usize) -> Value {
        self.dots = self.dots.saturating_sub(1);
        let [m, n, inner] = self.tile;
        let whole = inner * steps;
        let depth = if self.rng.one_in(2) { whole } else { whole - self.rng.below(inner) };
        let rows = self.times(b, self.program[0], m);
        let columns = self.times(b, self.program[1], n);
        let at = self.times(b, k, inner);
        let x = self.operand(b, 0, [m, inner], [self.extents[0], depth], [rows, at]);
        let y = if self.rng.one_in(4) {
            // Chained dots: the result of one is an operand of the next.
            let between = self.rng.pick(&[8, 16, 32, 64]).min(self.tile[2].max(16));
            let zero = b.int(0, DType::I32);
            let w = self.operand(b, 1, [inner, between], [depth, between], [at, zero]);
            let start = b.zero(Type::tensor(&[m, between], self.acc));
            let s = b.dot(x, w, start, self.precision);
            let p = self.softmax(b, s);
            let v = self.operand(b, 1, [between, n], [between, self.extents[1]], [zero, columns]);
            return b.dot(p, v, acc, self.precision);
        } else {
            self.operand(b, 1, [inner, n], [depth, self.extents[1]], [at, columns])
        };
        b.dot(x, y, acc, self.precision)
    }

    /// The part of attention between its two dots, with integers.
    fn softmax(&mut self, b: &mut Builder, s: Value) -> Value {
        let mut s = s;
        if self.rng.one_in(2) {
            let shape = b.func.ty(s).shape().to_vec();
            let most = b.reduce_with(BinaryOp::Max, s, 1);
            let most = b.expand_dims(most, 1);
            let most = b.broadcast(most, &shape);
            s = b.binary(BinaryOp::Sub, s, most);
        }
        self.clamped(b, s)
    }

    /// A loop of `steps` iterations, with attributes.
    pub fn counted_loop(
        &mut self,
        b: &mut Builder,
        acc: &[Value],
        steps: usize,
        body: impl FnOnce(&mut Self, &mut Builder, Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let (zero, one) = (b.int(0, DType::I32), b.int(1, DType::I32));
        let upper = self.upper(b, steps);
        self.depth += 1;
        let results = b.for_loop(zero, upper, one, acc, |b, index, carried| body(self, b, index, carried));
        self.depth -= 1;
        let mut maybe = |n: usize| self.rng.one_in(n).then(|| !self.rng.one_in(4));
        let (mut specialize, overlap_hint) = (maybe(3), maybe(4));
        if self.tma_compatible {
            specialize = None;
        }
        let stages = self.rng.one_in(4).then(|| self.rng.range(1, 4) as u32);
        let unroll_hint = self.rng.one_in(6).then(|| self.rng.range(1, 4) as u32);
        if let Some(id) = b.func.def_op(results[0])
            && let Op::For { num_stages, unroll, warp_specialize, overlap, .. } = b.func.op_mut(id)
        {
            (*num_stages, *unroll, *warp_specialize, *overlap) = (stages, unroll_hint, specialize, overlap_hint);
        }
        results
    }

    /// Generates one or two updates of the accumulators, at step `k` of `steps`.
    fn statements(&mut self, b: &mut Builder, acc: &[Value], k: Value, steps: usize) -> Vec<Value> {
        let mut acc = acc.to_vec();
        for i in 0..self.rng.range(1, 2) {
            let which = self.rng.below(acc.len());
            match self.rng.below(8) {
                0 if i > 0 && self.depth < 2 && self.dots > 0 => {
                    acc = if self.rng.one_in(3) { self.block_loop(b, &acc) } else { self.loop_of(b, &acc) };
                }
                1 | 2 if self.dots > 0 => acc = self.branch(b, &acc, k, steps),
                3 if i > 0 => {
                    let x = acc[which];
                    acc[which] = self.elementwise(b, x);
                }
                _ if i == 0 || self.dots > 0 => acc[which] = self.dot(b, acc[which], k, steps),
                _ => {}
            }
        }
        acc
    }

    pub fn loop_of(&mut self, b: &mut Builder, acc: &[Value]) -> Vec<Value> {
        let steps = if self.depth == 0 { self.rng.range(0, 4) } else { self.rng.range(1, 2) } as usize;
        self.counted_loop(b, acc, steps, |g, b, k, carried| g.statements(b, carried, k, steps.max(1)))
    }

    /// Generates a branch on the parity of `k`: one of its sides, or both, has a dot.
    fn branch(&mut self, b: &mut Builder, acc: &[Value], k: Value, steps: usize) -> Vec<Value> {
        let (two, zero) = (b.int(2, DType::I32), b.int(0, DType::I32));
        let parity = b.binary(BinaryOp::Rem, k, two);
        let condition = b.cmp(CmpOp::Eq, parity, zero);
        let types: Vec<Type> = acc.iter().map(|&v| b.func.ty(v).clone()).collect();
        let side = |g: &mut Self, b: &mut Builder, dot: bool| {
            region(b, &[], Op::Yield, |b, _| {
                let mut acc = acc.to_vec();
                let which = g.rng.below(acc.len());
                acc[which] = if dot { g.dot(b, acc[which], k, steps) } else { g.elementwise(b, acc[which]) };
                acc
            })
        };
        let both = self.rng.one_in(4);
        let sides = [side(self, b, true), side(self, b, both)];
        with_regions(b, Op::If, &[condition], &types, &sides)
    }

    /// A `while` loop that counts down, with a dot in it.
    fn bounded_while(&mut self, b: &mut Builder, acc: &[Value]) -> Vec<Value> {
        let steps = self.rng.range(1, 3);
        let count = b.int(steps, DType::I32);
        let init: Vec<Value> = [&[count], acc].concat();
        let types: Vec<Type> = init.iter().map(|&v| b.func.ty(v).clone()).collect();
        let before = region(b, &types, Op::Condition, |b, params| {
            let zero = b.int(0, DType::I32);
            let go_on = b.cmp(CmpOp::Gt, params[0], zero);
            [&[go_on], params].concat()
        });
        let after = region(b, &types, Op::Yield, |b, params| {
            let one = b.int(1, DType::I32);
            let left = b.binary(BinaryOp::Sub, params[0], one);
            let mut acc = params[1..].to_vec();
            acc[0] = self.dot(b, acc[0], left, steps as usize);
            [vec![left], acc].concat()
        });
        with_regions(b, Op::While, &init, &types, &[before, after]).split_off(1)
    }

    fn body(&mut self, b: &mut Builder) {
        let [m, n, _] = self.tile;
        let ty = Type::tensor(&[m, n], self.acc);
        let count = if self.rng.one_in(4) { 2 } else { 1 };
        let mut acc: Vec<Value> = (0..count).map(|_| b.zero(ty.clone())).collect();
        let zero = b.int(0, DType::I32);
        for _ in 0..self.rng.range(1, 2) {
            acc = match self.rng.below(10) {
                0 => self.statements(b, &acc, zero, 1),
                1 if !self.tma_compatible && self.rng.one_in(2) => self.bounded_while(b, &acc),
                2 | 3 => self.block_loop(b, &acc),
                4 => self.loop_in_branch(b, &acc),
                _ => self.loop_of(b, &acc),
            };
        }
        for &v in &acc {
            self.write(b, v);
        }
    }

    /// Stores a result or a function of it, or adds it to memory.
    fn write(&mut self, b: &mut Builder, v: Value) {
        // Sums of many rows or columns may exceed the integers of f16.
        let (acc, shape) = (mma::widened_acc(self.acc), [self.tile[0], self.tile[1]]);
        let mut v = b.cast(v, acc);
        match self.rng.below(8) {
            0 => {
                let (axis, reverse) = (self.rng.below(2), self.rng.one_in(2));
                v = b.scan(&[v], axis, reverse, |b, l, r| vec![b.binary(BinaryOp::Add, l[0], r[0])])[0];
            }
            1 | 2 => {
                let axis = self.rng.below(2);
                let op = self.rng.pick(&[BinaryOp::Add, BinaryOp::Max, BinaryOp::Min]);
                let reduced = b.reduce_with(op, v, axis);
                let reduced = b.expand_dims(reduced, axis);
                let spread = b.broadcast(reduced, &shape);
                v = b.binary(BinaryOp::Sub, v, spread);
            }
            _ => {}
        }
        let at = [0, 1].map(|d| self.times(b, self.program[d], shape[d]));
        let add = self.rng.one_in(5) && matches!(acc, DType::F32 | DType::I32);
        let dtype = if add || self.rng.one_in(2) {
            acc
        } else {
            self.rng.pick(&[DType::BF16, DType::F16, DType::F32, DType::I32])
        };
        let m = self.matrix(b, dtype, self.extents, true);
        let v = b.cast(v, dtype);
        if self.rng.one_in(3) {
            let (pointers, mask) = self.pointers(b, &m, shape, at, true);
            if add {
                b.atomic_rmw(AtomicOp::Add, pointers, v, mask);
            } else {
                let eviction = self.eviction();
                b.store(pointers, v, mask, eviction);
            }
            return;
        }
        let (view, boundary) = self.view(b, &m, shape, at);
        if add {
            b.atomic_view(AtomicOp::Add, view, v, &boundary);
        } else {
            let eviction = self.eviction();
            b.store_view(view, v, &boundary, eviction);
        }
    }
}
