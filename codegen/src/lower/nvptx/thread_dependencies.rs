//! Dependencies between the threads of a block through global memory: one thread loads what another has stored.
//!
//! A program observes its own earlier writes, whichever thread performed them, and not its later ones. So a barrier
//! separates a load, a store and an atomic on the memory of one argument, unless each thread accesses only its own
//! elements: through one view, or one tile of consecutive pointers, in one layout without copies.
//!
//! Stores are not ordered with stores, nor an op with itself in the next iteration: every loop over an output would pay
//! for it. Therefore it is unspecified which value remains where stores overlap.

use crate::analysis::axis::AxisAnalysis;
use crate::analysis::memory_effects;
use crate::ir::{AtomicOp, Func, LayoutId, Op, OpId, Type, Value};
use crate::layout::Dim;
use std::collections::{HashMap, HashSet};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Load,
    Store,
    Atomic,
}

/// An access of global memory.
#[derive(Clone, Debug)]
struct Access {
    kind: Kind,
    /// The view, or the pointers.
    address: Value,
    /// The layout of the tile; `None` for a scalar, which all threads load and one stores.
    layout: Option<LayoutId>,
    /// Whether each memory location belongs to only one thread.
    is_private: bool,
    /// The arguments whose memory it may access.
    arguments: HashSet<Value>,
}

/// The accesses, loads included, of memory that a kernel writes.
#[derive(Clone, Debug, Default)]
pub struct ThreadDependencies {
    accesses: HashMap<OpId, Access>,
}

impl ThreadDependencies {
    pub fn new(func: &Func, axis: &AxisAnalysis) -> ThreadDependencies {
        let mut all: HashMap<OpId, Access> =
            func.walk().into_iter().filter_map(|id| Some((id, access(func, axis, id)?))).collect();
        let of = |wanted: fn(Kind) -> bool| -> HashSet<Value> {
            all.values().filter(|a| wanted(a.kind)).flat_map(|a| a.arguments.iter().copied()).collect()
        };
        let written = of(|kind| kind != Kind::Load);
        all.retain(|_, a| !a.arguments.is_disjoint(&written));
        ThreadDependencies { accesses: all }
    }

    /// Whether an op accesses memory that the kernel writes.
    pub fn tracks(&self, id: OpId) -> bool {
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

    /// Whether a barrier is needed between two ops.
    pub fn need_barrier(&self, first: OpId, then: OpId) -> bool {
        let (Some(a), Some(b)) = (self.accesses.get(&first), self.accesses.get(&then)) else { return false };
        if first == then || a.arguments.is_disjoint(&b.arguments) {
            return false;
        }
        let own = a.address == b.address && a.layout == b.layout && a.is_private && b.is_private;
        a.kind != b.kind && !own
    }

    /// The arguments through which threads depend on each other: other threads may change the memory of these arguments
    /// between two accesses of one thread.
    pub fn shared_arguments(&self) -> HashSet<Value> {
        let pairs =
            self.accesses.iter().flat_map(|(&first, a)| self.accesses.keys().map(move |&then| (first, a, then)));
        let dependent = pairs.filter(|&(first, _, then)| self.need_barrier(first, then));
        dependent.flat_map(|(_, a, then)| &a.arguments & &self.accesses[&then].arguments).collect()
    }
}

fn access(func: &Func, axis: &AxisAnalysis, id: OpId) -> Option<Access> {
    let data = func.op(id);
    let (kind, tile) = match data.op {
        Op::LoadView { .. } | Op::Load { .. } => (Kind::Load, data.results[0]),
        Op::StoreView { .. } | Op::Store { .. } => (Kind::Store, data.operands[1]),
        Op::AtomicView { .. } | Op::AtomicRmw { .. } | Op::AtomicCas { .. } | Op::SemaphoreWait => {
            (Kind::Atomic, data.operands[1])
        }
        _ => return None,
    };
    let address = data.operands[0];
    let layout = func.ty(tile).layout();
    // All threads with a copy of an element load it, and the first of them stores it.
    let copies = |layout| {
        let layout = func.layout(layout);
        layout.free_mask(Dim::Lane) != 0 || layout.free_mask(Dim::Warp) != 0
    };
    // Pointers of a tile may be equal.
    let apart = match func.ty(address) {
        Type::Tensor { shape, .. } => shape.len() == 1 && axis.get(func, address).contiguity[0] >= shape[0] as u64,
        _ => true,
    };
    let is_private = apart && layout.is_some_and(|layout| !copies(layout));
    let arguments = memory_effects::underlying_arguments(func, address);
    Some(Access { kind, address, layout, is_private, arguments })
}
