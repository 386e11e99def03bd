//! Control flow of generated programs.

use super::generate::{Gen, INPUT_ELEMENTS, region, with_regions};
use crate::ir::{BinaryOp, Builder, CmpOp, DType, Op, Type, Value};

impl Gen<'_> {
    /// Generates a loop or a branch; appends its results to the pool.
    pub(super) fn control(&mut self, b: &mut Builder) {
        self.depth += 1;
        match self.rng.below(6) {
            0 | 1 => self.counted_loop(b),
            2 => self.view_loop(b),
            3 => self.branch(b),
            4 => self.pointer_loop(b),
            _ => self.bounded_while(b),
        }
        self.depth -= 1;
    }

    /// One to three values of the pool, with their types.
    fn pick_values(&mut self, b: &Builder) -> (Vec<Value>, Vec<Type>) {
        let count = self.rng.range(1, 3) as usize;
        let values: Vec<Value> = (0..count).map(|_| self.rng.pick(&self.pool)).collect();
        let types = values.iter().map(|&v| b.func.ty(v).clone()).collect();
        (values, types)
    }

    /// Generates a few ops in a region that sees the pool and `params`; returns values of these types. Restores the
    /// pool.
    fn inside(&mut self, b: &mut Builder, params: &[Value], types: &[Type]) -> Vec<Value> {
        let outer = self.pool.len();
        self.pool.extend(params);
        for _ in 0..self.rng.range(1, 5) {
            if self.budget > 0 {
                self.step(b);
            }
        }
        let results = types.iter().map(|ty| self.of_type(b, ty)).collect();
        self.pool.truncate(outer);
        results
    }

    /// A value of this type: often one of the pool, otherwise a generated one.
    fn of_type(&mut self, b: &mut Builder, ty: &Type) -> Value {
        let fitting: Vec<Value> = self.pool.iter().copied().filter(|&v| b.func.ty(v) == ty).collect();
        if !fitting.is_empty() && !self.rng.one_in(3) {
            return self.rng.pick(&fitting);
        }
        let dtype = super::dtype_of(ty.elem());
        self.value(b, ty.shape(), dtype)
    }

    /// Lower bound, upper bound and step of a loop with at most six iterations, possibly none.
    fn bounds(&mut self, b: &mut Builder) -> [Value; 3] {
        let lower = b.int(self.rng.range(-1, 1), DType::I32);
        let upper = if self.rng.one_in(3) {
            // The argument `n`, which is first in the pool.
            self.pool[0]
        } else {
            b.int(self.rng.range(-1, 4), DType::I32)
        };
        let step = b.int(self.rng.range(1, 2), DType::I32);
        [lower, upper, step]
    }

    fn counted_loop(&mut self, b: &mut Builder) {
        let [lower, upper, step] = self.bounds(b);
        let (init, types) = self.pick_values(b);
        let results = b.for_loop(lower, upper, step, &init, |b, index, carried| {
            let params: Vec<Value> = [&[index], carried].concat();
            self.inside(b, &params, &types)
        });
        self.set_loop_attributes(b, &results);
        self.pool.extend(results);
    }

    /// Sometimes sets the attributes of a loop (`num_stages`, `unroll`).
    fn set_loop_attributes(&mut self, b: &mut Builder, results: &[Value]) {
        let (stages, factor) = (self.rng.range(1, 4) as u32, self.rng.range(1, 4) as u32);
        let (set_stages, set_unroll) = (self.rng.one_in(4), self.rng.one_in(4));
        if let Some(id) = b.func.def_op(results[0])
            && let Op::For { num_stages, unroll, .. } = b.func.op_mut(id)
        {
            (*num_stages, *unroll) = (set_stages.then_some(stages), set_unroll.then_some(factor));
        }
    }

    /// A loop that loads through pointers or through an index and advances them, as Triton's kernels do.
    fn pointer_loop(&mut self, b: &mut Builder) {
        let input = self.rng.pick(&self.inputs);
        let shape: &[usize] = self.rng.pick(&[&[8][..], &[16], &[4, 8], &[8, 2]]);
        let elements: usize = shape.iter().product();
        let [lower, upper, step] = self.bounds(b);
        // At most five advances precede the last load: with at most this delta, they stay inside of the buffer.
        let delta = b.int(self.rng.range(0, ((INPUT_ELEMENTS - elements) / 5) as i64), DType::I32);
        let range = b.arange(0, elements as i64);
        let index = if shape.len() == 1 { range } else { b.reshape(range, shape) };
        let base = b.splat(input.pointer, shape);
        let carries_pointers = self.rng.one_in(2);
        let (mut init, types) = self.pick_values(b);
        init.push(if carries_pointers { b.ptr_add(base, index) } else { index });
        let results = b.for_loop(lower, upper, step, &init, |b, number, carried| {
            let (&place, carried) = carried.split_last().expect("the place is carried");
            let pointers = if carries_pointers { place } else { b.ptr_add(base, place) };
            let eviction = self.eviction();
            let tile = b.load(pointers, None, None, eviction);
            let params: Vec<Value> = [&[number, tile], carried].concat();
            let mut next = self.inside(b, &params, &types);
            let by = b.splat(delta, shape);
            next.push(if carries_pointers { b.ptr_add(place, by) } else { b.binary(BinaryOp::Add, place, by) });
            next
        });
        self.set_loop_attributes(b, &results);
        let (&place, rest) = results.split_last().expect("the place is a result");
        self.pool.extend(rest);
        if !carries_pointers {
            self.pool.push(place);
        }
    }

    /// A loop that loads through a view and advances it.
    fn view_loop(&mut self, b: &mut Builder) {
        let input = self.rng.pick(&self.inputs);
        let block: &[usize] = self.rng.pick(&[&[8][..], &[4, 8], &[8, 4]]);
        let view = self.view(b, &input, block);
        let [lower, upper, step] = self.bounds(b);
        let (mut init, types) = self.pick_values(b);
        init.push(view);
        let deltas: Vec<i64> = block.iter().map(|_| self.rng.range(-1, 3)).collect();
        let results = b.for_loop(lower, upper, step, &init, |b, index, carried| {
            let (&view, carried) = carried.split_last().expect("the view is carried");
            let tile = self.load_through(b, view, input.dtype);
            let params: Vec<Value> = [&[index, tile], carried].concat();
            let mut next = self.inside(b, &params, &types);
            let deltas: Vec<Value> = deltas.iter().map(|&d| b.int(d, DType::I64)).collect();
            next.push(b.advance(view, &deltas));
            next
        });
        let (&view, rest) = results.split_last().expect("the view is a result");
        let tile = self.load_through(b, view, input.dtype);
        self.pool.extend(rest);
        self.pool.push(tile);
    }

    fn branch(&mut self, b: &mut Builder) {
        let v = self.rng.pick(&self.pool);
        let v = self.one_number(b, v);
        let condition = b.cast(v, DType::Bool);
        let (_, types) = self.pick_values(b);
        let sides = [0, 1].map(|_| region(b, &[], Op::Yield, |b, _| self.inside(b, &[], &types)));
        let results = with_regions(b, Op::If, &[condition], &types, &sides);
        self.pool.extend(results);
    }

    /// A `while` loop that counts down from at most four.
    fn bounded_while(&mut self, b: &mut Builder) {
        let (init, types) = self.pick_values(b);
        let count = b.int(self.rng.range(0, 4), DType::I32);
        let init: Vec<Value> = [&[count], init.as_slice()].concat();
        let carried: Vec<Type> = [&[Type::scalar(DType::I32)], types.as_slice()].concat();
        let before = region(b, &carried, Op::Condition, |b, params| {
            let zero = b.int(0, DType::I32);
            let go_on = b.cmp(CmpOp::Gt, params[0], zero);
            [&[go_on], params].concat()
        });
        let after = region(b, &carried, Op::Yield, |b, params| {
            let one = b.int(1, DType::I32);
            let left = b.binary(BinaryOp::Sub, params[0], one);
            [vec![left], self.inside(b, params, &types)].concat()
        });
        let results = with_regions(b, Op::While, &init, &carried, &[before, after]);
        self.pool.extend(results);
    }
}
