//! Functions of Tile IR: arenas of values, ops and blocks, and queries. [`super::edit`] changes them.

use super::ops::{Effects, Op};
use super::place::Placement;
use super::types::Type;
use serde::{Deserialize, Serialize};
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
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub struct Loc {
    pub file: Arc<str>,
    pub line: u32,
    pub column: u32,
}

impl Loc {
    /// Location of ops that no source line produced.
    pub fn unknown() -> Loc {
        Loc { file: Arc::from(""), line: 0, column: 0 }
    }

    pub fn is_unknown(&self) -> bool {
        self.line == 0
    }
}

impl From<Loc> for String {
    fn from(loc: Loc) -> String {
        loc.to_string()
    }
}

impl From<String> for Loc {
    /// Reads the output of `to_string`; any other text is an unknown location.
    fn from(text: String) -> Loc {
        let mut parts = text.rsplitn(3, ':');
        let mut number = || parts.next()?.parse().ok();
        match (number(), number(), parts.next()) {
            (Some(column), Some(line), Some(file)) => Loc { file: Arc::from(file), line, column },
            _ => Loc::unknown(),
        }
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

/// A use of a value: operand `index` of `op`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Use {
    pub op: OpId,
    pub index: usize,
}

#[derive(Clone, Debug)]
pub struct ValueData {
    pub ty: Type,
    pub def: Def,
    /// The user's name for the value, if known; only for printing.
    pub name: Option<Arc<str>>,
    pub(super) uses: Vec<Use>,
}

#[derive(Clone, Debug)]
pub struct OpData {
    pub op: Op,
    pub operands: Vec<Value>,
    pub results: Vec<Value>,
    pub regions: Vec<BlockId>,
    pub loc: Loc,
    /// When and where the op runs, in a scheduled loop.
    pub place: Option<Placement>,
    /// The block that contains the op.
    pub(super) block: Option<BlockId>,
    /// The op's index in `block`.
    pub(super) position: usize,
    /// For each operand, the index of this use among the uses of the value.
    pub(super) use_slots: Vec<usize>,
}

#[derive(Clone, Debug, Default)]
pub struct BlockData {
    pub params: Vec<Value>,
    pub ops: Vec<OpId>,
    /// The op that has the block as a region.
    pub(super) owner: Option<OpId>,
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
    pub(super) values: Vec<ValueData>,
    pub(super) ops: Vec<OpData>,
    pub(super) blocks: Vec<BlockData>,
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

    pub fn op(&self, id: OpId) -> &OpData {
        &self.ops[id.0 as usize]
    }

    pub fn block(&self, id: BlockId) -> &BlockData {
        &self.blocks[id.0 as usize]
    }

    pub fn value(&self, v: Value) -> &ValueData {
        &self.values[v.0 as usize]
    }

    pub fn ty(&self, v: Value) -> &Type {
        &self.values[v.0 as usize].ty
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

    /// Bytes that a shared buffer or ring takes: those of its layout, which may have room for more columns than the buffer.
    pub fn shared_bytes(&self, ty: &Type) -> usize {
        let Type::Shared { shape, elem, layout } = ty else { return 0 };
        let layout = self.layout(*layout);
        let slots: usize = shape[..shape.len() - layout.shape().len()].iter().product();
        slots * layout.shape().iter().product::<u32>() as usize * elem.bytes()
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

    /// The block that contains an op; `None` for an op that is not inserted yet, or erased.
    pub fn block_of(&self, id: OpId) -> Option<BlockId> {
        self.op(id).block
    }

    /// The block that contains an op. Panics if no block does: a compiler bug.
    pub fn parent_block(&self, id: OpId) -> BlockId {
        self.block_of(id).expect("internal compiler error: an op outside any block; please report this")
    }

    /// The index of an op in the block that contains it.
    pub fn position(&self, id: OpId) -> usize {
        self.op(id).position
    }

    /// Whether an op is directly in a block, not in a region of one of its ops.
    pub fn is_in(&self, id: OpId, block: BlockId) -> bool {
        self.block_of(id) == Some(block)
    }

    /// The op that has a block as a region; `None` for the body.
    pub fn owner(&self, block: BlockId) -> Option<OpId> {
        self.block(block).owner
    }

    /// The op whose region contains an op; `None` in the body.
    pub fn parent_op(&self, id: OpId) -> Option<OpId> {
        self.owner(self.block_of(id)?)
    }

    /// The terminator of a region. Panics if the region is empty: a compiler bug.
    pub fn terminator(&self, region: BlockId) -> OpId {
        *self.block(region).ops.last().expect("internal compiler error: an empty region; please report this")
    }

    /// The uses of a value, in no order. Ops outside of any block count until they are erased.
    pub fn uses(&self, v: Value) -> &[Use] {
        &self.value(v).uses
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
