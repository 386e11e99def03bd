//! Tuning of the kernels of attention: default tile sizes, warps and stages by head dimension, element type and target,
//! and which configurations of the spaces, which are at the kernels, the autotuner measures.

use super::loops::SCALED_ROWS;
use super::modifiers::{MaskMod, ScoreMod};
use tilewright_codegen::constexpr_enum;
use tilewright_codegen::lang::Precision;
use tilewright_codegen::target::{GpuArch, Schedule, Target};
use tilewright_runtime::autotune::{Config, Problem};

/// The kernels of attention that have tile sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    Forward,
    /// The kernel that computes dK and dV.
    Dkdv,
    /// The kernel that computes dQ.
    Dq,
}

/// Tile sizes and compile options of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tiles {
    /// Query rows of a tile: a power of two, at least 16.
    pub q_tile: usize,
    /// Keys of a tile: a power of two, at least 16.
    pub k_tile: usize,
    /// Programs of the forward kernel that share a block and its loads: 1 for the other kernels.
    pub replicas: usize,
    /// Whether programs of the forward kernel compute tile after tile.
    pub persistent: bool,
    /// Warps per program (GPU).
    pub num_warps: u32,
    /// Stages of the software pipelines (GPU).
    pub num_stages: u32,
    /// Schedule choices; `None` leaves a choice to the compiler.
    pub schedule: Schedule,
}

impl Tiles {
    /// Tile sizes that leave the schedule to the compiler.
    pub fn new(q_tile: usize, k_tile: usize, num_warps: u32, num_stages: u32) -> Tiles {
        let schedule = Schedule::default();
        Tiles { q_tile, k_tile, replicas: 1, persistent: false, num_warps, num_stages, schedule }
    }

    /// Converts to a configuration of the autotuner.
    pub fn config(self) -> Config {
        let mut config = Config::default().set("q_tile", self.q_tile).set("k_tile", self.k_tile);
        if self.replicas > 1 {
            config = config.set("replicas", self.replicas);
        }
        if self.persistent {
            config = config.set("persistent", true);
        }
        let config = config.num_warps(self.num_warps).num_stages(self.num_stages);
        Config { schedule: self.schedule, ..config }
    }

    /// Converts a configuration of one of the three kernels; `None` where it has no tile sizes, or is for clusters.
    pub fn of(config: &Config) -> Option<Tiles> {
        (config.num_ctas == 1).then_some(())?;
        let (q_tile, k_tile) = (config.get("q_tile")?, config.get("k_tile")?);
        let replicas = config.get("replicas").unwrap_or(1);
        let persistent = config.get("persistent").unwrap_or(false);
        let Config { num_warps, num_stages, schedule, .. } = *config;
        Some(Tiles { q_tile, k_tile, replicas, persistent, num_warps, num_stages, schedule })
    }
}

constexpr_enum! {
    /// Where the keys are, as far as it decides about tiles.
    pub enum Keys {
        /// In tensors.
        Tensor,
        /// In a cache, where tiles of 64 keys are blocks of memory.
        CacheOfBlocks,
        /// In a cache with pages of other numbers of rows.
        CacheOfRows,
    }
}

impl Keys {
    /// Those of a cache or not, with the rows of a page, 0 without pages.
    pub fn of(cached: bool, page: usize) -> Keys {
        match cached {
            false => Keys::Tensor,
            true if page.is_multiple_of(64) => Keys::CacheOfBlocks,
            true => Keys::CacheOfRows,
        }
    }
}

/// The rows of a sequence that decide about tiles, of `n_q` rows. Where sequences are packed, with `starts` numbers of `row_starts`, a
/// quarter of their mean length: most have one row, as a rule, or many, and wide tiles have fewer rows in them then.
pub fn rows_of_sequences(n_q: usize, starts: usize) -> usize {
    if starts == 0 { n_q } else { n_q.div_ceil((starts - 1).max(1)).div_ceil(4) }
}

/// Whether programs of the forward kernel may share a block, and compute tile after tile: on Hopper, where their loads are TMA's. Ranges
/// of masks are short as a rule, and those of the rows of several programs are longer.
pub(super) fn may_share(
    target: &Target,
    element_bytes: usize,
    d: usize,
    is_sub_wave: bool,
    keys: Keys,
    has_ranges: bool,
) -> bool {
    let pays = keys == Keys::Tensor && !is_sub_wave && !(has_ranges && d_tile(d) <= 64);
    is_hopper(target) && element_bytes <= 2 && pays
}

/// Whether the grid is sub-wave: heads of `rows` rows, in tiles of 64 rows, give too few programs to keep the SMs of a
/// large GPU busy. Smaller tiles, which give more programs, are faster for such a grid.
pub fn is_sub_wave([batch, heads]: [usize; 2], rows: usize) -> bool {
    /// About two programs for each of 132 SMs.
    const MIN_PROGRAMS: usize = 256;
    batch.saturating_mul(heads).saturating_mul(rows.div_ceil(64)) < MIN_PROGRAMS
}

/// Whether the backward pass in one pass is faster than in two, for bf16 and f16 and grids of more than a wave: on Hopper,
/// where the L2 cache adds the tiles of dQ (`harness/records/2026-11-25-h100-one-pass.jsonl`; with d = 192 and d_v = 128 or 192
/// `…/2026-12-01-h200-attention-wide-tried.jsonl`, with d = 256 `…-wide-one-pass.jsonl`), and on older GPUs with 163 KB of shared memory
/// (`…/2026-11-30-h200-ldmatrix.jsonl`, code for sm_80). Measured with d = 64 and 128; with padded d the loop is the same.
pub fn one_pass_is_faster(target: &Target, element_bytes: usize, [batch, heads_kv, n_k, d]: [usize; 4]) -> bool {
    let has_memory = matches!(target, Target::Nvptx(arch) if !arch.is_desktop());
    let was_faster = match d_tile(d) {
        64 | 128 => true,
        192 | 256 => is_hopper(target),
        _ => false,
    };
    has_memory && element_bytes == 2 && was_faster && !is_sub_wave([batch, heads_kv], n_k)
}

/// Whether one pass with additions in a fixed order is faster than two passes: on Hopper, where a warp of its own adds, if loops
/// are long (`harness/records/2026-11-30-h200-ordered.jsonl`), up to d = 128 (`…/2026-12-01-h200-attention-wide-tried.jsonl`).
pub fn ordered_is_faster(target: &Target, element_bytes: usize, k: [usize; 4]) -> bool {
    is_hopper(target) && k[2] >= 1024 && d_tile(k[3]) <= 128 && one_pass_is_faster(target, element_bytes, k)
}

/// Whether the kernel of one pass adds dQ with consecutive elements in the lanes of a warp: on GPUs that add single elements,
/// before Hopper.
pub fn adds_lanes_first(target: &Target) -> bool {
    matches!(target, Target::Nvptx(arch) if *arch < GpuArch::Sm90a)
}

/// The default for a problem of the autotuner: the tiles of the special cases that were measured, else [`default_tiles`].
pub fn default_config(pass: Pass, problem: &Problem) -> Config {
    let d = head_dim(problem);
    let bytes = element_bytes(problem);
    let tiles =
        cache_tiles(pass, problem).or_else(|| modified_tiles(pass, problem)).or_else(|| dense_tiles(pass, problem));
    tiles.unwrap_or_else(|| default_tiles(pass, d, bytes, &problem.target)).config()
}

/// The tiles of keys in a cache, and of few rows.
fn cache_tiles(pass: Pass, problem: &Problem) -> Option<Tiles> {
    let bytes = element_bytes(problem);
    let (keys, rows) = (keys_of(problem), rows_of(problem).unwrap_or(usize::MAX));
    let is_few = has_few_rows(problem) && bytes == 2 && problem.is_gpu();
    let key_bytes = problem.dtypes.get(2).map_or(bytes, |dtype| dtype.bytes());
    (pass == Pass::Forward && (keys != Keys::Tensor || is_few))
        .then(|| decoding_tiles(rows, head_dim(problem), [bytes, key_bytes], keys, &problem.target))
}

/// The tiles without modifiers.
fn dense_tiles(pass: Pass, problem: &Problem) -> Option<Tiles> {
    let d = head_dim(problem);
    let bytes = element_bytes(problem);
    let hopper = is_hopper(&problem.target);
    let mma_sync = problem.is_gpu() && !hopper && bytes == 2;
    let tf32x3 = bytes == 4 && problem.get("precision") == Some(Precision::Tf32x3);
    let sub_wave: Option<bool> = problem.get("sub_wave");
    // TMA loads rows of a multiple of 16 bytes. Wide tiles that are loaded otherwise spill.
    if let Target::Nvptx(arch) = problem.target
        && bytes <= 2
        && d_tile(d) > 128
        && !has_whole_rows(problem)
    {
        return Some(mma_sync_tiles(pass, d, arch));
    }
    match sub_wave {
        Some(false) if hopper && tf32x3 => wgmma_f32_tiles(pass, d),
        Some(true) if hopper && bytes <= 2 => Some(sub_wave_tiles(pass, d)),
        Some(true) if problem.is_gpu() && bytes <= 2 && d_tile(d) <= 64 => Some(Tiles::new(64, 64, 4, 2)),
        Some(false) if hopper && bytes <= 2 && pass == Pass::Forward && d_tile(d) == 64 => Some(shared_tiles(problem)),
        Some(false) if hopper && bytes == 1 && d_tile(d) == 128 => Some(tiles_of_8_bits()),
        // The fastest that spills nothing (`harness/records/2026-12-01-h200-attention-wide-tried.jsonl`).
        Some(false) if hopper && bytes == 1 && d_tile(d) > 128 => Some(warp_specialized(Tiles::new(128, 128, 8, 2))),
        // Spills up to 144 bytes in one pass, and is faster than 64 × 64 all the same (8.5 and 9.7 ms). With more columns, the sums of
        // dK and dV spill more.
        Some(false) if hopper && bytes == 2 && pass == Pass::Dkdv && d_tile(d) == 192 && columns(problem) <= 320 => {
            Some(warp_specialized(Tiles::new(32, 128, 8, 2)))
        }
        // With the causal mask, these spill.
        _ if mma_sync && pass == Pass::Forward && d_tile(d) == 128 && problem.get("causal") == Some(false) => {
            Some(Tiles::new(128, 32, 4, 2))
        }
        _ => None,
    }
}

fn keys_of(problem: &Problem) -> Keys {
    problem.get("keys").unwrap_or(Keys::Tensor)
}

fn extent(problem: &Problem, name: &str) -> Option<usize> {
    problem.int(name).and_then(|n| usize::try_from(n).ok())
}

/// Query rows of a tile's head, with packed heads those of a group.
fn rows_of(problem: &Problem) -> Option<usize> {
    extent(problem, "rows").or_else(|| extent(problem, "n_q"))
}

/// Whether a sequence has few rows, as in decoding.
fn has_few_rows(problem: &Problem) -> bool {
    problem.get("few_rows") == Some(true)
}

/// The keys of a sequence, in a cache those that there is room for.
fn keys_per_sequence(problem: &Problem) -> Option<usize> {
    extent(problem, "most_keys").or_else(|| extent(problem, "n_k"))
}

/// The size of an element of q.
fn element_bytes(problem: &Problem) -> usize {
    problem.dtypes.first().map_or(2, |dtype| dtype.bytes())
}

/// Whether rows of q and of v have a multiple of 16 bytes.
fn has_whole_rows(problem: &Problem) -> bool {
    let is_whole = |name| extent(problem, name).is_none_or(|d| (d * element_bytes(problem)).is_multiple_of(16));
    is_whole("d") && is_whole("d_v")
}

/// The columns of a tile of dK and one of dV.
fn columns(problem: &Problem) -> usize {
    let of = |name| extent(problem, name).map_or(0, d_tile);
    of("d") + of("d_v")
}

/// The larger of the head dimensions of q and v.
fn head_dim(problem: &Problem) -> usize {
    let known = ["d", "d_v"].into_iter().filter_map(|name| problem.int(name).and_then(|d| usize::try_from(d).ok()));
    known.max().unwrap_or(64)
}

/// The tiles of the forward kernel with d = 64: three programs of 64 × 128 share loads, four of 64 × 64 in shorter
/// sequences
/// (`harness/records/2026-11-28-h200-attention-persistent.jsonl`).
fn shared_tiles(problem: &Problem) -> Tiles {
    let short = if problem.get("causal") == Some(false) { 1024 } else { 4096_usize };
    let is_short = [rows_of(problem), keys_per_sequence(problem)].iter().any(|n| n.is_none_or(|n| n <= short));
    persistent(match is_short {
        true => replicated(4, Tiles::new(64, 64, 4, 3)),
        false => replicated(3, Tiles::new(64, 128, 4, 2)),
    })
}

/// The tiles of the forward kernel of 8-bit floats with d = 128: taking turns on the tensor cores, which need half of the time of
/// bf16, costs more than it gives (`harness/records/2026-11-30-h200-attention-8-bit-tried.jsonl`).
fn tiles_of_8_bits() -> Tiles {
    let shared = persistent(replicated(2, Tiles::new(64, 128, 4, 3)));
    Tiles { schedule: Schedule { pingpong: None, ..shared.schedule }, ..shared }
}

/// Tiles of bf16 and f16 on Hopper for sub-wave grids: smaller ones, which give more programs.
fn sub_wave_tiles(pass: Pass, d: usize) -> Tiles {
    warp_specialized(match (pass, d_tile(d)) {
        (Pass::Forward, ..=192) => Tiles::new(64, 128, 4, 2),
        (Pass::Forward, _) => Tiles::new(64, 64, 4, 2),
        (Pass::Dkdv | Pass::Dq, ..=128) => Tiles::new(64, 64, 4, 3),
        _ => return hopper_tiles(pass, d),
    })
}

/// Tiles of tf32x3 on Hopper for grids of more than a wave: with wgmma, operands are split (3xTF32) once per block, and
/// the dots take half of the time. `None` where this was not measured, and where registers would spill.
fn wgmma_f32_tiles(pass: Pass, d: usize) -> Option<Tiles> {
    let tiles = match (pass, d_tile(d)) {
        (Pass::Forward, 64) => Tiles::new(64, 32, 4, 2),
        (Pass::Forward, 128) if d <= 80 => Tiles::new(128, 32, 8, 2),
        (Pass::Forward, 128) => Tiles::new(64, 32, 8, 2),
        (Pass::Dkdv, 64) => without_overlap(Tiles::new(32, 128, 8, 2)),
        // Wider tiles spill.
        (Pass::Dkdv, 128) if d <= 80 => without_overlap(Tiles::new(16, 64, 8, 2)),
        (Pass::Dq, 64) => Tiles::new(128, 32, 8, 2),
        (Pass::Dq, 128) if d <= 80 => Tiles::new(64, 32, 4, 2),
        _ => return None,
    };
    Some(Tiles { schedule: Schedule { wgmma_f32: Some(true), ..tiles.schedule }, ..tiles })
}

/// The tiles of a kernel with modifiers, where those without modifiers would spill registers or do not suit: for bf16 and f16.
/// A score function with a derivative keeps one more tile in registers, and a mask of ranges has three loops.
fn modified_tiles(pass: Pass, problem: &Problem) -> Option<Tiles> {
    let (d, target) = (head_dim(problem), &problem.target);
    let has_ranges = has_ranges(problem);
    let score = problem.get::<&'static ScoreMod>("score");
    let has_score = score.is_some_and(|score| !score.is_plain());
    let has_derivative = score.is_some_and(|score| score.has_derivative);
    if !problem.is_gpu() || element_bytes(problem) > 2 {
        return None;
    }
    if !is_hopper(target) {
        return match (pass, d_tile(d)) {
            (Pass::Forward, ..=64) if has_ranges || has_score => Some(Tiles::new(64, 128, 4, 2)),
            (Pass::Forward, 128) if has_ranges => Some(Tiles::new(64, 64, 4, 2)),
            (Pass::Dkdv, ..=64) if has_ranges || has_score => Some(Tiles::new(64, 64, 4, 2)),
            _ => None,
        };
    }
    let tiles = match (pass, d_tile(d)) {
        (Pass::Forward, 64) if has_ranges => Tiles::new(64, 128, 4, 2),
        (Pass::Dkdv, 64) if has_derivative => Tiles::new(64, 128, 8, 2),
        (Pass::Dq, 64) if has_derivative || has_ranges => without_overlap(Tiles::new(128, 128, 8, 2)),
        _ => return None,
    };
    Some(warp_specialized(tiles))
}

/// Whether a mask of ranges is given.
fn has_ranges(problem: &Problem) -> bool {
    problem.get::<&'static MaskMod>("mask").is_some_and(|mask| !mask.is_dense())
}

/// The tiles of the forward kernel for few rows, and for keys in a cache. With d = 128 and 64 the fastest or within 1 % of it
/// (`harness/records/2026-11-30-h200-decode-tried.jsonl`; keys of 8 bits: `…-decode-8-bit-tried.jsonl`). Of more rows, measured with d = 128
/// alone, those in `…-prompts-tried.jsonl`, on Hopper: a producer warp loads tiles of 64 keys that are blocks of memory.
/// The element types of q and of k have these sizes.
pub fn decoding_tiles(
    n_q: usize,
    d: usize,
    [element_bytes, key_bytes]: [usize; 2],
    keys: Keys,
    target: &Target,
) -> Tiles {
    let are_blocks = keys != Keys::CacheOfRows;
    let is_wide_hopper = is_hopper(target) && element_bytes == 2 && key_bytes == 2 && d_tile(d) <= 128;
    match target {
        Target::Nvptx(_) if is_wide_hopper && n_q > 64 && are_blocks => warp_specialized(Tiles::new(128, 64, 8, 3)),
        Target::Nvptx(_) if is_wide_hopper && n_q > 64 => warp_specialized(Tiles::new(128, 128, 8, 2)),
        Target::Nvptx(_) if is_wide_hopper && n_q > 16 && are_blocks => warp_specialized(Tiles::new(64, 64, 4, 2)),
        Target::Nvptx(_) if element_bytes == 2 && key_bytes == 1 && n_q <= 16 && d_tile(d) <= 128 => {
            Tiles::new(16, 128, 4, 2)
        }
        Target::Nvptx(_) if element_bytes == 2 && n_q <= 16 => Tiles::new(16, 64, 4, 3),
        Target::Nvptx(_) if element_bytes == 2 && d_tile(d) <= 128 => Tiles::new(64, 64, 4, 2),
        Target::Nvptx(arch) if element_bytes == 2 => mma_sync_tiles(Pass::Forward, d, *arch),
        _ => default_tiles(Pass::Forward, d, element_bytes, target),
    }
}

/// Whether a configuration is worth measuring. The compiler's estimate of registers and shared memory rejects others.
pub fn keep(pass: Pass, problem: &Problem, config: &Config) -> bool {
    let Some(Tiles { q_tile, k_tile, replicas, persistent, num_warps, schedule, .. }) = Tiles::of(config) else {
        return false;
    };
    let Target::Nvptx(arch) = problem.target else {
        // Smaller tiles have more overhead, larger ones leave the caches. Programs share nothing.
        return replicas == 1 && (32..=128).contains(&q_tile) && (32..=128).contains(&k_tile);
    };
    // Tiles are no larger than what there is.
    let fits = |tile: usize, extent: Option<usize>| extent.is_none_or(|n| tile <= n.max(64));
    if !fits(q_tile, rows_of(problem)) || !fits(k_tile, keys_per_sequence(problem)) {
        return false;
    }
    // The rows that a program owns are distributed to its warps; it loops over the others.
    let (own, other) = if pass == Pass::Dkdv { (k_tile, q_tile) } else { (q_tile, k_tile) };
    let (warps, is_sub_wave) = (num_warps as usize, problem.get("sub_wave") == Some(true));
    let bytes = element_bytes(problem);
    let is_wide = bytes > 2;
    if bytes == 1 && q_tile.max(k_tile) > SCALED_ROWS {
        return false;
    }
    let is_wgmma_f32 = schedule.wgmma_f32 == Some(true);
    if replicas > 1 {
        // The warpgroups of a block share its registers.
        let registers = matches!(
            (d_tile(head_dim(problem)), k_tile, replicas),
            (..=64, 64, 4) | (..=64, 128, 3) | (128.., 64 | 128, 2)
        );
        let (d, keys, has_ranges) = (head_dim(problem), keys_of(problem), has_ranges(problem));
        return registers && may_share(&problem.target, bytes, d, is_sub_wave, keys, has_ranges);
    }
    if persistent {
        return false;
    }
    match schedule.warp_specialize {
        // A consumer warpgroup has the 64 rows of a `wgmma`.
        Some(true) if is_wide != is_wgmma_f32 => false,
        // Two share them where one would spill.
        Some(true) => {
            arch >= GpuArch::Sm90a && (own == 16 * warps || d_tile(head_dim(problem)) > 128 && own == 8 * warps)
        }
        // `wgmma` of f32: two warpgroups may share 64 rows.
        _ if is_wgmma_f32 => is_wide && (8 * warps..=16 * warps).contains(&own),
        // FMA and 3xTF32 keep operands in registers, and unroll the dots.
        _ if is_wide => (256 * warps..=64 * 64).contains(&(q_tile * k_tile)),
        // A warp has at least the 16 rows of an MMA, and more than 32 rows spill. Smaller tiles give more programs, and suit few rows.
        _ if (is_sub_wave || has_few_rows(problem)) && own < 64 => warps == 4 && other >= 32,
        _ => (16 * warps..=32 * warps).contains(&own) && other >= 32,
    }
}

/// The tile's extent along the head dimension: a power of two that the MMA instructions support, or 192, which the compiler splits into
/// 128 and 64. Saturates. (Products skip the padding. 64 + 16 and 64 + 32 columns took 19 and 17 % longer than 128 on an H200:
/// `harness/records/2026-12-01-h200-attention-wide-tried.jsonl`.)
pub fn d_tile(d: usize) -> usize {
    match d {
        129..=192 => 192,
        _ => d.checked_next_power_of_two().unwrap_or(usize::MAX).max(16),
    }
}

/// Enables warp specialization (producer warps).
fn warp_specialized(tiles: Tiles) -> Tiles {
    Tiles { schedule: Schedule { warp_specialize: Some(true), ..tiles.schedule }, ..tiles }
}

/// Programs that share loads, with ping-pong scheduling of their warpgroups.
fn replicated(replicas: usize, tiles: Tiles) -> Tiles {
    Tiles { replicas, schedule: Schedule { pingpong: Some(true), overlap: Some(true), ..tiles.schedule }, ..tiles }
}

/// Programs that compute tile after tile, with warp specialization.
fn persistent(tiles: Tiles) -> Tiles {
    warp_specialized(Tiles { persistent: true, ..tiles })
}

/// Disables overlap: no asynchronous MMA stays in flight.
fn without_overlap(tiles: Tiles) -> Tiles {
    Tiles { schedule: Schedule { overlap: Some(false), ..tiles.schedule }, ..tiles }
}

fn is_hopper(target: &Target) -> bool {
    matches!(target, Target::Nvptx(arch) if *arch >= GpuArch::Sm90a)
}

/// The tiles that are used if neither the caller nor the autotuner gives any, except in the special cases that
/// [`default_config`] adds for Hopper.
pub fn default_tiles(pass: Pass, d: usize, element_bytes: usize, target: &Target) -> Tiles {
    let Target::Nvptx(arch) = target else { return Tiles::new(64, 64, 1, 1) };
    if element_bytes > 2 {
        return f32_tiles(pass, d, *arch);
    }
    if is_hopper(target) {
        return hopper_tiles(pass, d);
    }
    mma_sync_tiles(pass, d, *arch)
}

/// Tiles of bf16 and f16 for loads by threads and products by warps.
fn mma_sync_tiles(pass: Pass, d: usize, arch: GpuArch) -> Tiles {
    // With d = 64 and 128 the fastest of `2026-11-30-h200-ldmatrix.jsonl` that spill no registers (two passes with d = 128
    // 4 bytes), and of which two blocks fit into an SM of such a GPU where possible.
    let is_small = arch.is_desktop();
    match (pass, d_tile(d)) {
        (Pass::Forward, ..=64) => Tiles::new(128, 64, 4, 2),
        (Pass::Forward, 128) if is_small => Tiles::new(64, 32, 4, 2),
        (Pass::Forward, 128) => Tiles::new(64, 64, 4, 2),
        (Pass::Forward, _) if is_small => Tiles::new(128, 32, 8, 2),
        (Pass::Forward, _) => Tiles::new(128, 64, 8, 2),
        // Wider tiles spill with the causal mask.
        (Pass::Dkdv, ..=64) if is_small => Tiles::new(16, 128, 4, 2),
        (Pass::Dkdv, ..=64) => Tiles::new(64, 64, 4, 2),
        (Pass::Dq, ..=64) => Tiles::new(128, 32, 4, 2),
        (Pass::Dq, 128) if is_small => Tiles::new(64, 64, 4, 2),
        (Pass::Dq, 128) => Tiles::new(128, 64, 8, 2),
        (Pass::Dkdv, 128) => Tiles::new(32, 64, 4, 2),
        (Pass::Dkdv, _) if is_small => Tiles::new(32, 32, 8, 2),
        (Pass::Dkdv, _) => Tiles::new(32, 64, 8, 2),
        (Pass::Dq, _) => Tiles::new(64, 32, 8, 2),
    }
}

/// f32 dots keep their operands in shared memory at twice the size.
fn f32_tiles(pass: Pass, d: usize, arch: GpuArch) -> Tiles {
    // Operands of 128 columns in a pipeline take 170 KB.
    let is_small = arch.max_shared_bytes() < 200 << 10;
    match (pass, d_tile(d)) {
        (Pass::Forward, ..=128) => Tiles::new(32, 64, 8, 2),
        (Pass::Forward, _) => Tiles::new(32, 16, 4, 2),
        (Pass::Dkdv, 32) => Tiles::new(64, 32, 4, 2),
        (Pass::Dkdv, 128) if is_small || d < 128 => Tiles::new(32, 32, 8, 2),
        (Pass::Dkdv, ..=128) => Tiles::new(64, 32, 8, 2),
        (Pass::Dq, ..=32) => Tiles::new(32, 64, 4, 2),
        (Pass::Dq, 64) => Tiles::new(16, 64, 4, 2),
        (Pass::Dq, 128) if is_small || d < 128 => Tiles::new(16, 32, 4, 2),
        (Pass::Dq, 128) => Tiles::new(32, 64, 8, 2),
        (Pass::Dkdv | Pass::Dq, _) => Tiles::new(16, 16, 4, 2),
    }
}

/// Hopper loads by TMA from producer warps.
fn hopper_tiles(pass: Pass, d: usize) -> Tiles {
    warp_specialized(match (pass, d_tile(d)) {
        // Two blocks per SM with a consumer warpgroup each: their softmax and `wgmma` overlap without barriers.
        (Pass::Forward, ..=64) => Tiles::new(64, 128, 4, 2),
        // One warpgroup for each program of 64 rows.
        (Pass::Forward, 128) => persistent(replicated(2, Tiles::new(64, 128, 4, 2))),
        (Pass::Forward, 192) => Tiles::new(128, 128, 8, 2),
        (Pass::Forward, _) => persistent(replicated(2, Tiles::new(64, 64, 4, 2))),
        (Pass::Dkdv, 64) => Tiles::new(128, 128, 8, 2),
        // 128 × 128 takes 9 % longer with d = 32 on an H200, and spills with d = 128.
        (Pass::Dkdv, ..=128) => Tiles::new(64, 128, 8, 3),
        (Pass::Dkdv, _) => Tiles::new(64, 64, 8, 2),
        (Pass::Dq, ..=32) => Tiles::new(128, 64, 8, 4),
        // Spills with asynchronous MMAs in flight.
        (Pass::Dq, ..=128) => without_overlap(Tiles::new(128, 128, 8, 2)),
        (Pass::Dq, 192) => without_overlap(Tiles::new(128, 64, 8, 2)),
        (Pass::Dq, _) => Tiles::new(64, 64, 4, 2),
    })
}
