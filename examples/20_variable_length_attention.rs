//! Causal attention of packed sequences of different lengths (`cu_seqlens`), without padding: a mask of the library's
//! kernels, which load no tile of another sequence.

#[path = "common/mod.rs"]
pub mod common;

use common::{Outcome, Row, Work, check, to, wave};
use tilewright::kernels::attention::documents::document_ranges;
use tilewright::kernels::attention::{self, Mask, Options, Tensor};
use tilewright::prelude::*;

// ANCHOR: kernel
/// O of q, k and v [1, heads, n, d], of sequences that begin at `starts[0]` … and end at its last number.
fn variable_length_attention(
    device: &Device,
    [q, k, v]: [Tensor<'_, bf16>; 3],
    starts: View<'_, i32>,
    n: usize,
) -> Result<Buffer<bf16>> {
    let mut ranges = Buffer::<i32>::uninit(device, 4 * n)?;
    document_ranges(device, [starts, starts], [n, n], true, None, ranges.view_mut(), None)?;
    let options = Options { mask: Mask::documents(ranges.view(), n), ..Options::new(true) };
    Ok(attention::forward(device, q, k, v, &options)?.0)
}
// ANCHOR_END: kernel

fn case(device: &Device, heads: usize, d: usize, lengths: &[usize], bench: bool) -> Outcome<Row> {
    let mut starts = vec![0];
    lengths.iter().for_each(|length| starts.push(starts[starts.len() - 1] + *length as i32));
    let n: usize = lengths.iter().sum();
    let host = [0.7, 0.3, 1.1].map(|frequency| to(&wave(heads * n * d, frequency), bf16::from_f32));
    let [q, k, v] = host.each_ref().map(|x| Buffer::from_slice(device, x));
    let (q, k, v, start_buffer) = (q?, k?, v?, Buffer::from_slice(device, &starts)?);
    let dense = |x| Tensor::dense(x, [1, heads, n, d]);
    let inputs = [dense(q.view())?, dense(k.view())?, dense(v.view())?];
    let mut o = None;
    let time = common::time(device, bench, || {
        o = Some(variable_length_attention(device, inputs, start_buffer.view(), n)?);
        Ok(())
    })?;
    let o = o.ok_or("nothing was launched")?;
    let want = |at: usize| {
        let (head, row, column) = (at / d / n, at / d % n, at % d);
        let first = *starts.iter().rfind(|start| **start as usize <= row).unwrap_or(&0) as usize;
        let element = |x: &[bf16], row: usize, column: usize| x[(head * n + row) * d + column].to_f64();
        let dot = |j: usize| (0..d).map(|x| element(&host[0], row, x) * element(&host[1], j, x)).sum::<f64>();
        let weights: Vec<f64> = (first..=row).map(|j| (dot(j) * (d as f64).powf(-0.5)).exp()).collect();
        let sum = weights.iter().zip(first..).map(|(w, j)| w * element(&host[2], j, column)).sum::<f64>();
        sum / weights.iter().sum::<f64>()
    };
    let error = check("o", &o.to_vec()?, 2000, 1e-2, want)?;
    let pairs: usize = lengths.iter().map(|n| n * (n + 1) / 2).sum();
    let case = format!("{} sequences of {n} tokens, {heads} × {d}", lengths.len());
    Ok(Row { kernel: "variable_length_attention", case, work: Work::Flop((4 * heads * pairs * d) as f64), error, time })
}

/// Checks small shapes, or checks and times realistic ones.
///
/// # Errors
/// A result that differs from its definition, and errors of launches.
pub fn cases(device: &Device, bench: bool) -> Outcome<Vec<Row>> {
    Ok(vec![match bench {
        true => case(device, 16, 128, &[4096, 100, 2000, 512, 7000, 1300, 64, 1312], true)?,
        false => case(device, 2, 32, &[40, 1, 33, 17], false)?,
    }])
}

fn main() -> Outcome {
    common::main(cases)
}
