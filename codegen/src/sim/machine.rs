//! Executes the threads of one program, one at a time. A thread runs until it reaches a collective instruction, waits
//! or yields.

use super::Global;
use super::barriers::{BulkCopy, MAP_BASE, Mbarrier, NamedBarrier};
use super::bulk_write::{BulkWrite, BulkWrites};
use super::callee::Callee;
use super::error::{Fault, SimError, UnsupportedKind};
use super::global::{AccessKind, Accessor};
use super::grid::Launch;
use super::memory::Shared;
use super::parse::{Function, Inst, Line, Module, Operand, Ty};
use super::random::Random;
use super::value::{self, Value, from_bytes, mask, to_bytes, to_bytes_undef_as_zero};
use crate::target::TensorMapDesc;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;

/// Maximum number of instructions per thread; a thread that exceeds it is reported as an infinite loop.
const MAX_STEPS: u64 = 50_000_000;
/// A thread that repeats an atomic, or the same load, this many times while memory does not change is considered to
/// spin, waiting for other programs.
const SPIN_LIMIT: u32 = 256;
/// Repeated accesses of which the registers are not compared, which takes long.
const UNCOMPARED_REPEATS: u32 = 64;
/// Bits of the address of a byte in a local variable, of which each thread has its own.
const LOCAL_BITS: u32 = 32;
/// One in this many plain accesses of global memory switches to other threads and programs.
const SWITCH_PERIOD: usize = 8;

/// The functions of the module and the launch arguments, shared by all programs of a launch.
pub(super) struct LoadedKernel {
    functions: HashMap<String, Rc<Function>>,
    entry: Rc<Function>,
    args: Vec<u64>,
    /// The blocks of a cluster.
    pub ctas: u32,
}

impl LoadedKernel {
    /// Checks a parsed module against the launch.
    ///
    /// # Errors
    /// The module has no kernel, or the number of its parameters differs from the launch's arguments.
    pub fn new(module: Module, launch: &Launch) -> Result<LoadedKernel, SimError> {
        let functions: HashMap<String, Rc<Function>> =
            module.functions.into_iter().map(|(name, f)| (name, Rc::new(f))).collect();
        let entry = functions.get(&module.entry).cloned();
        let entry = entry.ok_or_else(|| SimError::Launch("the LLVM IR defines no `ptx_kernel`".into()))?;
        let maps = (0..launch.tensor_maps.len() as u64).map(|i| MAP_BASE + i);
        let args: Vec<u64> = launch.args.iter().copied().chain(maps).collect();
        if entry.params.len() != args.len() {
            let (takes, has) = (entry.params.len(), args.len());
            let message = format!("the kernel takes {takes} arguments, tensor maps included, and the launch has {has}");
            return Err(SimError::Launch(message));
        }
        launch.tensor_maps.iter().try_for_each(TensorMapDesc::check).map_err(SimError::Launch)?;
        let ctas = cluster_size(launch.llvm_ir)?;
        if !launch.grid[0].is_multiple_of(ctas) {
            let message = format!("a grid of {} blocks along x for clusters of {ctas}", launch.grid[0]);
            return Err(SimError::Launch(message));
        }
        Ok(LoadedKernel { functions, entry, args, ctas })
    }

    /// Number of registers per thread.
    pub fn registers(&self) -> usize {
        self.entry.registers
    }
}

/// The blocks of a cluster, which extends along the first axis.
fn cluster_size(llvm_ir: &str) -> Result<u32, SimError> {
    let Some((_, rest)) = llvm_ir.split_once("\"nvvm.cluster_dim\"=\"") else { return Ok(1) };
    let size = rest.split('"').next().and_then(|dims| dims.strip_suffix(",1,1")).and_then(|x| x.parse().ok());
    size.filter(|&n| n > 0).ok_or_else(|| SimError::Launch("a cluster with other dimensions than the first".into()))
}

/// How a time slice of a program ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum SliceEnd {
    Ready,
    /// At an access of global memory, where other programs may run.
    Yield,
    Exited,
}

/// What a thread waits for.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Waiting {
    /// The other threads of its cluster, block, warpgroup or warp, at this instruction.
    Cluster,
    Block,
    Warpgroup,
    Warp,
    /// A phase of the mbarrier at this address, by its parity.
    Phase(u64, u64),
    /// The named barrier of this number.
    NamedBarrier(usize),
    Done,
}

/// A call frame: a position in a function, and its registers.
#[derive(Clone, Debug)]
struct Frame {
    function: Rc<Function>,
    block: usize,
    /// Index in the block of the next instruction.
    next_line: usize,
    /// The predecessor block, for phis.
    from: usize,
    registers: Vec<Value>,
    /// Register of the caller that receives the result.
    result: Option<usize>,
}

pub(super) struct Thread {
    pub id: u32,
    frames: Vec<Frame>,
    pub waiting: Option<Waiting>,
    /// `cp.async` copies that are not committed yet, and committed groups.
    pub uncommitted_copies: Vec<(u64, Vec<u8>)>,
    pub copy_groups: Vec<Vec<(u64, Vec<u8>)>>,
    pub bulk_writes: BulkWrites,
    /// Bytes of local variables, by address.
    stack: HashMap<u64, u8>,
    steps: u64,
    spin: SpinWait,
}

impl Thread {
    /// The value of a local variable: undefined if it was not stored.
    fn load_local(&self, ty: &Ty, p: u64) -> Value {
        let bytes: Option<Vec<u8>> = (p..).take(ty.bytes()).map(|at| self.stack.get(&at).copied()).collect();
        bytes.map_or(Value::Undef, |bytes| from_bytes(ty, &bytes))
    }
}

/// An instruction, by its basic block and its index there, and the address that it accesses.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct AccessSite {
    block: usize,
    line: usize,
    address: u64,
}

/// Detects spin waits of a thread: repeated accesses of global memory that observed no change.
#[derive(Default)]
struct SpinWait {
    count: u32,
    /// Accesses that were made before, since the last change.
    repeats: u32,
    /// The value of `Global::changes` during these accesses.
    changes: u64,
    /// Atomics since the last change, and the last load, with a hash of the thread's registers at the last repetition.
    atomics: HashMap<AccessSite, Option<u64>>,
    loaded: Option<(AccessSite, Option<u64>)>,
}

/// An MMA in flight, and the shared memory that it reads.
pub(super) struct WgmmaInFlight {
    pub number: u64,
    /// Addresses and lengths.
    pub reads: Vec<(u64, usize)>,
}

/// The wgmma groups of a warpgroup.
#[derive(Default)]
pub(super) struct WgmmaGroups {
    pub committed: Vec<Vec<WgmmaInFlight>>,
    pub uncommitted: Vec<WgmmaInFlight>,
    /// Per member: whether a `wgmma.fence` follows the last commit.
    pub fenced: Vec<bool>,
}

pub(super) struct Block<'a> {
    pub launch: &'a Launch<'a>,
    kernel: &'a LoadedKernel,
    /// Coordinates of the block in the grid (`%ctaid`), or of the first block of the cluster, whose threads follow each
    /// other.
    program_id: [u32; 3],
    /// Linear index of the block or cluster in the grid.
    pub number: u32,
    pub threads: Vec<Thread>,
    pub shared: Shared,
    pub random: Random,
    /// MMAs in flight, per warpgroup.
    pub wgmma_groups: HashMap<u32, WgmmaGroups>,
    pub next_wgmma: u64,
    /// By shared address.
    pub mbarriers: HashMap<u64, Mbarrier>,
    pub next_barrier: u32,
    pub named: HashMap<usize, NamedBarrier>,
    /// TMA loads in flight.
    pub bulk_copies: Vec<BulkCopy>,
    /// Bulk reductions and TMA stores that have read their values and not written them yet.
    pub pending_bulk_writes: Vec<BulkWrite>,
    /// Instructions of all threads so far: what the clock shows.
    pub steps: u64,
    /// Whether the running thread yields.
    yields: bool,
    /// A thread that only spins, and the value of `Global::changes` then.
    spinning: Option<(u32, u64)>,
}

impl<'a> Block<'a> {
    pub fn new(kernel: &'a LoadedKernel, launch: &'a Launch<'a>, program_id: [u32; 3], number: u32) -> Block<'a> {
        let threads = (0..launch.threads * kernel.ctas)
            .map(|id| {
                let entry = kernel.entry.clone();
                let mut registers = vec![Value::Undef; entry.registers];
                for (&p, &a) in entry.params.iter().zip(&kernel.args) {
                    registers[p] = Value::Bits(a);
                }
                let frame = Frame { function: entry, block: 0, next_line: 0, from: 0, registers, result: None };
                Thread {
                    id,
                    frames: vec![frame],
                    waiting: None,
                    uncommitted_copies: Vec::new(),
                    copy_groups: Vec::new(),
                    bulk_writes: BulkWrites::default(),
                    stack: HashMap::new(),
                    steps: 0,
                    spin: SpinWait::default(),
                }
            })
            .collect();
        Block {
            launch,
            kernel,
            program_id,
            number,
            threads,
            shared: Shared::new(launch.shared_bytes, launch.threads, kernel.ctas),
            random: Random::new(launch.seed.wrapping_add(u64::from(number) << 32)),
            wgmma_groups: HashMap::new(),
            next_wgmma: 0,
            mbarriers: HashMap::new(),
            next_barrier: 0,
            named: HashMap::new(),
            bulk_copies: Vec::new(),
            pending_bulk_writes: Vec::new(),
            steps: 0,
            yields: false,
            spinning: None,
        }
    }

    /// Runs one thread until it waits or yields; if no thread can run, executes the collective instructions that are
    /// complete.
    pub fn run_slice(&mut self, global: &mut Global) -> Result<SliceEnd, SimError> {
        let ready = self.threads.iter().filter(|thread| thread.waiting.is_none()).count();
        if ready == 0 {
            if self.threads.iter().all(|t| t.waiting == Some(Waiting::Done)) {
                return self.end(global).map(|()| SliceEnd::Exited).map_err(|e| self.error(None, e));
            }
            let which = self.random.below(usize::MAX);
            if !self.run_collectives(global)? && !self.complete_bulk_copy(which) {
                return Err(self.deadlock());
            }
            return Ok(SliceEnd::Ready);
        }
        // Copies complete at random times.
        if !self.bulk_copies.is_empty() && self.random.below(4) == 0 {
            let which = self.random.below(usize::MAX);
            self.complete_bulk_copy(which);
        }
        if !self.pending_bulk_writes.is_empty() && self.random.below(4) == 0 {
            let which = self.random.below(self.pending_bulk_writes.len());
            let write = self.pending_bulk_writes.swap_remove(which);
            write.apply(&self.shared, self.number, global).map_err(|e| self.error(None, e))?;
        }
        let chosen = self.random.below(ready);
        let mut waiting = self.threads.iter().enumerate().filter(|(_, thread)| thread.waiting.is_none());
        let (t, _) = waiting.nth(chosen).expect("internal error: fewer ready threads than counted");
        self.yields = false;
        while self.threads[t].waiting.is_none() {
            self.step(t, global).map_err(|e| self.error(Some(t), e))?;
            if self.yields {
                return Ok(SliceEnd::Yield);
            }
        }
        Ok(SliceEnd::Ready)
    }

    /// Ends the program when all threads have exited.
    fn end(&mut self, global: &mut Global) -> Result<(), String> {
        if self
            .wgmma_groups
            .values()
            .any(|f| !f.uncommitted.is_empty() || f.committed.iter().any(|group| !group.is_empty()))
        {
            return Err("the block ends while wgmma instructions are in flight".into());
        }
        self.barriers_at_end()?;
        for write in std::mem::take(&mut self.pending_bulk_writes) {
            write.apply(&self.shared, self.number, global)?;
        }
        Ok(())
    }

    /// An error of a thread at its current instruction, or of the whole block.
    fn error(&self, thread: Option<usize>, message: String) -> SimError {
        let at = thread.and_then(|t| self.current_line(t));
        let (instruction, source_loc) =
            at.map_or_else(Default::default, |l| (l.text.clone(), l.source_loc.to_string()));
        self.fault(thread, instruction, source_loc, message)
    }

    fn fault(&self, thread: Option<usize>, instruction: String, source_loc: String, message: String) -> SimError {
        let thread = thread.map(|t| t as u32);
        SimError::Fault(Box::new(Fault { block: self.program_id, thread, instruction, source_loc, message }))
    }

    /// The current instruction of a thread.
    fn current_line(&self, thread: usize) -> Option<&Line> {
        let f = self.threads[thread].frames.last()?;
        f.function.blocks[f.block].get(f.next_line)
    }

    fn current_text(&self, thread: usize) -> &str {
        self.current_line(thread).map_or("the end", |l| &l.text)
    }

    fn deadlock(&self) -> SimError {
        let waiting_threads = self.threads.chunks(32).map(|warp| {
            let t = warp.iter().find(|t| t.waiting != Some(Waiting::Done)).unwrap_or(&warp[0]);
            format!("thread {}: {}", t.id, self.current_text(t.id as usize))
        });
        let waiting_threads: Vec<String> = waiting_threads.collect();
        let open = self.incomplete_phases();
        let first = self.threads.iter().position(|t| t.waiting != Some(Waiting::Done));
        let source_loc =
            first.and_then(|t| self.current_line(t)).map_or_else(String::new, |l| l.source_loc.to_string());
        let message = format!("deadlock: threads wait for each other forever: {}{open}", waiting_threads.join("; "));
        self.fault(None, String::new(), source_loc, message)
    }

    /// Whether the program only waits for other programs, in this state of memory.
    pub fn is_spinning(&self, changes: u64) -> bool {
        self.spinning.is_some_and(|(_, when)| when == changes)
    }

    /// The error if every program spins and memory does not change.
    pub fn livelock(&self, programs: usize) -> SimError {
        let thread = self.spinning.map(|(t, _)| t as usize);
        let message = format!(
            "livelock: all {programs} programs that have not exited repeat global memory accesses that change nothing"
        );
        self.error(thread, message)
    }

    /// Notes an access of global memory by thread `t`, at which other threads may run.
    fn note_access(&mut self, t: usize, global: &Global, address: u64, atomic: bool) {
        let Thread { frames, spin, .. } = &mut self.threads[t];
        let f = frames.last().expect("internal error: no running thread");
        let here = AccessSite { block: f.block, line: f.next_line, address };
        if spin.changes != global.changes {
            *spin = SpinWait { changes: global.changes, ..SpinWait::default() };
        }
        let seen = match atomic {
            true => spin.atomics.get(&here).copied(),
            false => spin.loaded.filter(|(site, _)| *site == here).map(|(_, state)| state),
        };
        spin.repeats += u32::from(seen.is_some());
        // With other register values, such as a loop index, it is not a repetition. Loops of few iterations need no such comparison.
        let state = seen.filter(|_| spin.repeats > UNCOMPARED_REPEATS).map(|_| {
            let mut hasher = DefaultHasher::new();
            f.registers.hash(&mut hasher);
            hasher.finish()
        });
        match atomic {
            true => _ = spin.atomics.insert(here, state),
            false => spin.loaded = Some((here, state)),
        }
        let again = state.is_some() && seen == Some(state);
        spin.count += u32::from(again);
        if spin.count >= SPIN_LIMIT {
            self.spinning = Some((t as u32, global.changes));
        }
        self.yields |= atomic || again;
    }

    fn maybe_switch(&mut self) {
        self.yields |= self.random.below(SWITCH_PERIOD) == 0;
    }

    pub(super) fn read_global(&mut self, t: usize, global: &mut Global, p: u64, len: usize) -> Result<Vec<u8>, String> {
        let accessor = Accessor { program: self.number, thread: t as u32, clocks: &self.shared.clocks };
        let bytes = global.read(p, len, &accessor)?;
        self.note_access(t, global, p, false);
        self.maybe_switch();
        Ok(bytes)
    }

    pub(super) fn write_global(&mut self, t: usize, global: &mut Global, p: u64, bytes: &[u8]) -> Result<(), String> {
        let accessor = Accessor { program: self.number, thread: t as u32, clocks: &self.shared.clocks };
        global.write(p, bytes, &accessor)?;
        self.maybe_switch();
        Ok(())
    }

    /// Executes an atomic; returns the old value.
    pub(super) fn atomic_global(
        &mut self,
        t: usize,
        global: &mut Global,
        p: u64,
        ty: &Ty,
        f: impl FnOnce(u64) -> Result<Option<u64>, String>,
    ) -> Result<u64, String> {
        let accessor = Accessor { program: self.number, thread: t as u32, clocks: &self.shared.clocks };
        let old = global.update(p, ty.bytes(), &accessor, AccessKind::Atomic, |old| {
            let new = f(from_bytes(ty, old).bits()?)?;
            Ok(new.map(|new| new.to_le_bytes()[..ty.bytes()].to_vec()))
        })?;
        self.note_access(t, global, p, true);
        from_bytes(ty, &old).bits()
    }

    /// Executes the collective instructions at which all participating threads have arrived.
    fn run_collectives(&mut self, global: &mut Global) -> Result<bool, SimError> {
        let n = self.threads.len();
        let mut any = false;
        let block = self.launch.threads as usize;
        for (kind, size) in
            [(Waiting::Warp, 32), (Waiting::Warpgroup, 128), (Waiting::Block, block), (Waiting::Cluster, n)]
        {
            for first in (0..n).step_by(size) {
                let alive: Vec<usize> = (first..(first + size).min(n))
                    .filter(|&t| self.threads[t].waiting != Some(Waiting::Done))
                    .collect();
                if alive.is_empty() || !alive.iter().all(|&t| self.threads[t].waiting.as_ref() == Some(&kind)) {
                    continue;
                }
                let at = self.current_text(alive[0]);
                if let Some(&t) = alive.iter().find(|&&t| self.current_text(t) != at) {
                    let message = format!(
                        "divergence: threads of one {kind:?} are at different collective instructions, one is `{at}`"
                    );
                    return Err(self.error(Some(t), message));
                }
                self.run_collective(&alive, global).map_err(|e| self.error(Some(alive[0]), e))?;
                any = true;
            }
        }
        Ok(any)
    }

    pub(super) fn get(&self, t: usize, o: &Operand) -> Value {
        match o {
            Operand::Reg(r) => {
                self.threads[t].frames.last().expect("internal error: no running thread").registers[*r].clone()
            }
            Operand::Bits(b) => Value::Bits(*b),
            Operand::Undef => Value::Undef,
            Operand::Zero => Value::Bits(0),
        }
    }

    pub(super) fn bits(&self, t: usize, o: &Operand) -> Result<u64, String> {
        self.get(t, o).bits()
    }

    /// Stores the result of the current instruction and advances to the next.
    pub(super) fn finish(&mut self, t: usize, result: Option<usize>, v: Value) {
        let f = self.threads[t].frames.last_mut().expect("internal error: no running thread");
        if let Some(r) = result {
            f.registers[r] = v;
        }
        f.next_line += 1;
    }

    fn jump(&mut self, t: usize, to: usize) -> Result<(), String> {
        let f = self.threads[t].frames.last_mut().expect("internal error: no running thread");
        f.from = f.block;
        f.block = to;
        f.next_line = 0;
        // All phis of a block read their operands before any is written.
        let function = f.function.clone();
        let mut values = Vec::new();
        for line in &function.blocks[to] {
            let Inst::Phi { edges } = &line.inst else { break };
            let from = self.threads[t].frames.last().expect("internal error: no running thread").from;
            let (v, _) =
                edges.iter().find(|(_, b)| *b == from).ok_or("a phi without an edge for the predecessor block")?;
            values.push((line.result, self.get(t, v)));
        }
        let f = self.threads[t].frames.last_mut().expect("internal error: no running thread");
        f.next_line = values.len();
        for (r, v) in values {
            f.registers[r.expect("internal error: a phi without a result")] = v;
        }
        Ok(())
    }

    #[expect(clippy::too_many_lines, reason = "one arm per instruction")]
    fn step(&mut self, t: usize, global: &mut Global) -> Result<(), String> {
        self.threads[t].steps += 1;
        self.steps += 1;
        if self.threads[t].steps > MAX_STEPS {
            return Err("the thread executed more instructions than the limit: probably an infinite loop".into());
        }
        let f = self.threads[t].frames.last().expect("internal error: no running thread");
        let (function, block, next_line) = (f.function.clone(), f.block, f.next_line);
        let line = &function.blocks[block][next_line];
        let result = line.result;
        let v = match &line.inst {
            Inst::Binary { op, ty: Ty::Int(128), a, b } => {
                let (a, b) = (u128_bits(&self.get(t, a))?, u128_bits(&self.get(t, b))?);
                u128_value(value::wide_binary(op, a, b)?)
            }
            Inst::Binary { op, ty, a, b } => Value::Bits(value::binary(op, ty, self.bits(t, a)?, self.bits(t, b)?)?),
            Inst::Compare { predicate, ty, a, b } => {
                Value::Bits(u64::from(value::compare(predicate, ty, self.bits(t, a)?, self.bits(t, b)?)?))
            }
            Inst::FNeg { ty, x } => Value::Bits(self.bits(t, x)? ^ (1 << (ty.bytes() * 8 - 1))),
            Inst::Select { c, a, b } => {
                let chosen = if self.bits(t, c)? & 1 == 1 { a } else { b };
                self.get(t, chosen)
            }
            Inst::Cast { op, from, x, to } => self.cast(t, op, from, x, to)?,
            Inst::Gep { element, base, index_ty, index } => {
                let i = value::signed(self.bits(t, index)?, value::int_bits(index_ty)?);
                Value::Bits(self.bits(t, base)?.wrapping_add_signed(i.wrapping_mul(*element as i64)))
            }
            Inst::AtomicLoad { ty, p } => {
                let p = self.bits(t, p)?;
                Value::Bits(self.atomic_global(t, global, p, ty, |_| Ok(None))?)
            }
            Inst::Load { ty, space, p } => {
                let p = self.bits(t, p)?;
                match space {
                    0 => self.threads[t].load_local(ty, p),
                    3 => from_bytes(ty, &self.shared.read(p, ty.bytes(), t as u32)?),
                    _ => from_bytes(ty, &self.read_global(t, global, p, ty.bytes())?),
                }
            }
            Inst::Store { ty, v, space, p } => {
                let bytes = to_bytes(ty, &self.get(t, v))?;
                let p = self.bits(t, p)?;
                match space {
                    0 => self.threads[t].stack.extend((p..).zip(bytes)),
                    3 => self.shared.write(p, &bytes, t as u32)?,
                    _ => self.write_global(t, global, p, &bytes)?,
                }
                Value::Undef
            }
            Inst::ExtractElement { v, i } => self.get(t, v).element(self.bits(t, i)? as usize),
            Inst::InsertElement { len, v, x, i } => {
                let mut list: Vec<Value> = match self.get(t, v) {
                    Value::Aggregate(list) => list.to_vec(),
                    _ => vec![Value::Undef; *len],
                };
                let i = self.bits(t, i)? as usize;
                *list.get_mut(i).ok_or_else(|| format!("element {i} of a vector of {len}"))? = self.get(t, x);
                Value::aggregate(list)
            }
            Inst::ExtractValue { v, i } => self.get(t, v).element(*i),
            Inst::Call { callee, ty, args } => match self.call(t, callee, ty, args, result)? {
                Some(v) => v,
                None => return Ok(()),
            },
            Inst::Asm { program: Some(program), ty, args, .. } => {
                let inputs: Result<Vec<u64>, String> = args.iter().map(|(_, v)| self.bits(t, v)).collect();
                program.run(ty, &inputs?)?
            }
            Inst::Asm { text, constraints, ty, args, .. } => match self.asm(t, text, constraints, ty, args, global)? {
                Some(v) => v,
                None => return Ok(()),
            },
            Inst::Phi { .. } => return Err("a phi in the middle of a block".into()),
            Inst::Branch { to } => return self.jump(t, *to),
            Inst::BranchIf { c, yes, no } => {
                let to = if self.bits(t, c)? & 1 == 1 { *yes } else { *no };
                return self.jump(t, to);
            }
            Inst::Ret { v } => {
                let v = v.as_ref().map(|v| self.get(t, v));
                let frame = self.threads[t].frames.pop().expect("internal error: no running thread");
                if self.threads[t].frames.is_empty() {
                    if self.threads[t].bulk_writes.are_reading() {
                        return Err(format!("thread {t} exits before its bulk writes have read shared memory"));
                    }
                    self.threads[t].waiting = Some(Waiting::Done);
                } else {
                    self.finish(t, frame.result, v.unwrap_or(Value::Undef));
                }
                return Ok(());
            }
            Inst::Atomic { op, p, ty, v, order } => {
                let (p, v) = (self.bits(t, p)?, self.bits(t, v)?);
                let old = self.atomic_global(t, global, p, ty, |old| Ok(Some(atomic(op, ty, old, v)?)))?;
                global.synchronize(p, self.number, *order);
                Value::Bits(old)
            }
            Inst::CompareExchange { p, ty, expected, new, order } => {
                let (p, expected, new) = (self.bits(t, p)?, self.bits(t, expected)?, self.bits(t, new)?);
                let expected = expected & mask((ty.bytes() * 8) as u32);
                let old = self.atomic_global(t, global, p, ty, |old| Ok((old == expected).then_some(new)))?;
                global.synchronize(p, self.number, *order);
                Value::aggregate(vec![Value::Bits(old), Value::Bits(u64::from(old == expected))])
            }
            Inst::Alloca => Value::Bits((next_line as u64) << LOCAL_BITS),
        };
        self.finish(t, result, v);
        Ok(())
    }

    fn cast(&self, t: usize, op: &str, from: &Ty, x: &Operand, to: &Ty) -> Result<Value, String> {
        let x = self.get(t, x);
        match (from, to) {
            (Ty::Vector(..), _) | (_, Ty::Vector(..)) => {
                // Undefined parts read as zeros: only the defined parts are used later.
                let bytes = to_bytes_undef_as_zero(from, &x)?;
                Ok(from_bytes(to, &bytes))
            }
            (Ty::Int(n), Ty::Int(128)) => {
                let x = x.bits()?;
                Ok(u128_value(if op == "sext" {
                    value::signed(x, *n) as i128 as u128
                } else {
                    u128::from(x & mask(*n))
                }))
            }
            (Ty::Int(128), to) => Ok(Value::Bits(u128_bits(&x)? as u64 & mask(value::int_bits(to)?))),
            _ => match x {
                Value::Undef if op == "bitcast" => Ok(Value::Undef),
                x => Ok(Value::Bits(value::cast(op, from, x.bits()?, to)?)),
            },
        }
    }

    /// Executes a call of an intrinsic or of a function of the module. `None` if control has moved or the thread waits.
    fn call(
        &mut self,
        t: usize,
        callee: &Callee,
        ty: &Ty,
        args: &[(Ty, Operand)],
        result: Option<usize>,
    ) -> Result<Option<Value>, String> {
        let bits = |number: u32| Ok(Some(Value::Bits(u64::from(number))));
        match callee {
            Callee::Function(name) => {
                let function = self.kernel.functions.get(name).cloned();
                let function = function.ok_or_else(|| format!("a call of `{name}`, which is not defined"))?;
                let mut registers = vec![Value::Undef; function.registers];
                for (&p, (_, a)) in function.params.iter().zip(args) {
                    registers[p] = self.get(t, a);
                }
                self.threads[t].frames.push(Frame { function, block: 0, next_line: 0, from: 0, registers, result });
                Ok(None)
            }
            Callee::Pure(intrinsic) => {
                let values: Result<Vec<(&Ty, u64)>, String> =
                    args.iter().map(|(ty, a)| Ok((ty, self.bits(t, a)?))).collect();
                Ok(Some(intrinsic.evaluate(ty, &values?)?))
            }
            Callee::Shuffle { .. } | Callee::Any | Callee::WarpBarrier => {
                self.threads[t].waiting = Some(Waiting::Warp);
                Ok(None)
            }
            Callee::ProxyFence => {
                self.shared.clocks.fence(t as u32);
                Ok(Some(Value::Undef))
            }
            Callee::ThreadId => bits(t as u32 % self.launch.threads),
            Callee::ProgramId(0) => bits(self.program_id[0] + t as u32 / self.launch.threads),
            Callee::ProgramId(axis) => bits(self.program_id[*axis]),
            Callee::NumPrograms(axis) => bits(self.launch.grid[*axis]),
            Callee::Nothing => bits(0),
            Callee::Trap => Err("the kernel executes a trap".into()),
            Callee::AssertFailed => Err("a device_assert failed".into()),
        }
    }

    /// Executes an instruction collectively for several threads.
    fn run_collective(&mut self, members: &[usize], global: &mut Global) -> Result<(), String> {
        let f = self.threads[members[0]].frames.last().expect("internal error: no running thread");
        let (function, block, next_line) = (f.function.clone(), f.block, f.next_line);
        let line = &function.blocks[block][next_line];
        match &line.inst {
            Inst::Call { callee: Callee::WarpBarrier, .. } => {
                self.shared.clocks.barrier(members);
                for &t in members {
                    self.finish(t, None, Value::Undef);
                    self.threads[t].waiting = None;
                }
                Ok(())
            }
            Inst::Call { callee: Callee::Any, args, .. } => {
                let mut any = 0;
                for &t in members {
                    any |= self.bits(t, operand(args, 1)?)? & 1;
                }
                for &t in members {
                    self.finish(t, line.result, Value::Bits(any));
                    self.threads[t].waiting = None;
                }
                Ok(())
            }
            Inst::Call { callee: Callee::Shuffle { butterfly }, args, .. } => {
                let mut sources = Vec::new();
                for &t in members {
                    let segment = self.bits(t, operand(args, 3)?)?;
                    let kept = segment >> 8 & 31;
                    if segment & 31 != 31 || segment >> 13 != 0 || *butterfly && kept != 0 {
                        return Err(format!("a shuffle in segments of {segment:#x}"));
                    }
                    sources.push((self.get(t, operand(args, 1)?), self.bits(t, operand(args, 2)?)?, kept));
                }
                for (i, &t) in members.iter().enumerate() {
                    let (lane, kept) = (sources[i].1 as usize, sources[i].2 as usize);
                    let from = if *butterfly { i ^ lane } else { i & kept | lane & !kept };
                    let v = sources.get(from).ok_or("a shuffle from a lane that does not exist")?.0.clone();
                    self.finish(t, line.result, v);
                    self.threads[t].waiting = None;
                }
                Ok(())
            }
            Inst::Asm { text, constraints, args, .. } => {
                self.asm_collective(members, line.result, text, constraints, args, global)
            }
            other => Err(format!("{other:?} is not a collective instruction")),
        }
    }
}

/// Operand number `i`.
pub(super) fn operand(args: &[(Ty, Operand)], i: usize) -> Result<&Operand, String> {
    args.get(i)
        .map(|(_, operand)| operand)
        .ok_or_else(|| format!("operand {i} does not exist: there are {}", args.len()))
}

/// The bits of a value of up to 128 bits.
fn u128_bits(v: &Value) -> Result<u128, String> {
    match v {
        Value::Aggregate(_) => Ok(u128::from(v.element(0).bits()?) | u128::from(v.element(1).bits()?) << 64),
        v => Ok(u128::from(v.bits()?)),
    }
}

/// A 128-bit value: its lower and upper 64 bits.
fn u128_value(v: u128) -> Value {
    Value::aggregate(vec![Value::Bits(v as u64), Value::Bits((v >> 64) as u64)])
}

pub(super) fn atomic(op: &str, ty: &Ty, old: u64, v: u64) -> Result<u64, UnsupportedKind> {
    let bits = (ty.bytes() * 8) as u32;
    let (a, b) = (value::signed(old, bits), value::signed(v, bits));
    Ok(match op {
        "fadd" | "add" | "and" | "or" | "xor" => value::binary(op, ty, old, v)?,
        "min" => a.min(b) as u64 & mask(bits),
        "max" => a.max(b) as u64 & mask(bits),
        "umin" => old.min(v & mask(bits)),
        "umax" => old.max(v & mask(bits)),
        "xchg" => v,
        _ => return Err(UnsupportedKind::Instruction(format!("atomicrmw {op} {ty}"))),
    })
}
