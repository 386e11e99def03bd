//! Reads rows of other implementations: JSON lines, as printed by programs that measure them on the same machine.
//!
//! A row has `peer` (a name), `B`, `H`, `N`, `D`, `dtype` (`bfloat16` or `bf16`), `causal`, and the medians `fwd_ms`,
//! `bwd_ms` and `fb_sum_ms`, or `error`. A row with `ceiling` (a name) and `v` (a number) is a peak rate that the
//! other program measured. Other lines are skipped.

use std::path::Path;

use serde::Deserialize;
use tilewright::kernels::attention::reference::Problem;

use super::measure::Plan;
use crate::cli::{CliError, Result};

/// The times of one implementation for one case.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub struct Peer {
    #[serde(rename = "peer")]
    pub name: String,
    #[serde(rename = "B", default)]
    batch: Option<usize>,
    #[serde(rename = "H", default)]
    heads: Option<usize>,
    #[serde(rename = "N")]
    length: usize,
    #[serde(rename = "D")]
    d: usize,
    dtype: String,
    causal: bool,
    #[serde(default)]
    fwd_ms: Option<f64>,
    #[serde(default)]
    bwd_ms: Option<f64>,
    #[serde(default)]
    fb_sum_ms: Option<f64>,
    /// The error, if there is no time.
    #[serde(default)]
    pub error: Option<String>,
}

#[derive(Deserialize)]
struct Ceiling {
    ceiling: String,
    v: f64,
}

/// The contents of a file.
#[derive(Clone, Debug, Default)]
pub struct Peers {
    rows: Vec<Peer>,
    /// Names and values of peak rates that the other program measured, in the units that the names state.
    pub ceilings: Vec<(String, f64)>,
}

impl Peer {
    /// Returns the medians in milliseconds, in the order of [`PASSES`](super::measure::PASSES).
    pub fn times(&self) -> [Option<f64>; 3] {
        [self.fwd_ms, self.bwd_ms, self.fb_sum_ms]
    }

    fn matches(&self, plan: &Plan) -> bool {
        let dtype = match self.dtype.as_str() {
            "bfloat16" => "bf16",
            "float16" => "f16",
            "float32" => "f32",
            other => other,
        };
        let Problem { batch, heads_q, n_q, d, causal, .. } = plan.problem;
        // Rows of errors may omit batch and heads.
        let same = |given: Option<usize>, wanted: usize| given.is_none_or(|given| given == wanted);
        same(self.batch, batch)
            && same(self.heads, heads_q)
            && (self.length, self.d, dtype, self.causal) == (n_q, d, plan.dtype.as_str(), causal)
    }
}

impl Peers {
    /// Reads a file; lines of other forms are skipped.
    ///
    /// # Errors
    /// The file cannot be read, or has no row.
    pub fn read(path: &Path) -> Result<Peers> {
        let text = crate::files::read_to_string(path).map_err(|error| CliError::file("read", path, error))?;
        let mut peers = Peers::default();
        for line in text.lines() {
            if let Ok(row) = serde_json::from_str(line) {
                peers.rows.push(row);
            } else if let Ok(Ceiling { ceiling, v }) = serde_json::from_str(line) {
                peers.ceilings.push((ceiling, v));
            }
        }
        match peers.rows.is_empty() {
            true => Err(CliError::usage(
                format!("{} has no row of another implementation", path.display()),
                "expected JSON lines with peer, B, H, N, D, dtype, causal, fwd_ms, bwd_ms and fb_sum_ms",
            )),
            false => Ok(peers),
        }
    }

    /// Returns the rows of a case, in the file's order.
    pub fn of(&self, plan: &Plan) -> Vec<&Peer> {
        self.rows.iter().filter(|row| row.matches(plan)).collect()
    }

    /// Returns the fastest implementation of a pass, with its time in milliseconds.
    pub fn best(&self, plan: &Plan, pass: usize) -> Option<(&str, f64)> {
        let times = self.of(plan).into_iter().filter_map(|row| row.times()[pass].map(|ms| (row.name.as_str(), ms)));
        times.min_by(|(_, a), (_, b)| a.total_cmp(b))
    }
}
