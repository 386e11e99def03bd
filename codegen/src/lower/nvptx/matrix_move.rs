//! `ldmatrix` and `stmatrix`: a warp moves four 8 × 8 matrices of 16-bit elements between registers and shared memory in
//! one instruction, where each thread would need four or eight.

use super::Lowering;
use super::emit::Val;
use super::memory::memory_type;
use super::shared::SharedAccess;
use crate::ir::DType;
use crate::layout::{Dim, LinearLayout, MatrixMove};
use crate::target::GpuArch;

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
        if layout.free_mask(Dim::Warp) != 0 {
            return false;
        }
        let Some((plan, mut rows)) = self.matrix_rows(layout, memory, base, elem, GpuArch::Sm90a) else { return false };
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
        let (plan, mut rows) = self.matrix_rows(layout, memory, base, elem, GpuArch::Sm80)?;
        let mut regs = vec![Val::new(); layout.num_registers()];
        for (number, (_, firsts)) in plan.moves.iter().enumerate() {
            let (row, n) = (self.shared_pointer(&mut rows, number), firsts.len());
            let list: Vec<String> = (0..n).map(|i| format!("${i}")).collect();
            let ty = if n == 1 { "i32".to_string() } else { format!("{{ {} }}", vec!["i32"; n].join(", ")) };
            let v = self.e.inst(format!(
                "call {ty} asm sideeffect \"ldmatrix.sync.aligned.m8n8.x{n}{}.shared.b16 {{{}}}, [${n}];\", \"{}r,~{{memory}}\"(ptr addrspace(3) {row}) #1",
                if plan.transposed { ".trans" } else { "" },
                list.join(", "),
                "=r,".repeat(n),
            ));
            for (i, &first) in firsts.iter().enumerate() {
                let word = if n == 1 { v.clone() } else { self.e.inst(format!("extractvalue {ty} {v}, {i}")) };
                let element = memory_type(elem);
                let pair = self.e.inst(format!("bitcast i32 {word} to <2 x {element}>"));
                for (r, value) in self.e.elements(&pair, element, 2).into_iter().enumerate() {
                    regs[first + r] = value;
                }
            }
        }
        Some(regs)
    }

    /// The moves of a tile, and the addresses of their rows, where the target and the layouts have them.
    fn matrix_rows(
        &mut self,
        layout: &LinearLayout,
        memory: &LinearLayout,
        base: &Val,
        elem: DType,
        least: GpuArch,
    ) -> Option<(MatrixMove, SharedAccess)> {
        let plan = layout.matrix_move(memory).filter(|_| elem.bytes() == 2 && self.arch >= least)?;
        let offsets = super::threads::Coordinate {
            thread: self.threads.linear(&mut self.e, &plan.lane, &plan.warp),
            mask: plan.lane.iter().chain(&plan.warp).fold(0, |m, i| m | i),
            register: plan.moves.iter().map(|(offset, _)| *offset).collect(),
        };
        let rows = SharedAccess::of_rows(offsets, base.clone(), elem);
        Some((plan, rows))
    }
}
