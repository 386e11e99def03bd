//! What commands cannot find out about the shipped kernels by themselves.

use tilewright::codegen::lang::kernel::{ConstValue, KernelDef, ParamKind};
use tilewright::kernels::{AUTOTUNED, KERNELS};
use tilewright_cli::bind::{self, Extents};
use tilewright_cli::{Hints, Kernel, Kernels, choose};

/// The kernels that ship, for the commands of [`tilewright_cli`].
pub fn shipped() -> Kernels {
    let tuned = AUTOTUNED.iter().map(|autotune| *autotune as &dyn Kernel);
    let all: Vec<&'static dyn Kernel> = KERNELS.iter().map(|def| *def as &dyn Kernel).chain(tuned).collect();
    Kernels::of(&all).with_hints(&Shipped)
}

struct Shipped;

impl Hints for Shipped {
    /// The values that the host functions of the shipped kernels choose for large tensors.
    fn constant(&self, name: &str, constants: &[(&'static str, ConstValue)]) -> Option<ConstValue> {
        let d = integer(constants, "d");
        Some(match name {
            "d" | "q_tile" => ConstValue::Int(64),
            "d_tile" => ConstValue::Int(d.map_or(1024, |d| d.min(1 << 62).next_power_of_two().max(16)) as i64),
            "ids_tile" => ConstValue::Int(512),
            "rows_tile" | "heads_tile" => ConstValue::Int(8),
            "tokens_tile" => ConstValue::Int(32),
            // A tile beside a head dimension is of queries and keys.
            "tile" => ConstValue::Int(if d.is_some() { 64 } else { 1024 }),
            _ => return None,
        })
    }

    /// Attention: the other tensors have the shape of q by default, or of k, and no loop is split.
    fn complete_shapes(
        &self,
        def: &'static KernelDef,
        extents: &mut Extents,
        constants: &[(&'static str, ConstValue)],
    ) {
        let strides = bind::strides(def);
        let d_v = integer(constants, "d_v");
        for (name, like) in [("k", "q"), ("v", "k"), ("o", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")] {
            let Some(param) = def.params.iter().find(|p| p.name == name) else { continue };
            if extents.shape(name).is_none()
                && !matches!(param.kind, ParamKind::Scalar(_) | ParamKind::Constexpr { .. })
                && let Some(strides) = strides.get(name)
                && let Some(mut shape) = extents.shape(like).map(<[usize]>::to_vec)
            {
                if let (Some(d_v), "v", Some(columns)) = (d_v, name, shape.last_mut()) {
                    *columns = d_v;
                }
                // O has the columns of v.
                if let (Some(v), "o", Some(columns)) = (extents.shape("v"), name, shape.last_mut()) {
                    *columns = v.last().copied().unwrap_or(*columns);
                }
                extents.add_tensor(param.name, &shape, Some(strides));
            }
        }
    }

    fn flop(&self, def: &KernelDef, extents: &Extents, constants: &[(&str, ConstValue)]) -> Option<f64> {
        flop(def, extents, constants)
    }

    /// In records, attention's forward kernel has the name of the forward pass.
    fn record_name<'n>(&self, kernel: &'n str) -> &'n str {
        match kernel {
            "flash_attention_fwd" => "attention_fwd",
            other => other,
        }
    }

    fn record_shapes(&self, def: &KernelDef, shape: &[usize]) -> Vec<(&'static str, Vec<usize>)> {
        match (def.name, shape) {
            ("matmul", &[m, n, k]) => vec![("a", vec![m, k]), ("b", vec![k, n])],
            _ => Vec::new(),
        }
    }

    /// The mask without modifiers, a precision, and the columns of v.
    fn record_constants(&self, case: &str) -> Option<Vec<(&'static str, ConstValue)>> {
        let constant = |word: &str| match word {
            "causal" => Some(("causal", ConstValue::Bool(true))),
            "full" => Some(("causal", ConstValue::Bool(false))),
            "ieee" | "tf32" | "tf32x3" => Some(("precision", ConstValue::Variant(word.to_string()))),
            _ => Some(("d_v", ConstValue::Int(word.strip_prefix("d_v=")?.parse().ok()?))),
        };
        case.split_whitespace().map(constant).collect()
    }
}

/// Returns the value of an integer constant that is not negative.
fn integer(constants: &[(&'static str, ConstValue)], name: &str) -> Option<usize> {
    match choose::given(constants, name)? {
        ConstValue::Int(n) => usize::try_from(n).ok(),
        _ => None,
    }
}

/// Counts the FLOPs of a launch, for kernels with matmuls: 2mnk for an m × k by k × n matmul.
/// Attention has matmuls of queries × keys × head dimension, with half of the scores if causal: two in the forward
/// kernel (S, O), four in the dK/dV kernel (S, dP, dV, dK), three in the dQ kernel (S, dP, dQ). With a cache, all pages
/// of a table count, and queries are the last tokens of causal sequences.
fn flop(def: &KernelDef, extents: &Extents, constants: &[(&str, ConstValue)]) -> Option<f64> {
    // Matmuls with the columns of q and k, and with those of v.
    let matmuls = match def.name {
        "matmul" => {
            let size = |name: &str| extents.of_name(name).ok().flatten().map(|n| n as f64);
            return Some(2.0 * size("m")? * size("n")? * size("k")?);
        }
        "flash_attention_fwd" => [1.0, 1.0],
        "flash_attention_bwd_dkdv" => [2.0, 2.0],
        "flash_attention_bwd_dq" => [2.0, 1.0],
        _ => return None,
    };
    let [batch, heads, n_q, d] = *extents.shape("q")? else { return None };
    let rows = *extents.shape("k")?.get(2)?;
    let n_k = extents.shape("table").and_then(|table| table.get(1)).map_or(rows, |pages| pages.saturating_mul(rows));
    let is_cached = ["table", "lengths"].iter().any(|name| extents.shape(name).is_some());
    let d_v = extents.shape("v").and_then(|v| v.get(3)).copied().unwrap_or(d);
    let causal = constants.iter().any(|(name, value)| *name == "causal" && *value == ConstValue::Bool(true));
    let [batch, heads, n_q, n_k] = [batch, heads, n_q, n_k].map(|n| n as f64);
    let seen = match (causal, is_cached) {
        (false, _) => n_q * n_k,
        (true, false) => 0.5 * n_q * n_k,
        (true, true) => (n_q * n_k - 0.5 * n_q * (n_q - 1.0)).max(0.5 * n_q * n_k),
    };
    let columns = matmuls[0] * d as f64 + matmuls[1] * d_v as f64;
    Some(2.0 * batch * heads * seen * columns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewright::kernels::attention::forward::FLASH_ATTENTION_FWD;

    #[test]
    fn attention_flop_is_halved_by_the_causal_mask() {
        let mut extents = Extents::default();
        extents.add_tensor("q", &[1, 16, 16384, 64], None);
        extents.add_tensor("k", &[1, 16, 16384, 64], None);
        let of = |causal| flop(&FLASH_ATTENTION_FWD, &extents, &[("causal", ConstValue::Bool(causal))]).unwrap();
        assert_eq!((of(false), of(true)), (4.0 * 16.0 * 16384.0 * 16384.0 * 64.0, of(false) / 2.0));
    }

    #[test]
    fn all_pages_of_a_cache_count() {
        let mut extents = Extents::default();
        extents.add_tensor("q", &[32, 32, 1, 128], None);
        extents.add_tensor("k", &[4096, 8, 64, 128], None);
        extents.add_tensor("table", &[32, 100], None);
        let found = flop(&FLASH_ATTENTION_FWD, &extents, &[("causal", ConstValue::Bool(true))]);
        assert_eq!(found, Some(4.0 * 32.0 * 32.0 * 6400.0 * 128.0));
    }
}
