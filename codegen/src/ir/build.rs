//! Typed constructors of ops, which compute the result types.
//!
//! The constructors do not check their operands: the language surface checks user input beforehand, and the verifier
//! checks the result. They panic only on compiler bugs.

use super::attr::Literal;
use super::func::{BlockId, Func, Loc, OpId, Value};
use super::ops::{AtomicOp, BinaryOp, CmpOp, Eviction, Op, Padding, Precision, UnaryOp};
use super::types::{DType, Elem, LayoutId, Type};

/// Adds ops to a function, one after the other from a place on.
pub struct Builder<'f> {
    pub func: &'f mut Func,
    pub block: BlockId,
    /// The op before which ops are inserted; `None` at the end of `block`.
    next: Option<OpId>,
    /// Source location of every op that is added from here on.
    pub loc: Loc,
}

impl Op {
    /// A counted loop without hints.
    pub const PLAIN_FOR: Op =
        Op::For { num_stages: None, unroll: None, warp_specialize: None, overlap: None, split: None, replicas: None };

    /// Whether the op multiplies tiles, at any stage.
    pub fn is_dot(&self) -> bool {
        matches!(self, Op::Dot { .. } | Op::MmaSync { .. } | Op::FmaDot | Op::Wgmma { .. })
    }

    /// Whether the op runs a region again and again.
    pub fn is_loop(&self) -> bool {
        matches!(self, Op::For { .. } | Op::While)
    }

    /// Whether the op writes global memory, and no shared memory that other ops read.
    pub fn only_writes_global_memory(&self) -> bool {
        matches!(
            self,
            Op::Store { .. }
                | Op::StoreView { .. }
                | Op::TmaStore { .. }
                | Op::AtomicRmw { .. }
                | Op::AtomicCas { .. }
                | Op::SemaphoreWait
                | Op::AtomicView { .. }
        )
    }
}

impl<'f> Builder<'f> {
    /// Builder that appends to `block`.
    pub fn new(func: &'f mut Func, block: BlockId, loc: Loc) -> Builder<'f> {
        Builder { func, block, next: None, loc }
    }

    /// Builder that inserts before `op`.
    pub fn before(func: &'f mut Func, op: OpId, loc: Loc) -> Builder<'f> {
        let block = func.parent_block(op);
        Builder { func, block, next: Some(op), loc }
    }

    /// Builder that inserts after `op`.
    pub fn after(func: &'f mut Func, op: OpId, loc: Loc) -> Builder<'f> {
        let block = func.parent_block(op);
        let next = func.block(block).ops.get(func.position(op) + 1).copied();
        Builder { func, block, next, loc }
    }

    /// Adds an op with explicit result types.
    pub fn op(&mut self, op: Op, operands: &[Value], results: &[Type]) -> OpId {
        self.op_with_regions(op, operands, results, &[])
    }

    pub fn op_with_regions(&mut self, op: Op, operands: &[Value], results: &[Type], regions: &[BlockId]) -> OpId {
        let id = self.func.create_op(op, operands.to_vec(), results.to_vec(), regions.to_vec(), self.loc.clone());
        match self.next {
            Some(next) => self.func.insert(self.block, self.func.position(next), &[id]),
            None => self.func.push(self.block, id),
        }
        id
    }

    /// Adds an op with one result.
    pub fn one(&mut self, op: Op, operands: &[Value], result: Type) -> Value {
        let id = self.op(op, operands, &[result]);
        self.func.result(id)
    }

    pub(crate) fn ty(&self, v: Value) -> Type {
        self.func.ty(v).clone()
    }

    // Programs and constants.

    pub fn program_id(&mut self, axis: u32) -> Value {
        self.one(Op::ProgramId { axis }, &[], Type::scalar(DType::I32))
    }

    pub fn num_programs(&mut self, axis: u32) -> Value {
        self.one(Op::NumPrograms { axis }, &[], Type::scalar(DType::I32))
    }

    /// A scalar or tile constant of type `ty`.
    pub fn constant(&mut self, value: Literal, ty: Type) -> Value {
        self.one(Op::Constant { value }, &[], ty)
    }

    /// A scalar integer constant.
    pub fn int(&mut self, value: i64, dtype: DType) -> Value {
        self.constant(Literal::Int(value), Type::scalar(dtype))
    }

    /// Zero of any number type (`false` for bool).
    pub fn zero(&mut self, ty: Type) -> Value {
        self.number(0.0, ty)
    }

    /// `value` as a constant of type `ty`.
    pub fn number(&mut self, value: f64, ty: Type) -> Value {
        self.constant(Literal::number(value, ty.dtype()), ty)
    }

    pub fn arange(&mut self, start: i64, end: i64) -> Value {
        self.one(Op::Arange { start, end }, &[], Type::tensor(&[(end - start) as usize], DType::I32))
    }

    // Views and pointers.

    /// A view of the memory at `base`, a scalar pointer. Shape, strides and offsets are scalar i64 values, in elements.
    pub fn make_view(
        &mut self,
        base: Value,
        shape: &[Value],
        strides: &[Value],
        offsets: &[Value],
        block: &[usize],
        order: &[usize],
    ) -> Value {
        let elem = self
            .ty(base)
            .elem()
            .and_then(Elem::pointee)
            .expect("internal compiler error: view of a non-pointer; please report this");
        let mut operands = vec![base];
        operands.extend(shape);
        operands.extend(strides);
        operands.extend(offsets);
        let ty = Type::View { block: block.to_vec(), elem };
        self.one(Op::MakeView { order: order.to_vec() }, &operands, ty)
    }

    pub fn advance(&mut self, view: Value, deltas: &[Value]) -> Value {
        let mut operands = vec![view];
        operands.extend(deltas);
        let ty = self.ty(view);
        self.one(Op::Advance, &operands, ty)
    }

    pub fn load_view(&mut self, view: Value, boundary: &[usize], padding: Padding, eviction: Eviction) -> Value {
        let Type::View { block, elem } = self.ty(view) else {
            panic!("internal compiler error: load_view of a non-view; please report this")
        };
        let op = Op::LoadView { boundary: boundary.to_vec(), padding, eviction };
        self.one(op, &[view], Type::tensor(&block, elem))
    }

    pub fn store_view(&mut self, view: Value, tile: Value, boundary: &[usize], eviction: Eviction) {
        self.op(Op::StoreView { boundary: boundary.to_vec(), eviction }, &[view, tile], &[]);
    }

    pub fn atomic_view(&mut self, op: AtomicOp, view: Value, tile: Value, boundary: &[usize]) {
        self.op(Op::AtomicView { op, boundary: boundary.to_vec() }, &[view, tile], &[]);
    }

    pub fn ptr_add(&mut self, ptr: Value, offset: Value) -> Value {
        let ty = self.ty(ptr);
        self.one(Op::PtrAdd, &[ptr, offset], ty)
    }

    pub fn load(&mut self, ptr: Value, mask: Option<Value>, other: Option<Value>, eviction: Eviction) -> Value {
        let ty = self.ty(ptr);
        let elem = ty
            .elem()
            .and_then(Elem::pointee)
            .expect("internal compiler error: load of a non-pointer; please report this");
        let operands: Vec<Value> = [Some(ptr), mask, other].into_iter().flatten().collect();
        self.one(Op::Load { eviction }, &operands, ty.with_elem(elem))
    }

    pub fn store(&mut self, ptr: Value, value: Value, mask: Option<Value>, eviction: Eviction) {
        let operands: Vec<Value> = [Some(ptr), Some(value), mask].into_iter().flatten().collect();
        self.op(Op::Store { eviction }, &operands, &[]);
    }

    pub fn atomic_rmw(&mut self, op: AtomicOp, ptr: Value, value: Value, mask: Option<Value>) -> Value {
        let ty = self.ty(value);
        let operands: Vec<Value> = [Some(ptr), Some(value), mask].into_iter().flatten().collect();
        self.one(Op::AtomicRmw { op, sem: None, scope: None }, &operands, ty)
    }

    pub fn atomic_cas(&mut self, ptr: Value, expected: Value, new: Value) -> Value {
        let ty = self.ty(new);
        self.one(Op::AtomicCas { sem: None, scope: None }, &[ptr, expected, new], ty)
    }

    // Shape.

    /// Repeats a scalar to `shape`. Returns the scalar itself for an empty shape.
    pub fn splat(&mut self, scalar: Value, shape: &[usize]) -> Value {
        if shape.is_empty() {
            return scalar;
        }
        let elem = self.ty(scalar).elem().expect("internal compiler error: splat of a non-scalar; please report this");
        self.one(Op::Splat, &[scalar], Type::tensor(shape, elem))
    }

    pub fn expand_dims(&mut self, tile: Value, axis: usize) -> Value {
        let ty = self.ty(tile);
        let mut shape = ty.shape().to_vec();
        shape.insert(axis, 1);
        let elem = ty.elem().expect("internal compiler error: expand_dims of a non-tile; please report this");
        self.one(Op::ExpandDims { axis }, &[tile], Type::tensor(&shape, elem))
    }

    /// Broadcasts a tile to `shape` (same rank). Returns the tile itself if it has that shape.
    pub fn broadcast(&mut self, tile: Value, shape: &[usize]) -> Value {
        let ty = self.ty(tile);
        if ty.shape() == shape {
            return tile;
        }
        let elem = ty.elem().expect("internal compiler error: broadcast of a non-tile; please report this");
        self.one(Op::Broadcast, &[tile], Type::tensor(shape, elem))
    }

    pub fn trans(&mut self, tile: Value, perm: &[usize]) -> Value {
        let ty = self.ty(tile);
        let shape: Vec<usize> = perm.iter().map(|&p| ty.shape()[p]).collect();
        let elem = ty.elem().expect("internal compiler error: trans of a non-tile; please report this");
        self.one(Op::Trans { perm: perm.to_vec() }, &[tile], Type::tensor(&shape, elem))
    }

    pub fn reshape(&mut self, tile: Value, shape: &[usize]) -> Value {
        let elem = self.ty(tile).elem().expect("internal compiler error: reshape of a non-tile; please report this");
        self.one(Op::Reshape, &[tile], Type::tensor(shape, elem))
    }

    pub fn join(&mut self, a: Value, b: Value) -> Value {
        let ty = self.ty(a);
        let mut shape = ty.shape().to_vec();
        shape.push(2);
        let elem = ty.elem().expect("internal compiler error: join of a non-tile; please report this");
        self.one(Op::Join, &[a, b], Type::tensor(&shape, elem))
    }

    pub fn split(&mut self, tile: Value) -> (Value, Value) {
        let ty = self.ty(tile);
        let shape = &ty.shape()[..ty.shape().len() - 1];
        let half =
            Type::tensor(shape, ty.elem().expect("internal compiler error: split of a non-tile; please report this"));
        let id = self.op(Op::Split, &[tile], &[half.clone(), half]);
        let results = &self.func.op(id).results;
        (results[0], results[1])
    }

    pub fn gather(&mut self, tile: Value, index: Value, axis: usize) -> Value {
        let elem = self.ty(tile).elem().expect("internal compiler error: gather of a non-tile; please report this");
        let ty = self.ty(index).with_elem(elem);
        self.one(Op::Gather { axis }, &[tile, index], ty)
    }

    // Elementwise.

    pub fn unary(&mut self, op: UnaryOp, x: Value) -> Value {
        let ty = self.ty(x);
        self.one(Op::Unary(op), &[x], ty)
    }

    pub fn binary(&mut self, op: BinaryOp, a: Value, b: Value) -> Value {
        let ty = self.ty(a);
        self.one(Op::Binary(op), &[a, b], ty)
    }

    pub fn cmp(&mut self, op: CmpOp, a: Value, b: Value) -> Value {
        let ty = self.ty(a).with_elem(DType::Bool);
        self.one(Op::Cmp(op), &[a, b], ty)
    }

    pub fn fma(&mut self, a: Value, b: Value, c: Value) -> Value {
        let ty = self.ty(a);
        self.one(Op::Fma, &[a, b, c], ty)
    }

    pub fn select(&mut self, condition: Value, a: Value, b: Value) -> Value {
        let ty = self.ty(a);
        self.one(Op::Select, &[condition, a, b], ty)
    }

    /// `x`, with the hint that no element is below `at_least`.
    pub fn at_least(&mut self, x: Value, at_least: i64) -> Value {
        let ty = self.func.ty(x).clone();
        self.one(Op::Hint { divisible: None, contiguous: None, at_least: Some(at_least) }, &[x], ty)
    }

    /// Numeric conversion. Returns the value itself if it has that type.
    pub fn cast(&mut self, x: Value, dtype: DType) -> Value {
        let ty = self.ty(x);
        if ty.dtype() == Some(dtype) {
            return x;
        }
        self.one(Op::Cast, &[x], ty.with_elem(dtype))
    }

    pub fn bitcast(&mut self, x: Value, elem: impl Into<Elem>) -> Value {
        let ty = self.ty(x).with_elem(elem);
        self.one(Op::Bitcast, &[x], ty)
    }

    // Contractions.

    pub fn dot(&mut self, a: Value, b: Value, acc: Value, precision: Precision) -> Value {
        let ty = self.ty(acc);
        self.one(Op::Dot { precision, max_imprecise: None }, &[a, b, acc], ty)
    }

    /// Reduction along `axis`. `combine(builder, accumulated, new)` builds the region on scalars.
    pub fn reduce(
        &mut self,
        operands: &[Value],
        axis: usize,
        combine: impl FnOnce(&mut Builder, &[Value], &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let region = self.combine_region(operands, combine);
        let results: Vec<Type> = operands
            .iter()
            .map(|&v| {
                let ty = self.ty(v);
                let mut shape = ty.shape().to_vec();
                shape.remove(axis);
                Type::tensor(
                    &shape,
                    ty.elem().expect("internal compiler error: reduce of a non-tile; please report this"),
                )
            })
            .collect();
        let id = self.op_with_regions(Op::Reduce { axis }, operands, &results, &[region]);
        self.func.op(id).results.clone()
    }

    /// Scan along `axis`. `combine(builder, left, right)` builds the region on scalars.
    pub fn scan(
        &mut self,
        operands: &[Value],
        axis: usize,
        reverse: bool,
        combine: impl FnOnce(&mut Builder, &[Value], &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let region = self.combine_region(operands, combine);
        let results: Vec<Type> = operands.iter().map(|&v| self.ty(v)).collect();
        let id = self.op_with_regions(Op::Scan { axis, reverse }, operands, &results, &[region]);
        self.func.op(id).results.clone()
    }

    fn combine_region(
        &mut self,
        operands: &[Value],
        combine: impl FnOnce(&mut Builder, &[Value], &[Value]) -> Vec<Value>,
    ) -> BlockId {
        let region = self.func.add_block();
        let scalars: Vec<Type> = operands
            .iter()
            .map(|&v| Type::Scalar(self.ty(v).elem().expect("internal compiler error: not a tile; please report this")))
            .collect();
        let params: Vec<Value> =
            scalars.iter().chain(&scalars).map(|ty| self.func.add_param(region, ty.clone())).collect();
        let (left, right) = params.split_at(operands.len());
        let mut inner = Builder::new(self.func, region, self.loc.clone());
        let results = combine(&mut inner, left, right);
        inner.op(Op::Yield, &results, &[]);
        region
    }

    /// Reduction with one binary op.
    pub fn reduce_with(&mut self, op: BinaryOp, tile: Value, axis: usize) -> Value {
        self.reduce(&[tile], axis, |b, l, r| vec![b.binary(op, l[0], r[0])])[0]
    }

    // Control flow.

    /// Counted loop. `body(builder, index, carried)` returns the values carried to the next iteration.
    pub fn for_loop(
        &mut self,
        lower: Value,
        upper: Value,
        step: Value,
        init: &[Value],
        body: impl FnOnce(&mut Builder, Value, &[Value]) -> Vec<Value>,
    ) -> Vec<Value> {
        let region = self.func.add_block();
        let index_ty = self.ty(lower);
        let types: Vec<Type> = init.iter().map(|&v| self.ty(v)).collect();
        let index = self.func.add_param(region, index_ty);
        let carried: Vec<Value> = types.iter().map(|ty| self.func.add_param(region, ty.clone())).collect();
        let mut inner = Builder::new(self.func, region, self.loc.clone());
        let next = body(&mut inner, index, &carried);
        inner.op(Op::Yield, &next, &[]);
        let mut operands = vec![lower, upper, step];
        operands.extend(init);
        let id = self.op_with_regions(Op::PLAIN_FOR, &operands, &types, &[region]);
        self.func.op(id).results.clone()
    }

    pub fn ret(&mut self) {
        self.op(Op::Return, &[], &[]);
    }

    // Layouts.

    /// Converts a tile to another layout. Returns the tile itself if it has that layout.
    pub fn convert_layout(&mut self, tile: Value, layout: LayoutId) -> Value {
        let ty = self.ty(tile);
        if ty.layout() == Some(layout) {
            return tile;
        }
        self.one(Op::ConvertLayout, &[tile], ty.with_layout(Some(layout)))
    }
}
