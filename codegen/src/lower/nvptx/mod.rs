//! Lowers Tile IR of stage *async* (or *layout*) to LLVM IR for NVPTX.
//!
//! Every tile becomes one LLVM value per register of its layout, and ops on tiles become straight-line code on these
//! values. Coordinates of elements are never stored: they are linear functions of lane and warp, XOR a constant per
//! register.
//!
//! Reading order: [`emit`] (text), [`threads`] (coordinates), this file (ops), [`control`] (control flow),
//! [`elementwise`], [`memory`] (global memory), [`atomic`], [`bulk_reduce`], [`shared`], [`tma`] (mbarriers, TMA,
//! warp specialization), [`tma_store`], [`reduce`], [`dot`], [`wgmma`] (`wgmma` waits), [`joined`] (dots that share
//! an instruction), [`plan`] (shared memory and barriers), [`thread_dependencies`] (dependencies between threads
//! through global memory), [`clocks`] (records for measured timelines).

mod atomic;
mod bulk_reduce;
mod cast;
mod clocks;
mod control;
mod debug;
mod deferred;
mod dot;
mod elementwise;
mod emit;
mod joined;
mod math;
mod matrix_move;
mod memory;
mod ordered_adds;
mod plan;
mod reduce;
mod remainder;
mod rescale;
mod shared;
#[cfg(test)]
mod tests;
mod thread_dependencies;
mod threads;
mod tma;
mod tma_store;
mod wgmma;

pub(crate) use self::clocks::RECORD as RECORD_CLOCK;
use self::emit::{Emitter, Val};
pub(crate) use self::emit::{LOC_COMMENT, USER_ASM};
pub use self::joined::JoinedDots;
use self::ordered_adds::OrderedAdds;
use self::plan::SharedPlan;
pub use self::plan::{Contents, Placed};
use self::thread_dependencies::ThreadDependencies;
use self::threads::Threads;
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::{bounds, memory_effects, registers};
use crate::ir::nested::{ctas, takes_turns};
use crate::ir::{BlockId, DType, Elem, Func, Loc, Op, OpId, Type, Value};
use crate::layout::{Index, LinearLayout};
use crate::lower::Unsupported;
use crate::target::{ArgDesc, ArgType, CompileOptions, GpuArch, TensorMapDesc};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

/// 32-bit registers of a streaming multiprocessor (SM).
const REGISTERS: u32 = 65536;

/// A kernel as LLVM IR, with the data that its launch needs.
#[derive(Clone, Debug)]
pub struct GpuModule {
    pub llvm_ir: String,
    pub entry: String,
    pub args: Vec<ArgDesc>,
    pub threads: u32,
    pub programs_per_block: u32,
    pub ctas_per_program: u32,
    pub shared_bytes: u32,
    pub tensor_maps: Vec<TensorMapDesc>,
}

/// The shared memory of a block, as [`lower`] allocates it.
#[derive(Clone, Debug)]
pub struct SharedMemory {
    pub bytes: u32,
    /// By offset.
    pub parts: Vec<Placed>,
    /// Ops before which the lowering inserts a barrier of the block or of the partition.
    pub barriers: HashSet<OpId>,
}

/// Plans the shared memory of a function of stage *async*.
pub fn shared_memory(func: &Func, arch: GpuArch) -> SharedMemory {
    let (plan, _) = plan_shared_memory(func, &AxisAnalysis::new(func), arch);
    let barriers = func.walk().into_iter().filter(|&id| plan.barrier_before(id)).collect();
    SharedMemory { bytes: plan.bytes, parts: plan.placed, barriers }
}

/// The dots of a function of stage *async* that share instructions.
pub fn joined_dots(func: &Func) -> JoinedDots {
    let stored = plan::stored_rings(func);
    JoinedDots::find(func, |ring| stored.contains_key(&ring))
}

/// The shared memory of a function, and the ordered additions that a warp of their own does there.
fn plan_shared_memory(func: &Func, axis: &AxisAnalysis, arch: GpuArch) -> (SharedPlan, OrderedAdds) {
    let dependencies = Rc::new(ThreadDependencies::new(func, axis));
    let ordered_adds = OrderedAdds::find(func, axis, &dependencies, arch);
    let reductions = bulk_reduce::find(func, axis, &dependencies, &ordered_adds, arch);
    let plan = SharedPlan::new(func, dependencies.clone(), reductions);
    match plan.bytes > arch.max_shared_bytes() {
        // Atomics of threads need no shared memory.
        true => (SharedPlan::new(func, dependencies, HashMap::new()), OrderedAdds::default()),
        false => (plan, ordered_adds),
    }
}

/// Lowers a function whose tiles all have layouts.
///
/// # Errors
/// The feature that the target does not support.
pub fn lower(func: &Func, arch: GpuArch, options: &CompileOptions) -> Result<GpuModule, Unsupported> {
    let threads = block_threads(func, options);
    let axis = AxisAnalysis::new(func);
    let (mut plan, ordered_adds) = plan_shared_memory(func, &axis, arch);
    let registers = registers_for_mma(func, options, threads);
    Rc::make_mut(&mut plan.joined).retain(|dots| dot::fit_registers(func, dots, registers));
    let dependencies = plan.dependencies.clone();
    if plan.bytes > arch.max_shared_bytes() {
        return Err(Unsupported {
            loc: func.loc.clone(),
            message: format!(
                "kernel `{}` needs {} bytes of shared memory per block, and {} has {}",
                func.name,
                plan.bytes,
                arch.name(),
                arch.max_shared_bytes()
            ),
            help: Some("use smaller tiles or fewer pipeline stages".into()),
        });
    }
    let mut e = Emitter::new();
    let ids = Threads::new(&mut e, threads);
    let mut l = Lowering {
        func,
        arch,
        options,
        axis,
        plan,
        ordered_adds,
        threads: ids,
        values: vec![None; func.num_values()],
        maps: Vec::new(),
        num_warps: options.num_warps,
        consumers: None,
        replicas: replicas(func),
        ctas: ctas(func),
        takes_turns: takes_turns(func),
        deferred: deferred::deferred_ops(func),
        written: memory_effects::written_pointers(func),
        replica: None,
        registers,
        clocks: None,
        e,
        loc: func.loc.clone(),
    };
    let mut params = l.params(&dependencies);
    if let Some(block) = options.clocks {
        params.push(format!("ptr addrspace(1) align 16 %{}", clocks::PARAMETER));
        l.start_clocks(block);
    }
    l.block(func.body)?;
    let (map_params, map_args) = l.map_arguments();
    params.extend(map_params);
    let shared_bytes = l.plan.bytes;
    l.e.global("@smem", "external addrspace(3) global [0 x i8], align 1024");
    let mut attributes = format!("nounwind \"nvvm.reqntid\"=\"{threads}\"");
    // Without `minctasm`, ptxas limits the registers so that a second block fits, and spills a few, even where shared
    // memory has no room for a second block. An SM has the maximum shared memory of one block plus 1 KB, and reserves
    // 1 KB for each block.
    let is_alone = 2 * shared_bytes + 1024 > arch.max_shared_bytes() && options.max_registers.is_none();
    if let Some(n) = options.max_registers {
        // Above this limit, a block of this size does not launch. ptxas accepts only one of the two attributes.
        let n = n.min(registers::available(threads));
        attributes.push_str(&format!(" \"nvvm.maxnreg\"=\"{n}\""));
    } else if let Some(blocks) = resident_blocks(func).or(is_alone.then_some(1)) {
        attributes.push_str(&format!(" \"nvvm.minctasm\"=\"{blocks}\""));
    }
    if l.ctas > 1 {
        attributes.push_str(&format!(" \"nvvm.cluster_dim\"=\"{},1,1\"", l.ctas));
    }
    let args = func
        .args
        .iter()
        .zip(&func.block(func.body).params)
        .map(|(arg, &v)| ArgDesc {
            name: arg.name.clone(),
            ty: arg_type(func.ty(v)),
            divisible_by: arg.divisible_by,
            equal_to: arg.equal_to,
        })
        .chain(options.clocks.map(|_| ArgDesc {
            name: clocks::PARAMETER.into(),
            ty: ArgType::Clocks,
            divisible_by: 1,
            equal_to: None,
        }))
        .chain(map_args)
        .collect();
    let signature = format!("@{}({})", func.name, params.join(", "));
    Ok(GpuModule {
        llvm_ir: l.e.finish(&signature, &attributes),
        entry: func.name.clone(),
        args,
        threads,
        programs_per_block: replicas(func),
        ctas_per_program: ctas(func),
        shared_bytes,
        tensor_maps: l.maps,
    })
}

/// The number of blocks whose registers fit an SM, for a warp-specialized kernel that redistributes registers
/// (`setmaxnreg`); `None` for other kernels. A block is launched with as many registers as its partitions have
/// afterwards.
fn resident_blocks(func: &Func) -> Option<u32> {
    func.walk().iter().find_map(|&id| match &func.op(id).op {
        Op::WarpSpecialize { warps, registers, replicas, .. } => match registers[..] {
            [consumer, producer] => {
                let consumer_threads = 32 * warps * replicas.unwrap_or(1);
                Some((REGISTERS / (consumer_threads * consumer + 128 * producer)).max(1))
            }
            _ => None,
        },
        _ => None,
    })
}

/// Threads per block: those of `num_warps`, plus four producer warps in a warp-specialized kernel.
fn block_threads(func: &Func, options: &CompileOptions) -> u32 {
    let is_specialized = func.walk().iter().any(|&id| matches!(func.op(id).op, Op::WarpSpecialize { .. }));
    32 * (options.num_warps * replicas(func) + if is_specialized { 4 } else { 0 })
}

/// The programs that one block runs.
fn replicas(func: &Func) -> u32 {
    let of_op = |id: OpId| match func.op(id).op {
        Op::WarpSpecialize { replicas, .. } => replicas,
        _ => None,
    };
    func.walk().into_iter().find_map(of_op).unwrap_or(1)
}

/// How the launch passes an argument of this type. 16-bit floats are passed as their bits.
pub fn arg_type(ty: &Type) -> ArgType {
    match ty.elem() {
        Some(Elem::Ptr(_)) => ArgType::Ptr,
        Some(Elem::Num(d)) => match d {
            DType::F32 => ArgType::F32,
            DType::F64 => ArgType::F64,
            DType::Bool | DType::I8 | DType::U8 | DType::F8E4M3 | DType::F8E5M2 => ArgType::I8,
            DType::I16 | DType::U16 | DType::F16 | DType::BF16 => ArgType::I16,
            DType::I32 | DType::U32 => ArgType::I32,
            DType::I64 | DType::U64 => ArgType::I64,
        },
        None => panic!("internal compiler error: a kernel argument that is neither number nor pointer"),
    }
}

/// The LLVM type of one element in a register.
pub(crate) fn llvm_type(elem: Elem) -> &'static str {
    match elem {
        Elem::Ptr(_) => "ptr addrspace(1)",
        Elem::Num(d) => match d {
            DType::Bool => "i1",
            DType::I8 | DType::U8 | DType::F8E4M3 | DType::F8E5M2 => "i8",
            DType::I16 | DType::U16 => "i16",
            DType::I32 | DType::U32 => "i32",
            DType::I64 | DType::U64 => "i64",
            DType::F16 => "half",
            DType::BF16 => "bfloat",
            DType::F32 => "float",
            DType::F64 => "double",
        },
    }
}

/// Maps coordinates to coordinates.
type CoordinateMap<'f> = Box<dyn Fn(&[u32]) -> Vec<u32> + 'f>;

/// The registers of a value: one for a scalar, one per register of the layout for a tile.
type Regs = Rc<Vec<Val>>;

/// Registers per thread of the consumer partition, or of every thread without warp specialization; no more than at launch, which is
/// what `ptxas` compares matrix instructions with.
fn registers_for_mma(func: &Func, options: &CompileOptions, threads: u32) -> u32 {
    let of_partition = func.walk().into_iter().find_map(|id| match &func.op(id).op {
        Op::WarpSpecialize { registers, .. } => registers.first().copied(),
        _ => None,
    });
    let available = registers::available(threads * resident_blocks(func).unwrap_or(1));
    let at_launch = options.max_registers.map_or(available, |most| most.min(available));
    of_partition.map_or(at_launch, |registers| registers.min(at_launch))
}

struct Lowering<'f> {
    func: &'f Func,
    arch: GpuArch,
    options: &'f CompileOptions,
    axis: AxisAnalysis,
    plan: SharedPlan,
    ordered_adds: OrderedAdds,
    threads: Threads,
    values: Vec<Option<Regs>>,
    /// Tensor maps that the kernel takes after its arguments.
    maps: Vec<TensorMapDesc>,
    /// The number of warps that run the code being lowered.
    num_warps: u32,
    /// The number of consumer warps, for barriers inside of the consumer partition; `None` outside of it.
    consumers: Option<u32>,
    /// The programs that one block runs, consecutive on axis 0.
    replicas: u32,
    /// The CTAs of a cluster that run one program.
    ctas: u32,
    /// Whether these load in turn, and are as many programs apart as there are blocks.
    takes_turns: bool,
    /// Ops that stores compute box by box.
    deferred: HashSet<OpId>,
    /// Pointers and views that the kernel writes through, with all that they derive from.
    written: HashSet<Value>,
    /// The index of the program that the code being lowered belongs to, where there are several.
    replica: Option<Val>,
    /// Registers available to a thread that issues `wgmma`.
    registers: u32,
    /// The variable with the offset of this thread's next event, where clocks are recorded.
    clocks: Option<Val>,
    e: Emitter,
    /// Source location of the op being lowered, for errors.
    loc: Loc,
}

type Result<T, E = Unsupported> = std::result::Result<T, E>;

impl<'f> Lowering<'f> {
    /// Defines the values of the kernel's arguments. Returns their LLVM parameters.
    fn params(&mut self, dependencies: &ThreadDependencies) -> Vec<String> {
        let func = self.func;
        let shared_between_threads = dependencies.shared_arguments();
        let releases = memory_effects::may_release_stores(func);
        let mut params = Vec::new();
        for (i, (arg, &v)) in func.args.iter().zip(&func.block(func.body).params).enumerate() {
            let elem = func.ty(v).elem().expect("internal compiler error: argument type");
            let text = match elem {
                Elem::Ptr(_) => {
                    // Written buffers are borrowed exclusively: no two arguments overlap.
                    let readonly = if self.written.contains(&v) { "" } else { " readonly" };
                    // `noalias` would assert that only this thread accesses what it writes, regardless of barriers, and of
                    // atomics that release stores to other programs.
                    let shared = shared_between_threads.contains(&v) || releases && self.written.contains(&v);
                    let noalias = if shared { "" } else { " noalias" };
                    format!(
                        "ptr addrspace(1){noalias}{readonly} align {} %a{i}",
                        1 << arg.divisible_by.trailing_zeros().min(4)
                    )
                }
                Elem::Num(DType::Bool) => format!("i8 %a{i}"),
                Elem::Num(_) => format!("{} %a{i}", llvm_type(elem)),
            };
            params.push(text);
            let value = match (elem, arg.equal_to) {
                (Elem::Num(d), Some(n)) if d.is_int() => n.to_string(),
                (Elem::Num(DType::Bool), _) => self.e.hoist(format!("trunc i8 %a{i} to i1")),
                _ => format!("%a{i}"),
            };
            self.values[v.0 as usize] = Some(Rc::new(vec![value]));
        }
        params
    }

    /// The registers of a value.
    fn regs(&self, v: Value) -> Regs {
        self.values[v.0 as usize].clone().expect("internal compiler error: a value used before its definition")
    }

    /// The single register of a scalar.
    fn scalar(&self, v: Value) -> Val {
        self.regs(v)[0].clone()
    }

    fn set(&mut self, v: Value, regs: Vec<Val>) {
        assert_eq!(
            regs.len(),
            self.layout(v).map_or(1, LinearLayout::num_registers),
            "registers of {}",
            self.func.ty(v)
        );
        self.values[v.0 as usize] = Some(Rc::new(regs));
    }

    /// The layout of a tile; `None` for other values.
    fn layout(&self, v: Value) -> Option<&'f LinearLayout> {
        match self.func.ty(v) {
            Type::Tensor { layout, .. } => {
                Some(self.func.layout(layout.expect("internal compiler error: a tile without a layout")))
            }
            _ => None,
        }
    }

    fn elem(&self, v: Value) -> Elem {
        self.func.ty(v).elem().expect("internal compiler error: a value without an element")
    }

    fn dtype(&self, v: Value) -> DType {
        self.elem(v).num().expect("internal compiler error: a pointer where a number belongs")
    }

    fn ty(&self, v: Value) -> &'static str {
        llvm_type(self.elem(v))
    }

    fn unsupported<T>(&self, message: impl Into<String>, help: Option<&str>) -> Result<T> {
        Err(Unsupported { loc: self.loc.clone(), message: message.into(), help: help.map(Into::into) })
    }

    fn block(&mut self, block: BlockId) -> Result<()> {
        self.record_iteration(block);
        for &id in &self.func.block(block).ops {
            self.loc = self.func.op(id).loc.clone();
            self.e.set_loc(&self.loc);
            if self.plan.fence_before(id) {
                self.fence_async_shared();
            }
            if self.plan.barrier_before(id) {
                self.recorded_barrier(id);
            }
            if !self.deferred.contains(&id) {
                self.recorded_op(id)?;
            }
        }
        Ok(())
    }

    /// Emits the fence between this thread's accesses of shared memory and those by the async proxy.
    fn fence_async_shared(&mut self) {
        self.e.call("void", "llvm.nvvm.fence.proxy.async.shared_cta", &[]);
    }

    /// Emits `bar.warp.sync` for all lanes.
    fn warp_barrier(&mut self) {
        self.e.declare("declare void @llvm.nvvm.bar.warp.sync(i32)");
        self.e.void("call void @llvm.nvvm.bar.warp.sync(i32 -1)");
    }

    /// Emits `bar.sync` for all threads of the block, or of the partition.
    fn barrier(&mut self) {
        if self.plan.has_row_reductions() {
            self.wait_for_bulk_reads();
        }
        match (self.consumers, self.replica.clone()) {
            (Some(warps), Some(replica)) => {
                let id = self.e.hoist(format!("add i32 {replica}, 1"));
                let barrier = format!("bar.sync $0, {};", 32 * warps);
                self.e.void(format!("call void asm sideeffect \"{barrier}\", \"r,~{{memory}}\"(i32 {id}) #1"));
            }
            (Some(warps), None) => self.named_barrier(&format!("1, {}", 32 * warps)),
            (None, _) => self.named_barrier("0"),
        }
    }

    fn named_barrier(&mut self, which: &str) {
        self.e.void(format!("call void asm sideeffect \"bar.sync {which};\", \"~{{memory}}\"() #1"));
    }

    /// The index of the program on an axis.
    fn program_id(&mut self, axis: u32) -> Val {
        let replica = self.replica.clone().filter(|_| axis == 0);
        if self.takes_turns && axis == 0 {
            let block = self.of_grid("ctaid", axis);
            let Some(replica) = replica else { return block };
            let blocks = self.of_grid("nctaid", axis);
            let apart = self.e.hoist(format!("mul i32 {blocks}, {replica}"));
            return self.e.hoist(format!("add i32 {block}, {apart}"));
        }
        let first = self.in_programs("ctaid", axis);
        match replica {
            Some(replica) => self.e.hoist(format!("add i32 {first}, {replica}")),
            None => first,
        }
    }

    /// A register that counts blocks on an axis.
    fn of_grid(&mut self, register: &str, axis: u32) -> Val {
        let name = format!("llvm.nvvm.read.ptx.sreg.{register}.{}", ["x", "y", "z"][axis as usize]);
        self.e.declare(&format!("declare i32 @{name}()"));
        self.e.hoist(format!("call i32 @{name}()"))
    }

    /// The rank of this CTA in its cluster, which extends along the first axis.
    fn cta_rank(&mut self) -> Val {
        let block = self.of_grid("ctaid", 0);
        self.e.hoist(format!("urem i32 {block}, {}", self.ctas))
    }

    /// A register that counts blocks on an axis, in programs.
    fn in_programs(&mut self, register: &str, axis: u32) -> Val {
        let blocks = self.of_grid(register, axis);
        if self.ctas > 1 && axis == 0 {
            return self.e.hoist(format!("udiv i32 {blocks}, {}", self.ctas));
        }
        match self.replicas {
            2.. if axis == 0 => self.e.hoist(format!("mul i32 {blocks}, {}", self.replicas)),
            _ => blocks,
        }
    }

    #[expect(clippy::too_many_lines, reason = "one arm per op")]
    fn op(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        match &data.op {
            Op::ProgramId { .. } | Op::CtaRank { .. } | Op::NumPrograms { .. } => {
                let v = match data.op {
                    Op::ProgramId { axis } => self.program_id(axis),
                    Op::NumPrograms { axis } => self.in_programs("nctaid", axis),
                    _ => self.cta_rank(),
                };
                self.set(data.results[0], vec![v]);
            }
            Op::Constant { .. }
            | Op::Arange { .. }
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Cmp(_)
            | Op::Fma
            | Op::Select
            | Op::Cast
            | Op::Bitcast
            | Op::PtrAdd
            | Op::InlineAsm { .. } => self.elementwise(id)?,
            Op::Splat
            | Op::ExpandDims { .. }
            | Op::Broadcast
            | Op::Trans { .. }
            | Op::Reshape
            | Op::Join
            | Op::Split => self.rename(id),
            Op::DynamicIndex => {
                let index = self.regs(data.operands[1]);
                self.set(data.results[0], index.to_vec());
            }
            Op::TakeIndex => self.take_index(id),
            Op::TakenIndex => self.taken_index(id),
            Op::Hint { .. } => {
                let regs = self.regs(data.operands[0]);
                self.set(data.results[0], regs.to_vec());
            }
            // Not passed to LLVM, where a violated assumption is undefined behavior.
            Op::Assume if bounds::checks_assumption(self.func, id) => {}
            Op::Assume => self.device_assert(id, "the assumption does not hold"),
            // Views have no registers: accesses read their operands.
            Op::MakeView { .. } => {}
            Op::Advance => panic!("internal compiler error: an unresolved view"),
            Op::LoadView { .. } => self.load_view(id)?,
            Op::StoreView { .. } => self.store_view(id)?,
            Op::AtomicView { .. } => self.atomic_view(id)?,
            Op::Load { .. } => self.load(id)?,
            Op::Store { .. } => self.store(id)?,
            Op::SemaphoreWait | Op::AtomicRmw { .. } if self.ordered_adds.covers(id) => self.around_ordered(id),
            Op::AtomicRmw { .. } => self.atomic_rmw(id)?,
            Op::AtomicCas { .. } => self.atomic_cas(id)?,
            Op::SemaphoreWait => self.semaphore_wait(id),
            Op::Reduce { .. } => self.reduce(id)?,
            Op::Scan { .. } => self.scan(id)?,
            Op::Gather { axis } => self.gather(id, *axis)?,
            Op::For { .. } => self.for_loop(id)?,
            Op::If => self.if_op(id)?,
            Op::While => self.while_loop(id)?,
            // The ops that contain the region read its terminator.
            Op::Yield | Op::Condition => {}
            Op::Return => {
                if self.plan.has_bulk_writes() {
                    self.wait_for_bulk_reads();
                }
                self.e.void("ret void");
            }
            Op::DevicePrint { .. } => self.device_print(id)?,
            Op::DeviceAssert { message } => self.device_assert(id, message),
            Op::ConvertLayout => self.convert_layout(id)?,
            Op::LocalAlloc => self.local_alloc(id),
            Op::LocalLoad => self.local_load(id),
            Op::LocalStore => self.local_store(id),
            Op::LocalSlot => self.local_slot(id),
            Op::LocalTrans { .. } => {
                let base = self.regs(data.operands[0]);
                self.values[data.results[0].0 as usize] = Some(base);
            }
            Op::AsyncCopy { .. } => self.async_copy(id)?,
            Op::AsyncLoad { .. } => self.async_load(id)?,
            Op::AsyncCommit => self.e.void("call void asm sideeffect \"cp.async.commit_group;\", \"~{memory}\"()"),
            Op::AsyncWait { pending } => {
                self.e.void(format!("call void asm sideeffect \"cp.async.wait_group {pending};\", \"~{{memory}}\"()"));
            }
            Op::MmaSync { .. } => self.mma_sync(id)?,
            Op::FmaDot => self.fma_dot(id)?,
            Op::Wgmma { .. } => self.wgmma(id)?,
            Op::WgmmaWait { .. } => self.wgmma_wait(id),
            Op::FenceAsyncShared => self.fence_async_shared(),
            Op::BlockBarrier { id: 0, threads: None } => self.barrier(),
            Op::BlockBarrier { id: barrier, threads } => {
                let n = threads.unwrap_or(32 * self.options.num_warps);
                self.named_barrier(&format!("{barrier}, {n}"));
            }
            Op::ClusterBarrier => self.cluster_barrier(),
            Op::MbarrierAlloc { .. } => self.mbarrier_alloc(id),
            Op::MbarrierFree => self.mbarrier_free(id),
            Op::MbarrierExpect { .. } => self.mbarrier_expect(id),
            Op::MbarrierArrive { .. } => self.mbarrier_arrive(id),
            Op::AsyncArrive { .. } => self.async_arrive(id),
            Op::MbarrierWait => self.mbarrier_wait(id),
            Op::TmaLoad { .. } => self.tma_load(id)?,
            Op::TmaStore { .. } => self.tma_store(id)?,
            Op::PrefetchView { .. } => self.prefetch_view(id)?,
            Op::PingpongWait => self.pingpong_barrier("sync", 0),
            Op::PingpongArrive => self.pingpong_barrier("arrive", 1),
            Op::WarpSpecialize { .. } => self.warp_specialize(id)?,
            Op::Dot { .. } => panic!("internal compiler error: a dot without an instruction"),
        }
        Ok(())
    }

    /// Ops that only rename registers: each result register is the operand register with the corresponding element.
    fn rename(&mut self, id: OpId) {
        let data = self.func.op(id);
        let result = data.results[0];
        let regs = match &data.op {
            Op::Splat => {
                vec![self.scalar(data.operands[0]); self.layout(result).map_or(1, LinearLayout::num_registers)]
            }
            Op::Join => {
                let operands = [self.regs(data.operands[0]), self.regs(data.operands[1])];
                match self.layout(data.operands[0]) {
                    Some(half) => half.join().registers.iter().map(|&(i, r)| operands[i][r].clone()).collect(),
                    // Two scalars: the coordinate selects, and it is the same in every thread.
                    None => {
                        let to = self.tile_layout(result);
                        let at = |r: usize| to.apply(Index::register(r as u32))[0] as usize;
                        (0..to.num_registers()).map(|r| operands[at(r)][0].clone()).collect()
                    }
                }
            }
            Op::Split => {
                let whole = self.regs(data.operands[0]);
                let split = self.tile_layout(data.operands[0]).split();
                let split = split.expect("internal compiler error: a split across threads");
                for (&result, registers) in data.results.iter().zip(&split.registers) {
                    let count = self.layout(result).map_or(1, LinearLayout::num_registers);
                    self.set(result, registers[..count].iter().map(|&r| whole[r].clone()).collect());
                }
                return;
            }
            _ => {
                // A reshape to or from a single element may involve scalars.
                let operand = self.regs(data.operands[0]);
                match (self.layout(data.operands[0]), self.layout(result)) {
                    (Some(from), Some(to)) => {
                        let map = self.coordinate_map(id);
                        let back = from.pseudo_invert();
                        (0..to.num_registers())
                            .map(|r| {
                                let source = back.apply(&map(&to.apply(Index::register(r as u32))));
                                operand[source.register as usize].clone()
                            })
                            .collect()
                    }
                    (_, to) => vec![operand[0].clone(); to.map_or(1, LinearLayout::num_registers)],
                }
            }
        };
        self.set(result, regs);
    }

    fn tile_layout(&self, v: Value) -> &'f LinearLayout {
        self.layout(v).expect("internal compiler error: a scalar where a tile belongs")
    }

    /// Maps coordinates of the result to coordinates of the operand.
    fn coordinate_map(&self, id: OpId) -> CoordinateMap<'f> {
        let data = self.func.op(id);
        let from = self.func.ty(data.operands[0]).shape();
        let to = self.func.ty(data.results[0]).shape();
        match &data.op {
            Op::ExpandDims { axis } => {
                let axis = *axis;
                Box::new(move |c| {
                    let mut c = c.to_vec();
                    c.remove(axis);
                    c
                })
            }
            Op::Broadcast => Box::new(move |c| c.iter().zip(from).map(|(&c, &n)| if n == 1 { 0 } else { c }).collect()),
            Op::Trans { perm } => Box::new(move |c| {
                let mut out = vec![0; perm.len()];
                perm.iter().zip(c).for_each(|(&p, &c)| out[p] = c);
                out
            }),
            Op::Reshape => Box::new(move |c| {
                let flat = c.iter().zip(to).fold(0usize, |f, (&c, &n)| f * n + c as usize);
                let mut rest = flat;
                let mut out: Vec<u32> = from
                    .iter()
                    .rev()
                    .map(|&n| {
                        let c = rest % n;
                        rest /= n;
                        c as u32
                    })
                    .collect();
                out.reverse();
                out
            }),
            other => panic!("internal compiler error: `{}` renames nothing", other.mnemonic()),
        }
    }
}
