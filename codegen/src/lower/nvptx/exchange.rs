//! Memory through which the threads of a block tell each other something: what one stores and another one loads.
//!
//! A program reads what it has written before, whichever thread wrote it, and not what it writes afterwards. So between a load, a store
//! and an atomic of one argument's memory threads meet, unless each thread only comes back to its own elements: through one view, or one
//! tile of neighbouring pointers, in one layout without copies.
//!
//! Stores do not wait for stores, nor does an op wait for itself in the next iteration: every loop that walks along its output would pay.
//! Which of two values stays where stores overlap is open, therefore.

use crate::analysis::axis::AxisAnalysis;
use crate::analysis::written;
use crate::ir::{AtomicOp, Def, Func, LayoutId, Op, OpId, Type, Value};
use crate::layout::Dim;
use std::collections::{HashMap, HashSet};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Load,
    Store,
    Atomic,
}

/// One access of global memory.
#[derive(Clone, Debug)]
struct Access {
    kind: Kind,
    /// View, or pointers.
    place: Value,
    /// Which thread has which element; `None` for a scalar, which all threads load and one stores.
    layout: Option<LayoutId>,
    /// No place in memory belongs to several threads.
    single: bool,
    /// Arguments whose memory it may be.
    arguments: HashSet<Value>,
}

/// The accesses of memory that a kernel both reads and writes.
#[derive(Clone, Debug, Default)]
pub struct Exchange {
    accesses: HashMap<OpId, Access>,
}

impl Exchange {
    pub fn new(func: &Func, axis: &AxisAnalysis) -> Exchange {
        let mut all: HashMap<OpId, Access> =
            func.walk().into_iter().filter_map(|id| Some((id, access(func, axis, id)?))).collect();
        let of = |wanted: fn(Kind) -> bool| -> HashSet<Value> {
            all.values().filter(|a| wanted(a.kind)).flat_map(|a| a.arguments.iter().copied()).collect()
        };
        let written = of(|kind| kind != Kind::Load);
        all.retain(|_, a| !a.arguments.is_disjoint(&written));
        Exchange { accesses: all }
    }

    /// Whether an op accesses memory that counts here.
    pub fn has(&self, id: OpId) -> bool {
        self.accesses.contains_key(&id)
    }

    /// Whether the kernel only adds to the memory that an op accesses.
    pub fn only_adds(&self, func: &Func, id: OpId) -> bool {
        let adds = |id: OpId| matches!(func.op(id).op, Op::AtomicView { op: AtomicOp::Add, .. });
        self.accesses.get(&id).is_some_and(|own| {
            let mut others = self.accesses.iter();
            !own.arguments.is_empty()
                && others.all(|(&id, other)| adds(id) || own.arguments.is_disjoint(&other.arguments))
        })
    }

    /// Whether threads have to meet between two ops.
    pub fn meet(&self, first: OpId, then: OpId) -> bool {
        let (Some(a), Some(b)) = (self.accesses.get(&first), self.accesses.get(&then)) else { return false };
        if first == then || a.arguments.is_disjoint(&b.arguments) {
            return false;
        }
        let own = a.place == b.place && a.layout == b.layout && a.single && b.single;
        a.kind != b.kind && !own
    }

    /// Arguments through which threads tell each other something: between two accesses of one thread, others change their memory.
    pub fn arguments(&self) -> HashSet<Value> {
        let pairs =
            self.accesses.iter().flat_map(|(&first, a)| self.accesses.keys().map(move |&then| (first, a, then)));
        let met = pairs.filter(|&(first, _, then)| self.meet(first, then));
        met.flat_map(|(_, a, then)| &a.arguments & &self.accesses[&then].arguments).collect()
    }
}

fn access(func: &Func, axis: &AxisAnalysis, id: OpId) -> Option<Access> {
    let data = func.op(id);
    let (kind, tile) = match data.op {
        Op::LoadView { .. } | Op::Load { .. } => (Kind::Load, data.results[0]),
        Op::StoreView { .. } | Op::Store { .. } => (Kind::Store, data.operands[1]),
        Op::AtomicView { .. } | Op::AtomicRmw { .. } | Op::AtomicCas => (Kind::Atomic, data.operands[1]),
        _ => return None,
    };
    let place = data.operands[0];
    let layout = func.ty(tile).layout();
    // Copies of an element are loaded by all who have one, and stored by the first of them.
    let copies = |layout| {
        let layout = func.layout(layout);
        layout.free_mask(Dim::Lane) != 0 || layout.free_mask(Dim::Warp) != 0
    };
    // Elements of a tile of pointers may meet in one place.
    let apart = match func.ty(place) {
        Type::Tensor { shape, .. } => shape.len() == 1 && axis.get(func, place).contiguity[0] >= shape[0] as u64,
        _ => true,
    };
    let single = apart && layout.is_some_and(|layout| !copies(layout));
    let argument = |v: &Value| matches!(func.value(*v).def, Def::Param(block, _) if block == func.body);
    let arguments = written::sources(func, place).into_iter().filter(argument).collect();
    Some(Access { kind, place, layout, single, arguments })
}
