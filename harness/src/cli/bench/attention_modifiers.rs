//! Parses the modifiers of attention on the command line.

use std::collections::HashSet;

use tilewright::kernels::attention::reference::{Modifiers, Problem};

use crate::cli::{CliError, Result};

#[derive(clap::Args, Clone, Debug)]
pub struct ModifierArguments {
    /// Modifier of attention, may be repeated: window=SIZE (keys before the diagonal that a row sees), prefix=LENGTH (keys
    /// that a row sees beside those up to the diagonal), softcap=CAP, alibi, relative (a bias for each distance),
    /// sinks, or documents=LENGTH,LENGTH,… (packed sequences)
    #[arg(long = "modifier", value_name = "MODIFIER")]
    modifiers: Vec<String>,
}

impl ModifierArguments {
    /// The modifiers of a problem with sequences of `seq_len` rows.
    ///
    /// # Errors
    /// Modifiers that are not there, are given twice, or cannot be combined.
    pub fn of(&self, seq_len: usize, causal: bool) -> Result<Modifiers> {
        let mut modifiers = Modifiers::default();
        let mut names = HashSet::new();
        for text in &self.modifiers {
            let invalid = |expected: &str| CliError::usage(format!("invalid modifier `{text}`"), expected.to_string());
            let (name, value) = text.split_once('=').unwrap_or((text, ""));
            if !names.insert(name) {
                return Err(invalid("expected each modifier once"));
            }
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
                "relative" if value.is_empty() => modifiers.relative = true,
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
                        "expected window=SIZE, prefix=LENGTH, softcap=CAP, alibi, relative, sinks, or documents=LENGTH,LENGTH,…",
                    ));
                }
            }
        }
        let refused = |message: &str, help: &str| Err(CliError::usage(message.to_string(), help.to_string()));
        if modifiers.relative && (modifiers.alibi || modifiers.softcap.is_some()) {
            return refused("modifier `relative` cannot be combined with softcap or alibi", "give one of them");
        }
        if modifiers.prefix.is_some() && (modifiers.window.is_some() || modifiers.documents.is_some()) {
            return refused("modifier `prefix` cannot be combined with window or documents", "give one of them");
        }
        if modifiers.prefix.is_some() && !causal {
            return refused("modifier `prefix` is causal", "give --causal true: without it every row sees all keys");
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
