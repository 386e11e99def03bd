//! Parses the modifiers of attention on the command line.

use tilewright::kernels::attention::reference::{Modifiers, Problem};

use crate::cli::{CliError, Result};

#[derive(clap::Args, Clone, Debug)]
pub struct ModifierArguments {
    /// Modifier of attention, may be repeated: window=SIZE (keys before the diagonal that a row sees), prefix=LENGTH (keys
    /// that a row sees beside those up to the diagonal), softcap=CAP, alibi, sinks, or documents=LENGTH,LENGTH,… (packed
    /// sequences)
    #[arg(long = "modifier", value_name = "MODIFIER", conflicts_with_all = ["kinds", "splits"])]
    modifiers: Vec<String>,
}

impl ModifierArguments {
    /// The modifiers of a problem with sequences of `seq_len` rows.
    pub fn of(&self, seq_len: usize) -> Result<Modifiers> {
        let mut modifiers = Modifiers::default();
        for text in &self.modifiers {
            let invalid = |expected: &str| CliError::usage(format!("invalid modifier `{text}`"), expected.to_string());
            let (name, value) = text.split_once('=').unwrap_or((text, ""));
            match name {
                "window" => {
                    let size = value.parse().map_err(|_| invalid("expected window=SIZE, a number of keys"))?;
                    modifiers.window = Some(size);
                }
                "prefix" => {
                    let length = value.parse().map_err(|_| invalid("expected prefix=LENGTH, a number of keys"))?;
                    modifiers.prefix = Some(length);
                }
                "softcap" => {
                    let cap = value.parse().ok().filter(|cap: &f64| *cap > 0.0 && cap.is_finite());
                    modifiers.softcap = Some(cap.ok_or_else(|| invalid("expected softcap=CAP, a positive number"))?);
                }
                "alibi" if value.is_empty() => modifiers.alibi = true,
                "sinks" if value.is_empty() => modifiers.sinks = true,
                "documents" => {
                    let lengths: Option<Vec<usize>> = value.split(',').map(|length| length.parse().ok()).collect();
                    let fits = |lengths: &Vec<usize>| {
                        let total = lengths.iter().try_fold(0_usize, |total, length| total.checked_add(*length));
                        total.is_some_and(|total| total <= seq_len)
                    };
                    let lengths = lengths.filter(fits).ok_or_else(|| {
                        invalid(&format!("expected documents=LENGTH,LENGTH,…, at most {seq_len} tokens in all"))
                    })?;
                    let mut starts = vec![[0, 0]];
                    starts.extend(lengths.iter().scan(0, |end, length| {
                        *end += length;
                        Some([*end, *end])
                    }));
                    // A few numbers, for the life of the program: problems are plain values.
                    modifiers.documents = Some(Vec::leak(starts));
                }
                _ => {
                    return Err(invalid(
                        "expected window=SIZE, prefix=LENGTH, softcap=CAP, alibi, sinks, or documents=LENGTH,LENGTH,…",
                    ));
                }
            }
        }
        Ok(modifiers)
    }

    /// The modifiers as given, for a row's case.
    pub fn text(&self) -> String {
        self.modifiers.iter().map(|modifier| format!(" {modifier}")).collect()
    }
}

/// The (row, key) pairs of one head, for the count of FLOPs: half of all with the causal mask, as other libraries count
/// it; with a window, a prefix or packed sequences, the pairs that the mask leaves.
pub fn pairs(problem: &Problem) -> f64 {
    let Problem { n_q, n_k, causal, modifiers, .. } = problem;
    match modifiers {
        Modifiers { window: None, prefix: None, documents: None, .. } => {
            (*n_q as f64) * (*n_k as f64) * if *causal { 0.5 } else { 1.0 }
        }
        _ => problem.pairs() as f64,
    }
}
