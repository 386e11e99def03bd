//! Execution of ops without control flow, scheduling of the programs of a grid, and their state. Control flow is in
//! [`super::exec_context`].

use super::barriers::BarrierTable;
use super::dot_and_reduce::{self, Elements};
use super::exec_context::{ControlState, Stop};
use super::memory::Memory;
use super::shared::SharedMemory;
use super::value::{Tile, Val};
use super::{InterpError, Outcome, Trace, access, elementwise, literal_bits, shape};
use crate::ir::nested::{ctas, takes_turns};
use crate::ir::{BlockId, DType, Elem, Func, MemSem, Op, OpId, Padding, Precision, Type, Value};
use crate::text::print_op;
use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

/// How the message of a run with too many ops begins.
pub const STOPPED: &str = "stopped after";

/// Options of a run.
#[derive(Clone, Copy, Debug)]
pub struct RunOptions {
    /// Maximum number of ops that all programs together may execute. Ops of combine regions count each time.
    pub max_ops: u64,
    pub order: Order,
}

impl Default for RunOptions {
    /// No limit.
    fn default() -> RunOptions {
        RunOptions { max_ops: u64::MAX, order: Order::default() }
    }
}

/// Order in which programs run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// One program after the other, except that a program which waits for a later one lets it run.
    Sequential,
    /// Interleaved at accesses to global memory, in an order derived from the seed.
    Interleaved(u64),
}

impl Default for Order {
    fn default() -> Order {
        Order::Interleaved(0)
    }
}

/// Number of programs that run concurrently, unless a program waits for one that has not started: bounds the memory
/// use.
const MAX_RESIDENT_PROGRAMS: usize = 4;
/// Number of repeated atomics, or repetitions of one load, without a change of memory or of the program's scalars,
/// after which a program counts as spinning.
const SPIN_LIMIT: u32 = 256;
/// Interleaved programs switch at one in this many plain accesses to global memory.
const SWITCH_PERIOD: usize = 4;

/// State of a program that has started, while another one runs.
struct Program {
    number: usize,
    coordinates: [u32; 3],
    cta: u32,
    values: Vec<Option<Val>>,
    shared: SharedMemory,
    barriers: BarrierTable,
    prints: Vec<String>,
    spin: SpinWait,
    flow: ControlState,
}

/// Detects spin waits: accesses that repeat without any change.
#[derive(Default)]
struct SpinWait {
    count: u32,
    /// Change count of memory at the last access.
    changes: u64,
    /// Atomics since that change, and the last load: the op and its first address, with a hash of the program's scalars
    /// if it was executed before.
    atomics: HashMap<(OpId, u64), Option<u64>>,
    loaded: Option<((OpId, u64), Option<u64>)>,
    /// The op that spins.
    at: Option<OpId>,
}

/// Runs a verified function.
pub(super) fn run(
    func: &Func,
    args: &[Tile],
    grid: [u32; 3],
    memory: &mut Memory,
    options: RunOptions,
    trace: &mut dyn Trace,
) -> Result<Outcome, InterpError> {
    let ctas = ctas(func);
    let total = grid.iter().map(|&n| n as usize).product::<usize>() * ctas as usize;
    memory.begin_launch(total);
    let mut machine = Machine {
        func,
        takes_turns: takes_turns(func),
        memory,
        trace,
        max_ops: options.max_ops,
        grid,
        ctas,
        program: [0; 3],
        cta: 0,
        values: Vec::new(),
        shared: SharedMemory::default(),
        barriers: BarrierTable::default(),
        outcome: Outcome::default(),
        spin: SpinWait::default(),
        random: match options.order {
            Order::Sequential => None,
            Order::Interleaved(seed) => Some(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1),
        },
    };
    let outcome = machine.run_grid(args, total);
    memory.end_launch();
    outcome
}

pub(super) struct Machine<'a> {
    pub func: &'a Func,
    /// Whether programs of a block take turns, in which others use the buffers of a producer.
    pub takes_turns: bool,
    pub memory: &'a mut Memory,
    trace: &'a mut dyn Trace,
    max_ops: u64,
    grid: [u32; 3],
    /// The CTAs of a cluster that run one program. Each runs as if it were a program of its own.
    ctas: u32,
    /// Coordinates and state of the running program, and the rank of its CTA.
    pub program: [u32; 3],
    cta: u32,
    values: Vec<Option<Val>>,
    pub shared: SharedMemory,
    pub barriers: BarrierTable,
    pub outcome: Outcome,
    spin: SpinWait,
    /// State of Marsaglia's xorshift; `None` if programs run one after the other.
    random: Option<u64>,
}

impl Machine<'_> {
    fn random_below(&mut self, n: usize) -> usize {
        let Some(x) = &mut self.random else { return 0 };
        *x ^= *x << 13;
        *x ^= *x >> 7;
        *x ^= *x << 17;
        (*x % n as u64) as usize
    }

    fn start(&mut self, number: usize, args: &[Tile]) -> Program {
        let [x, y, _] = self.grid.map(|n| n as usize);
        let (number_of_cta, ctas) = (number, self.ctas as usize);
        let number = number_of_cta / ctas;
        let coordinates = [number % x, number / x % y, number / (x * y)].map(|n| n as u32);
        let mut values = vec![None; self.func.num_values()];
        for (&v, arg) in self.func.block(self.func.body).params.iter().zip(args) {
            values[v.0 as usize] = Some(Val::from(arg.clone()));
        }
        Program {
            number: number_of_cta,
            coordinates,
            cta: (number_of_cta % ctas) as u32,
            values,
            shared: SharedMemory::default(),
            barriers: BarrierTable::default(),
            prints: Vec::new(),
            spin: SpinWait::default(),
            flow: ControlState::new(self.func.body),
        }
    }

    /// Swaps a program's state in or out.
    fn swap_state(&mut self, program: &mut Program) {
        std::mem::swap(&mut self.values, &mut program.values);
        std::mem::swap(&mut self.shared, &mut program.shared);
        std::mem::swap(&mut self.barriers, &mut program.barriers);
        std::mem::swap(&mut self.outcome.prints, &mut program.prints);
        std::mem::swap(&mut self.spin, &mut program.spin);
    }

    fn run_grid(&mut self, args: &[Tile], total: usize) -> Result<Outcome, InterpError> {
        let mut limit = if self.random.is_some() { MAX_RESIDENT_PROGRAMS } else { 1 };
        let mut resident: Vec<Program> = Vec::new();
        let mut prints = BTreeMap::new();
        let mut started = 0;
        loop {
            while resident.len() < limit && started < total {
                resident.push(self.start(started, args));
                started += 1;
            }
            if resident.is_empty() {
                self.outcome.prints = prints.into_values().flatten().collect();
                return Ok(std::mem::take(&mut self.outcome));
            }
            // In sequential order: the first program that is not spinning.
            let changes = self.memory.changes();
            let waits = |p: &Program| p.spin.count >= SPIN_LIMIT && p.spin.changes == changes;
            let at = match self.random {
                Some(_) => self.random_below(resident.len()),
                None => resident.iter().position(|p| !waits(p)).unwrap_or(0),
            };
            let mut program = resident.swap_remove(at);
            (self.program, self.cta) = (program.coordinates, program.cta);
            self.memory.set_program(program.number);
            self.swap_state(&mut program);
            let stop = self.resume(&mut program.flow);
            self.swap_state(&mut program);
            match stop? {
                Stop::Ended => {
                    prints.insert(program.number, program.prints);
                    continue;
                }
                Stop::Switch => resident.push(program),
            }
            let changes = self.memory.changes();
            let waits = |p: &Program| p.spin.count >= SPIN_LIMIT && p.spin.changes == changes;
            if !resident.iter().all(waits) {
                continue;
            }
            if started < total {
                // The programs may wait for one that has not started.
                limit = resident.len() + 1;
                continue;
            }
            let first = &resident[0];
            self.program = first.coordinates;
            let at =
                first.spin.at.expect("internal compiler error: a spinning program without an op; please report this");
            let message = format!(
                "livelock: all {} programs that have not exited repeat global memory accesses that change nothing",
                resident.len()
            );
            return Err(self.error(at, message));
        }
    }

    /// Hash of the program's scalars.
    fn hash_scalars(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for value in &self.values {
            if let Some(Val::Tile(tile)) = value
                && tile.shape.is_empty()
            {
                tile.bits.hash(&mut hasher);
            }
        }
        hasher.finish()
    }

    /// Whether the scheduler may switch programs after this op, which has been executed. Updates the detection of spin
    /// waits.
    pub(super) fn yields_after(&mut self, id: OpId) -> bool {
        let func = self.func;
        let data = func.op(id);
        let atomic = match data.op {
            Op::AtomicRmw { .. } | Op::AtomicCas { .. } | Op::AtomicView { .. } | Op::SemaphoreWait => true,
            Op::Load { .. }
            | Op::Store { .. }
            | Op::LoadView { .. }
            | Op::StoreView { .. }
            | Op::AsyncCopy { .. }
            | Op::AsyncLoad { .. }
            | Op::TmaLoad { .. }
            | Op::TmaStore { .. } => false,
            _ => return false,
        };
        let first = match &self.operands(id)[0] {
            Val::Tile(pointers) => pointers.bits.first().copied().unwrap_or(0),
            Val::View(view) => view
                .base
                .wrapping_add(view.offsets.iter().fold(0u64, |sum, &o| sum.wrapping_mul(31).wrapping_add(o as u64))),
            Val::Shared(_) | Val::Barriers(_) => 0,
        };
        let (here, changes) = ((id, first), self.memory.changes());
        if self.spin.changes != changes {
            self.spin = SpinWait { changes, ..SpinWait::default() };
        }
        let seen = match atomic {
            true => self.spin.atomics.get(&here).copied(),
            false => self.spin.loaded.filter(|(last, _)| *last == here).map(|(_, scalars)| scalars),
        };
        // Different scalars, such as a loop index, mean progress.
        let scalars = seen.map(|_| self.hash_scalars());
        match atomic {
            true => _ = self.spin.atomics.insert(here, scalars),
            false => self.spin.loaded = Some((here, scalars)),
        }
        let again = scalars.is_some() && seen == Some(scalars);
        self.spin.count += u32::from(again);
        self.spin.at = Some(id);
        atomic || again || (self.random.is_some() && self.random_below(SWITCH_PERIOD) == 0)
    }
}

/// Failure of an op: in the op itself, or in an op of its regions, which the error names already.
pub(super) enum Fault {
    Here(String),
    Inside(InterpError),
}

impl From<String> for Fault {
    fn from(message: String) -> Fault {
        Fault::Here(message)
    }
}

impl From<InterpError> for Fault {
    fn from(error: InterpError) -> Fault {
        Fault::Inside(error)
    }
}

/// Result of an op with one result.
fn one(value: impl Into<Val>) -> Result<Vec<Val>, Fault> {
    Ok(vec![value.into()])
}

/// Result of an op without results, given its completion.
fn none(_done: ()) -> Result<Vec<Val>, Fault> {
    Ok(Vec::new())
}

/// Whether operand `i`, a predicate, is present and false.
fn is_predicated_off(operands: &[Val], i: usize) -> bool {
    operands.get(i).is_some_and(|switch| switch.bits() == 0)
}

fn wrong_type(op: &str) -> ! {
    panic!("internal compiler error: {op} of another type passed the verifier; please report this")
}

impl<'a> Machine<'a> {
    /// Runs a region of pure ops with these arguments; returns the operands of its terminator.
    fn enter(&mut self, block: BlockId, params: Vec<Val>) -> Result<Vec<Val>, InterpError> {
        self.set_params(block, params);
        for &id in &self.func.block(block).ops {
            if self.func.op(id).op == Op::Yield {
                return Ok(self.operands(id));
            }
            let results = self.op(id).map_err(|fault| match fault {
                Fault::Here(message) => self.error(id, message),
                Fault::Inside(error) => error,
            })?;
            self.set_results(id, results);
        }
        unreachable!("internal compiler error: a block without a terminator passed the verifier; please report this")
    }

    pub(super) fn set_params(&mut self, block: BlockId, params: Vec<Val>) {
        for (&v, val) in self.func.block(block).params.iter().zip(params) {
            self.set(v, val);
        }
    }

    pub(super) fn set_results(&mut self, id: OpId, results: Vec<Val>) {
        for (&v, val) in self.func.op(id).results.iter().zip(results) {
            self.set(v, val);
        }
    }

    fn set(&mut self, v: Value, val: Val) {
        if let Val::Tile(tile) = &val {
            self.trace.value(v, tile);
        }
        self.values[v.0 as usize] = Some(val);
    }

    /// Counts an executed op; fails at the limit.
    pub(super) fn count(&mut self) -> Result<(), Fault> {
        self.outcome.ops += 1;
        if self.outcome.ops > self.max_ops {
            return Err(Fault::Here(format!("{STOPPED} {} ops", self.max_ops)));
        }
        Ok(())
    }

    pub(super) fn error(&self, id: OpId, message: String) -> InterpError {
        InterpError { op: print_op(self.func, id), loc: self.func.op(id).loc.clone(), program: self.program, message }
    }

    fn get(&self, v: Value) -> Val {
        self.values[v.0 as usize].clone().expect("internal compiler error: use before definition; please report this")
    }

    pub(super) fn operands(&self, id: OpId) -> Vec<Val> {
        self.func.op(id).operands.iter().map(|&v| self.get(v)).collect()
    }

    /// Type of a result.
    fn ty(&self, id: OpId, result: usize) -> &'a Type {
        self.func.ty(self.func.op(id).results[result])
    }

    /// Executes an op without control flow.
    #[expect(clippy::too_many_lines, reason = "one arm per op")]
    pub(super) fn op(&mut self, id: OpId) -> Result<Vec<Val>, Fault> {
        self.count()?;
        let operands = self.operands(id);
        let tile = |i: usize| operands[i].tile();
        let optional = |i: usize| operands.get(i).map(Val::tile);
        match &self.func.op(id).op {
            Op::Unary(op) => one(elementwise::unary(*op, tile(0))),
            Op::Binary(op) => one(elementwise::binary(*op, tile(0), tile(1))),
            Op::Cmp(op) => one(elementwise::cmp(*op, tile(0), tile(1))),
            Op::Fma => one(elementwise::fma(tile(0), tile(1), tile(2))),
            Op::Select => one(elementwise::select(tile(0), tile(1), tile(2))),
            Op::Cast => one(elementwise::cast(tile(0), self.dtype(id))),
            Op::Bitcast => one(elementwise::bitcast(tile(0), self.ty(id, 0).elem().unwrap_or(tile(0).elem))),
            Op::InlineAsm { .. } => Err(Fault::Here("the interpreter does not support inline assembly".into())),
            Op::Hint { divisible, contiguous, at_least } => {
                elementwise::hint(tile(0), divisible.unwrap_or(1), *contiguous, *at_least)?;
                Ok(operands)
            }

            Op::ProgramId { axis } => {
                let own = self.program[*axis as usize];
                let replicas = replicas_of_producer(self.func, id).filter(|_| *axis == 0).map_or(1, |(count, _)| count);
                let first = match self.takes_turns {
                    true => own % (self.grid[0] / replicas).max(1),
                    false => own - own % replicas,
                };
                one(Tile::scalar(DType::I32, first as u64))
            }
            Op::CtaRank { .. } => one(Tile::scalar(DType::I32, self.cta.into())),
            Op::DynamicIndex => Ok(vec![operands[1].clone()]),
            Op::TakeIndex => {
                let [index, step, end] = [1, 2, 3].map(|i| operands[i].int());
                let next = (index + step).min(end) as u32;
                self.shared.store(operands[4].shared(), &Tile::scalar(DType::I32, next.into()));
                none(self.barriers.arrive(operands[5].barriers(), operands[6].int(), 1)?)
            }
            Op::TakenIndex => {
                let index = self.shared.load(operands[0].shared())?;
                one(Tile::scalar(DType::I32, index.bits[0]))
            }
            Op::NumPrograms { axis } => one(Tile::scalar(DType::I32, self.grid[*axis as usize] as u64)),
            Op::Constant { value } => {
                let scalar = Tile::scalar(self.dtype(id), literal_bits(*value, self.dtype(id)));
                one(shape::splat(&scalar, self.ty(id, 0).shape()))
            }
            Op::Arange { start, end } => one(shape::arange(*start, *end)),
            Op::Splat => one(shape::splat(tile(0), self.ty(id, 0).shape())),
            Op::ExpandDims { axis: _ } | Op::Reshape => one(shape::reshape(tile(0), self.ty(id, 0).shape())),
            Op::Broadcast => one(shape::broadcast(tile(0), self.ty(id, 0).shape())),
            Op::Trans { perm } => one(shape::trans(tile(0), perm)),
            Op::Join => one(shape::join(tile(0), tile(1))),
            Op::Split => Ok(shape::split(tile(0)).map(Val::from).into()),
            Op::Gather { axis } => one(shape::gather_along(tile(0), tile(1), *axis)),

            Op::MakeView { order: _ } => {
                let Type::View { block, elem } = self.ty(id, 0) else { wrong_type("make_view") };
                one(access::make_view(&operands, block, *elem))
            }
            Op::Advance => one(access::advance(operands[0].view(), &operands[1..])),
            Op::LoadView { boundary, padding, eviction: _ } => {
                one(operands[0].view().load(self.memory, boundary, *padding)?)
            }
            Op::StoreView { boundary, .. } | Op::TmaStore { boundary, op: None } => {
                none(operands[0].view().store(self.memory, tile(1), boundary)?)
            }
            Op::PrefetchView { .. } => none(()),
            Op::AtomicView { op, boundary } | Op::TmaStore { boundary, op: Some(op) } => {
                none(operands[0].view().atomic(self.memory, *op, tile(1), boundary)?)
            }
            Op::PtrAdd => one(access::ptr_add(tile(0), tile(1))),
            Op::Load { eviction: _ } => one(access::load(self.memory, tile(0), optional(1), optional(2))?),
            Op::Store { eviction: _ } => none(access::store(self.memory, tile(0), tile(1), optional(2))?),
            Op::AtomicRmw { op, sem, scope } => {
                let order = access::order(sem.unwrap_or(MemSem::Relaxed), *scope);
                one(access::atomic_rmw(self.memory, *op, tile(0), tile(1), optional(2), order)?)
            }
            Op::AtomicCas { sem, scope } => {
                let order = access::order(sem.unwrap_or(MemSem::AcqRel), *scope);
                one(access::atomic_cas(self.memory, [tile(0), tile(1), tile(2)], optional(3), order)?)
            }

            Op::Dot { precision, .. } => one(dot_and_reduce::dot(tile(0), tile(1), tile(2), *precision)),
            Op::Reduce { axis } => self.reduce(id, &operands, *axis),
            Op::Scan { axis, reverse } => self.scan(id, &operands, *axis, *reverse),

            Op::For { .. }
            | Op::If
            | Op::While
            | Op::WarpSpecialize { .. }
            | Op::MbarrierWait
            | Op::SemaphoreWait
            | Op::PingpongWait
            | Op::Yield
            | Op::Condition
            | Op::Return => {
                unreachable!("internal compiler error: control flow among pure ops; please report this")
            }
            Op::Assume if operands[0].bits() == 0 => Err(Fault::Here("the assumption does not hold".into())),
            Op::Assume => none(()),
            Op::DevicePrint { prefix } => {
                let values: Vec<String> = operands.iter().map(|v| elementwise::display(v.tile())).collect();
                self.outcome.prints.push(format!("{prefix}{}", values.join(" ")));
                none(())
            }
            Op::DeviceAssert { message } => match tile(0).bits.iter().position(|&b| b == 0) {
                Some(i) => Err(Fault::Here(format!("assertion failed at element {i}: {message}"))),
                None => none(()),
            },

            Op::ConvertLayout | Op::WgmmaWait { pending: _ } => Ok(operands),
            Op::LocalAlloc => {
                let Type::Shared { shape, elem, layout: _ } = self.ty(id, 0) else { wrong_type("local_alloc") };
                one(self.shared.alloc(shape, *elem, optional(0)))
            }
            Op::LocalLoad => one(self.shared.load(operands[0].shared())?),
            Op::LocalStore => {
                self.shared.store(operands[0].shared(), tile(1));
                none(())
            }
            Op::LocalSlot => one(operands[0].shared().slot(operands[1].int())?),
            Op::LocalTrans { perm } => one(operands[0].shared().trans(perm)),
            Op::AsyncCopy { boundary, padding } => {
                if operands.get(2).is_none_or(|switch| switch.bits() != 0) {
                    let tile = operands[0].view().load(self.memory, boundary, *padding)?;
                    self.shared.store(operands[1].shared(), &tile);
                }
                none(())
            }
            Op::AsyncLoad { vector: _ } => {
                if !is_predicated_off(&operands, 2) {
                    let loaded = access::load(self.memory, tile(0), optional(3), None)?;
                    self.shared.store(operands[1].shared(), &loaded);
                }
                none(())
            }
            Op::AsyncCommit
            | Op::AsyncWait { pending: _ }
            | Op::FenceAsyncShared
            | Op::PingpongArrive
            | Op::ClusterBarrier
            | Op::BlockBarrier { id: _, threads: _ } => none(()),
            Op::MbarrierAlloc { arrivals } => {
                let Type::Barrier { count } = self.ty(id, 0) else { wrong_type("mbarrier_alloc") };
                one(self.barriers.alloc(*count, *arrivals))
            }
            Op::MbarrierFree => none(self.barriers.free(operands[0].barriers())?),
            Op::MbarrierExpect { bytes } => match is_predicated_off(&operands, 2) {
                true => none(()),
                false => none(self.barriers.expect(operands[0].barriers(), operands[1].int(), *bytes)?),
            },
            // The other CTAs of the cluster do the same as this one.
            Op::MbarrierArrive { warps, lanes, ctas } => {
                let arrivals = warps * lanes * ctas.unwrap_or(1);
                none(self.barriers.arrive(operands[0].barriers(), operands[1].int(), arrivals)?)
            }
            Op::AsyncArrive { threads } => {
                none(self.barriers.arrive(operands[0].barriers(), operands[1].int(), *threads)?)
            }
            Op::TmaLoad { boundary, ctas: _ } => {
                if !is_predicated_off(&operands, 4) {
                    let tile = operands[0].view().load(self.memory, boundary, Padding::Zero)?;
                    let (group, index, to) = (operands[2].barriers(), operands[3].int(), operands[1].shared());
                    self.barriers.copy(group, index, to, tile, &mut self.shared)?;
                }
                none(())
            }
            Op::MmaSync { precision, warps: _, k_end, n_end } => {
                one(self.dot_of_tiles_or_buffers(&operands, *precision, [*k_end, *n_end])?)
            }
            Op::FmaDot => one(self.dot_of_tiles_or_buffers(&operands, Precision::Ieee, [None; 2])?),
            Op::Wgmma { warps: _, k_end, n_end } => {
                one(self.dot_of_tiles_or_buffers(&operands, Precision::Tf32, [*k_end, *n_end])?)
            }
        }
    }

    /// Number type of the first result.
    fn dtype(&self, id: OpId) -> DType {
        self.ty(id, 0).dtype().expect("internal compiler error: not a number after verification; please report this")
    }

    /// A dot whose operands may be in shared memory. Ignores elements beyond `ends` along K and N, which hardware may
    /// skip.
    fn dot_of_tiles_or_buffers(
        &self,
        operands: &[Val],
        precision: Precision,
        ends: [Option<u32>; 2],
    ) -> Result<Tile, String> {
        let read = |v: &Val| match v {
            Val::Shared(buffer) => self.shared.load(buffer).map(Rc::new),
            Val::Tile(tile) => Ok(tile.clone()),
            Val::View(_) | Val::Barriers(_) => {
                unreachable!("internal compiler error: dot of a view or barrier; please report this")
            }
        };
        let [k_end, n_end] = ends;
        let a = zero_beyond(read(&operands[0])?, 1, k_end);
        let b = zero_beyond(zero_beyond(read(&operands[1])?, 0, k_end), 1, n_end);
        Ok(dot_and_reduce::dot(&a, &b, operands[2].tile(), precision))
    }

    /// Runs the combine region of a `reduce` or `scan` on the elements at two positions.
    fn combine(
        &mut self,
        region: BlockId,
        elems: &[Elem],
        left: &Elements,
        right: &Elements,
    ) -> Result<Elements, InterpError> {
        let scalars = elems.iter().cycle().zip(left.iter().chain(right));
        let params = scalars.map(|(&elem, &bits)| Tile::scalar(elem, bits).into()).collect();
        Ok(self.enter(region, params)?.iter().map(Val::bits).collect())
    }

    fn reduce(&mut self, id: OpId, operands: &[Val], axis: usize) -> Result<Vec<Val>, Fault> {
        let region = self.func.op(id).regions[0];
        let tiles: Vec<&Tile> = operands.iter().map(Val::tile).collect();
        let elems: Vec<Elem> = tiles.iter().map(|t| t.elem).collect();
        let mut results: Vec<Tile> = tiles.iter().map(|t| Tile { bits: Vec::new(), ..(*t).clone() }).collect();
        for result in &mut results {
            result.shape.remove(axis);
        }
        for positions in dot_and_reduce::slices_along_axis(&tiles[0].shape, axis) {
            let slice = positions.iter().map(|&p| tiles.iter().map(|t| t.bits[p]).collect()).collect();
            let reduced = dot_and_reduce::tree_reduce(slice, |l, r| self.combine(region, &elems, l, r))?;
            for (result, bits) in results.iter_mut().zip(reduced) {
                result.bits.push(bits);
            }
        }
        Ok(results.into_iter().map(Val::from).collect())
    }

    fn scan(&mut self, id: OpId, operands: &[Val], axis: usize, reverse: bool) -> Result<Vec<Val>, Fault> {
        let region = self.func.op(id).regions[0];
        let tiles: Vec<&Tile> = operands.iter().map(Val::tile).collect();
        let elems: Vec<Elem> = tiles.iter().map(|t| t.elem).collect();
        let mut results: Vec<Tile> = tiles.iter().map(|t| (*t).clone()).collect();
        for mut positions in dot_and_reduce::slices_along_axis(&tiles[0].shape, axis) {
            if reverse {
                positions.reverse();
            }
            let mut slice: Vec<Elements> =
                positions.iter().map(|&p| tiles.iter().map(|t| t.bits[p]).collect()).collect();
            dot_and_reduce::inclusive_scan(&mut slice, |l, r| self.combine(region, &elems, l, r))?;
            for (&p, elements) in positions.iter().zip(slice) {
                for (result, bits) in results.iter_mut().zip(elements) {
                    result.bits[p] = bits;
                }
            }
        }
        Ok(results.into_iter().map(Val::from).collect())
    }
}

/// A matrix with zeros from `end` on along a dimension.
fn zero_beyond(tile: Rc<Tile>, dim: usize, end: Option<u32>) -> Rc<Tile> {
    let Some(end) = end else { return tile };
    let mut cleared = (*tile).clone();
    let columns = cleared.shape[1];
    for (i, bits) in cleared.bits.iter_mut().enumerate() {
        if [i / columns, i % columns][dim] >= end as usize {
            *bits = 0;
        }
    }
    Rc::new(cleared)
}

/// The programs for which a producer loads, for an op in its partition, and the warps of each: each program interprets the
/// producer of its block.
pub(super) fn replicas_of_producer(func: &Func, id: OpId) -> Option<(u32, u32)> {
    let mut block = func.parent_block(id);
    while let Some(owner) = func.owner(block) {
        if let Op::WarpSpecialize { replicas, warps, .. } = func.op(owner).op {
            return replicas.filter(|_| func.op(owner).regions[1] == block).map(|count| (count, warps));
        }
        block = func.parent_block(owner);
    }
    None
}
