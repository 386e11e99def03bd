//! How products of operands of one or two bytes are cut into tiles on Hopper: by a model of their time, and the configuration that
//! this gives.

use crate::matmul::Addend;
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ConstValue, Constexpr};
use tilewright_codegen::target::Schedule;
use tilewright_runtime::autotune::{Config, Problem};

/// How programs share out the tiles of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Programs {
    /// A program for each tile.
    OfOneTile,
    /// Programs compute tile after tile.
    Persistent,
    /// Two persistent programs share an SM and take turns: one stores its tile while the other multiplies.
    Turns,
    /// A program for each tile, whose threads load operands element by element: those whose rows TMA does not take.
    LoadingByThreads,
}

/// How a product of operands of one or two bytes is cut into tiles on Hopper.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Cut {
    /// Rows and columns of a tile.
    pub tile: [usize; 2],
    pub programs: Programs,
}

/// In keys, as in `128x192`, `128x192p`, `128x192t` or `128x128l`.
impl Constexpr for Cut {
    const TYPE: &'static str = "a tile, as in 128x192, 128x192p for persistent programs, 128x192t for those that take turns, or \
         128x128l for those whose threads load";
    const PLACEHOLDER: Cut = Cut { tile: [64, 64], programs: Programs::OfOneTile };

    fn to_const(self) -> ConstValue {
        let [rows, columns] = self.tile;
        let suffix = match self.programs {
            Programs::OfOneTile => "",
            Programs::Persistent => "p",
            Programs::Turns => "t",
            Programs::LoadingByThreads => "l",
        };
        ConstValue::Variant(format!("{rows}x{columns}{suffix}"))
    }

    fn from_const(value: &ConstValue) -> Option<Cut> {
        let ConstValue::Variant(text) = value else { return None };
        let forms = [("p", Programs::Persistent), ("t", Programs::Turns), ("l", Programs::LoadingByThreads)];
        let form = forms.into_iter().find_map(|(suffix, programs)| Some((text.strip_suffix(suffix)?, programs)));
        let (size, programs) = form.unwrap_or((text.as_str(), Programs::OfOneTile));
        let (rows, columns) = size.split_once('x')?;
        Some(Cut { tile: [rows.parse().ok()?, columns.parse().ok()?], programs })
    }

    fn key(self) -> u64 {
        let [rows, columns] = self.tile.map(|n| n as u64);
        rows << 32 | columns << 2 | self.programs as u64
    }
}

/// A tile and its times in microseconds, of a step of 64 along k, and of a tile in addition to its steps: of programs of one
/// tile, of persistent programs, and of programs that take turns.
type TileTimes = ([usize; 2], [f64; 2], Option<[f64; 2]>, Option<[f64; 2]>);

/// Tiles for products with many rows. Robust least squares of relative errors over 152 products on an H100 and an H200,
/// median times of `harness/records/2026-11-27-h100-matmul-forms.jsonl` and `…-h200-…`; tiles that few of these products
/// have stay near the fit of `…-matmul-turns.jsonl`.
const TILES: [TileTimes; 19] = [
    ([64, 64], [0.133, 2.34], None, None),
    ([64, 80], [0.156, 3.36], None, None),
    ([64, 96], [0.173, 3.30], None, None),
    ([64, 128], [0.193, 2.92], None, None),
    ([64, 160], [0.228, 3.17], None, None),
    ([64, 192], [0.290, 2.57], None, None),
    ([128, 64], [0.212, 2.81], None, None),
    ([128, 80], [0.233, 3.16], None, None),
    ([128, 96], [0.255, 3.48], None, None),
    ([128, 112], [0.291, 4.03], Some([0.319, 1.27]), None),
    ([128, 128], [0.326, 3.35], Some([0.339, 0.81]), Some([0.338, 0.29])),
    ([128, 144], [0.384, 4.25], Some([0.388, 1.73]), Some([0.391, 0.28])),
    ([128, 160], [0.410, 4.41], Some([0.424, 1.27]), Some([0.423, 0.39])),
    ([128, 176], [0.443, 4.41], Some([0.464, 1.39]), Some([0.457, 0.45])),
    ([128, 192], [0.471, 3.82], Some([0.487, 1.29]), Some([0.488, 0.50])),
    ([128, 208], [0.519, 4.92], Some([0.529, 1.73]), Some([0.545, 0.55])),
    ([128, 224], [0.567, 4.84], Some([0.574, 1.64]), None),
    ([128, 240], [0.594, 5.00], Some([0.612, 1.69]), None),
    ([128, 256], [0.622, 4.75], Some([0.645, 1.63]), None),
];

/// What the cut of a product depends on in addition to its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Bytes per element of c that are written, and read where a matrix is added.
    pub bytes: usize,
    /// The most columns of tiles whose programs take turns: their threads have twice as many sums, and hold a matrix to add
    /// beside them (the previous content of c, or another matrix that is not in f32), or a few elements of it at a time
    /// (another matrix in f32).
    pub turns: usize,
    /// Whether rows of b are contiguous. Its columns are then loaded in panels of 64, of which the last one may have fewer, a
    /// power of two: the `wgmma` of a tile reads them all.
    pub b_rows: bool,
    /// Whether `wgmma` reads such a b as it is loaded: if its elements have two bytes.
    pub panels: bool,
    /// Whether rows of an operand start where TMA cannot load them.
    pub by_threads: bool,
}

impl Memory {
    pub(crate) fn of([operand, result]: [DType; 2], addend: Addend, b_col_major: bool) -> Memory {
        let accesses = if addend == Addend::None { 1 } else { 2 };
        let turns = match addend {
            Addend::None | Addend::Atomic => 208,
            Addend::Other if result == DType::F32 => 192,
            Addend::Other | Addend::Itself => 128,
        };
        let panels = operand.bytes() > 1;
        Memory { bytes: accesses * result.bytes(), turns, b_rows: !b_col_major, panels, by_threads: false }
    }

    /// The same, of dense operands a and b whose rows, or columns where these are contiguous, have these lengths.
    pub(crate) fn of_rows(self, operand: DType, lengths: [usize; 2]) -> Memory {
        let by_threads = !lengths.into_iter().all(|length| (length * operand.bytes()).is_multiple_of(16));
        Memory { by_threads, ..self }
    }

    /// What a step of this cut takes in units of the table's, where the cut is possible.
    fn step(self, Cut { tile: [rows, columns], programs }: Cut) -> Option<f64> {
        /// With a last panel that is not full (fit to 80 products, medians of `2026-11-27-h200-matmul-gradients.jsonl`).
        const NARROW_PANEL: f64 = 1.02;
        if programs == Programs::Turns && columns > self.turns {
            return None;
        }
        match columns % 64 {
            0 => Some(1.0),
            _ if !self.b_rows => Some(1.0),
            16 | 32 if self.panels && rows == 128 && columns > 128 => Some(NARROW_PANEL),
            _ => None,
        }
    }
}

/// SMs of an H100 or H200.
pub(crate) const SMS: usize = 132;

/// The cut of a product of [m, k] and [k, n] on a GPU with this number of SMs: that of the shortest time by a model. An SM computes its tiles one after the
/// other, at a cost for each that does not depend on k (filling the pipeline, storing), most of which persistent programs
/// and programs that take turns hide.
pub(crate) fn cut(sizes: [usize; 3], sms: usize, memory: Memory) -> Cut {
    let [m, n, _] = sizes;
    if memory.by_threads && m > 64 && n > FEW {
        // The most products for each element that threads load. Of 9 products, it takes 1.15 times as long as the fastest tile in the
        // mean, and 1.29 times at most (`…/2026-11-30-h200-matmul-odd-rows.jsonl`).
        return Cut { tile: [128, 128], programs: Programs::LoadingByThreads };
    }
    cut_among(sizes, sms, memory.bytes, |cut| memory.step(cut))
}

/// As [`cut`], of those for which `step` says what a step takes in units of the table's, as for sums that take more
/// registers, and for results of which an element takes this number of bytes.
pub(crate) fn cut_among([m, n, k]: [usize; 3], sms: usize, bytes: usize, step: impl Fn(Cut) -> Option<f64>) -> Cut {
    /// Persistent programs get their tiles in advance; without them, an SM takes the next tile when it is free.
    const LEAST_GAIN: f64 = 1.01;
    /// Microseconds before the first of several tiles of an SM and after the last.
    const ENDS: f64 = 3.0;
    /// Bytes per microsecond of results that are wider than those of two bytes, as fitted: an SM's share of the 3.35 TB/s of
    /// an H100's memory is 25 000.
    const STORED: f64 = 28_000.0;
    if n <= FEW && n <= m {
        let tile = [widest_in_fewest_rounds(m, [64, 128], sms), n.next_power_of_two().max(8)];
        return Cut { tile, programs: Programs::OfOneTile };
    }
    if m <= 64 {
        let tile = [64, widest_in_fewest_rounds(n, [32, 64, 128, 256], sms)];
        return Cut { tile, programs: Programs::OfOneTile };
    }
    let steps = k as f64 / 64.0;
    let times = TILES.iter().flat_map(|&(tile, alone, persistent, turns)| {
        let rounds = m.div_ceil(tile[0]).saturating_mul(n.div_ceil(tile[1])).div_ceil(sms.max(1)) as f64;
        let stored = |bytes: usize| (bytes * tile[0] * tile[1]) as f64 / STORED;
        let of = |times: Option<[f64; 2]>, programs| {
            let ([per_step, each], factor) = (times?, step(Cut { tile, programs })?);
            let of_sums = steps * per_step * factor + each + stored(bytes.saturating_sub(2));
            let all = rounds * of_sums.max(stored(bytes));
            match programs {
                Programs::OfOneTile | Programs::LoadingByThreads => Some(all),
                Programs::Persistent | Programs::Turns => (rounds > 1.0).then_some(all + ENDS),
            }
        };
        let of_alone = of(Some(alone), Programs::OfOneTile);
        let of_persistent = of(persistent, Programs::Persistent);
        let of_persistent = of_persistent.filter(|time| of_alone.is_some_and(|alone| alone > LEAST_GAIN * time));
        let all = [
            (of_alone, Programs::OfOneTile),
            (of_persistent, Programs::Persistent),
            (of(turns, Programs::Turns), Programs::Turns),
        ];
        all.into_iter().filter_map(move |(time, programs)| Some((time?, Cut { tile, programs })))
    });
    times.min_by(|a, b| a.0.total_cmp(&b.0)).map_or(Cut::PLACEHOLDER, |(_, cut)| cut)
}

/// Whether tiles of this size give programs for most SMs of a Hopper GPU.
pub(crate) fn occupies([m, n]: [usize; 2], [rows, columns]: [usize; 2]) -> bool {
    m.div_ceil(rows).saturating_mul(n.div_ceil(columns)) >= 120
}

/// The most rows or columns of a product that is bound by reading one operand, and is cut by the rows or columns of the result
/// that this operand gives.
pub(crate) const FEW: usize = 32;

/// How many of n rows or columns a tile has, where reading them takes the time: an SM reads those of its rounds of tiles one
/// after the other. Of `sizes`, in ascending order, the widest of those with which an SM reads the fewest.
fn widest_in_fewest_rounds<const N: usize>(n: usize, sizes: [usize; N], sms: usize) -> usize {
    let read = |size: &usize| n.div_ceil(*size).div_ceil(sms.max(1)).max(1).saturating_mul(*size);
    sizes.into_iter().rev().min_by_key(read).unwrap_or(64)
}

/// The configuration for Hopper of a product of operands of one or two bytes. Producer warps load rows of 128 bytes, and of
/// 256 or 512 for narrow tiles of two-byte types, whose steps would be shorter than the waits between them. The compiler
/// reduces the stages to those that fit.
pub(crate) fn config_of_cut(problem: &Problem, bytes: usize, Cut { tile, programs }: Cut) -> Config {
    let [m_tile, n_tile] = tile;
    // Bytes in flight bound products of few rows: as many of one-byte types as of two-byte types (`…-matmul-few-rows.jsonl`).
    let by_threads = programs == Programs::LoadingByThreads;
    let most_stages = match by_threads {
        true => 3,
        false if m_tile == 64 && n_tile <= 64 => 16 / bytes,
        false => 8,
    };
    let size = |name: &str| problem.int(name).unwrap_or(1) as usize;
    let row_bytes = match n_tile {
        _ if by_threads => 256,
        ..=16 if m_tile == 64 && bytes == 2 => 512,
        ..=127 if m_tile == 64 && bytes == 2 => 256,
        _ => 128,
    };
    let k_tile = size("k").clamp(32, row_bytes / bytes);
    let steps = size("k").div_ceil(k_tile);
    let turns = programs == Programs::Turns;
    let config = Config::default().set("m_tile", m_tile).set("n_tile", n_tile).set("k_tile", k_tile);
    let persistent = matches!(programs, Programs::Persistent | Programs::Turns);
    let config = config.set("persistent", persistent).set("replicas", if turns { 2 } else { 1 });
    let config = config.num_warps(if m_tile > 64 && !turns { 8 } else { 4 });
    let config = config.num_stages(most_stages.min(steps.max(2)) as u32);
    Config { schedule: Schedule { warp_specialize: Some(true), ..Schedule::default() }, ..config }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text([m, n, k]: [usize; 3]) -> String {
        cut([m, n, k], SMS, Memory::of([DType::BF16; 2], Addend::None, true)).to_const().to_string()
    }

    #[test]
    fn products_of_few_rows_are_cut_by_columns() {
        assert_eq!([[0, 4096, 4096], [48, 4096, 4096], [64, 64, 64]].map(text), ["64x32"; 3]);
        // Not two rounds of tiles of half the width.
        assert_eq!([[33, 6144, 4096], [64, 8192, 8192]].map(text), ["64x64"; 2]);
        assert_eq!([[64, 14336, 4096], [64, 16384, 4096]].map(text), ["64x128"; 2]);
        assert_eq!([text([64, 131_072, 4096]), text([64, usize::MAX, 1])], ["64x256", "64x128"]);
    }

    #[test]
    fn products_of_few_columns_are_cut_by_rows() {
        assert_eq!([[4096, 1, 4096], [8192, 8, 8192]].map(text), ["64x8"; 2]);
        assert_eq!([[8192, 9, 8192], [4096, 16, 0], [8192, 32, 64]].map(text), ["64x16", "64x16", "64x32"]);
        assert_eq!([[16384, 1, 16384], [16384, 32, 16384], [usize::MAX, 0, 1]].map(text), ["128x8", "128x32", "128x8"]);
        assert_eq!(text([8192, 33, 8192]), "64x64");
    }

    #[test]
    fn large_products_are_cut_by_rounds_of_the_sms() {
        assert_eq!([[128, 64, 64], [512, 768, 3072], [512, 1024, 4096]].map(text), ["64x64"; 3]);
        // 128 tiles of each, and 124 of 128 × 208.
        assert_eq!([[512, 1280, 5120], [1024, 1024, 1024], [4096, 768, 768]].map(text), ["64x80", "64x128", "128x192"]);
        assert_eq!(
            [[512, 2560, 10240], [512, 5120, 1280], [512, 6400, 1600]].map(text),
            ["64x160", "128x160", "128x208"]
        );
        // One round: persistent programs have nothing to hide.
        assert_eq!(text([2048, 2048, 2048]), "128x256");
        // Two rounds of 128 tiles with few steps, and of 128 with more.
        assert_eq!([[4096, 1280, 1280], [4096, 1600, 1600]].map(text), ["128x160t", "128x208t"]);
        assert_eq!(text([usize::MAX, usize::MAX, 1]), "128x128p");
    }

    #[test]
    fn rows_of_b_and_wide_results_change_the_cut() {
        let text = |sizes, memory| cut(sizes, SMS, memory).to_const().to_string();
        let rows = Memory::of([DType::BF16; 2], Addend::None, false);
        assert_eq!([[512, 1280, 5120], [4096, 2560, 2560]].map(|size| text(size, rows)), ["64x128", "128x128t"]);
        // Gradients of weights in f32. Threads hold other matrices that they add beside the sums.
        let of = |addend| Memory::of([DType::BF16, DType::F32], addend, true);
        let [stored, added, read, held] = [Addend::None, Addend::Atomic, Addend::Other, Addend::Itself].map(of);
        assert_eq!([stored.bytes, added.bytes, read.bytes], [4, 8, 8]);
        let turns = |tile| Cut { tile, programs: Programs::Turns };
        let narrow = Memory::of([DType::BF16; 2], Addend::Other, true);
        assert_eq!(
            [added, read, held, narrow].map(|of| of.step(turns([128, 192])).is_some()),
            [true, true, false, false]
        );
        assert_eq!([held, rows].map(|of| of.step(turns([128, 128]))), [Some(1.0); 2]);
        assert_eq!(
            [128, 144, 160, 176, 192, 208].map(|columns| rows.step(turns([128, columns])).is_some()),
            [true, true, true, false, true, true]
        );
    }

    #[test]
    fn rows_that_tma_does_not_take_get_tiles_that_load_little() {
        let text = |sizes, lengths| {
            let memory = Memory::of([DType::BF16; 2], Addend::None, true).of_rows(DType::BF16, lengths);
            cut(sizes, SMS, memory).to_const().to_string()
        };
        // Rows of 5000 elements start at multiples of 16 bytes, those of 5001 do not.
        assert_ne!(text([5001; 3], [5000; 2]), "128x128l");
        assert_eq!([[5001, 5000], [5000, 5001]].map(|lengths| text([5001; 3], lengths)), ["128x128l"; 2]);
        assert_eq!(text([64, 4096, 777], [777; 2]), "64x32");
        assert_eq!(text([4096, 8, 777], [777; 2]), "64x8");
    }

    #[test]
    fn cuts_survive_their_text() {
        for cut in [
            Cut { tile: [128, 192], programs: Programs::Persistent },
            Cut { tile: [128, 176], programs: Programs::Turns },
            Cut { tile: [64, 80], programs: Programs::OfOneTile },
            Cut { tile: [128, 128], programs: Programs::LoadingByThreads },
        ] {
            assert_eq!(Cut::from_const(&cut.to_const()), Some(cut));
        }
        for wrong in ["", "p", "64", "64x", "axb", "64x64q"] {
            assert_eq!(Cut::from_const(&ConstValue::Variant(wrong.into())), None, "{wrong}");
        }
    }
}
