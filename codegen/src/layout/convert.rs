//! Conversions between distributed layouts, classified by the quotient of the two maps.

use super::gf2::{self, Span};
use super::linear::{Dim, LinearLayout, bug};

/// Maximum number of shuffles of a conversion inside a warp; with more, shared memory is faster.
const MAX_SHUFFLES: usize = 64;
/// Maximum number of selects per shuffle. Shared memory costs a store, a load and a share of two barriers per value.
const MAX_SELECTS_PER_SHUFFLE: usize = 8;

/// The cheapest way to convert a tensor from one layout to another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Conversion {
    /// Both layouts hold every value in the same place.
    Identity,
    /// Every thread already holds its values: result register `r` is source register `map[r]`.
    Registers(Vec<usize>),
    /// Values stay in their warp.
    Lanes(LanePlan),
    /// Values move between warps (or shuffles would cost more): write to shared memory, barrier, read back. See
    /// [`LinearLayout::conversion_scratch`].
    Shared,
    /// A block needs values that only another block of the cluster holds.
    Blocks,
}

impl Conversion {
    /// Classifies the conversion of a tensor from layout `src` to layout `dst`.
    ///
    /// # Panics
    /// If the two are not distributed layouts of one shape with the same numbers of lanes, warps and blocks: a compiler
    /// bug.
    #[track_caller]
    pub fn between(src: &LinearLayout, dst: &LinearLayout) -> Conversion {
        let alike = [Dim::Lane, Dim::Warp, Dim::Block].iter().all(|&dim| src.bits(dim) == dst.bits(dim));
        if src.shape() != dst.shape() || !src.is_distributed() || !dst.is_distributed() || !alike {
            bug(format!("conversion from {src} to {dst}"));
        }
        if src == dst {
            return Conversion::Identity;
        }
        let same_place = |dim| src.bases(dim) == dst.bases(dim);
        if same_place(Dim::Lane)
            && same_place(Dim::Warp)
            && same_place(Dim::Block)
            && let Some(map) = src.registers_of(dst)
        {
            return Conversion::Registers(map);
        }
        match LanePlan::find(src, dst) {
            Some(plan) if plan.is_cheap() => Conversion::Lanes(plan),
            _ if stays_in_block(src, dst) => Conversion::Shared,
            _ => Conversion::Blocks,
        }
    }
}

/// Whether each block holds all values that it needs.
fn stays_in_block(src: &LinearLayout, dst: &LinearLayout) -> bool {
    let dims = [Dim::Register, Dim::Lane, Dim::Warp];
    let held: Vec<u64> = dims.iter().flat_map(|&dim| src.columns(dim)).collect();
    let span = Span::of_columns(&held);
    let moves = src.columns(Dim::Block).into_iter().zip(dst.columns(Dim::Block)).map(|(a, b)| a ^ b);
    dims.iter().flat_map(|&dim| dst.columns(dim)).chain(moves).all(|column| span.contains(column))
}

/// How a lane finds the lane that a shuffle reads from, given [`Shuffle::lane`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SourceLane {
    /// XORs it into its own number (`shfl.bfly`; no shuffle if it is zero).
    Xor,
    /// Keeps the bits `kept` of its own number, and takes the others (`shfl.idx` with a segment mask). The lane is an
    /// immediate, and takes no register.
    Segment { kept: u32 },
    /// XORs it into a number that each thread computes first.
    Computed,
}

/// One shuffle of a plan.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shuffle {
    /// The (rotated) register that every lane provides.
    pub register: usize,
    /// XORed into the number of the lane to read from.
    pub lane: u32,
}

/// A conversion inside each warp, in three steps. Masks are per lane bit and warp bit: a thread XORs the masks of the
/// bits that are set in its lane and warp number, written `⊕mask` here.
///
/// 1. Rotate: `offer[s] = source[s ^ ⊕rotate_in]` — per set mask one select per register.
/// 2. Shuffle: `taken[k] = shfl.idx(offer[shuffles[k].register], ⊕from ^ shuffles[k].lane)`.
/// 3. Rotate: `value[k] = taken[k ^ ⊕rotate_out]`.
///
/// Result register `r` is then `value[registers[r]]`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LanePlan {
    /// Register masks of the first rotation, per lane bit.
    pub rotate_in_lane: Vec<u32>,
    /// Register masks of the first rotation, per warp bit.
    pub rotate_in_warp: Vec<u32>,
    /// One shuffle per distinct result register.
    pub shuffles: Vec<Shuffle>,
    /// Masks of the lane to read from, per lane bit (`1 << bit` for every bit if each lane reads from itself).
    pub from_lane: Vec<u32>,
    /// Masks of the lane to read from, per warp bit.
    pub from_warp: Vec<u32>,
    /// Register masks of the second rotation, per lane bit.
    pub rotate_out_lane: Vec<u32>,
    /// Index into `value` of each result register.
    pub registers: Vec<usize>,
    /// Number of registers of the source.
    pub source_registers: usize,
}

/// The (register, lane) of the source that holds the image of one bit of the result.
#[derive(Clone, Copy, Default)]
struct Source {
    register: u64,
    lane: u64,
}

impl LanePlan {
    /// A plan, if every value is already in the right warp and shuffles can move it to its lane.
    ///
    /// Let the element of register `r` of lane `l` of the result lie in source register `A·r + B·l`, lane `C·r + D·l`.
    /// In a shuffle, each lane provides the same register to all lanes that read from it. With shuffles numbered
    /// `k = r + E·l`, a lane reads from lane `C·k + M·l` with `M = D + C·E`. `E` (and, among replicas, `D`) is chosen
    /// to make `M` injective; the register that a lane provides is then a function of that lane and `k` alone.
    pub fn find(src: &LinearLayout, dst: &LinearLayout) -> Option<LanePlan> {
        let distinct = dst.without_redundant_registers().layout;
        let registers = distinct.registers_of(dst)?;
        let mut sources = Sources::find(src, &distinct)?;
        let e = sources.choose_shuffles()?;
        let a: Vec<u64> = sources.register.iter().map(|source| source.register).collect();
        let c: Vec<u64> = sources.register.iter().map(|source| source.lane).collect();
        let b: Vec<u64> = sources.lane.iter().map(|source| source.register).collect();
        let d: Vec<u64> = sources.lane.iter().map(|source| source.lane).collect();

        let xor = |left: &[u64], right: Vec<u64>| -> Vec<u64> {
            left.iter().zip(right).map(|(left, right)| left ^ right).collect()
        };
        let after = |outer: &[u64], inner: &[u64]| -> Vec<u64> {
            inner.iter().map(|&vector| gf2::image(outer, vector)).collect()
        };
        // M, and the register N·l = (A·E + B)·l that lane l needs from shuffle 0, as a function of the lane M·l that
        // provides it.
        let m = xor(&d, after(&c, &e));
        let n = xor(&b, after(&a, &e));
        let inverse = Span::of_columns(&m);
        let wanted_by = |lane: u64| gf2::image(&n, inverse.reduce(lane).1);
        let lane_bits = src.bits(Dim::Lane);
        let rotate_in_lane: Vec<u32> = (0..lane_bits).map(|bit| wanted_by(1 << bit) as u32).collect();
        let shuffle = |k: u64| {
            let lane = gf2::image(&c, k);
            Shuffle { register: (gf2::image(&a, k) ^ wanted_by(lane)) as usize, lane: lane as u32 }
        };
        Some(LanePlan {
            rotate_in_lane,
            rotate_in_warp: sources
                .warp
                .iter()
                .map(|source| (source.register ^ wanted_by(source.lane)) as u32)
                .collect(),
            shuffles: (0..distinct.num_registers() as u64).map(shuffle).collect(),
            from_lane: m.iter().map(|&lane| lane as u32).collect(),
            from_warp: sources.warp.iter().map(|source| source.lane as u32).collect(),
            rotate_out_lane: e.iter().map(|&register| register as u32).collect(),
            registers,
            source_registers: src.num_registers(),
        })
    }

    /// How a lane finds the lane that each shuffle reads from.
    pub fn source_lane(&self) -> SourceLane {
        let masks = self.from_lane.iter().enumerate();
        if self.from_warp.iter().any(|&mask| mask != 0) {
            return SourceLane::Computed;
        }
        if masks.clone().all(|(bit, &mask)| mask == 1 << bit) {
            return SourceLane::Xor;
        }
        let kept = masks.clone().fold(0, |kept, (_, mask)| kept | mask);
        let keeps_or_drops = masks.clone().all(|(bit, &mask)| mask == 0 || mask == 1 << bit);
        let sets_others = self.shuffles.iter().all(|shuffle| shuffle.lane & kept == 0);
        if keeps_or_drops && sets_others { SourceLane::Segment { kept } } else { SourceLane::Computed }
    }

    /// Number of shuffle instructions per thread, for 32-bit elements.
    pub fn num_shuffles(&self) -> usize {
        let is_xor = self.source_lane() == SourceLane::Xor;
        self.shuffles.iter().filter(|shuffle| shuffle.lane != 0 || !is_xor).count()
    }

    /// Number of select instructions per thread of the two rotations.
    pub fn num_selects(&self) -> usize {
        let set = |masks: &[u32]| masks.iter().filter(|&&mask| mask != 0).count();
        (set(&self.rotate_in_lane) + set(&self.rotate_in_warp)) * self.source_registers
            + set(&self.rotate_out_lane) * self.shuffles.len()
    }

    /// Whether the plan is faster than a round trip through shared memory.
    pub fn is_cheap(&self) -> bool {
        self.num_shuffles() <= MAX_SHUFFLES
            && self.num_selects() <= MAX_SELECTS_PER_SHUFFLE * self.shuffles.len().max(1)
    }
}

/// For each bit of the result, the place in the source that holds its image.
struct Sources {
    register: Vec<Source>,
    lane: Vec<Source>,
    warp: Vec<Source>,
    /// Moves between replicas: they change the place, not the value.
    replica_moves: Vec<Source>,
}

impl Sources {
    /// `None` if some value lies in another warp or block.
    fn find(src: &LinearLayout, dst: &LinearLayout) -> Option<Sources> {
        if src.bases(Dim::Block) != dst.bases(Dim::Block) {
            return None;
        }
        let in_thread = Span::of_columns(&src.columns(Dim::Register));
        let held = [src.columns(Dim::Register), src.columns(Dim::Lane)].concat();
        let in_warp = Span::of_columns(&held);
        let register_bits = src.bits(Dim::Register);
        let unpack = |place: u64| Source { register: place & ((1 << register_bits) - 1), lane: place >> register_bits };
        let solve = |column| in_warp.solve(column).map(unpack);

        let register = dst.columns(Dim::Register).into_iter().map(solve).collect::<Option<_>>()?;
        let lane_pairs = src.columns(Dim::Lane).into_iter().zip(dst.columns(Dim::Lane)).enumerate();
        // Prefers a register of the same lane.
        let lane_source = |(bit, (held, wanted))| match in_thread.solve(held ^ wanted) {
            Some(register) => Some(Source { register, lane: 1u64 << bit }),
            None => solve(wanted),
        };
        let lane = lane_pairs.map(lane_source).collect::<Option<_>>()?;
        let warp_pairs = src.columns(Dim::Warp).into_iter().zip(dst.columns(Dim::Warp));
        let warp = warp_pairs.map(|(held, wanted)| solve(held ^ wanted)).collect::<Option<_>>()?;
        let replica_moves = gf2::kernel(&held).into_iter().map(unpack).collect();
        Some(Sources { register, lane, warp, replica_moves })
    }

    /// Chooses `E`, per lane bit, and redirects lanes to replicas, such that lanes that read from one lane in one
    /// shuffle (`(D + C·E)·l = 0`) need the same register of it: afterwards, such `l` satisfy `B·l = 0` and `E·l = 0`.
    /// `None` if neither replicas nor the registers of the result give access to enough other lanes.
    fn choose_shuffles(&mut self) -> Option<Vec<u64>> {
        let column = |list: &[Source], part: fn(&Source) -> u64| -> Vec<u64> { list.iter().map(part).collect() };
        let reads = column(&self.lane, |source| source.lane);
        let wants = column(&self.lane, |source| source.register);
        let mut read = Span::of_columns(&reads);
        // Directions to other lanes. Moves to replicas are free, so these come first. In a choice, a bit below
        // `registers` is a result register, a higher one a move between replicas.
        let registers = self.register.len();
        let moves = self.replica_moves.iter().enumerate().map(|(i, source)| (registers + i, source.lane));
        let directions = moves.chain(self.register.iter().map(|source| source.lane).enumerate());
        let spare: Vec<u64> =
            directions.filter(|&(_, lane)| read.insert(lane, 0)).map(|(choice, _)| 1 << choice).collect();
        let mut spare = spare.into_iter();

        let mut e = vec![0; self.lane.len()];
        // Tags are the choices for the steps inserted so far, which makes the choice a linear function.
        let mut wanted = Span::default();
        // Lanes that differ by a kernel step read from one lane. The choice for a step is assigned to its highest bit,
        // which no other step has.
        for step in gf2::kernel(&reads) {
            let bit = step.ilog2() as usize;
            let (rest, known) = wanted.reduce(gf2::image(&wants, step));
            let choice = if rest == 0 {
                known
            } else {
                let own = spare.next()?;
                wanted.insert(rest, known ^ own);
                own
            };
            e[bit] = choice & ((1 << registers) - 1);
            for (i, replica) in self.replica_moves.iter().enumerate() {
                if choice >> (registers + i) & 1 == 1 {
                    self.lane[bit].register ^= replica.register;
                    self.lane[bit].lane ^= replica.lane;
                }
            }
        }
        Some(e)
    }
}
