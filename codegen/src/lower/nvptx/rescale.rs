//! Products that a warp skips where all of its factors are 1.

use super::Lowering;
use super::elementwise::literal;
use super::emit::Val;
use crate::ir::{DType, Elem, Literal, Value};
use crate::target::GpuArch;
use std::collections::HashSet;

impl Lowering<'_> {
    /// Whether warps vote, and skip a `rescale`.
    pub(super) fn is_skipped_by_warps(&self, result: Value, factors: &[Val]) -> bool {
        /// A vote and a branch take about as long as a few multiplications.
        const FEWEST: usize = 16;
        let distinct: HashSet<&Val> = factors.iter().collect();
        // Each factor takes a comparison.
        let pays = factors.len() >= FEWEST && 4 * distinct.len() <= factors.len();
        self.arch == GpuArch::Sm90a && self.dtype(result) == DType::F32 && pays
    }

    /// The products of registers and factors, unless all factors of the warp are 1.
    pub(super) fn rescale(&mut self, values: &[Val], factors: &[Val]) -> Vec<Val> {
        let one = literal(Literal::Float(1.0), Elem::Num(DType::F32));
        let mut compared: HashSet<&Val> = HashSet::new();
        let mut changes: Val = "false".into();
        for factor in factors.iter().filter(|&f| compared.insert(f)) {
            let own = self.e.inst(format!("fcmp une float {factor}, {one}"));
            changes = self.e.inst(format!("or i1 {changes}, {own}"));
        }
        let any = self.e.call("i1", "llvm.nvvm.vote.any.sync", &[("i32", "-1"), ("i1", &changes)]);
        // Named as the blocks of other conditional regions: the simulator's mutants move waits across those.
        let (scale, join) = (self.e.new_label("when"), self.e.new_label("after"));
        let from = self.e.label();
        self.e.branch_if(&any, &scale, &join);
        self.e.start_block(&scale);
        let products: Vec<Val> =
            values.iter().zip(factors).map(|(x, f)| self.e.inst(format!("fmul float {x}, {f}"))).collect();
        self.e.branch(&join);
        self.e.start_block(&join);
        let phi =
            |(x, product): (&Val, &Val)| self.e.inst(format!("phi float [ {x}, %{from} ], [ {product}, %{scale} ]"));
        values.iter().zip(&products).map(phi).collect()
    }
}
