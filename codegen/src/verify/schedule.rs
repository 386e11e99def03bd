//! Rules of schedules: placements are where they mean something, and no op runs before what it depends on.

use super::{Check, Rule, Violation};
use crate::ir::nested::uses;
use crate::ir::{BlockId, Def, Effects, Func, Op, OpId, Partition, Placement, Stage, Type, Value};
use crate::schedule::candidates::ahead_ops;
use crate::schedule::overlap::only_ahead;
use crate::schedule::stages;
use std::collections::HashMap;

/// Checks the placements of all ops.
pub fn check(func: &Func, stage: Stage) -> Vec<(Option<OpId>, Violation)> {
    let mut violations = Vec::new();
    let mut orders: HashMap<OpId, u32> = HashMap::new();
    for id in func.walk() {
        if let (Op::For { .. }, [region]) = (&func.op(id).op, &func.op(id).regions[..])
            && stages::main_stage(func, *region).is_some()
        {
            orders.extend(stages::orders(func, *region));
        }
        let in_loop = func.parent_op(id).is_some_and(|owner| matches!(func.op(owner).op, Op::For { .. }));
        let region = func.parent_block(id);
        let main = stages::main_stage(func, region).filter(|_| in_loop);
        let Some(place) = func.op(id).place else {
            // Later, the placements of deferred waits are all that is left.
            let main = main.filter(|_| stage == Stage::Schedule);
            let check = main.map_or(Ok(()), |main| Body { func, region, main, orders: &orders }.dependences(id));
            violations.extend(check.err().map(|v| (Some(id), v)));
            continue;
        };
        let check = match main {
            _ if stage < Stage::Schedule => fail(format!("a placement is not legal at stage {stage:?}")),
            Some(main) => {
                let body = Body { func, region, main, orders: &orders };
                // Later, the loads are gone, and what their addresses depend on may be left.
                let ahead = if stage == Stage::Schedule { body.ahead(id, place) } else { Ok(()) };
                ahead.and_then(|()| body.op(id, place))
            }
            None if is_loaded_once(func, id, place) => Ok(()),
            None if in_loop => fail("the `yield` of the loop has no placement: it gives the main stage".into()),
            None => fail(
                "only ops directly in the body of a `for`, and a `load_view` of a producer by TMA with depth 1, have a \
                 placement"
                    .into(),
            ),
        };
        violations.extend(check.err().map(|v| (Some(id), v)));
    }
    violations
}

fn fail(message: String) -> Check {
    Err(Violation { rule: Rule::Schedule, message })
}

/// Whether a placement is that of a load of a producer outside of the scheduled loops.
fn is_loaded_once(func: &Func, id: OpId, place: Placement) -> bool {
    let once = Placement { partition: Partition::Producer, depth: Some(1), tma: true, ..Placement::default() };
    matches!(func.op(id).op, Op::LoadView { .. }) && place == once
}

/// The body of a scheduled loop.
struct Body<'f> {
    func: &'f Func,
    region: BlockId,
    main: u32,
    /// Of the ops of this loop, and of others.
    orders: &'f HashMap<OpId, u32>,
}

/// When an op runs, compared within one iteration of the source loop.
type Time = (u32, u32);

impl Body<'_> {
    fn op(&self, id: OpId, place: Placement) -> Check {
        self.attributes(id, place)?;
        if place.depth.is_some() && self.func.op(id).op != Op::LocalAlloc {
            return self.load_ahead(id, place);
        }
        if place.stage > self.main {
            self.behind(id, place)?;
        }
        if place.stage >= self.main {
            self.dependences(id)?;
        }
        Ok(())
    }

    fn attributes(&self, id: OpId, place: Placement) -> Check {
        /// No loop runs as many iterations ahead, and no shared memory holds as many buffers.
        const MOST: u32 = 255;
        let data = self.func.op(id);
        let numbers =
            [("stage", Some(place.stage)), ("stage of the loop's end", Some(self.main)), ("depth", place.depth)];
        if let Some((what, Some(n))) = numbers.into_iter().find(|(_, n)| n.is_some_and(|n| n > MOST)) {
            return fail(format!("the {what} is {n}: at most {MOST} is supported"));
        }
        let is_load = matches!(data.op, Op::Load { .. } | Op::LoadView { .. });
        /// No loop has as many ops.
        const LAST: u32 = 1 << 20;
        if place.order > LAST {
            return fail(format!("the order is {}: at most {LAST} is supported", place.order));
        }
        if place.stage > self.main + 1 {
            return fail(format!(
                "stage {} is more than one behind the main stage {} of its loop",
                place.stage, self.main
            ));
        }
        let exchanges = data.op == Op::LocalAlloc && data.operands.len() == 1;
        if place.depth.is_some() && !is_load && !exchanges {
            return fail("only loads and buffers of tiles have a `depth`: it is that of the ring they fill".into());
        }
        if exchanges && place.depth.is_some() && (place.depth != Some(2) || place.stage != self.main) {
            return fail(format!(
                "the ring of a buffer of a tile has two buffers, and is of the main stage {}",
                self.main
            ));
        }
        if place.depth == Some(0) {
            return fail("a ring has at least one buffer, found depth 0".into());
        }
        if place.tma && (place.depth.is_none() || !matches!(data.op, Op::LoadView { .. })) {
            return fail("only a `load_view` with a `depth` can be loaded by TMA".into());
        }
        Ok(())
    }

    /// Only a load into a ring, its buffer, and what its address depends on run before the main stage.
    fn ahead(&self, id: OpId, place: Placement) -> Check {
        let func = self.func;
        let in_ring =
            |id: OpId| func.op(id).op != Op::LocalAlloc && func.op(id).place.is_some_and(|at| at.depth.is_some());
        let is_buffer = func.op(id).op == Op::LocalAlloc
            && func.op(id).operands.iter().any(|&v| func.def_op(v).is_some_and(in_ring));
        if place.stage >= self.main || in_ring(id) || is_buffer {
            return Ok(());
        }
        let loads = func.block(self.region).ops.iter().copied().filter(|&load| in_ring(load));
        let addresses = loads.flat_map(|load| func.op(load).operands.iter().copied().take(2));
        match ahead_ops(func, self.region, addresses).contains(&id) {
            true => Ok(()),
            false => fail(format!(
                "it runs in stage {}, and only loads with a ring (`depth`), their buffers, and what their addresses depend on \
                 run before the main stage {}",
                place.stage, self.main
            )),
        }
    }

    /// A load into a ring: its address is known ahead, and its ring keeps a tile until the last read.
    fn load_ahead(&self, id: OpId, place: Placement) -> Check {
        let ahead = ahead_ops(self.func, self.region, self.func.op(id).operands.iter().copied().take(2));
        let has_ring = |op: OpId| self.func.op(op).place.is_some_and(|at| at.depth.is_some());
        let only_ahead = only_ahead(self.func, self.region, &ahead, has_ring);
        for op in ahead {
            let data = self.func.op(op);
            let is_pure = data.op.effects() == Effects::Pure && data.regions.is_empty();
            // A producer waits for the scalars that it loads itself.
            let is_before = |at: Placement| {
                let is_scalar = !self.func.ty(self.func.result(op)).is_tensor();
                let producer = Partition::Producer;
                // A load that the main stage uses too stays there, and is repeated ahead.
                let is_repeated = at.stage == self.main && !only_ahead.contains(&op);
                at.stage < place.stage
                    || is_repeated && (is_scalar || place.partition == Partition::Consumer)
                    || is_scalar && at.stage == place.stage && [at.partition, place.partition] == [producer; 2]
            };
            let is_known = matches!(data.op, Op::Load { .. }) && data.place.is_some_and(is_before);
            if !is_pure && !is_known {
                return fail(format!(
                    "it runs in stage {}, and its address depends on {}, which runs in stage {}",
                    place.stage,
                    self.describe(op),
                    data.place.map_or(self.main, |at| at.stage)
                ));
            }
        }
        let (last, reader) = self.last_read(id);
        let needed = match place.partition {
            Partition::Consumer => last.saturating_add(1).saturating_sub(place.stage),
            // The producer waits until a buffer is free.
            Partition::Producer => last.saturating_sub(self.main).saturating_add(1),
        };
        match place.depth {
            Some(depth) if depth < needed => fail(format!(
                "its ring has {depth} buffers, and needs {needed}: {} is done with a tile in stage {last}",
                self.describe(reader)
            )),
            _ => Ok(()),
        }
    }

    /// The stage in which the last reader of a loaded tile is done with it, and that reader.
    fn last_read(&self, load: OpId) -> (u32, OpId) {
        let mut last = (self.main, load);
        let mut values = self.func.op(load).results.clone();
        while let Some(v) = values.pop() {
            for used in self.func.uses(v) {
                let data = self.func.op(used.op);
                match data.op {
                    Op::LocalAlloc | Op::LocalTrans { .. } => values.extend(&data.results),
                    // Done when it is waited for.
                    Op::Wgmma { .. } if matches!(self.func.ty(v), Type::Shared { .. }) => values.extend(&data.results),
                    _ => {}
                }
                let stage = data.place.map_or(self.main, |at| at.stage);
                if stage > last.0 || last.1 == load {
                    last = (stage.max(last.0), used.op);
                }
            }
        }
        last
    }

    /// What can run behind the main stage.
    fn behind(&self, id: OpId, place: Placement) -> Check {
        let data = self.func.op(id);
        let can_run = data.op.effects() == Effects::Pure
            || matches!(
                data.op,
                Op::Wgmma { .. } | Op::WgmmaWait { .. } | Op::MbarrierArrive { .. } | Op::MbarrierWait
            );
        match can_run {
            true => Ok(()),
            false => fail(format!(
                "it runs in stage {}, behind the main stage {}, where only arithmetic and `wgmma` can run",
                place.stage, self.main
            )),
        }
    }

    /// An op of the main stage or behind it runs after the ops that it depends on, in its own iteration and through
    /// carried values.
    fn dependences(&self, id: OpId) -> Check {
        let mut used: Vec<Value> = uses(self.func, id).into_iter().collect();
        used.sort();
        let end = self.func.terminator(self.region);
        for v in used {
            match self.func.value(v).def {
                Def::Result(op, _) if self.func.is_in(op, self.region) && id != end => {
                    let (on, own) = (self.time(op), self.time(id));
                    if on > own && (on.0 == own.0 || !self.runs_anywhere(op)) {
                        return self.too_early(id, op, "");
                    }
                    let is_deferred = matches!(self.func.op(id).op, Op::WgmmaWait { .. }) && own.0 > on.0;
                    if is_deferred && own.1 < on.1 {
                        return fail(format!(
                            "it waits one stage later for {}, and should have order {} or a later one, found {}",
                            self.describe(op),
                            on.1,
                            own.1
                        ));
                    }
                }
                Def::Param(block, index) if block == self.region && index > 0 => {
                    let carried = self.func.op(end).operands[index - 1];
                    let Some(op) = self.func.def_op(carried).filter(|&op| self.func.is_in(op, self.region)) else {
                        continue;
                    };
                    // Both run together: the order decides.
                    let (on, own) = (self.time(op), self.time(id));
                    let is_behind = on.0 > self.main && own.0 <= self.main && own.1 <= on.1;
                    if id != end && is_behind && !self.accumulates_in_order(id, op) {
                        return self.too_early(id, op, " of the iteration before");
                    }
                }
                Def::Result(..) | Def::Param(..) => {}
            }
        }
        Ok(())
    }

    fn time(&self, id: OpId) -> Time {
        let stage = self.func.op(id).place.map_or(self.main, |at| at.stage);
        (stage, self.orders.get(&id).copied().unwrap_or_default())
    }

    /// Whether an op is copied to the other stages that use it: one that names a part of shared memory.
    fn runs_anywhere(&self, id: OpId) -> bool {
        matches!(self.func.op(id).op, Op::LocalSlot | Op::LocalTrans { .. })
    }

    /// Whether `wait` is the deferred wait for the `wgmma` `dot`: accumulations of one tile complete in order.
    fn accumulates_in_order(&self, dot: OpId, wait: OpId) -> bool {
        let is_dot = matches!(self.func.op(dot).op, Op::Wgmma { .. });
        is_dot && stages::accumulator_of(self.func, self.region, dot).is_some_and(|(own, _)| own == wait)
    }

    fn too_early(&self, id: OpId, on: OpId, which: &str) -> Check {
        let [(stage, order), (other_stage, other_order)] = [id, on].map(|op| self.time(op));
        fail(format!(
            "it runs in stage {stage}, order {order}, and depends on {}{which}, which runs in stage {other_stage}, order \
             {other_order}",
            self.describe(on)
        ))
    }

    fn describe(&self, id: OpId) -> String {
        let data = self.func.op(id);
        let line = crate::text::print_op(self.func, id);
        if data.loc.is_unknown() { format!("`{line}`") } else { format!("`{line}` at {}", data.loc) }
    }
}
