//! Straight-line code of generated programs.

use super::{Argument, Options, Program, Rng, dtype_of};
use crate::ir::{
    Arg, AtomicOp, BinaryOp, BlockId, Builder, CmpOp, DType, Elem, Eviction, Func, Literal, Loc, Op, Padding,
    Precision, Type, UnaryOp, Value, parts,
};
use crate::num;

/// Elements of each input buffer: a power of two, so that a mask keeps indices in bounds.
pub(super) const INPUT_ELEMENTS: usize = 64;
/// Elements per program in a buffer that is divided among the programs.
pub(super) const ELEMENTS_PER_PROGRAM: usize = 64;
/// Shapes of tiles; the first is a scalar.
const SHAPES: &[&[usize]] = &[
    &[],
    &[1],
    &[8],
    &[16],
    &[32],
    &[1, 8],
    &[4, 8],
    &[8, 4],
    &[16, 2],
    &[8, 8],
    &[2, 4, 4],
    &[24],
    &[7],
    &[3, 8],
    &[4, 12],
    &[6, 5],
];

/// The places of the elements of a tile in row-major order, as i32.
fn row_major(b: &mut Builder, shape: &[usize]) -> Value {
    let mut sum = b.constant(Literal::Int(0), Type::tensor(shape, DType::I32));
    let mut stride = 1;
    for (axis, &extent) in shape.iter().enumerate().rev() {
        let mut places = b.arange(0, extent as i64);
        for other in (0..shape.len()).filter(|&other| other != axis) {
            places = b.expand_dims(places, other);
        }
        let places = b.broadcast(places, shape);
        let factor = b.constant(Literal::Int(stride), Type::tensor(shape, DType::I32));
        let places = b.binary(BinaryOp::Mul, places, factor);
        sum = b.binary(BinaryOp::Add, sum, places);
        stride *= extent as i64;
    }
    sum
}

/// An input buffer: its pointer and element type.
#[derive(Clone)]
pub(super) struct Input {
    pub pointer: Value,
    pub dtype: DType,
}

/// A buffer that all programs change by one commutative atomic.
#[derive(Clone)]
struct AtomicTarget {
    pointer: Value,
    dtype: DType,
    op: AtomicOp,
}

/// The state of the generator. `pool` holds the visible values (scalars and tiles of numbers).
pub(super) struct Gen<'o> {
    pub rng: Rng,
    pub options: &'o Options,
    pub pool: Vec<Value>,
    pub inputs: Vec<Input>,
    /// Number of ops left to generate.
    pub budget: usize,
    pub depth: usize,
    /// The program's linear index, i32.
    pub program: Value,
    atomics: Vec<AtomicTarget>,
    /// Buffers with [`ELEMENTS_PER_PROGRAM`] elements per program; a single op reads and writes each.
    pub private_buffers: Vec<(Value, DType)>,
}

pub(super) fn program(mut rng: Rng, options: &Options) -> Program {
    let mut func = Func::new("generated");
    let mut args = Vec::new();
    let add = |func: &mut Func, args: &mut Vec<Argument>, name: String, ty: Type, value: Argument| {
        args.push(value);
        func.add_arg(Arg { name, divisible_by: 1, equal_to: None }, ty)
    };
    let mut inputs = Vec::new();
    for i in 0..3 {
        let dtype = rng.pick(&options.dtypes);
        let bytes = random_bytes(&mut rng, dtype, INPUT_ELEMENTS);
        let value = Argument::Input { dtype, bytes };
        let pointer = add(&mut func, &mut args, format!("in{i}"), Type::Scalar(Elem::Ptr(dtype)), value);
        inputs.push(Input { pointer, dtype });
    }
    let n = rng.range(0, 5);
    let n_value = add(&mut func, &mut args, "n".into(), Type::scalar(DType::I32), Argument::Int(n));
    let x = rng.range(-8, 8) as f64 / 4.0;
    let x_value = add(&mut func, &mut args, "x".into(), Type::scalar(DType::F32), Argument::Float(x));
    let grid = [rng.range(1, 3) as u32, rng.range(1, 2) as u32, 1];

    // Outputs are arguments, but their types are needed before their values exist: some of each type, used or not.
    let mut outputs = Vec::new();
    for i in 0..4 {
        let dtype = rng.pick(&options.dtypes);
        let bytes = vec![0; grid[0] as usize * grid[1] as usize * ELEMENTS_PER_PROGRAM * dtype.bytes()];
        let ty = Type::Scalar(Elem::Ptr(dtype));
        let pointer = add(&mut func, &mut args, format!("out{i}"), ty, Argument::Output { dtype, bytes });
        outputs.push((pointer, dtype));
    }
    let mut atomics = Vec::new();
    for i in 0..2 {
        let dtype = if rng.one_in(2) { DType::I32 } else { DType::U64 };
        let bytes = random_bytes(&mut rng, dtype, INPUT_ELEMENTS);
        let ty = Type::Scalar(Elem::Ptr(dtype));
        let pointer = add(&mut func, &mut args, format!("sum{i}"), ty, Argument::Output { dtype, bytes });
        let commuting = [AtomicOp::Add, AtomicOp::Min, AtomicOp::Max, AtomicOp::And, AtomicOp::Or, AtomicOp::Xor];
        atomics.push(AtomicTarget { pointer, dtype, op: rng.pick(&commuting) });
    }

    let mut private_buffers = Vec::new();
    for i in 0..2 {
        let dtype = rng.pick(&options.dtypes);
        let bytes = random_bytes(&mut rng, dtype, grid[0] as usize * grid[1] as usize * ELEMENTS_PER_PROGRAM);
        let ty = Type::Scalar(Elem::Ptr(dtype));
        private_buffers
            .push((add(&mut func, &mut args, format!("own{i}"), ty, Argument::Output { dtype, bytes }), dtype));
    }

    let body = func.body;
    let mut b = Builder::new(&mut func, body, Loc::unknown());
    let (px, py, nx) = (b.program_id(0), b.program_id(1), b.num_programs(0));
    let row = b.binary(BinaryOp::Mul, py, nx);
    let program = b.binary(BinaryOp::Add, row, px);
    let pool = vec![n_value, x_value, px, program];
    let mut g = Gen { rng, options, pool, inputs, budget: options.size, depth: 0, program, atomics, private_buffers };
    while g.budget > 0 {
        g.step(&mut b);
    }
    for (pointer, dtype) in outputs {
        g.output(&mut b, pointer, dtype);
    }
    if g.rng.one_in(2) {
        assume_range(&mut b, n_value, n);
    }
    b.ret();
    Program { func, args, grid }
}

/// Assumes bounds that hold for an argument.
fn assume_range(b: &mut Builder, argument: Value, n: i64) {
    let [low, high] = [n - 1, n].map(|n| b.constant(Literal::Int(n), Type::scalar(DType::I32)));
    let (above, most) = (b.cmp(CmpOp::Lt, low, argument), b.cmp(CmpOp::Le, argument, high));
    let both = b.binary(BinaryOp::And, above, most);
    b.op(Op::Assume, &[both], &[]);
}

/// The bytes of `n` random elements: small round numbers, and some special values.
fn random_bytes(rng: &mut Rng, dtype: DType, n: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..n {
        let small = rng.range(-40, 40);
        let bits = if dtype.is_float() {
            let special = [0.0, -0.0, f64::INFINITY, f64::NAN, 1e-7, 65504.0, 1.0 / 3.0];
            num::encode(dtype, if rng.one_in(16) { rng.pick(&special) } else { small as f64 / 8.0 })
        } else if rng.one_in(8) {
            num::encode_int(dtype, rng.next_u64() as i128)
        } else {
            num::encode_int(dtype, small as i128)
        };
        bytes.extend_from_slice(&bits.to_le_bytes()[..dtype.bytes()]);
    }
    bytes
}

impl Gen<'_> {
    /// Generates one op, or a few related ones, and appends the result to the pool.
    pub fn step(&mut self, b: &mut Builder) {
        self.budget = self.budget.saturating_sub(1);
        if self.options.control_flow && self.depth < 3 && self.rng.one_in(8) {
            return self.control(b);
        }
        let result = match self.rng.below(19) {
            0..3 => self.elementwise_unary(b),
            3..7 => self.elementwise_binary(b),
            7 => self.compare_and_select(b),
            8 => self.cast(b),
            9 | 10 => self.load(b),
            11 => self.load_view(b),
            12 => self.reshape(b),
            13 => self.reduce_or_scan(b),
            14 => self.dot(b),
            15 => self.function(b),
            16 => return self.debug(b),
            17 if !self.private_buffers.is_empty() => self.private_atomic(b),
            _ => return self.atomic(b),
        };
        self.pool.push(result);
    }

    fn any(&mut self) -> Value {
        self.rng.pick(&self.pool)
    }

    pub fn dtype(&self, b: &Builder, v: Value) -> DType {
        dtype_of(b.func.ty(v).elem())
    }

    /// A value of this shape and type, computed from one of the pool.
    pub fn value(&mut self, b: &mut Builder, shape: &[usize], dtype: DType) -> Value {
        let v = self.any();
        let v = b.cast(v, dtype);
        self.shaped(b, v, shape)
    }

    /// Reshapes a value to this shape: as it is, broadcast, or reduced to one number.
    fn shaped(&mut self, b: &mut Builder, v: Value, shape: &[usize]) -> Value {
        let from = b.func.ty(v).shape().to_vec();
        if from == shape {
            return v;
        }
        let elements = |s: &[usize]| s.iter().product::<usize>();
        let reshapes = elements(&from) == elements(shape) && parts::reshapes(&from, shape);
        if !from.is_empty() && !shape.is_empty() && reshapes {
            return b.reshape(v, shape);
        }
        let repeats = from.len() == shape.len() && from.iter().zip(shape).all(|(&f, &s)| f == s || f == 1);
        if !from.is_empty() && repeats {
            return b.broadcast(v, shape);
        }
        let scalar = self.one_number(b, v);
        b.splat(scalar, shape)
    }

    /// Reduces a tile to one number: its maximum or minimum.
    pub fn one_number(&mut self, b: &mut Builder, v: Value) -> Value {
        let elements = b.func.ty(v).numel();
        let dtype = self.dtype(b, v);
        if b.func.ty(v).is_scalar() {
            return v;
        }
        let op = match dtype {
            DType::Bool => BinaryOp::And,
            _ if self.rng.one_in(2) => BinaryOp::Min,
            _ => BinaryOp::Max,
        };
        let mut rest = v;
        if parts::reshapes(b.func.ty(v).shape(), &[elements]) && b.func.ty(v).shape().len() > 1 {
            rest = b.reshape(v, &[elements]);
        }
        while !b.func.ty(rest).is_scalar() {
            rest = b.reduce_with(op, rest, b.func.ty(rest).shape().len() - 1);
        }
        rest
    }

    fn shape(&mut self) -> Vec<usize> {
        self.rng.pick(SHAPES).to_vec()
    }

    fn elementwise_unary(&mut self, b: &mut Builder) -> Value {
        let v = self.any();
        let dtype = self.dtype(b, v);
        let exact =
            [UnaryOp::Neg, UnaryOp::Abs, UnaryOp::Floor, UnaryOp::Ceil, UnaryOp::Trunc, UnaryOp::Rint, UnaryOp::Sqrt];
        let op = match dtype {
            DType::Bool => UnaryOp::Not,
            d if d.is_int() => self.rng.pick(&[UnaryOp::Neg, UnaryOp::Not, UnaryOp::Abs]),
            _ if self.options.exact => self.rng.pick(&exact),
            _ => loop {
                let op = self.rng.pick(UnaryOp::ALL);
                if op != UnaryOp::Not {
                    break op;
                }
            },
        };
        b.unary(op, v)
    }

    fn elementwise_binary(&mut self, b: &mut Builder) -> Value {
        let left = self.any();
        let (ty, dtype) = (b.func.ty(left).clone(), self.dtype(b, left));
        let right = if self.rng.one_in(4) {
            let small = self.rng.range(-2, 3);
            b.constant(literal(dtype, small), ty.clone())
        } else {
            self.value(b, ty.shape(), dtype)
        };
        if dtype.is_float() && self.rng.one_in(6) && !(self.options.exact && dtype.bits() < 32) {
            let third = self.value(b, ty.shape(), dtype);
            return b.fma(left, right, third);
        }
        use BinaryOp::*;
        let op = match dtype {
            DType::Bool => self.rng.pick(&[And, Or, Xor]),
            d if d.is_float() => match self.rng.pick(&[Add, Sub, Mul, Rescale, Div, Rem, Min, Max]) {
                // A GPU divides f32 with an error of up to two units in the last place.
                Div if self.options.exact && d.bits() < 64 => Rem,
                op => op,
            },
            _ => {
                let ops: Vec<BinaryOp> = BinaryOp::of_integers().collect();
                self.rng.pick(&ops)
            }
        };
        b.binary(op, left, right)
    }

    fn compare_and_select(&mut self, b: &mut Builder) -> Value {
        let left = self.any();
        let (ty, dtype) = (b.func.ty(left).clone(), self.dtype(b, left));
        let right = self.value(b, ty.shape(), dtype);
        let op = if dtype == DType::Bool { self.rng.pick(&[CmpOp::Eq, CmpOp::Ne]) } else { self.rng.pick(CmpOp::ALL) };
        let mut condition = b.cmp(op, left, right);
        if self.rng.one_in(12) {
            condition = b.constant(Literal::Bool(self.rng.one_in(2)), ty.with_elem(DType::Bool));
        }
        if self.rng.one_in(3) {
            return condition;
        }
        let dtype = self.rng.pick(&self.options.dtypes);
        let (yes, no) = (self.value(b, ty.shape(), dtype), self.value(b, ty.shape(), dtype));
        b.select(condition, yes, no)
    }

    fn cast(&mut self, b: &mut Builder) -> Value {
        let v = self.any();
        let dtype = self.rng.pick(&self.options.dtypes);
        let from = self.dtype(b, v);
        // Bitcasts change the sign of integers of one width. Floats are not cast to bits: NaN has many encodings.
        if from.is_int() && dtype.is_int() && from.bits() == dtype.bits() && from != dtype {
            return b.bitcast(v, dtype);
        }
        b.cast(v, dtype)
    }

    /// Indices of this shape below `INPUT_ELEMENTS`, i32; pairwise different if `distinct`.
    fn indices(&mut self, b: &mut Builder, shape: &[usize], distinct: bool) -> Value {
        let elements: usize = shape.iter().product();
        let mut index = match shape {
            [] => b.int(0, DType::I32),
            _ if parts::reshapes(&[elements], shape) => {
                let flat = b.arange(0, elements as i64);
                if shape.len() > 1 { b.reshape(flat, shape) } else { flat }
            }
            _ => row_major(b, shape),
        };
        if !distinct {
            let offset = self.value(b, shape, DType::I32);
            index = b.binary(BinaryOp::Add, index, offset);
        }
        let ty = b.func.ty(index).clone();
        let mask = b.constant(Literal::Int(INPUT_ELEMENTS as i64 - 1), ty);
        b.binary(BinaryOp::And, index, mask)
    }

    fn load(&mut self, b: &mut Builder) -> Value {
        let input = self.rng.pick(&self.inputs);
        let shape = self.shape();
        let index = self.indices(b, &shape, false);
        let pointers = b.splat(input.pointer, &shape);
        let pointers = b.ptr_add(pointers, index);
        let mask = (!self.rng.one_in(3)).then(|| self.mask(b, &shape));
        let other = (mask.is_some() && self.rng.one_in(2)).then(|| self.value(b, &shape, input.dtype));
        let eviction = self.eviction();
        b.load(pointers, mask, other, eviction)
    }

    /// A mask of this shape, rarely constant.
    fn mask(&mut self, b: &mut Builder, shape: &[usize]) -> Value {
        if self.rng.one_in(12) {
            let all = b.constant(Literal::Bool(self.rng.one_in(2)), Type::scalar(DType::Bool));
            return if shape.is_empty() { all } else { b.splat(all, shape) };
        }
        self.value(b, shape, DType::Bool)
    }

    pub fn eviction(&mut self) -> Eviction {
        self.rng.pick(&[Eviction::Normal, Eviction::Cg, Eviction::First, Eviction::Last])
    }

    /// A view of an input as a matrix of `rows` by `cols`, with a block of this shape at random offsets that may exceed
    /// the matrix on every side.
    pub fn view(&mut self, b: &mut Builder, input: &Input, block: &[usize]) -> Value {
        let scalar = |b: &mut Builder, n: i64| b.int(n, DType::I64);
        let (rows, cols) = (self.rng.range(1, 7), self.rng.range(1, 8));
        let (extents, strides) = if block.len() == 1 {
            (vec![rows * cols], vec![1])
        } else if self.rng.one_in(3) {
            (vec![cols, rows], vec![1, 8])
        } else {
            (vec![rows, cols], vec![8, 1])
        };
        let offsets: Vec<i64> = extents.iter().map(|&n| self.rng.range(-3, n)).collect();
        let list = |b: &mut Builder, numbers: &[i64]| numbers.iter().map(|&n| scalar(b, n)).collect::<Vec<_>>();
        let (shape, strides) = (list(b, &extents), list(b, &strides));
        let mut offsets = list(b, &offsets);
        if self.rng.one_in(2) {
            let program = b.cast(self.program, DType::I64);
            offsets[0] = b.binary(BinaryOp::Add, offsets[0], program);
        }
        let order: Vec<usize> = (0..block.len()).rev().collect();
        b.make_view(input.pointer, &shape, &strides, &offsets, block, &order)
    }

    fn load_view(&mut self, b: &mut Builder) -> Value {
        let input = self.rng.pick(&self.inputs);
        let block: &[usize] = self.rng.pick(&[&[8][..], &[4, 8], &[8, 4], &[8, 8]]);
        let view = self.view(b, &input, block);
        self.load_through(b, view, input.dtype)
    }

    pub fn load_through(&mut self, b: &mut Builder, view: Value, dtype: DType) -> Value {
        let boundary: Vec<usize> = (0..b.func.ty(view).shape().len()).collect();
        let padding = if dtype.is_float() && self.rng.one_in(3) { Padding::Nan } else { Padding::Zero };
        let eviction = self.eviction();
        b.load_view(view, &boundary, padding, eviction)
    }

    /// One or two ops that change the shape.
    fn reshape(&mut self, b: &mut Builder) -> Value {
        let v = self.any();
        let v = self.reshaped(b, v);
        if self.rng.one_in(3) { self.reshaped(b, v) } else { v }
    }

    fn reshaped(&mut self, b: &mut Builder, v: Value) -> Value {
        let shape = b.func.ty(v).shape().to_vec();
        match self.rng.below(5) {
            0 if shape.len() >= 2 => {
                let mut perm: Vec<usize> = (0..shape.len()).collect();
                let k = self.rng.below(perm.len());
                perm.rotate_left(k);
                b.trans(v, &perm)
            }
            1 if !shape.is_empty() && shape.len() < 3 => {
                let axis = self.rng.below(shape.len() + 1);
                b.expand_dims(v, axis)
            }
            2 if shape.len() < 3 && b.func.ty(v).numel() <= 32 => {
                let dtype = self.dtype(b, v);
                let other = self.value(b, &shape, dtype);
                b.join(v, other)
            }
            3 if shape.last() == Some(&2)
                || shape.len() == 2
                    && b.func.ty(v).numel().is_multiple_of(4)
                    && parts::reshapes(&shape, &[b.func.ty(v).numel() / 2, 2]) =>
            {
                let pairs = b.func.ty(v).numel() / 2;
                let v = if shape.last() == Some(&2) { v } else { b.reshape(v, &[pairs, 2]) };
                let (first, second) = b.split(v);
                if self.rng.one_in(2) { first } else { second }
            }
            _ => {
                let to = self.shape();
                self.shaped(b, v, &to)
            }
        }
    }

    fn reduce_or_scan(&mut self, b: &mut Builder) -> Value {
        let mut v = self.any();
        if b.func.ty(v).is_scalar() {
            v = b.splat(v, &[8]);
        }
        let dtype = self.dtype(b, v);
        let axis = self.rng.below(b.func.ty(v).shape().len());
        use BinaryOp::*;
        let op = match dtype {
            DType::Bool => self.rng.pick(&[And, Or, Xor]),
            d if d.is_int() => self.rng.pick(&[Add, Mul, Min, Max, And, Or, Xor]),
            _ if self.options.exact => self.rng.pick(&[Min, Max]),
            _ => self.rng.pick(&[Add, Min, Max]),
        };
        match self.rng.below(4) {
            0 => {
                let reverse = self.rng.one_in(2);
                b.scan(&[v], axis, reverse, |b, l, r| vec![b.binary(op, l[0], r[0])])[0]
            }
            1 if dtype.is_int() => self.arg_reduce(b, v, axis),
            2 if self.rng.one_in(2) => self.gather(b, v, axis),
            _ => b.reduce_with(op, v, axis),
        }
    }

    /// Elements along an axis at indices that are computed from integers of the pool, in bounds or not.
    fn gather(&mut self, b: &mut Builder, v: Value, axis: usize) -> Value {
        let mut shape = b.func.ty(v).shape().to_vec();
        if self.rng.one_in(3) {
            shape[axis] = self.rng.pick(&[1, 4, 16]);
        }
        let ints: Vec<Value> = self.pool.iter().copied().filter(|&v| self.dtype(b, v).is_int()).collect();
        let index = match ints.is_empty() {
            true => b.constant(crate::ir::Literal::Int(3), Type::tensor(&shape, DType::I32)),
            false => {
                let index = self.rng.pick(&ints);
                let index = self.shaped(b, index, &shape);
                b.cast(index, DType::I32)
            }
        };
        b.gather(v, index, axis)
    }

    /// Index of the largest element along an axis; the smallest index of equal elements.
    fn arg_reduce(&mut self, b: &mut Builder, v: Value, axis: usize) -> Value {
        let shape = b.func.ty(v).shape().to_vec();
        let mut index = b.arange(0, shape[axis] as i64);
        for d in 0..shape.len() {
            if d != axis {
                index = b.expand_dims(index, d);
            }
        }
        let index = b.broadcast(index, &shape);
        let combine = |b: &mut Builder, l: &[Value], r: &[Value]| {
            let greater = b.cmp(CmpOp::Gt, r[0], l[0]);
            let equal = b.cmp(CmpOp::Eq, r[0], l[0]);
            let earlier = b.cmp(CmpOp::Lt, r[1], l[1]);
            let tie = b.binary(BinaryOp::And, equal, earlier);
            let take = b.binary(BinaryOp::Or, greater, tie);
            vec![b.select(take, r[0], l[0]), b.select(take, r[1], l[1])]
        };
        b.reduce(&[v, index], axis, combine)[1]
    }

    fn dot(&mut self, b: &mut Builder) -> Value {
        let [m, k, n] = [0; 3].map(|_| self.rng.pick(&[4, 8, 4, 8, 6]));
        let choices: &[(DType, DType)] = if self.options.exact {
            &[(DType::I8, DType::I32), (DType::U8, DType::I32)]
        } else {
            &[
                (DType::F16, DType::F32),
                (DType::BF16, DType::F32),
                (DType::F32, DType::F32),
                (DType::F64, DType::F64),
                (DType::I8, DType::I32),
                (DType::F8E4M3, DType::F32),
            ]
        };
        let allowed: Vec<(DType, DType)> = choices
            .iter()
            .copied()
            .filter(|(x, acc)| self.options.dtypes.contains(x) && self.options.dtypes.contains(acc))
            .collect();
        if allowed.is_empty() {
            return self.elementwise_unary(b);
        }
        let (operands, acc) = self.rng.pick(&allowed);
        let (x, y) = (self.value(b, &[m, k], operands), self.value(b, &[k, n], operands));
        let acc = self.value(b, &[m, n], acc);
        let precision = self.rng.pick(Precision::ALL);
        b.dot(x, y, acc, precision)
    }

    /// An atomic on a buffer shared by all programs. Adds no value.
    fn atomic(&mut self, b: &mut Builder) {
        let AtomicTarget { pointer, dtype, op } = self.rng.pick(&self.atomics);
        let shape = self.shape();
        let index = self.indices(b, &shape, false);
        let pointers = b.splat(pointer, &shape);
        let pointers = b.ptr_add(pointers, index);
        let value = self.value(b, &shape, dtype);
        let mask = self.rng.one_in(2).then(|| self.mask(b, &shape));
        b.atomic_rmw(op, pointers, value, mask);
    }

    /// Stores a value to the part of an output that belongs to this program.
    fn output(&mut self, b: &mut Builder, pointer: Value, dtype: DType) {
        // The newest values depend on most of the others.
        let newest = self.pool.len() - self.rng.below(self.pool.len().min(4)) - 1;
        // A gather may have made a tile that is larger than the part.
        let fits = |v: &&Value| b.func.ty(**v).shape().iter().product::<usize>() <= ELEMENTS_PER_PROGRAM;
        let chosen = *self.pool[..=newest].iter().rev().find(fits).expect("scalars fit");
        let v = b.cast(chosen, dtype);
        let shape = b.func.ty(v).shape().to_vec();
        let first = self.program_offset(b);
        if shape.len() == 2 && self.rng.one_in(2) {
            let start = b.ptr_add(pointer, first);
            let [rows, cols] = [shape[0], shape[1]].map(|n| b.int(n as i64, DType::I64));
            let (zero, one) = (b.int(0, DType::I64), b.int(1, DType::I64));
            // One row less than the tile has: the boundary check masks the last one.
            let fewer = b.binary(BinaryOp::Sub, rows, one);
            let view = b.make_view(start, &[fewer, cols], &[cols, one], &[zero, zero], &shape, &[1, 0]);
            let eviction = self.eviction();
            return b.store_view(view, v, &[0], eviction);
        }
        let pointers = self.program_pointers(b, pointer, &shape);
        let mask = self.rng.one_in(3).then(|| self.mask(b, &shape));
        let eviction = self.eviction();
        b.store(pointers, v, mask, eviction);
    }
}

impl Gen<'_> {
    /// Index of the first element of an output that belongs to this program, i32.
    fn program_offset(&self, b: &mut Builder) -> Value {
        let size = b.int(ELEMENTS_PER_PROGRAM as i64, DType::I32);
        b.binary(BinaryOp::Mul, self.program, size)
    }

    /// Pairwise different pointers to elements of this program's part of an output.
    pub fn program_pointers(&mut self, b: &mut Builder, pointer: Value, shape: &[usize]) -> Value {
        let first = self.program_offset(b);
        let index = self.indices(b, shape, true);
        let start = b.splat(first, shape);
        let index = b.binary(BinaryOp::Add, index, start);
        let pointers = b.splat(pointer, shape);
        b.ptr_add(pointers, index)
    }
}

/// A small number as a literal.
pub(super) fn literal(dtype: DType, value: i64) -> Literal {
    match dtype {
        DType::Bool => Literal::Bool(value > 0),
        d if d.is_float() => Literal::Float(value as f64),
        // Wrapped into the range of the type, as the verifier requires.
        d => Literal::Int(num::decode_int(d, num::encode_int(d, value as i128)) as i64),
    }
}

/// A region that `fill` fills and `end` terminates, with the values that `fill` returns as operands.
pub(super) fn region(
    b: &mut Builder,
    params: &[Type],
    end: Op,
    fill: impl FnOnce(&mut Builder, &[Value]) -> Vec<Value>,
) -> BlockId {
    let region = b.func.add_block();
    let params: Vec<Value> = params.iter().map(|ty| b.func.add_param(region, ty.clone())).collect();
    let loc = b.loc.clone();
    let mut inner = Builder::new(b.func, region, loc);
    let results = fill(&mut inner, &params);
    inner.op(end, &results, &[]);
    region
}

/// Creates an op with regions; returns its results.
pub(super) fn with_regions(
    b: &mut Builder,
    op: Op,
    operands: &[Value],
    results: &[Type],
    regions: &[BlockId],
) -> Vec<Value> {
    let id = b.op_with_regions(op, operands, results, regions);
    b.func.op(id).results.clone()
}
