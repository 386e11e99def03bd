//! Lowers Tile IR of stage *tile* to LLVM IR for a CPU. One call of the entry runs one program instance.
//!
//! Reading order: [`plan`] decides which tiles get a buffer and which are fused into their consumers; [`state`] tracks
//! the location of every value; [`loop_nest`] emits loop nests and [`eval`] their bodies; [`access`] reads and writes
//! memory; [`reduce`], [`scan`], [`dot`], [`memory`], [`control`] and [`debug`] lower the ops with their own loops;
//! [`elementwise`], [`math`] and [`repr`] emit arithmetic on one vector.
//!
//! Tiles that need a buffer are in the arena that the caller passes, which [`arena`] allocates by live range. Views
//! stay operands (base, shape, strides, offsets) and never reach memory. A loop nest that accesses views is emitted in
//! two versions where necessary: one for blocks in bounds with contiguous rows, without tests in its loops, and one
//! with masks and gathers; a test before the nest selects the version.

mod access;
mod arena;
mod control;
mod debug;
mod dot;
mod elementwise;
mod eval;
mod loop_nest;
pub(in crate::lower) mod math;
mod memory;
mod plan;
mod reduce;
mod repr;
mod scan;
mod state;
#[cfg(test)]
mod tests;
mod transpose;
pub(in crate::lower) mod writer;

use crate::analysis::bounds;
use crate::ir::{BlockId, DType, Elem, Func, Op, OpId, Type};
use crate::target::{ArgDesc, ArgType, CompileOptions, HostCpu};
use access::ViewRef;
use plan::is_fused;
use repr::{from_memory, in_memory};
use state::{Lowering, Result};

/// The LLVM IR of a kernel, with the data that its launch needs.
#[derive(Clone, Debug)]
pub struct HostModule {
    pub llvm_ir: String,
    /// Symbol of a [`HostEntry`](crate::target::HostEntry).
    pub entry: String,
    /// Scratch memory of one running program instance, in bytes.
    pub arena_bytes: u64,
    pub args: Vec<ArgDesc>,
}

/// Lowers a verified function of stage *tile*.
///
/// # Errors
/// The feature that the CPU does not support.
pub fn lower(func: &Func, cpu: &HostCpu, options: &CompileOptions) -> Result<HostModule> {
    let entry = entry_name(&func.name);
    let mut l = Lowering::new(func, cpu, options);
    let args = l.arguments()?;
    l.ops(func.body)?;
    let section = l.w.selected();
    let body = l.w.take(section);
    let main = format!(
        "define i32 {entry}(ptr %args, ptr %pid, ptr %num_programs, ptr noalias %arena, ptr %hooks) #0 {{\nentry:\n\
         {}{body}}}\n\nattributes #0 = {{ nounwind \"min-legal-vector-width\"=\"512\" \
         \"prefer-vector-width\"=\"512\" }}\n",
        l.allocas
    );
    let arena_bytes = l.arena.bytes();
    Ok(HostModule { llvm_ir: l.w.finish(&main), entry: entry[1..].to_string(), arena_bytes, args })
}

/// A symbol that collides with no library function.
fn entry_name(kernel: &str) -> String {
    let safe: String = kernel.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    format!("@tilewright_{safe}")
}

/// How a launch passes an argument.
fn argument_type(elem: Elem) -> ArgType {
    match elem {
        Elem::Ptr(_) => ArgType::Ptr,
        Elem::Num(d) => match d {
            DType::Bool | DType::I8 | DType::U8 | DType::F8E4M3 | DType::F8E5M2 => ArgType::I8,
            DType::I16 | DType::U16 | DType::F16 | DType::BF16 => ArgType::I16,
            DType::I32 | DType::U32 => ArgType::I32,
            DType::I64 | DType::U64 => ArgType::I64,
            DType::F32 => ArgType::F32,
            DType::F64 => ArgType::F64,
        },
    }
}

impl Lowering<'_> {
    /// Loads the kernel's arguments.
    fn arguments(&mut self) -> Result<Vec<ArgDesc>> {
        let func = self.func;
        let mut list = Vec::new();
        for (i, (arg, &v)) in func.args.iter().zip(&func.block(func.body).params).enumerate() {
            let Type::Scalar(elem) = *func.ty(v) else {
                return self.unsupported(
                    format!("argument `{}` is a {}", arg.name, func.ty(v)),
                    Some("pass a pointer and make a view of it inside the kernel"),
                );
            };
            list.push(ArgDesc {
                name: arg.name.clone(),
                ty: argument_type(elem),
                divisible_by: arg.divisible_by,
                equal_to: arg.equal_to,
            });
            if let (Some(n), Elem::Num(d)) = (arg.equal_to, elem) {
                self.scalars.insert(v, eval::literal(d, 1, crate::ir::Literal::Int(n)));
                continue;
            }
            let slot = self.w.inst(format!("getelementptr ptr, ptr %args, i64 {i}"));
            let slot = self.w.inst(format!("load ptr, ptr {slot}"));
            let value = match elem {
                Elem::Ptr(_) => self.w.inst(format!("load ptr, ptr {slot}")),
                Elem::Num(d) => {
                    let raw = self.w.inst(format!("load {}, ptr {slot}", in_memory(d)));
                    from_memory(&mut self.w, d, 1, &raw)
                }
            };
            self.scalars.insert(v, value);
        }
        Ok(list)
    }

    /// Lowers the ops of a block up to its terminator, and returns the terminator.
    fn ops(&mut self, block: BlockId) -> Result<OpId> {
        for &id in &self.func.block(block).ops {
            let data = self.func.op(id);
            if matches!(data.op, Op::Yield | Op::Condition) {
                return Ok(id);
            }
            self.loc = data.loc.clone();
            if is_fused(self.func, id) {
                let result = data.results[0];
                if self.uses[result.0 as usize] == 0 {
                    self.dead(result);
                } else if matches!(data.op, Op::Load { .. } | Op::LoadView { .. }) {
                    self.pending_loads.push(result);
                }
                continue;
            }
            self.op(id)?;
            if data.op.effects() != crate::ir::Effects::Regions {
                for &v in &data.operands {
                    self.used(v);
                }
            }
            if data.op == Op::Return {
                return Ok(id);
            }
        }
        panic!("internal compiler error: a block without terminator; please report this")
    }

    /// Lowers one op that is not fused. Only loops and branches release their operands themselves.
    #[expect(clippy::too_many_lines, reason = "one arm per op")]
    fn op(&mut self, id: OpId) -> Result<()> {
        let func = self.func;
        let data = func.op(id);
        match &data.op {
            Op::ProgramId { axis } => self.coordinate(id, "%pid", *axis, 0),
            Op::NumPrograms { axis } => self.coordinate(id, "%num_programs", *axis, 1),
            Op::Constant { value } => {
                let d = self.elem(data.results[0]).num().expect("constants are numbers");
                self.scalars.insert(data.results[0], eval::literal(d, 1, *value));
            }
            Op::MakeView { order } => self.make_view(id, order),
            Op::Advance => self.advance(id),
            Op::Load { .. } => self.scalar_load(id),
            Op::Unary(_) | Op::Binary(_) | Op::Cmp(_) | Op::Fma | Op::Select | Op::Cast | Op::Bitcast | Op::PtrAdd => {
                let operands: Vec<String> = data.operands.iter().map(|&v| self.scalar(v)).collect();
                let name = self.apply(id, 1, &operands);
                self.scalars.insert(data.results[0], name);
            }
            Op::DynamicIndex => {
                let name = self.scalar(data.operands[1]);
                self.scalars.insert(data.results[0], name);
            }
            Op::Hint { .. } => {
                let name = self.scalar(data.operands[0]);
                self.scalars.insert(data.results[0], name);
            }
            Op::Reshape => self.reshape(id)?,
            Op::Join => self.join(id)?,
            Op::Split => self.split(id)?,
            Op::Gather { axis } => self.gather(id, *axis)?,
            Op::StoreView { boundary, .. } => self.store_view(id, boundary)?,
            Op::AtomicView { op, boundary } => self.atomic_view(id, *op, boundary)?,
            Op::Store { .. } => self.store(id)?,
            Op::AtomicRmw { .. } | Op::AtomicCas { .. } => self.atomic(id)?,
            Op::SemaphoreWait => self.semaphore_wait(id)?,
            Op::Dot { .. } => self.dot(id)?,
            Op::Reduce { axis } => self.reduce(id, *axis)?,
            Op::Scan { axis, reverse } => self.scan(id, *axis, *reverse)?,
            Op::For { .. } => self.for_loop(id)?,
            Op::If => self.branch(id)?,
            Op::While => self.while_loop(id)?,
            Op::Return => self.w.line("ret i32 0"),
            // Not passed to LLVM, where a violated assumption is undefined behavior.
            Op::Assume if bounds::checks_assumption(self.func, id) => {}
            Op::Assume if self.options.debug_asserts => self.assert(id, "the assumption does not hold")?,
            Op::Assume => {}
            Op::DevicePrint { prefix } => self.print(id, prefix)?,
            Op::DeviceAssert { message } if self.options.debug_asserts => self.assert(id, message)?,
            Op::DeviceAssert { .. } => {}
            Op::InlineAsm { .. } => {
                return self.unsupported(
                    "inline PTX is not supported on the CPU",
                    Some("write the operation with tile functions, or launch this kernel on a GPU"),
                );
            }
            Op::Arange { .. } | Op::LoadView { .. } | Op::Splat | Op::ExpandDims { .. } | Op::Broadcast => {
                panic!(
                    "internal compiler error: `{}` was not fused into its consumer; please report this",
                    data.op.mnemonic()
                )
            }
            Op::Trans { .. } => {
                panic!(
                    "internal compiler error: `{}` was not fused into its consumer; please report this",
                    data.op.mnemonic()
                )
            }
            Op::Yield | Op::Condition => {
                panic!("internal compiler error: `{}` inside a block; please report this", data.op.mnemonic())
            }
            Op::CtaRank { .. }
            | Op::TakeIndex
            | Op::TakenIndex
            | Op::ConvertLayout
            | Op::LocalAlloc
            | Op::LocalLoad
            | Op::LocalStore
            | Op::LocalSlot
            | Op::LocalTrans { .. }
            | Op::AsyncCopy { .. }
            | Op::AsyncLoad { .. }
            | Op::AsyncCommit
            | Op::AsyncWait { .. }
            | Op::Wgmma { .. }
            | Op::WgmmaWait { .. }
            | Op::MmaSync { .. }
            | Op::FmaDot
            | Op::FenceAsyncShared
            | Op::BlockBarrier { .. }
            | Op::ClusterBarrier
            | Op::MbarrierAlloc { .. }
            | Op::MbarrierFree
            | Op::MbarrierExpect { .. }
            | Op::MbarrierArrive { .. }
            | Op::AsyncArrive { .. }
            | Op::MbarrierWait
            | Op::TmaLoad { .. }
            | Op::TmaStore { .. }
            | Op::PrefetchView { .. }
            | Op::PingpongWait
            | Op::PingpongArrive
            | Op::WarpSpecialize { .. } => {
                panic!(
                    "internal compiler error: `{}` of a GPU stage on the CPU; please report this",
                    data.op.mnemonic()
                )
            }
        }
        Ok(())
    }

    /// A coordinate or extent of the grid; axes beyond the third have extent 1.
    fn coordinate(&mut self, id: OpId, array: &str, axis: u32, beyond: i32) {
        let name = if axis < 3 {
            let at = self.w.inst(format!("getelementptr i32, ptr {array}, i64 {axis}"));
            self.w.inst(format!("load i32, ptr {at}"))
        } else {
            beyond.to_string()
        };
        self.scalars.insert(self.func.result(id), name);
    }

    fn make_view(&mut self, id: OpId, order: &[usize]) {
        let data = self.func.op(id);
        let result = data.results[0];
        let Type::View { block, elem } = self.func.ty(result).clone() else {
            panic!("internal compiler error: make_view of another type; please report this")
        };
        let names: Vec<String> = data.operands.iter().map(|&v| self.scalar(v)).collect();
        let rank = block.len();
        let part = |k: usize| names[1 + k * rank..1 + (k + 1) * rank].to_vec();
        let shape = part(0).iter().map(|extent| self.extent(extent)).collect();
        let view = ViewRef {
            base: names[0].clone(),
            elem,
            order: order.to_vec(),
            block,
            shape,
            strides: part(1),
            offsets: part(2),
        };
        self.views.insert(result, view);
    }

    /// An extent, clamped to 0 if negative, because positions are compared with it as unsigned numbers.
    fn extent(&mut self, extent: &str) -> String {
        match extent.parse::<i64>() {
            Ok(n) => n.max(0).to_string(),
            Err(_) => self.w.call("i64", "@llvm.smax.i64", &[("i64", extent), ("i64", "0")]),
        }
    }

    fn advance(&mut self, id: OpId) {
        let data = self.func.op(id);
        let mut view = self.view(data.operands[0]);
        for (offset, &delta) in view.offsets.iter_mut().zip(&data.operands[1..]) {
            let delta = self.scalars[&delta].clone();
            if delta != "0" {
                *offset = self.w.inst(format!("add i64 {offset}, {delta}"));
            }
        }
        self.views.insert(data.results[0], view);
    }
}
