//! Functions of Tile IR: arenas of values, ops and blocks.

use super::ops::{Effects, Op};
use super::types::Type;
use std::sync::Arc;

/// An SSA value: a parameter of a block or a result of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Value(pub u32);

/// Index of an op in its function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpId(pub u32);

/// Index of a block, which is a region's body: parameters, then a straight line of ops that ends in a terminator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// A location in the user's source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Loc {
    pub file: Arc<str>,
    pub line: u32,
    pub column: u32,
}

impl Loc {
    /// Location of ops that no source line produced, and of functions parsed from text.
    pub fn unknown() -> Loc {
        Loc { file: Arc::from(""), line: 0, column: 0 }
    }

    pub fn is_unknown(&self) -> bool {
        self.line == 0
    }
}

impl From<&std::panic::Location<'_>> for Loc {
    fn from(l: &std::panic::Location<'_>) -> Loc {
        Loc { file: Arc::from(l.file()), line: l.line(), column: l.column() }
    }
}

impl std::fmt::Display for Loc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.is_unknown() {
            f.write_str("unknown")
        } else {
            write!(f, "{}:{}:{}", self.file, self.line, self.column)
        }
    }
}

/// Definition of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Def {
    /// Result `index` of an op.
    Result(OpId, usize),
    /// Parameter `index` of a block.
    Param(BlockId, usize),
}

#[derive(Clone, Debug)]
pub struct ValueData {
    pub ty: Type,
    pub def: Def,
    /// The user's name for the value, if known; only for printing.
    pub name: Option<Arc<str>>,
}

#[derive(Clone, Debug)]
pub struct OpData {
    pub op: Op,
    pub operands: Vec<Value>,
    pub results: Vec<Value>,
    pub regions: Vec<BlockId>,
    pub loc: Loc,
}

#[derive(Clone, Debug, Default)]
pub struct BlockData {
    pub params: Vec<Value>,
    pub ops: Vec<OpId>,
}

/// A kernel argument: parameter `i` of the body block, and the facts about it that the kernel is specialized for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Arg {
    pub name: String,
    /// The value (for pointers: the byte address) is a multiple of this; 1 states nothing.
    pub divisible_by: u64,
    /// The value equals this constant.
    pub equal_to: Option<i64>,
}

/// A kernel.
#[derive(Clone, Debug)]
pub struct Func {
    pub name: String,
    /// One per parameter of [`Func::body`], in order.
    pub args: Vec<Arg>,
    pub body: BlockId,
    pub loc: Loc,
    /// Layouts, which tensor and shared types refer to by index.
    pub layouts: Vec<crate::layout::LinearLayout>,
    values: Vec<ValueData>,
    ops: Vec<OpData>,
    blocks: Vec<BlockData>,
}

impl Func {
    /// An empty kernel without arguments.
    pub fn new(name: impl Into<String>) -> Func {
        Func {
            name: name.into(),
            args: Vec::new(),
            body: BlockId(0),
            loc: Loc::unknown(),
            layouts: Vec::new(),
            values: Vec::new(),
            ops: Vec::new(),
            blocks: vec![BlockData::default()],
        }
    }

    /// Appends a kernel argument and returns its value.
    pub fn add_arg(&mut self, arg: Arg, ty: Type) -> Value {
        let name = Arc::from(arg.name.as_str());
        self.args.push(arg);
        let v = self.add_param(self.body, ty);
        self.values[v.0 as usize].name = Some(name);
        v
    }

    pub fn add_block(&mut self) -> BlockId {
        self.blocks.push(BlockData::default());
        BlockId(self.blocks.len() as u32 - 1)
    }

    pub fn add_param(&mut self, block: BlockId, ty: Type) -> Value {
        let index = self.blocks[block.0 as usize].params.len();
        let v = self.new_value(ty, Def::Param(block, index));
        self.blocks[block.0 as usize].params.push(v);
        v
    }

    fn new_value(&mut self, ty: Type, def: Def) -> Value {
        self.values.push(ValueData { ty, def, name: None });
        Value(self.values.len() as u32 - 1)
    }

    /// Creates an op outside any block; [`Func::append`] also appends it to a block.
    pub fn create_op(
        &mut self,
        op: Op,
        operands: Vec<Value>,
        result_types: Vec<Type>,
        regions: Vec<BlockId>,
        loc: Loc,
    ) -> OpId {
        let id = OpId(self.ops.len() as u32);
        let results =
            result_types.into_iter().enumerate().map(|(i, ty)| self.new_value(ty, Def::Result(id, i))).collect();
        self.ops.push(OpData { op, operands, results, regions, loc });
        id
    }

    /// Adds a result to an op.
    pub fn add_result(&mut self, id: OpId, ty: Type) -> Value {
        let index = self.op(id).results.len();
        let v = self.new_value(ty, Def::Result(id, index));
        self.op_mut(id).results.push(v);
        v
    }

    /// Creates an op and appends it to a block.
    pub fn append(
        &mut self,
        block: BlockId,
        op: Op,
        operands: Vec<Value>,
        result_types: Vec<Type>,
        regions: Vec<BlockId>,
        loc: Loc,
    ) -> OpId {
        let id = self.create_op(op, operands, result_types, regions, loc);
        self.blocks[block.0 as usize].ops.push(id);
        id
    }

    pub fn op(&self, id: OpId) -> &OpData {
        &self.ops[id.0 as usize]
    }

    pub fn op_mut(&mut self, id: OpId) -> &mut OpData {
        &mut self.ops[id.0 as usize]
    }

    pub fn block(&self, id: BlockId) -> &BlockData {
        &self.blocks[id.0 as usize]
    }

    pub fn block_mut(&mut self, id: BlockId) -> &mut BlockData {
        &mut self.blocks[id.0 as usize]
    }

    pub fn value(&self, v: Value) -> &ValueData {
        &self.values[v.0 as usize]
    }

    pub fn value_mut(&mut self, v: Value) -> &mut ValueData {
        &mut self.values[v.0 as usize]
    }

    pub fn ty(&self, v: Value) -> &Type {
        &self.values[v.0 as usize].ty
    }

    pub fn set_ty(&mut self, v: Value, ty: Type) {
        self.values[v.0 as usize].ty = ty;
    }

    /// The single result of an op. Panics if the op has none: a compiler bug.
    pub fn result(&self, id: OpId) -> Value {
        self.op(id).results[0]
    }

    /// The op that defines a value; `None` for block parameters.
    pub fn def_op(&self, v: Value) -> Option<OpId> {
        match self.value(v).def {
            Def::Result(op, _) => Some(op),
            Def::Param(..) => None,
        }
    }

    /// Number of values ever created; the size of tables indexed by [`Value`].
    pub fn num_values(&self) -> usize {
        self.values.len()
    }

    /// Number of ops ever created; the size of tables indexed by [`OpId`].
    pub fn num_ops(&self) -> usize {
        self.ops.len()
    }

    /// Number of blocks ever created; the size of tables indexed by [`BlockId`].
    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Index of an equal layout; adds the layout if there is none.
    pub fn intern_layout(&mut self, layout: crate::layout::LinearLayout) -> super::LayoutId {
        let index = match self.layouts.iter().position(|l| *l == layout) {
            Some(i) => i,
            None => {
                self.layouts.push(layout);
                self.layouts.len() - 1
            }
        };
        super::LayoutId(index as u32)
    }

    pub fn layout(&self, id: super::LayoutId) -> &crate::layout::LinearLayout {
        &self.layouts[id.0 as usize]
    }

    /// The layout of a tensor or shared value. Panics if it has none: a compiler bug.
    pub fn layout_of(&self, v: Value) -> &crate::layout::LinearLayout {
        let id = self
            .ty(v)
            .layout()
            .expect("internal compiler error: a value without a layout after layout assignment; please report this");
        self.layout(id)
    }

    /// All ops of the function in text order; ops of nested regions follow the op that holds them.
    pub fn walk(&self) -> Vec<OpId> {
        let mut order = Vec::new();
        self.walk_block(self.body, &mut order);
        order
    }

    fn walk_block(&self, block: BlockId, order: &mut Vec<OpId>) {
        for &op in &self.block(block).ops {
            order.push(op);
            for &region in &self.op(op).regions {
                self.walk_block(region, order);
            }
        }
    }

    /// Ops of a block and of its nested regions, in text order.
    pub fn walk_from(&self, block: BlockId) -> Vec<OpId> {
        let mut order = Vec::new();
        self.walk_block(block, &mut order);
        order
    }

    /// The block that contains an op. Panics if no block does: a compiler bug.
    pub fn parent_block(&self, id: OpId) -> BlockId {
        (0..self.blocks.len() as u32)
            .map(BlockId)
            .find(|&b| self.block(b).ops.contains(&id))
            .expect("internal compiler error: an op outside any block; please report this")
    }

    /// The block that contains an op, and the op's index there. Panics if no block does: a compiler bug.
    pub fn op_position(&self, id: OpId) -> (BlockId, usize) {
        let regions = self.walk().into_iter().flat_map(|op| self.op(op).regions.iter().copied());
        std::iter::once(self.body)
            .chain(regions)
            .find_map(|block| Some((block, self.block(block).ops.iter().position(|&op| op == id)?)))
            .expect("internal compiler error: an op outside any block; please report this")
    }

    /// Replaces every use of `old` by `new`.
    pub fn replace_uses(&mut self, old: Value, new: Value) {
        for op in &mut self.ops {
            for operand in &mut op.operands {
                if *operand == old {
                    *operand = new;
                }
            }
        }
    }

    /// Number of uses of each value by ops that are in a block, indexed by value.
    pub fn use_counts(&self) -> Vec<u32> {
        let mut counts = vec![0; self.num_values()];
        for id in self.walk() {
            for v in &self.op(id).operands {
                counts[v.0 as usize] += 1;
            }
        }
        counts
    }

    /// Effects of an op, including its regions: the strongest effect inside.
    pub fn effects(&self, id: OpId) -> Effects {
        let data = self.op(id);
        match data.op.effects() {
            Effects::Regions => {
                let mut strongest = Effects::Pure;
                for &region in &data.regions {
                    for &inner in &self.block(region).ops {
                        match (self.op(inner).op.clone(), self.effects(inner)) {
                            (Op::Yield | Op::Condition, _) | (_, Effects::Pure) => {}
                            (_, Effects::Read) if strongest == Effects::Pure => strongest = Effects::Read,
                            (_, Effects::Read) => {}
                            (_, other) => strongest = other,
                        }
                    }
                }
                strongest
            }
            other => other,
        }
    }

    /// The constant that defines a value, also through `splat`.
    pub fn constant(&self, v: Value) -> Option<super::Literal> {
        let id = self.def_op(v)?;
        match &self.op(id).op {
            Op::Constant { value } => Some(*value),
            Op::Splat => self.constant(self.op(id).operands[0]),
            _ => None,
        }
    }

    /// The integer (or bool) constant that defines a value.
    pub fn constant_int(&self, v: Value) -> Option<i64> {
        match self.constant(v)? {
            super::Literal::Int(i) => Some(i),
            super::Literal::Bool(b) => Some(b as i64),
            super::Literal::Float(_) => None,
        }
    }
}
