//! Sizes of the residual stream and of other activations, computed without running a model.

use crate::report::{Cell, Column, Table};

/// Dimensions of the tensors of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub batch: usize,
    pub context: usize,
    pub d_model: usize,
    pub d_ff: usize,
    pub heads: usize,
    pub layers: usize,
    pub vocabulary: usize,
    /// Bytes per element of the activations.
    pub bytes: usize,
}

/// A tensor with its formula, its number of elements, and the bytes per element.
pub struct Entry {
    pub name: &'static str,
    pub formula: &'static str,
    pub elements: u128,
    pub bytes: usize,
}

/// Bytes per element of the residual stream: it is f32 in every precision.
pub const STREAM_BYTES: usize = 4;

impl Sizes {
    /// The tensors that dominate the memory of a step.
    pub fn entries(&self) -> Vec<Entry> {
        let [b, t, d, f, h, l, v] =
            [self.batch, self.context, self.d_model, self.d_ff, self.heads, self.layers, self.vocabulary]
                .map(|n| n as u128);
        let entry = |name, formula, elements| Entry { name, formula, elements, bytes: self.bytes };
        let stream = |name, formula, elements| Entry { name, formula, elements, bytes: STREAM_BYTES };
        vec![
            stream("residual stream", "batch × context × d_model", b * t * d),
            stream("residual streams saved, one per layer", "layers × batch × context × d_model", l * b * t * d),
            entry("feed-forward, inner activation", "batch × context × d_ff", b * t * f),
            entry("attention scores, if materialized", "batch × heads × context²", b * h * t * t),
            entry("logits", "batch × context × vocabulary", b * t * v),
        ]
    }

    /// Size of the residual stream in MiB (1024² bytes).
    pub fn residual_mib(&self) -> f64 {
        (self.batch * self.context * self.d_model * STREAM_BYTES) as f64 / (1 << 20) as f64
    }

    pub fn table(&self) -> Table {
        let mut table = Table::new(
            "residual-stream",
            &format!("Sizes of tensors, at {} bytes per element, {STREAM_BYTES} in the residual stream", self.bytes),
            [
                Column::text("tensor"),
                Column::text("elements").key("formula"),
                Column::integer("number of elements").key("elements"),
                Column::number("size").unit("MiB").decimals(2),
            ],
        )
        .note(format!(
            "batch {}, context {}, d_model {}, d_ff {}, heads {}, layers {}, vocabulary {}; 1 MiB is 1024² bytes.",
            self.batch, self.context, self.d_model, self.d_ff, self.heads, self.layers, self.vocabulary
        ));
        for entry in self.entries() {
            let mib = (entry.elements * entry.bytes as u128) as f64 / f64::from(1 << 20);
            let elements = i64::try_from(entry.elements).map_or(Cell::Number(entry.elements as f64), Cell::Integer);
            table.push([Cell::from(entry.name), Cell::from(entry.formula), elements, Cell::from(mib)]);
        }
        table
    }
}
