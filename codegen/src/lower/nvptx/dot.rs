//! Lowers dots to `fma`, `mma.sync` and `wgmma`.

use super::emit::Val;
use super::matrix_move::Matrices;
use super::shared::SharedAccess;
use super::{Lowering, Result, llvm_type};
use crate::ir::{DType, Elem, Func, Literal, Op, OpId, Precision, Type, Value};
use crate::layout::{Dim, Index, LinearLayout, NEXT_WORDS, ThreadBases};
use crate::mma::shared::Matrix;
use crate::mma::{F64_PART, Family, Instruction};
use crate::num::{TF32_HALF, TF32_KEPT};
use crate::target::GpuArch;

/// An operand whose registers are loaded on first use.
struct Operand {
    regs: Vec<Option<Val>>,
    source: Source,
}

/// Where the registers of an operand come from.
enum Source {
    /// All are present.
    Registers,
    /// A shared buffer, by loads of vectors.
    Shared(SharedAccess),
    /// A shared buffer, by `ldmatrix`.
    Matrices(Matrices),
}

/// A fragment of an operand of `mma.sync`, in 32-bit words or f64.
struct Fragment {
    words: Vec<Val>,
    /// tf32x3: the remainders of the rounded numbers.
    rest: Option<Vec<Val>>,
}

/// Steps along K that tensor cores accumulate in tf32x3 before an FP32 add.
const PARTIAL_STEPS: usize = 4;

/// An operand of `wgmma` in shared memory.
struct SharedMatrix {
    matrix: Matrix,
    /// The byte offset of its buffer.
    base: Val,
}

/// Operand a of a `wgmma`, for all K steps of a tile of rows.
enum OperandA {
    /// The [descriptors of the steps](Lowering::step_descriptors), and whether M is the fastest dimension.
    Shared(Vec<(Val, u32)>, bool),
    /// Four words for each step.
    Registers(Vec<Val>),
}

impl Lowering<'_> {
    /// The registers of an operand in the given layout, from registers or shared memory. `words`: those that one `ldmatrix`
    /// loads, by the bits of their number.
    fn operand(&mut self, v: Value, layout: &LinearLayout, words: [usize; 2]) -> Operand {
        let (regs, source) = match self.func.ty(v) {
            Type::Shared { .. } => {
                let (memory, elem, base) = self.buffer(v);
                let memory = memory.clone();
                let source = match self.matrices(layout, &memory, &base, elem, words) {
                    Some(matrices) => Source::Matrices(matrices),
                    None => Source::Shared(self.shared_access(layout, &memory, base, elem)),
                };
                (vec![None; layout.num_registers()], source)
            }
            _ => {
                let regs = self.regs(v);
                let map = self.tile_layout(v).registers_of(layout);
                let map = map.expect("internal compiler error: an operand in another layout");
                (map.iter().map(|&r| Some(regs[r].clone())).collect(), Source::Registers)
            }
        };
        Operand { regs, source }
    }

    fn fetch(&mut self, operand: &mut Operand, register: usize) -> Val {
        if let Some(v) = &operand.regs[register] {
            return v.clone();
        }
        let loaded = match &mut operand.source {
            Source::Registers => panic!("internal compiler error: a missing register"),
            Source::Shared(access) => self.load_shared_group(access, register),
            Source::Matrices(matrices) => self.load_matrices_with(matrices, register),
        };
        for (r, v) in loaded {
            operand.regs[r] = Some(v);
        }
        operand.regs[register].clone().expect("internal compiler error: a register was not loaded")
    }

    pub(super) fn fma_dot(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let [a, b, acc] = data.operands[..] else { panic!("internal compiler error: a dot has three operands") };
        let layout = self.tile_layout(data.results[0]);
        let k = self.func.ty(a).shape()[1] as u32;
        let (m, n) = (layout.shape()[0], layout.shape()[1]);
        // Each thread needs its own rows of a and its own columns of b, along all of K. K is in the low register bits,
        // so that vector loads run along K where memory does.
        let k_bits = k.trailing_zeros() as usize;
        let a_layout = fma_operand(layout, 0, [m, k], k_bits);
        let b_layout = fma_operand(layout, 1, [k, n], k_bits);
        let mut a_operand = self.operand(a, &a_layout, NEXT_WORDS);
        let mut b_operand = self.operand(b, &b_layout, NEXT_WORDS);
        let a_back = registers_by_coordinates(&a_layout);
        let b_back = registers_by_coordinates(&b_layout);
        let acc_dtype = self.dtype(acc);
        let (a_dtype, b_dtype) = (self.operand_dtype(a), self.operand_dtype(b));
        let mut sums = self.regs(acc).to_vec();
        let ty = llvm_type(Elem::Num(acc_dtype));
        for step in 0..k {
            for (r, sum) in sums.iter_mut().enumerate() {
                let at = layout.apply(Index::register(r as u32));
                let x = self.fetch(&mut a_operand, a_back[&vec![at[0], step]]);
                let y = self.fetch(&mut b_operand, b_back[&vec![step, at[1]]]);
                let x = self.cast_element(&x, a_dtype, acc_dtype);
                let y = self.cast_element(&y, b_dtype, acc_dtype);
                *sum = if acc_dtype.is_float() {
                    let suffix = if acc_dtype == DType::F64 { "f64" } else { "f32" };
                    self.e.call(ty, &format!("llvm.fma.{suffix}"), &[(ty, &x), (ty, &y), (ty, sum)])
                } else {
                    let product = self.e.inst(format!("mul {ty} {x}, {y}"));
                    self.e.inst(format!("add {ty} {sum}, {product}"))
                };
            }
        }
        self.set(data.results[0], sums);
        Ok(())
    }

    fn operand_dtype(&self, v: Value) -> DType {
        match self.func.ty(v) {
            Type::Shared { elem, .. } => *elem,
            _ => self.dtype(v),
        }
    }

    pub(super) fn mma_sync(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::MmaSync { precision, warps, k_end, n_end } = &data.op else {
            panic!("internal compiler error: not mma.sync")
        };
        let [a, b, acc] = data.operands[..] else { panic!("internal compiler error: a dot has three operands") };
        let instruction = self.instruction(Family::MmaSync, id);
        let [a_dtype, b_dtype] = instruction.operands;
        self.require_registers(instruction.min_registers(instruction.n[0], true))?;
        let (a_shape, b_shape) = (self.shape2(a), self.shape2(b));
        let warps = [warps[0], warps[1]];
        let bits = instruction.operand_bits();
        // The number of elements of a fragment: four registers of a, two of b.
        let per_word = instruction.per_word();
        let (a_size, b_size) = (4 * per_word, 2 * per_word);
        let k_steps = a_shape[1] as usize / (8 * per_word);
        let mut sums = self.regs(acc).to_vec();
        let n_tiles = (b_shape[1] as usize / (8 * warps[1] as usize)).max(1);
        let m_tiles = sums.len() / 4 / n_tiles;
        let mut a_regs = self.operand(a, &LinearLayout::mma_m16n8_a(&a_shape, bits, warps), NEXT_WORDS);
        // One `ldmatrix` loads fragments of b for two tiles along N, or, if there is only one, for two steps along K.
        let next = if n_tiles > 1 { 1 + k_steps.ilog2() as usize } else { 1 };
        let mut b_regs = self.operand(b, &LinearLayout::mma_m16n8_b(&b_shape, bits, warps), [0, next]);
        // Where the tile of the first warp lies beyond the end, the tiles of all other warps do.
        let n_used = n_end.map_or(n_tiles, |end| n_tiles.min((end as usize).div_ceil(8 * warps[1] as usize)));
        let k_used = k_end.map_or(k_steps, |end| k_steps.min((end as usize).div_ceil(8 * per_word)));
        let steps: Vec<usize> = (0..k_used).collect();
        for steps in steps.chunks(if *precision == Precision::Tf32x3 { PARTIAL_STEPS } else { 1 }) {
            for m in 0..m_tiles {
                let a: Vec<Fragment> = steps
                    .iter()
                    .map(|k| self.fragment(&mut a_regs, (m * k_steps + k) * a_size, a_size, a_dtype, *precision))
                    .collect();
                for n in 0..n_used {
                    let b: Vec<Fragment> = steps
                        .iter()
                        .map(|k| self.fragment(&mut b_regs, (n * k_steps + k) * b_size, b_size, b_dtype, *precision))
                        .collect();
                    let at = (m * n_tiles + n) * 4;
                    let sum = self.mma_steps(instruction, &a, &b, &sums[at..at + 4]);
                    sums[at..at + 4].clone_from_slice(&sum);
                }
            }
        }
        self.set(data.results[0], sums);
        Ok(())
    }

    fn shape2(&self, v: Value) -> [u32; 2] {
        let shape = self.func.ty(v).shape();
        [shape[0] as u32, shape[1] as u32]
    }

    /// Accumulates some steps along K.
    ///
    /// tf32x3: the small corrections come first. Tensor cores truncate bits that do not fit their accumulator, which
    /// biases long sums towards zero: sums of a few steps are therefore added in FP32, with rounding.
    fn mma_steps(&mut self, instruction: &Instruction, a: &[Fragment], b: &[Fragment], sum: &[Val]) -> Vec<Val> {
        let steps = || a.iter().zip(b);
        if steps().all(|(a, b)| a.rest.is_none() && b.rest.is_none()) {
            // Two sums of f16 are in one word.
            let words = if instruction.acc == DType::F16 { self.words(sum, DType::F16) } else { sum.to_vec() };
            let words = steps().fold(words, |sum, (a, b)| self.mma_m16n8(instruction, &a.words, &b.words, &sum));
            return match instruction.acc {
                DType::F16 => words.iter().flat_map(|word| self.unpack_elements(word, "i32", "half", 2)).collect(),
                _ => words,
            };
        }
        let mut partial = vec!["0.0".to_string(); 4];
        for (a, b) in steps() {
            let both = a.rest.as_ref().zip(b.rest.as_ref());
            let (a_rest, b_rest) = both.expect("internal compiler error: the operands of a dot differ in precision");
            partial = self.mma_m16n8(instruction, a_rest, &b.words, &partial);
            partial = self.mma_m16n8(instruction, &a.words, b_rest, &partial);
        }
        for (a, b) in steps() {
            partial = self.mma_m16n8(instruction, &a.words, &b.words, &partial);
        }
        let pairs = sum.iter().zip(&partial);
        pairs.map(|(sum, partial)| self.e.inst(format!("fadd float {sum}, {partial}"))).collect()
    }

    /// The words of one fragment.
    fn fragment(
        &mut self,
        operand: &mut Operand,
        first: usize,
        count: usize,
        dtype: DType,
        precision: Precision,
    ) -> Fragment {
        let elements: Vec<Val> = (first..first + count).map(|r| self.fetch(operand, r)).collect();
        if dtype.bits() < 32 {
            let ty = llvm_type(Elem::Num(dtype));
            let per_word = 32 / dtype.bits();
            let words = elements.chunks(per_word).map(|w| self.pack_elements(w, ty, "i32")).collect();
            return Fragment { words, rest: None };
        }
        // Each thread has consecutive elements along K; the words of the instruction are ordered by row first.
        let elements: Vec<Val> = match elements.len() {
            4 => [0, 2, 1, 3].map(|i| elements[i].clone()).to_vec(),
            _ => elements,
        };
        if dtype == DType::F64 {
            return Fragment { words: elements, rest: None };
        }
        if precision != Precision::Tf32x3 {
            return Fragment { words: elements.iter().map(|x| self.tf32(x)).collect(), rest: None };
        }
        let (words, rest) = elements.iter().map(|x| self.split_tf32(x)).unzip();
        Fragment { words, rest: Some(rest) }
    }

    /// Splits an f32: the bits of its tf32 rounding, and those of the remainder, which tensor cores truncate to tf32.
    ///
    /// Rounds with integer operations: `cvt.rna` takes four instructions per number and dominated kernels that multiply
    /// with few warps. The integer add rounds every number the same way. A NaN or an infinity leaves NaN as the
    /// remainder, whatever the rounded word becomes; a number that rounds to infinity leaves the opposite infinity. In
    /// all these cases the dot is NaN, where f32 arithmetic may have an infinity.
    fn split_tf32(&mut self, x: &str) -> (Val, Val) {
        let bits = self.e.inst(format!("bitcast float {x} to i32"));
        let above = self.e.inst(format!("add i32 {bits}, {TF32_HALF}"));
        let big = self.e.inst(format!("and i32 {above}, {}", TF32_KEPT as i32));
        let number = self.e.inst(format!("bitcast i32 {big} to float"));
        let rest = self.e.inst(format!("fsub float {x}, {number}"));
        (big, self.e.inst(format!("bitcast float {rest} to i32")))
    }

    fn tf32(&mut self, x: &str) -> Val {
        self.e.inst(format!("call i32 asm \"cvt.rna.tf32.f32 $0, $1;\", \"=r,f\"(float {x}) #2"))
    }

    fn mma_m16n8(&mut self, instruction: &Instruction, a: &[Val], b: &[Val], c: &[Val]) -> Vec<Val> {
        if instruction.acc == DType::F64 && self.arch < GpuArch::Sm90a {
            return self.four_m8n8k4(a, b, c);
        }
        self.mma_call(instruction, a, b, c)
    }

    /// `m16n8k8` of f64 by four `m8n8k4`: halves of the rows, and halves of K.
    fn four_m8n8k4(&mut self, a: &[Val], b: &[Val], c: &[Val]) -> Vec<Val> {
        let mut sums = Vec::new();
        for rows in 0..2 {
            let start = c[2 * rows..2 * rows + 2].to_vec();
            sums.extend(
                (0..2).fold(start, |sum, k| self.mma_call(&F64_PART, &a[rows + 2 * k..][..1], &b[k..][..1], &sum)),
            );
        }
        sums
    }

    /// Calls an `mma.sync` with these registers of a, b and c.
    fn mma_call(&mut self, instruction: &Instruction, a: &[Val], b: &[Val], c: &[Val]) -> Vec<Val> {
        // f64 in registers of their own, narrower numbers in words.
        let word = if instruction.operands[0] == DType::F64 { DType::F64 } else { DType::I32 };
        let sum = if instruction.acc == DType::F16 { DType::I32 } else { instruction.acc };
        let [operand, acc] = [word, sum].map(|dtype| (llvm_type(Elem::Num(dtype)), register_class(dtype)));
        let mut next = 0;
        let lists = [c, a, b, c].map(|regs| {
            let names: Vec<String> = (next..next + regs.len()).map(|i| format!("${i}")).collect();
            next += regs.len();
            format!("{{{}}}", names.join(","))
        });
        let text = format!("{} {};", instruction.mnemonic(instruction.n[0]), lists.join(", "));
        let mut args: Vec<String> = a.iter().chain(b).map(|w| format!("{} {w}", operand.0)).collect();
        args.extend(c.iter().map(|x| format!("{} {x}", acc.0)));
        let mut constraints = vec![format!("={}", acc.1); c.len()];
        constraints.extend(vec![operand.1.to_string(); a.len() + b.len()]);
        constraints.extend(vec![acc.1.to_string(); c.len()]);
        let ty = format!("{{ {} }}", vec![acc.0; c.len()].join(", "));
        let call = format!("call {ty} asm \"{text}\", \"{}\"({}) #4", constraints.join(","), args.join(", "));
        let v = self.e.inst(call);
        (0..c.len()).map(|i| self.e.inst(format!("extractvalue {ty} {v}, {i}"))).collect()
    }

    /// The instruction of an MMA op.
    pub(super) fn instruction(&self, family: Family, id: OpId) -> &'static Instruction {
        let instruction = Instruction::of(self.func, self.func.op(id), family);
        instruction.unwrap_or_else(|| panic!("internal compiler error: no {family:?} of these types"))
    }

    /// Checks that a thread has the registers that a matrix instruction needs.
    fn require_registers(&self, needs: u32) -> Result<()> {
        if self.registers >= needs {
            return Ok(());
        }
        self.unsupported(
            format!("this dot needs {needs} registers per thread, and {} are available", self.registers),
            Some("use narrower tiles or fewer warps, or raise `max_registers`"),
        )
    }

    pub(super) fn wgmma(&mut self, id: OpId) -> Result<()> {
        let joined = self.plan.joined.of(id);
        if joined.is_empty() {
            // The instruction of an earlier dot has computed this one.
            return Ok(());
        }
        let data = self.func.op(id);
        let Op::Wgmma { warps, k_end, .. } = &data.op else { panic!("internal compiler error: not wgmma") };
        let [a, b, acc] = data.operands[..] else { panic!("internal compiler error: a dot has three operands") };
        let layout = self.tile_layout(data.results[0]);
        let (m, n) = (layout.shape()[0], layout.shape()[1]);
        let n_instr = self.instruction_columns(id);
        let n_tiles = n / (n_instr * warps[1]);
        let m_tiles = m / (16 * warps[0]);
        let instruction = self.instruction(Family::Wgmma, id);
        let k_instr = instruction.k;
        let columns: Vec<u32> = joined.iter().map(|&id| self.instruction_columns(id)).collect();
        self.require_registers(instruction.min_registers(columns.iter().sum(), self.func.ty(a).is_tensor()))?;
        let k_steps = self.func.ty(b).shape()[0] as u32 / k_instr;
        let k_used = k_end.map_or(k_steps, |end| k_steps.min(end.div_ceil(k_instr)));
        let mn_major = instruction.allows_mn_major();
        let b_matrix = self.matrix(b, 0, mn_major);
        let a_matrix = matches!(self.func.ty(a), Type::Shared { .. }).then(|| self.matrix(a, 1, mn_major));
        // Four words for each step, emitted before the fence, which orders writes of registers before `wgmma`.
        let words_per_tile = 4 * k_steps as usize;
        let a_words = match a_matrix {
            Some(_) => Vec::new(),
            None => {
                let regs = self.regs(a);
                self.words(&regs, instruction.operands[0])
            }
        };
        // Warpgroups are distributed along M first, then along N.
        let groups_m = warps[0] / 4;
        let group = self.warp_uniform(|e, t| e.hoist(format!("lshr i32 {}, 2", t.warp)));
        let (along_m, along_n) = if self.options.num_warps == 4 {
            ("0".to_string(), "0".to_string())
        } else {
            let along_m = self.e.hoist(format!("and i32 {group}, {}", groups_m - 1));
            let along_n = self.e.hoist(format!("lshr i32 {group}, {}", groups_m.trailing_zeros()));
            (along_m, along_n)
        };
        let sums: Vec<_> = joined.iter().map(|&id| self.regs(self.func.op(id).operands[2])).collect();
        let starts_at_zero = matches!(self.func.constant(acc), Some(Literal::Float(0.0) | Literal::Int(0)));
        self.e.void("call void asm sideeffect \"wgmma.fence.sync.aligned;\", \"~{memory}\"() #1");
        let mut out: Vec<Vec<Val>> = vec![Vec::new(); joined.len()];
        for mi in 0..m_tiles {
            for ni in 0..n_tiles {
                let b_group = self.warpgroup_offset(&b_matrix, &along_n, n_instr);
                let b_tile = ni * n_instr * warps[1];
                // The registers of each dot, of which the instruction writes the first ones.
                let used: Vec<usize> = joined.iter().map(|&id| self.columns_written(id, ni) as usize / 2).collect();
                let of_tile = |dot: usize| {
                    let per_tile = columns[dot] as usize / 2;
                    let at = (mi * n_tiles + ni) as usize * per_tile;
                    sums[dot][at..at + per_tile].split_at(used[dot])
                };
                let mut own: Vec<Val> = (0..joined.len()).flat_map(|dot| of_tile(dot).0.to_vec()).collect();
                let n_used = 2 * own.len();
                if n_used > 0 && k_used > 0 {
                    let a = match &a_matrix {
                        Some(matrix) => {
                            let a_group = self.warpgroup_offset(matrix, &along_m, 64);
                            let at = mi * 16 * warps[0];
                            OperandA::Shared(
                                self.step_descriptors(matrix, &a_group, at, k_used, k_instr),
                                !matrix.matrix.k_major,
                            )
                        }
                        None => {
                            let of_tile = &a_words[mi as usize * words_per_tile..][..4 * k_used as usize];
                            OperandA::Registers(of_tile.to_vec())
                        }
                    };
                    let b =
                        (self.step_descriptors(&b_matrix, &b_group, b_tile, k_used, k_instr), !b_matrix.matrix.k_major);
                    own = self.wgmma_tile(instruction, n_used as u32, &a, &b, &own, starts_at_zero);
                }
                let mut own = own.into_iter();
                for (dot, out) in out.iter_mut().enumerate() {
                    out.extend(own.by_ref().take(used[dot]));
                    out.extend_from_slice(of_tile(dot).1);
                }
            }
        }
        self.e.void("call void asm sideeffect \"wgmma.commit_group.sync.aligned;\", \"~{memory}\"() #1");
        for (dot, out) in joined.into_iter().zip(out) {
            self.set(self.func.op(dot).results[0], out);
        }
        Ok(())
    }

    /// The 32-bit words of an operand's registers.
    pub(super) fn words(&mut self, regs: &[Val], dtype: DType) -> Vec<Val> {
        let ty = llvm_type(Elem::Num(dtype));
        match 32 / dtype.bits() {
            1 => regs.iter().map(|x| self.e.inst(format!("bitcast {ty} {x} to i32"))).collect(),
            n => regs.chunks(n).map(|w| self.pack_elements(w, ty, "i32")).collect(),
        }
    }

    /// A number that is equal in all lanes of a warp, marked as such for ptxas by a shuffle.
    pub(super) fn warp_uniform(
        &mut self,
        f: impl FnOnce(&mut super::emit::Emitter, &super::threads::Threads) -> Val,
    ) -> Val {
        let v = f(&mut self.e, &self.threads);
        let shuffle = self.uniform_shuffle(&v);
        self.e.hoist(shuffle)
    }

    /// A number that is equal in all lanes of a warp, marked as such for ptxas: without the mark, it would not keep what depends on it,
    /// such as the trip count of a loop and what is carried through it, in uniform registers.
    pub(super) fn marked_uniform(&mut self, v: &str) -> Val {
        let shuffle = self.uniform_shuffle(v);
        self.e.inst(shuffle)
    }

    fn uniform_shuffle(&mut self, v: &str) -> String {
        self.e.declare("declare i32 @llvm.nvvm.shfl.sync.idx.i32(i32, i32, i32, i32)");
        format!("call i32 @llvm.nvvm.shfl.sync.idx.i32(i32 -1, i32 {v}, i32 0, i32 31)")
    }

    /// An operand of `wgmma` in shared memory, whose dimension `k_axis` is K.
    fn matrix(&self, v: Value, k_axis: usize, allows_mn_major: bool) -> SharedMatrix {
        let (layout, _, base) = self.buffer(v);
        let matrix = Matrix::of(self.func, self.func.ty(v), k_axis, allows_mn_major);
        let matrix = matrix
            .unwrap_or_else(|| panic!("internal compiler error: wgmma cannot read an operand of layout {layout}"));
        SharedMatrix { matrix, base }
    }

    /// The byte offset of a warpgroup's part of the matrix, which starts at `group · step` along M or N.
    fn warpgroup_offset(&mut self, SharedMatrix { matrix, .. }: &SharedMatrix, group: &str, step: u32) -> Val {
        if group == "0" {
            return "0".into();
        }
        let panel = matrix.panel();
        if matrix.k_major || step >= panel {
            // The offset grows by the same amount with each step.
            let by = matrix.offset(step, 0);
            return self.e.hoist(format!("mul i32 {group}, {by}"));
        }
        let at = self.e.hoist(format!("mul i32 {group}, {step}"));
        let whole = self.e.hoist(format!("udiv i32 {at}, {panel}"));
        let part = self.e.hoist(format!("urem i32 {at}, {panel}"));
        let whole = self.e.hoist(format!("mul i32 {whole}, {}", matrix.offset(panel, 0)));
        let part = self.e.hoist(format!("mul i32 {part}, {}", matrix.element_bytes));
        self.e.hoist(format!("add i32 {whole}, {part}"))
    }

    /// The descriptors of all K steps at `at` along M or N: a base descriptor, and an offset from it in units of 16
    /// bytes.
    ///
    /// The asm statement adds the offsets: LLVM would hoist separate descriptors out of loops, where each takes two
    /// registers and an `R2UR` in every iteration.
    fn step_descriptors(
        &mut self,
        shared: &SharedMatrix,
        group: &str,
        at: u32,
        steps: u32,
        k_instr: u32,
    ) -> Vec<(Val, u32)> {
        let first = self.descriptor(shared, group);
        (0..steps).map(|k| (first.clone(), shared.matrix.offset(at, k_instr * k) >> 4)).collect()
    }

    /// The matrix descriptor (i64) of the start of a warpgroup's part of the matrix.
    fn descriptor(&mut self, shared: &SharedMatrix, group: &str) -> Val {
        let start = self.e.hoist("ptrtoint ptr addrspace(3) @smem to i32");
        let address = self.e.inst(format!("add i32 {start}, {}", shared.base));
        let address = self.e.inst(format!("add i32 {address}, {group}"));
        let address = self.e.inst(format!("and i32 {address}, 262143"));
        let start = self.e.inst(format!("lshr exact i32 {address}, 4"));
        let wide = self.e.inst(format!("zext nneg i32 {start} to i64"));
        self.e.inst(format!("add i64 {wide}, {}", shared.matrix.descriptor() as i64))
    }

    /// Emits all K steps of one 64×n tile in one asm statement, so that no instruction comes between them.
    fn wgmma_tile(
        &mut self,
        instruction: &Instruction,
        n: u32,
        a: &OperandA,
        (b, b_trans): &(Vec<(Val, u32)>, bool),
        sums: &[Val],
        starts_at_zero: bool,
    ) -> Vec<Val> {
        let (number, register) = (llvm_type(Elem::Num(instruction.acc)), register_class(instruction.acc));
        let count = sums.len();
        let outputs: Vec<String> = (0..count).map(|i| format!("${i}")).collect();
        // After the outputs come the accumulators tied to them, unless the accumulator starts at zero.
        let ties = if starts_at_zero { 0 } else { count };
        let mut args: Vec<String> =
            if starts_at_zero { Vec::new() } else { sums.iter().map(|s| format!("{number} {s}")).collect() };
        let output = format!("{}{register}", if starts_at_zero { "=&" } else { "=" });
        let mut constraints: Vec<String> = vec![output; count];
        if !starts_at_zero {
            constraints.extend((0..count).map(|i| i.to_string()));
        }
        let mut operand = |value: String, constraint: &str| {
            let known = args.iter().skip(ties).position(|arg| *arg == value);
            let at = known.unwrap_or_else(|| {
                args.push(value);
                constraints.push(constraint.into());
                args.len() - 1 - ties
            });
            format!("${}", count + ties + at)
        };
        let b: Vec<(String, u32)> =
            b.iter().map(|(base, units)| (operand(format!("i64 {base}"), "l"), *units)).collect();
        let (a_descriptors, a_words, a_trans) = match a {
            OperandA::Shared(step_descriptors, trans) => {
                let step_descriptors = step_descriptors
                    .iter()
                    .map(|(base, units)| (operand(format!("i64 {base}"), "l"), *units))
                    .collect();
                (step_descriptors, Vec::new(), Some(*trans))
            }
            OperandA::Registers(words) => {
                let words = words.iter().map(|w| operand(format!("i32 {w}"), "r")).collect();
                (Vec::new(), words, None)
            }
        };
        // Factors of a and b (only of floats), then what is MN-major (only where it may be).
        let mut flags = String::from(if instruction.acc.is_float() { ", 1, 1" } else { "" });
        if instruction.allows_mn_major() {
            flags.extend(a_trans.into_iter().chain([*b_trans]).map(|t| format!(", {}", u32::from(t))));
        }
        let mnemonic = instruction.mnemonic(n);
        // The scale-d (accumulate) flag is a predicate.
        let mut text = String::from("{.reg .pred add; .reg .pred set; setp.eq.u32 add, 0, 0; setp.ne.u32 set, 0, 0; ");
        if b.iter().chain(&a_descriptors).any(|&(_, units)| units > 0) {
            text.push_str(".reg .b64 da; .reg .b64 db; ");
        }
        for (i, b) in b.iter().enumerate() {
            let mut advance = |name: &str, (base, units): &(String, u32)| match units {
                0 => base.clone(),
                _ => {
                    text.push_str(&format!("add.s64 {name}, {base}, {units}; "));
                    name.to_string()
                }
            };
            let b_text = advance("db", b);
            let a_text = match a_descriptors.get(i) {
                Some(a) => advance("da", a),
                None => format!("{{{}}}", a_words[4 * i..4 * i + 4].join(",")),
            };
            let scale = if starts_at_zero && i == 0 { "set" } else { "add" };
            text.push_str(&format!("{mnemonic} {{{}}}, {a_text}, {b_text}, {scale}{flags};", outputs.join(",")));
        }
        text.push('}');
        constraints.push("~{memory}".into());
        let ty = format!("{{ {} }}", vec![number; count].join(", "));
        let v = self.e.inst(format!(
            "call {ty} asm sideeffect \"{text}\", \"{}\"({}) #1",
            constraints.join(","),
            args.join(", ")
        ));
        (0..count).map(|i| self.e.inst(format!("extractvalue {ty} {v}, {i}"))).collect()
    }
}

/// Whether a thread has the registers for one `wgmma` of all columns of these dots.
pub(super) fn fit_registers(func: &Func, dots: &[OpId], registers: u32) -> bool {
    let columns = dots.iter().map(|&id| func.ty(func.op(id).results[0]).shape()[1] as u32).sum();
    let first = func.op(dots[0]);
    let a_in_registers = func.ty(first.operands[0]).is_tensor();
    let instruction = Instruction::of(func, first, Family::Wgmma);
    instruction.is_some_and(|instruction| instruction.min_registers(columns, a_in_registers) <= registers)
}

/// The constraint of a number in a register of its type.
pub(super) fn register_class(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f",
        DType::F64 => "d",
        _ => "r",
    }
}

/// The layout of an operand of which each thread needs all of K: K in the low register bits, and the thread's own rows
/// (`axis` 0) or columns (`axis` 1) as in the accumulator.
fn fma_operand(acc: &LinearLayout, axis: usize, shape: [u32; 2], k_bits: usize) -> LinearLayout {
    let place = |x: u32| {
        let mut basis = vec![0; 2];
        basis[axis] = x;
        basis
    };
    let mut register: Vec<Vec<u32>> = (0..k_bits)
        .map(|b| {
            let mut basis = vec![0; 2];
            basis[1 - axis] = 1 << b;
            basis
        })
        .collect();
    register.extend(acc.bases(Dim::Register).iter().map(|b| b[axis]).filter(|&x| x != 0).map(place));
    let all = |dim| acc.bases(dim).iter().map(|b| place(b[axis])).collect();
    let (lane, warp) = (all(Dim::Lane), all(Dim::Warp));
    LinearLayout::distributed(&shape, ThreadBases { register, lane, warp, ..ThreadBases::default() })
}

/// Maps the coordinates of each element of thread 0 to the register that holds the element.
fn registers_by_coordinates(layout: &LinearLayout) -> std::collections::HashMap<Vec<u32>, usize> {
    (0..layout.num_registers()).rev().map(|r| (layout.apply(Index::register(r as u32)), r)).collect()
}
