//! Tuning of the kernels of attention: default tile sizes, warps and stages by head dimension, element type and target,
//! and which configurations of the spaces, which are at the kernels, the autotuner measures.

use super::loops::SCALED_ROWS;
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

/// Whether the grid is sub-wave: heads of `rows` rows, in tiles of 64 rows, give too few programs to keep the SMs of a
/// large GPU busy. Smaller tiles, which give more programs, are faster for such a grid.
pub fn is_sub_wave([batch, heads]: [usize; 2], rows: usize) -> bool {
    /// About two programs for each of 132 SMs.
    const MIN_PROGRAMS: usize = 256;
    batch.saturating_mul(heads).saturating_mul(rows.div_ceil(64)) < MIN_PROGRAMS
}

/// Whether the backward pass in one pass is faster than in two, for bf16 and f16 and grids of more than a wave: on Hopper,
/// where TMA adds the tiles of dQ (`harness/records/2026-11-25-h100-one-pass.jsonl`), and on older GPUs with 163 KB of shared
/// memory (`…/2026-11-30-h200-ldmatrix.jsonl`, code for sm_80). Measured with d = 64 and 128; with padded d the loop is the
/// same.
pub fn one_pass_is_faster(target: &Target, element_bytes: usize, [batch, heads_kv, n_k, d]: [usize; 4]) -> bool {
    let has_memory = matches!(target, Target::Nvptx(arch) if !arch.is_desktop());
    has_memory && element_bytes == 2 && matches!(d_tile(d), 64 | 128) && !is_sub_wave([batch, heads_kv], n_k)
}

/// Whether one pass with additions in a fixed order is faster than two passes: on Hopper, where a warp of its own adds, if loops
/// are long (`harness/records/2026-11-30-h200-ordered.jsonl`).
pub fn ordered_is_faster(target: &Target, element_bytes: usize, k: [usize; 4]) -> bool {
    is_hopper(target) && k[2] >= 1024 && one_pass_is_faster(target, element_bytes, k)
}

/// Whether the kernel of one pass adds dQ with consecutive elements in the lanes of a warp: on GPUs that add single elements,
/// before Hopper.
pub fn adds_lanes_first(target: &Target) -> bool {
    matches!(target, Target::Nvptx(arch) if *arch < GpuArch::Sm90a)
}

/// The default for a problem of the autotuner: [`default_tiles`], or tiles for the special cases that were measured.
pub fn default_config(pass: Pass, problem: &Problem) -> Config {
    let d = head_dim(problem);
    let bytes = problem.dtypes.first().map_or(2, |dtype| dtype.bytes());
    let hopper = is_hopper(&problem.target);
    let mma_sync = problem.is_gpu() && !hopper && bytes == 2;
    let tf32x3 = bytes == 4 && problem.get("precision") == Some(Precision::Tf32x3);
    let sub_wave: Option<bool> = problem.get("sub_wave");
    let tiles = match sub_wave {
        Some(false) if hopper && tf32x3 => wgmma_f32_tiles(pass, d),
        Some(true) if hopper && bytes <= 2 && d_tile(d) <= 128 => Some(sub_wave_tiles(pass)),
        Some(true) if problem.is_gpu() && bytes <= 2 && d_tile(d) <= 64 => Some(Tiles::new(64, 64, 4, 2)),
        Some(false) if hopper && bytes <= 2 && pass == Pass::Forward && d_tile(d) == 64 => Some(shared_tiles(problem)),
        Some(false) if hopper && bytes == 1 && d_tile(d) == 128 => Some(tiles_of_8_bits()),
        // With the causal mask, these spill.
        _ if mma_sync && pass == Pass::Forward && d_tile(d) == 128 && problem.get("causal") == Some(false) => {
            Some(Tiles::new(128, 32, 4, 2))
        }
        _ => None,
    };
    tiles.unwrap_or_else(|| default_tiles(pass, d, bytes, &problem.target)).config()
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
    let short = if problem.get("causal") == Some(false) { 1024 } else { 4096 };
    let is_short = ["n_q", "n_k"].iter().any(|&name| problem.int(name).is_none_or(|n| n <= short));
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
fn sub_wave_tiles(pass: Pass) -> Tiles {
    warp_specialized(match pass {
        Pass::Forward => Tiles::new(64, 128, 4, 2),
        Pass::Dkdv | Pass::Dq => Tiles::new(64, 64, 4, 3),
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
pub fn modified_tiles(
    pass: Pass,
    d: usize,
    element_bytes: usize,
    target: &Target,
    has_ranges: bool,
    has_score: bool,
    has_derivative: bool,
) -> Option<Tiles> {
    if !matches!(target, Target::Nvptx(_)) || element_bytes > 2 {
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
        // Ranges are short as a rule, and those of the rows of several programs are longer.
        (Pass::Forward, 64) if has_ranges => Tiles::new(64, 128, 4, 2),
        (Pass::Dkdv, 64) if has_derivative => Tiles::new(64, 128, 8, 2),
        (Pass::Dq, 64) if has_derivative || has_ranges => without_overlap(Tiles::new(128, 128, 8, 2)),
        _ => return None,
    };
    Some(warp_specialized(tiles))
}

/// The tiles of the forward kernel for few rows, and for keys in a cache. With d = 128 and 64 the fastest or within 1 % of it
/// (`harness/records/2026-11-30-h200-decode-tried.jsonl`; keys of 8 bits: `…-decode-8-bit-tried.jsonl`). Of more rows, measured with d = 128
/// alone, those in `…-prompts-tried.jsonl`, on Hopper: a producer warp loads tiles of 64 keys that are blocks of memory, which
/// `page`, the rows of a page or 0 without pages, decides. The element types of q and of k have these sizes.
pub fn decoding_tiles(
    n_q: usize,
    d: usize,
    [element_bytes, key_bytes]: [usize; 2],
    page: usize,
    target: &Target,
) -> Tiles {
    let is_wide_hopper = is_hopper(target) && element_bytes == 2 && key_bytes == 2 && d_tile(d) <= 128;
    match target {
        Target::Nvptx(_) if is_wide_hopper && n_q > 64 && page.is_multiple_of(64) => {
            warp_specialized(Tiles::new(128, 64, 8, 3))
        }
        Target::Nvptx(_) if is_wide_hopper && n_q > 64 => warp_specialized(Tiles::new(128, 128, 8, 2)),
        Target::Nvptx(_) if is_wide_hopper && n_q > 16 && page.is_multiple_of(64) => {
            warp_specialized(Tiles::new(64, 64, 4, 2))
        }
        Target::Nvptx(_) if element_bytes == 2 && key_bytes == 1 && n_q <= 16 && d_tile(d) <= 128 => {
            Tiles::new(16, 128, 4, 2)
        }
        Target::Nvptx(_) if element_bytes == 2 && n_q <= 16 => Tiles::new(16, 64, 4, 3),
        Target::Nvptx(_) if element_bytes == 2 && d_tile(d) <= 128 => Tiles::new(64, 64, 4, 2),
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
    let fits = |tile: usize, name: &str| problem.int(name).is_none_or(|n| tile as i64 <= n.max(64));
    if !fits(q_tile, "n_q") || !fits(k_tile, "n_k") {
        return false;
    }
    // The rows that a program owns are distributed to its warps; it loops over the others.
    let (own, other) = if pass == Pass::Dkdv { (k_tile, q_tile) } else { (q_tile, k_tile) };
    let (warps, is_sub_wave) = (num_warps as usize, problem.get("sub_wave") == Some(true));
    let bytes = problem.dtypes.first().map_or(2, |dtype| dtype.bytes());
    let is_wide = bytes > 2;
    if bytes == 1 && q_tile.max(k_tile) > SCALED_ROWS {
        return false;
    }
    let is_wgmma_f32 = schedule.wgmma_f32 == Some(true);
    if replicas > 1 {
        // The warpgroups of a block share its registers.
        let registers =
            matches!((d_tile(head_dim(problem)), k_tile, replicas), (..=64, 64, 4) | (..=64, 128, 3) | (128, 128, 2));
        return arch >= GpuArch::Sm90a && !is_wide && !is_sub_wave && registers;
    }
    if persistent {
        return false;
    }
    match schedule.warp_specialize {
        // A consumer warpgroup has the 64 rows of a `wgmma`.
        Some(true) if is_wide != is_wgmma_f32 => false,
        Some(true) => arch >= GpuArch::Sm90a && own == 16 * warps,
        // `wgmma` of f32: two warpgroups may share 64 rows.
        _ if is_wgmma_f32 => is_wide && (8 * warps..=16 * warps).contains(&own),
        // FMA and 3xTF32 keep operands in registers, and unroll the dots.
        _ if is_wide => (256 * warps..=64 * 64).contains(&(q_tile * k_tile)),
        // A warp has at least the 16 rows of an MMA, and more than 32 rows spill. Smaller tiles give more programs.
        _ if is_sub_wave && own < 64 => warps == 4 && other >= 32,
        _ => (16 * warps..=32 * warps).contains(&own) && other >= 32,
    }
}

/// The tile's extent along the head dimension: a power of two that the MMA instructions support. Saturates.
pub fn d_tile(d: usize) -> usize {
    d.checked_next_power_of_two().unwrap_or(usize::MAX).max(16)
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
    if is_hopper(target) && d_tile(d) <= 128 {
        return hopper_tiles(pass, d);
    }
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
        (Pass::Forward, _) => persistent(replicated(2, Tiles::new(64, 128, 4, 2))),
        (Pass::Dkdv, 64) => Tiles::new(128, 128, 8, 2),
        // 128 × 128 takes 9 % longer with d = 32 on an H200, and spills with d = 128.
        (Pass::Dkdv, _) => Tiles::new(64, 128, 8, 3),
        (Pass::Dq, ..=32) => Tiles::new(128, 64, 8, 4),
        // Spills with asynchronous MMAs in flight.
        (Pass::Dq, _) => without_overlap(Tiles::new(128, 128, 8, 2)),
    })
}
