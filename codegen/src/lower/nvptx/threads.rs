//! Thread indices, and linear functions of them: the coordinates of a thread's values in a layout.

use super::emit::{Emitter, Val};
use crate::layout::{Dim, Index, IndexMap, LinearLayout};

/// The lane and the warp of `tid.x`.
pub struct Threads {
    pub lane: Val,
    pub warp: Val,
}

impl Threads {
    pub fn new(e: &mut Emitter, threads: u32) -> Threads {
        e.declare("declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()");
        let tid = e.hoist(format!("call range(i32 0, {threads}) i32 @llvm.nvvm.read.ptx.sreg.tid.x()"));
        let lane = e.hoist(format!("and i32 {tid}, 31"));
        let warp = if threads > 32 { e.hoist(format!("lshr i32 {tid}, 5")) } else { "0".into() };
        Threads { lane, warp }
    }

    /// `⊕ images[bit]` over the set bits of the lane and warp indices, as i32, computed at entry.
    pub fn linear(&self, e: &mut Emitter, lane: &[u32], warp: &[u32]) -> Val {
        let mut terms = Vec::new();
        self.terms(e, &self.lane.clone(), lane, &mut terms);
        self.terms(e, &self.warp.clone(), warp, &mut terms);
        let mut covered = 0;
        let mut sum: Option<Val> = None;
        for (value, mask) in terms {
            sum = Some(match sum {
                None => value,
                Some(s) if covered & mask == 0 => e.hoist(format!("or disjoint i32 {s}, {value}")),
                Some(s) => e.hoist(format!("xor i32 {s}, {value}")),
            });
            covered |= mask;
        }
        sum.unwrap_or_else(|| "0".into())
    }

    /// Appends one term per run of bits whose images double, with the bits that the term may set.
    fn terms(&self, e: &mut Emitter, number: &str, images: &[u32], terms: &mut Vec<(Val, u32)>) {
        let mut bit = 0;
        while bit < images.len() {
            let first = images[bit];
            let mut run = 1;
            while first != 0 && bit + run < images.len() && images[bit + run] == first << run {
                run += 1;
            }
            if first != 0 && number != "0" {
                let shifted = if bit == 0 { number.to_string() } else { e.hoist(format!("lshr i32 {number}, {bit}")) };
                let masked = e.hoist(format!("and i32 {shifted}, {}", (1u32 << run) - 1));
                // If `first` has several bits, the images overlap with their doubles, where XOR is not multiplication:
                // such runs get one term per bit.
                if first.is_power_of_two() {
                    let value = match first.trailing_zeros() {
                        0 => masked,
                        s => e.hoist(format!("shl i32 {masked}, {s}")),
                    };
                    terms.push((value, ((1u32 << run) - 1) << first.trailing_zeros()));
                } else {
                    for i in 0..run {
                        let one = e.hoist(format!("lshr i32 {shifted}, {i}"));
                        let one = e.hoist(format!("and i32 {one}, 1"));
                        let value = e.hoist(format!("mul i32 {one}, {}", first << i));
                        terms.push((value, first << i));
                    }
                }
            }
            bit += run;
        }
    }

    /// i1: this thread acts for all threads that hold copies in this layout (the lane and warp bits that change nothing
    /// are zero). `None` where no thread holds copies.
    pub fn owner(&self, e: &mut Emitter, layout: &LinearLayout) -> Option<Val> {
        self.first_of(e, [Dim::Lane, Dim::Warp].map(|dim| (dim, layout.free_mask(dim))))
    }

    /// i1: this thread is the first of those that differ only in the bits of the masks; `None` if the masks are empty.
    pub fn first_of(&self, e: &mut Emitter, masks: [(Dim, u32); 2]) -> Option<Val> {
        let mut first: Option<Val> = None;
        for (dim, mask) in masks {
            let number = if dim == Dim::Lane { &self.lane } else { &self.warp };
            if mask != 0 {
                let bits = e.hoist(format!("and i32 {number}, {mask}"));
                let zero = e.hoist(format!("icmp eq i32 {bits}, 0"));
                first = Some(match first {
                    None => zero,
                    Some(f) => e.hoist(format!("and i1 {f}, {zero}")),
                });
            }
        }
        first
    }
}

/// The coordinates of a thread's values along one axis: `thread ⊕ register part`.
pub struct Coordinate {
    /// The thread part, i32, the same for all registers.
    pub thread: Val,
    /// The bits that `thread` may set.
    pub mask: u32,
    /// The register part, by register.
    pub register: Vec<u32>,
}

/// The coordinates along each axis.
pub fn coordinates(e: &mut Emitter, threads: &Threads, layout: &LinearLayout) -> Vec<Coordinate> {
    (0..layout.rank())
        .map(|axis| {
            let images = |dim| -> Vec<u32> { layout.bases(dim).iter().map(|b| b[axis]).collect() };
            let (lane, warp) = (images(Dim::Lane), images(Dim::Warp));
            let mask = lane.iter().chain(&warp).fold(0, |m, i| m | i);
            let register = (0..layout.num_registers()).map(|r| layout.apply(Index::register(r as u32))[axis]).collect();
            Coordinate { thread: threads.linear(e, &lane, &warp), mask, register }
        })
        .collect()
}

/// The offsets of a thread's values in a shared buffer, in elements: `thread ⊕ register part`.
pub fn offsets(e: &mut Emitter, threads: &Threads, layout: &LinearLayout, memory: &LinearLayout) -> Coordinate {
    let map: IndexMap = layout.locate_in(memory);
    let images = |dim| -> Vec<u32> { map.images(dim).iter().map(|i: &Index| i.offset).collect() };
    let (lane, warp) = (images(Dim::Lane), images(Dim::Warp));
    let mask = lane.iter().chain(&warp).fold(0, |m, i| m | i);
    let register = (0..layout.num_registers()).map(|r| map.apply(Index::register(r as u32)).offset).collect();
    Coordinate { thread: threads.linear(e, &lane, &warp), mask, register }
}

impl Coordinate {
    /// `thread ⊕ constant` as i32, where the constant is the part of a register.
    pub fn at(&self, e: &mut Emitter, constant: u32) -> Val {
        if constant == 0 {
            self.thread.clone()
        } else if self.thread == "0" {
            constant.to_string()
        } else if constant & self.mask == 0 {
            e.offset(&self.thread, constant)
        } else {
            e.inst(format!("xor i32 {}, {constant}", self.thread))
        }
    }
}
