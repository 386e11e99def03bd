//! `ldmatrix` and `stmatrix`: a warp moves four matrices of eight rows of 16 bytes between registers and shared memory in
//! one instruction, where each thread would need four or eight.

use super::Lowering;
use super::emit::Val;
use super::memory::memory_type;
use super::shared::SharedAccess;
use crate::ir::DType;
use crate::layout::{Dim, LinearLayout, MatrixMove, NEXT_WORDS};
use crate::target::GpuArch;

/// A tile in shared memory that is loaded by `ldmatrix`.
pub(super) struct Matrices {
    plan: MatrixMove,
    /// Addresses of rows, by the number of the move.
    rows: SharedAccess,
    elem: DType,
}

impl Lowering<'_> {
    /// Stores a tile by `stmatrix`. Returns false where it cannot.
    pub(super) fn store_matrices(
        &mut self,
        layout: &LinearLayout,
        memory: &LinearLayout,
        base: &Val,
        elem: DType,
        regs: &[Val],
    ) -> bool {
        if layout.free_mask(Dim::Warp) != 0 || self.arch < GpuArch::Sm90a || elem.bytes() != 2 {
            return false;
        }
        let Some(Matrices { plan, mut rows, .. }) = self.matrices(layout, memory, base, elem, NEXT_WORDS) else {
            return false;
        };
        for (number, (_, firsts)) in plan.moves.iter().enumerate() {
            let row = self.shared_pointer(&mut rows, number);
            let words: Vec<Val> = firsts.iter().flat_map(|&r| self.words(&regs[r..r + 2], elem)).collect();
            let list: Vec<String> = (1..=words.len()).map(|i| format!("${i}")).collect();
            let args: String = words.iter().map(|w| format!(", i32 {w}")).collect();
            self.e.void(format!(
                "call void asm sideeffect \"stmatrix.sync.aligned.m8n8.x{}{}.shared.b16 [$0], {{{}}};\", \"r{},~{{memory}}\"(ptr addrspace(3) {row}{args}) #1",
                words.len(),
                if plan.transposed { ".trans" } else { "" },
                list.join(", "),
                ",r".repeat(words.len()),
            ));
        }
        true
    }

    /// Loads a tile by `ldmatrix`; `None` where it cannot.
    pub(super) fn load_matrices(
        &mut self,
        layout: &LinearLayout,
        memory: &LinearLayout,
        base: &Val,
        elem: DType,
    ) -> Option<Vec<Val>> {
        // Scratch memory is laid out for matrices of 16-bit elements only.
        let mut matrices = (elem.bytes() == 2).then(|| self.matrices(layout, memory, base, elem, NEXT_WORDS))??;
        let mut regs = vec![Val::new(); layout.num_registers()];
        for number in 0..matrices.plan.moves.len() {
            for (register, value) in self.load_move(&mut matrices, number) {
                regs[register] = value;
            }
        }
        Some(regs)
    }

    /// Loads the matrices of the instruction that loads `register`. Returns their registers with their values.
    pub(super) fn load_matrices_with(&mut self, matrices: &mut Matrices, register: usize) -> Vec<(usize, Val)> {
        let first = register - register % (4 / matrices.elem.bytes());
        let number = matrices.plan.moves.iter().position(|(_, firsts)| firsts.contains(&first));
        self.load_move(matrices, number.expect("internal compiler error: a register that no instruction loads"))
    }

    fn load_move(&mut self, Matrices { plan, rows, elem }: &mut Matrices, number: usize) -> Vec<(usize, Val)> {
        let firsts = &plan.moves[number].1;
        let (row, n) = (self.shared_pointer(rows, number), firsts.len());
        let list: Vec<String> = (0..n).map(|i| format!("${i}")).collect();
        let ty = if n == 1 { "i32".to_string() } else { format!("{{ {} }}", vec!["i32"; n].join(", ")) };
        let v = self.e.inst(format!(
            "call {ty} asm sideeffect \"ldmatrix.sync.aligned.m8n8.x{n}{}.shared.b16 {{{}}}, [${n}];\", \"{}r,~{{memory}}\"(ptr addrspace(3) {row}) #1",
            if plan.transposed { ".trans" } else { "" },
            list.join(", "),
            "=r,".repeat(n),
        ));
        let (element, per_word) = (memory_type(*elem), 4 / elem.bytes());
        let mut regs = Vec::new();
        for (i, &first) in firsts.iter().enumerate() {
            let word = if n == 1 { v.clone() } else { self.e.inst(format!("extractvalue {ty} {v}, {i}")) };
            regs.extend((first..).zip(self.unpack_elements(&word, "i32", element, per_word)));
        }
        regs
    }

    /// The moves of a tile, and the addresses of their rows, where the layouts have them. `words`:
    /// [`LinearLayout::matrix_move`].
    pub(super) fn matrices(
        &mut self,
        layout: &LinearLayout,
        memory: &LinearLayout,
        base: &Val,
        elem: DType,
        words: [usize; 2],
    ) -> Option<Matrices> {
        let plan = layout.matrix_move(memory, elem.bytes(), words).filter(|_| elem != DType::Bool)?;
        let offsets = super::threads::Coordinate {
            thread: self.threads.linear(&mut self.e, &plan.lane, &plan.warp),
            mask: plan.lane.iter().chain(&plan.warp).fold(0, |m, i| m | i),
            register: plan.moves.iter().map(|(offset, _)| *offset).collect(),
        };
        let rows = SharedAccess::of_rows(offsets, base.clone(), elem);
        Some(Matrices { plan, rows, elem })
    }
}
