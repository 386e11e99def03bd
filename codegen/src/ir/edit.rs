//! Edits of a function.
//!
//! A function keeps the block and position of every op, the op that owns each block, and the uses of every value. Ops
//! and blocks are read-only outside of this module, so that these facts cannot become stale.
//!
//! An op is created outside of any block or appended to one. It uses its operands until it is erased, also while it is
//! outside of any block: a pass that drops an op erases it.

use super::func::{Arg, BlockData, BlockId, Def, Func, Loc, OpData, OpId, Use, Value, ValueData};
use super::ops::Op;
use super::place::Placement;
use super::types::{LayoutId, Type};
use std::sync::Arc;

/// Values, types and layouts.
impl Func {
    /// Appends a kernel argument and returns its value.
    pub fn add_arg(&mut self, arg: Arg, ty: Type) -> Value {
        let name = Arc::from(arg.name.as_str());
        self.args.push(arg);
        let v = self.add_param(self.body, ty);
        self.set_name(v, Some(name));
        v
    }

    pub fn add_block(&mut self) -> BlockId {
        self.blocks.push(BlockData::default());
        BlockId(self.blocks.len() as u32 - 1)
    }

    pub fn add_param(&mut self, block: BlockId, ty: Type) -> Value {
        let index = self.block(block).params.len();
        let v = self.new_value(ty, Def::Param(block, index));
        self.blocks[block.0 as usize].params.push(v);
        v
    }

    /// Sets the parameters of a block: old ones in any order, and new ones from [`Func::add_param`].
    pub fn set_params(&mut self, block: BlockId, params: Vec<Value>) {
        for (i, &v) in params.iter().enumerate() {
            self.values[v.0 as usize].def = Def::Param(block, i);
        }
        self.blocks[block.0 as usize].params = params;
    }

    /// Removes the parameters of a block that `keep` excludes.
    pub fn retain_params(&mut self, block: BlockId, keep: &[bool]) {
        let params = kept(&self.block(block).params, keep);
        self.set_params(block, params);
    }

    fn new_value(&mut self, ty: Type, def: Def) -> Value {
        self.values.push(ValueData { ty, def, name: None, uses: Vec::new() });
        Value(self.values.len() as u32 - 1)
    }

    pub fn set_ty(&mut self, v: Value, ty: Type) {
        self.values[v.0 as usize].ty = ty;
    }

    /// Sets the user's name for a value.
    pub fn set_name(&mut self, v: Value, name: Option<Arc<str>>) {
        self.values[v.0 as usize].name = name;
    }

    /// Index of an equal layout; adds the layout if there is none.
    pub fn intern_layout(&mut self, layout: crate::layout::LinearLayout) -> LayoutId {
        let index = self.layouts.iter().position(|l| *l == layout).unwrap_or_else(|| {
            self.layouts.push(layout);
            self.layouts.len() - 1
        });
        LayoutId(index as u32)
    }
}

/// Ops: creation, attributes, operands and results.
impl Func {
    /// Creates an op outside any block. It takes over the regions.
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
        for region in &regions {
            self.blocks[region.0 as usize].owner = Some(id);
        }
        let unplaced = OpData {
            op,
            operands: Vec::new(),
            results,
            regions,
            loc,
            place: None,
            block: None,
            position: 0,
            use_slots: Vec::new(),
        };
        self.ops.push(unplaced);
        self.add_operands(id, &operands);
        id
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
        self.push(block, id);
        id
    }

    /// The op with its attributes.
    pub fn op_mut(&mut self, id: OpId) -> &mut Op {
        &mut self.ops[id.0 as usize].op
    }

    /// Sets when and where an op of a loop runs; `None` for an op of a loop without schedule.
    pub fn set_place(&mut self, id: OpId, place: Option<Placement>) {
        self.ops[id.0 as usize].place = place;
    }

    pub fn set_loc(&mut self, id: OpId, loc: Loc) {
        self.ops[id.0 as usize].loc = loc;
    }

    /// Replaces an op without regions by another with the same results.
    pub fn rewrite(&mut self, id: OpId, op: Op, operands: Vec<Value>) {
        *self.op_mut(id) = op;
        self.set_operands(id, &operands);
    }

    /// Adds operands after the others.
    pub fn add_operands(&mut self, id: OpId, operands: &[Value]) {
        for &v in operands {
            let data = &mut self.ops[id.0 as usize];
            let uses = &mut self.values[v.0 as usize].uses;
            data.use_slots.push(uses.len());
            uses.push(Use { op: id, index: data.operands.len() });
            data.operands.push(v);
        }
    }

    pub fn set_operands(&mut self, id: OpId, operands: &[Value]) {
        for index in 0..self.op(id).operands.len() {
            self.remove_use(id, index);
        }
        let data = &mut self.ops[id.0 as usize];
        data.operands.clear();
        data.use_slots.clear();
        self.add_operands(id, operands);
    }

    pub fn set_operand(&mut self, id: OpId, index: usize, v: Value) {
        self.remove_use(id, index);
        let uses = &mut self.values[v.0 as usize].uses;
        let data = &mut self.ops[id.0 as usize];
        data.use_slots[index] = uses.len();
        data.operands[index] = v;
        uses.push(Use { op: id, index });
    }

    /// Removes the operands of an op that `keep` excludes.
    pub fn retain_operands(&mut self, id: OpId, keep: &[bool]) {
        let operands = kept(&self.op(id).operands, keep);
        self.set_operands(id, &operands);
    }

    /// Removes a use from the list of its value. The last use of the list takes its place there.
    fn remove_use(&mut self, id: OpId, index: usize) {
        let data = &self.ops[id.0 as usize];
        let (v, slot) = (data.operands[index], data.use_slots[index]);
        let uses = &mut self.values[v.0 as usize].uses;
        uses.swap_remove(slot);
        if let Some(moved) = uses.get(slot) {
            self.ops[moved.op.0 as usize].use_slots[moved.index] = slot;
        }
    }

    /// Replaces every use of `old` by `new`.
    pub fn replace_uses(&mut self, old: Value, new: Value) {
        if old == new {
            return;
        }
        let moved = std::mem::take(&mut self.values[old.0 as usize].uses);
        let uses = &mut self.values[new.0 as usize].uses;
        for used in moved {
            let data = &mut self.ops[used.op.0 as usize];
            data.operands[used.index] = new;
            data.use_slots[used.index] = uses.len();
            uses.push(used);
        }
    }

    /// Adds a result to an op.
    pub fn add_result(&mut self, id: OpId, ty: Type) -> Value {
        let index = self.op(id).results.len();
        let v = self.new_value(ty, Def::Result(id, index));
        self.ops[id.0 as usize].results.push(v);
        v
    }

    /// Removes the results of an op that `keep` excludes.
    pub fn retain_results(&mut self, id: OpId, keep: &[bool]) {
        let results = kept(&self.op(id).results, keep);
        for (i, &v) in results.iter().enumerate() {
            self.values[v.0 as usize].def = Def::Result(id, i);
        }
        self.ops[id.0 as usize].results = results;
    }
}

/// Blocks: which ops they contain, in which order.
impl Func {
    /// Inserts ops that are in no block at a position of a block.
    pub fn insert(&mut self, block: BlockId, at: usize, ops: &[OpId]) {
        for &id in ops {
            let before = self.ops[id.0 as usize].block.replace(block);
            debug_assert!(before.is_none(), "internal compiler error: an op is in two blocks; please report this");
        }
        self.blocks[block.0 as usize].ops.splice(at..at, ops.iter().copied());
        self.number(block, at);
    }

    /// Appends an op that is in no block to a block.
    pub fn push(&mut self, block: BlockId, id: OpId) {
        self.insert(block, self.block(block).ops.len(), &[id]);
    }

    /// Takes an op out of its block, to insert it elsewhere.
    pub fn detach(&mut self, id: OpId) {
        if let Some(block) = self.ops[id.0 as usize].block.take() {
            let at = self.position(id);
            self.blocks[block.0 as usize].ops.remove(at);
            self.number(block, at);
        }
    }

    /// Moves an op to the place before another.
    pub fn move_before(&mut self, id: OpId, other: OpId) {
        self.detach(id);
        self.insert(self.parent_block(other), self.position(other), &[id]);
    }

    /// Moves an op to the place after another.
    pub fn move_after(&mut self, id: OpId, other: OpId) {
        self.detach(id);
        self.insert(self.parent_block(other), self.position(other) + 1, &[id]);
    }

    /// Takes all ops out of a block. The caller inserts or erases them.
    pub fn take_ops(&mut self, block: BlockId) -> Vec<OpId> {
        let ops = std::mem::take(&mut self.blocks[block.0 as usize].ops);
        for &id in &ops {
            self.ops[id.0 as usize].block = None;
        }
        ops
    }

    /// Sets the ops of a block to ops that are in this block or in none. The caller inserts or erases those that were
    /// in the block before.
    pub fn set_ops(&mut self, block: BlockId, ops: &[OpId]) {
        self.take_ops(block);
        self.insert(block, 0, ops);
    }

    /// Erases the ops of a block that `keep` excludes. Returns whether there are any.
    pub fn retain_ops(&mut self, block: BlockId, keep: impl FnMut(&OpId) -> bool) -> bool {
        let (kept, erased): (Vec<OpId>, Vec<OpId>) = self.block(block).ops.iter().copied().partition(keep);
        if erased.is_empty() {
            return false;
        }
        self.set_ops(block, &kept);
        for id in erased {
            self.erase(id);
        }
        true
    }

    /// Removes an op with its regions from the function. Nothing may use its results afterwards.
    pub fn erase(&mut self, id: OpId) {
        self.detach(id);
        self.set_operands(id, &[]);
        for region in self.take_regions(id) {
            for inner in self.take_ops(region) {
                self.erase(inner);
            }
        }
    }

    /// Takes the regions from an op, for another op.
    pub fn take_regions(&mut self, id: OpId) -> Vec<BlockId> {
        let regions = std::mem::take(&mut self.ops[id.0 as usize].regions);
        for region in &regions {
            self.blocks[region.0 as usize].owner = None;
        }
        regions
    }

    /// Records the positions of the ops of a block from `first` on.
    fn number(&mut self, block: BlockId, first: usize) {
        for (at, &id) in self.blocks[block.0 as usize].ops.iter().enumerate().skip(first) {
            self.ops[id.0 as usize].position = at;
        }
    }
}

/// Consistency.
impl Func {
    /// Compares the kept facts with a recomputation. The function must be properly nested.
    ///
    /// # Errors
    /// The first difference.
    pub fn check_kept_facts(&self) -> Result<(), String> {
        let mut used = 0;
        let mut blocks = vec![(self.body, None)];
        while let Some((block, owner)) = blocks.pop() {
            if self.owner(block) != owner {
                return Err(format!("{block:?} belongs to {owner:?}, but records {:?}", self.owner(block)));
            }
            for (at, &id) in self.block(block).ops.iter().enumerate() {
                let data = self.op(id);
                if (data.block, data.position) != (Some(block), at) {
                    let recorded = (data.block, data.position);
                    return Err(format!("{id:?} is op {at} of {block:?}, but records {recorded:?}"));
                }
                for (index, (&v, &slot)) in data.operands.iter().zip(&data.use_slots).enumerate() {
                    if self.uses(v).get(slot) != Some(&Use { op: id, index }) {
                        return Err(format!(
                            "{id:?} uses {v:?} as operand {index}, which the uses of {v:?} do not list"
                        ));
                    }
                }
                used += data.operands.len();
                blocks.extend(data.regions.iter().map(|&region| (region, Some(id))));
            }
        }
        let listed: usize = self.values.iter().map(|v| v.uses.len()).sum();
        if listed == used {
            return Ok(());
        }
        Err(format!(
            "{listed} uses are listed, but ops in blocks have {used}: an op left its block without being erased"
        ))
    }
}

fn kept(values: &[Value], keep: &[bool]) -> Vec<Value> {
    values.iter().zip(keep).filter_map(|(&v, &k)| k.then_some(v)).collect()
}
