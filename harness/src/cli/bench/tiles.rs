//! Parses attention tiles on the command line, and lists the tiles of a sweep.
//!
//! `64,128,4,2` are q_tile, k_tile, warps and stages. Further words override the compiler's schedule: `ws` (warp
//! specialization), `pingpong` (ping-pong scheduling of the consumer warpgroups), `ov` (asynchronous MMAs overlap the
//! next iteration's arithmetic), `tma` (TMA loads), `wgmma` (f32 dots by wgmma), or the same with the prefix `no-`.
//! `replicas=4` lets four programs of the forward kernel share a block and its loads, and with `persistent` they
//! compute tile after tile. The older words `turns` (pingpong) and `bulk` (tma) are accepted too.

use tilewright::Device;
use tilewright::autotune::{self, Autotune, Choice};
use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::Precision;
use tilewright::codegen::lang::kernel::{ConstValue, Constexpr, GenericDef};
use tilewright::codegen::target::Schedule;
use tilewright::kernels::attention::config::Pass;
use tilewright::kernels::attention::reference::Problem;
use tilewright::kernels::attention::{Backward, Tiles};

use tilewright::kernels::{AUTOTUNED, OperandElement};
use tilewright::prelude::Dtype;

/// The options that say how the backward pass computes dQ.
#[derive(clap::Args, Clone, Debug)]
pub struct Passes {
    /// Backward in one pass: the dK/dV kernel also adds to dQ, atomically, so that its last bits change from run to run.
    /// Default: where that was measured to be faster (Hopper, bf16 and f16)
    #[arg(long, conflicts_with_all = ["deterministic", "dq_tiles"])]
    one_pass: bool,
    /// Backward that gives the same bits in every run: in one pass whose programs add to dQ in a fixed order, or in two
    /// passes, as was measured to be faster. --dq-tiles implies two passes
    #[arg(long)]
    deterministic: bool,
}

impl Passes {
    pub fn is_given(&self) -> bool {
        self.one_pass || self.deterministic
    }

    /// `has_dq_tiles`: tiles of the dQ kernel, which only two passes have, are given.
    pub fn backward(&self, has_dq_tiles: bool) -> Backward {
        match self.one_pass {
            true => Backward::OnePass,
            false if has_dq_tiles => Backward::TwoPass,
            false if self.deterministic => Backward::Deterministic,
            false => Backward::Auto,
        }
    }
}

/// The tiles that launches of this process took from the tuner for a problem with these modifiers, of the forward, the dK/dV and the dQ
/// kernel. `None` for a kernel that was not launched, or with given tiles.
pub fn taken<T: OperandElement>(
    problem: &Problem,
    [mask, score]: [&str; 2],
    precision: Option<Precision>,
    device: &Device,
    one_pass: bool,
) -> [Option<Tiles>; 3] {
    let precision = match (<T as Dtype>::dtype().bytes(), device.is_cuda()) {
        (4, true) => precision.unwrap_or(Precision::Tf32x3),
        (4, false) => precision.unwrap_or(Precision::Ieee),
        _ => Precision::Ieee,
    };
    let int = |n: usize| ConstValue::Int(n as i64);
    let value = |name: &str| match name {
        "batch" => Some(int(problem.batch)),
        "heads" => Some(int(problem.heads_q)),
        "heads_kv" => Some(int(problem.heads_kv)),
        "n_q" => Some(int(problem.n_q)),
        "n_k" => Some(int(problem.n_k)),
        "d" => Some(int(problem.d)),
        "d_v" => Some(int(problem.d_v)),
        "causal" => Some(ConstValue::Bool(problem.causal)),
        "one_pass" => Some(ConstValue::Bool(one_pass)),
        "precision" => Some(precision.to_const()),
        "mask" => Some(ConstValue::Variant(mask.to_string())),
        "score" => Some(ConstValue::Variant(score.to_string())),
        _ => None,
    };
    // Partial results of splits are f32.
    let (dtype, results) = (<T as Dtype>::dtype(), [<T::Result as Dtype>::dtype(), DType::F32]);
    let key = |autotune: &Autotune, result: DType| {
        let def = autotune.def;
        let of = |generic: &GenericDef| if generic.name == "R" { result } else { dtype };
        let dtypes: Vec<DType> = def.generics.iter().map(of).collect();
        let known =
            |name: &'static str| value(name).or_else(|| def.is_absent(name, value).then_some(ConstValue::Int(0)));
        let parts = autotune.key_of(&dtypes, &known).ok()?;
        Some(autotune::Problem { target: device.target(), def, dtypes: &dtypes, parts }.key())
    };
    let choices = autotune::current_choices();
    ["flash_attention_fwd", "flash_attention_bwd_dkdv", "flash_attention_bwd_dq"].map(|kernel| {
        let autotune = AUTOTUNED.iter().find(|autotune| autotune.def.name == kernel)?;
        let keys = results.map(|result| key(autotune, result));
        let is_for_this =
            |choice: &Choice| choice.kernel == kernel && keys.iter().flatten().any(|key| *key == choice.key);
        Tiles::of(&choices.iter().find(|choice| is_for_this(choice))?.config)
    })
}

/// The tiles of the dQ kernel, or why there is none.
pub fn dq_text(form: Backward, tiles: Tiles) -> String {
    match form {
        Backward::OnePass => "one pass".to_string(),
        Backward::Ordered => "one pass, ordered".to_string(),
        _ => text(tiles),
    }
}

/// Parses `q_tile,k_tile,warps,stages` and schedule hints.
pub fn parse(text: &str) -> Result<Tiles, String> {
    let words: Vec<&str> = text.split(',').map(str::trim).collect();
    let (given, hints) = words.split_at(words.len().min(4));
    let numbers: Vec<usize> = given
        .iter()
        .map(|n| n.trim().parse().map_err(|_| format!("`{n}` is not a number: expected q_tile,k_tile,warps,stages")))
        .collect::<Result<_, _>>()?;
    let &[q_tile, k_tile, warps, stages] = &numbers[..] else {
        return Err(format!("{} numbers where four are expected: q_tile,k_tile,warps,stages", numbers.len()));
    };
    for (name, tile) in [("q_tile", q_tile), ("k_tile", k_tile)] {
        if !tile.is_power_of_two() || !(16..=MAX_TILE).contains(&tile) {
            return Err(format!("{name} is {tile}: expected a power of two from 16 to {MAX_TILE}"));
        }
    }
    if !warps.is_power_of_two() || warps > 32 {
        return Err(format!("warps is {warps}: expected a power of two up to 32"));
    }
    if !(1..=8).contains(&stages) {
        return Err(format!("stages is {stages}: expected 1 to 8"));
    }
    let mut tiles = Tiles::new(q_tile, k_tile, warps as u32, stages as u32);
    for hint in hints {
        if let Some(count) = hint.strip_prefix("replicas=") {
            tiles.replicas = match count.parse() {
                Ok(count @ 1..=7) => count,
                _ => return Err(format!("replicas is `{count}`: expected 1 (none share loads) to 7")),
            };
            continue;
        }
        if *hint == "persistent" {
            tiles.persistent = true;
            continue;
        }
        let word = hint.strip_prefix("no-").unwrap_or(hint);
        let slot = match word {
            "tma" | "bulk" => &mut tiles.schedule.tma,
            "ws" => &mut tiles.schedule.warp_specialize,
            "pingpong" | "turns" => &mut tiles.schedule.pingpong,
            "ov" => &mut tiles.schedule.overlap,
            "wgmma" => &mut tiles.schedule.wgmma_f32,
            "tma-stores" => &mut tiles.schedule.tma_stores,
            _ => {
                return Err(format!(
                    "`{hint}` is not a hint: expected ws, pingpong, ov, tma, wgmma or tma-stores, one of them with the \
                     prefix no-, replicas=COUNT or persistent"
                ));
            }
        };
        *slot = Some(word == *hint);
    }
    Ok(tiles)
}

/// Largest tile along queries or keys, and a lower bound on the lengths to which checks reduce long sequences.
pub const MAX_TILE: usize = 512;

/// Formats tiles as [`parse`] reads them.
pub fn text(tiles: Tiles) -> String {
    let hint = |hint: Option<bool>, on: &str| match hint {
        None => String::new(),
        Some(true) => format!(",{on}"),
        Some(false) => format!(",no-{on}"),
    };
    let Tiles { q_tile, k_tile, replicas, persistent, num_warps, num_stages, schedule } = tiles;
    let Schedule { tma, warp_specialize, pingpong, overlap, wgmma_f32, tma_stores } = schedule;
    let hints = [
        (tma, "tma"),
        (warp_specialize, "ws"),
        (pingpong, "pingpong"),
        (overlap, "ov"),
        (wgmma_f32, "wgmma"),
        (tma_stores, "tma-stores"),
    ];
    let hints: String = hints.into_iter().map(|(value, word)| hint(value, word)).collect();
    let replicas = if replicas > 1 { format!(",replicas={replicas}") } else { String::new() };
    let persistent = if persistent { ",persistent" } else { "" };
    format!("{q_tile},{k_tile},{num_warps},{num_stages}{hints}{replicas}{persistent}")
}

/// Returns the tiles of a sweep, in addition to the default. Some do not fit some head dimensions: the sweep reports
/// them and continues.
pub fn sweep(pass: Pass) -> Vec<Tiles> {
    let list: &[[u32; 4]] = match pass {
        Pass::Forward => &[
            [64, 64, 4, 2],
            [64, 64, 4, 3],
            [64, 128, 4, 2],
            [64, 128, 4, 3],
            [128, 64, 4, 2],
            [128, 64, 8, 2],
            [128, 64, 8, 3],
            [128, 128, 8, 2],
            [128, 128, 8, 3],
            [128, 32, 4, 3],
            [256, 64, 8, 2],
        ],
        Pass::Dkdv | Pass::Dq => &[
            [32, 64, 4, 2],
            [64, 32, 4, 2],
            [64, 64, 4, 2],
            [64, 64, 4, 3],
            [64, 64, 8, 2],
            [64, 128, 4, 2],
            [64, 128, 8, 2],
            [128, 64, 4, 2],
            [128, 64, 8, 2],
            [128, 128, 8, 2],
        ],
    };
    let tiles = |&[q, k, num_warps, num_stages]: &[u32; 4]| Tiles::new(q as usize, k as usize, num_warps, num_stages);
    list.iter().map(tiles).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_read_as_they_are_written() {
        for pass in [Pass::Forward, Pass::Dkdv, Pass::Dq] {
            for tiles in sweep(pass) {
                assert_eq!(parse(&text(tiles)), Ok(tiles));
                let schedule = Schedule {
                    warp_specialize: Some(true),
                    overlap: Some(false),
                    pingpong: Some(false),
                    tma: Some(true),
                    wgmma_f32: Some(true),
                    tma_stores: Some(true),
                };
                let hinted = Tiles { schedule, replicas: 3, persistent: true, ..tiles };
                assert_eq!(parse(&text(hinted)), Ok(hinted));
            }
        }
    }

    /// Records and scripts of earlier versions have other words for two hints.
    #[test]
    fn older_hints_are_read() {
        assert_eq!(parse("64,128,4,2,no-bulk,ws,turns"), parse("64,128,4,2,no-tma,ws,pingpong"));
        assert!(parse("64,128,4,2,no-bulk").is_ok());
    }

    #[test]
    fn what_is_no_tile_is_refused_with_the_reason() {
        let refused = |text: &str, reason: &str| {
            let error = parse(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        };
        refused("64,64", "2 numbers");
        refused("64,x,4,2", "`x` is not a number");
        refused("48,64,4,2", "q_tile is 48");
        refused("64,8,4,2", "k_tile is 8");
        refused("64,64,3,2", "warps is 3");
        refused("64,64,4,0", "stages is 0");
        refused("64,64,4,2,fast", "`fast` is not a hint");
    }
}
