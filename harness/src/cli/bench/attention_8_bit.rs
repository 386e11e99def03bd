//! Attention of 8-bit floats of `tilewright bench attention`: `quantize` of bf16 tensors, and the forward pass.

use half::bf16;
use tilewright::kernels::attention::eight_bit::scaled_blocks;
use tilewright::kernels::attention::reference::{self, Problem};
use tilewright::kernels::attention::{Descale, Options, Quantized, Tiles, forward_into, quantize, quantize_into};
use tilewright::kernels::{OperandElement, TensorMut};
use tilewright::{Buffer, Device};

use super::attention_check::small;
use super::attention_modifiers::pairs;
use super::data::{Value, normal};
use super::record::{Measured, Recorder, Row, Work, accept};
use super::{Common, tiles};
use crate::cli::Result;
use crate::cli::demo::case::relative_error;

/// Largest relative error of O against attention of the tensors before they are rounded to four (e4m3) or three bits.
const TOLERANCE: [f64; 2] = [0.07, 0.14];

/// q, k and v in bf16, the same in 8 bits, and O.
struct Inputs<T: Value> {
    problem: Problem,
    wide: [Buffer<bf16>; 3],
    narrow: [Quantized<T>; 3],
    o: Buffer<bf16>,
    lse: Buffer<f32>,
}

impl<T: Value + OperandElement<Result = bf16>> Inputs<T> {
    fn new(device: &Device, problem: Problem) -> tilewright::Result<Inputs<T>> {
        let shape = shape(&problem);
        let len = tilewright::elements(&shape)?;
        device.check_memory(len as f64 * (3.0 * (2.0 + 1.0) + 2.0 + 1.0))?;
        let [q, k, v] = [1, 2, 3].map(|seed| normal::<bf16>(device, len, seed));
        let wide = [q?, k?, v?];
        let [q, k, v] = wide.each_ref().map(|x| quantize(device, x.tensor(shape)?));
        let rows = problem.batch * problem.heads_q * problem.n_q;
        let (o, lse) = (Buffer::poisoned(device, len)?, Buffer::poisoned(device, rows)?);
        Ok(Inputs { problem, wide, narrow: [q?, k?, v?], o, lse })
    }

    fn quantize(&mut self, device: &Device) -> tilewright::Result<()> {
        let (shape, scales) = (shape(&self.problem), scales_shape(&self.problem));
        for (wide, Quantized { values, descale }) in self.wide.iter().zip(&mut self.narrow) {
            quantize_into(device, wide.tensor(shape)?, values.tensor_mut(shape)?, descale.tensor_mut(scales)?)?;
        }
        Ok(())
    }

    fn forward(&mut self, device: &Device, tiles: Option<Tiles>) -> tilewright::Result<()> {
        let (shape, scales) = (shape(&self.problem), scales_shape(&self.problem));
        let [q, k, v] = &self.narrow;
        let [of_q, of_k, of_v] = self.narrow.each_ref().map(|x| x.descale.tensor(scales));
        let descale = Descale { q: Some(of_q?), k: of_k?, v: of_v? };
        let options = Options {
            descale: Some(descale),
            forward_tiles: tiles,
            num_splits: Some(1),
            ..Options::new(self.problem.causal)
        };
        let [q, k, v] = [q.values.tensor(shape)?, k.values.tensor(shape)?, v.values.tensor(shape)?];
        let o = TensorMut::dense(self.o.view_mut(), shape)?;
        let mut workspace = Buffer::<f32>::uninit(device, 0)?;
        forward_into(device, q, k, v, o, self.lse.view_mut(), workspace.view_mut(), &options)
    }

    /// The relative error of the rows from `first` on of the last head, against attention of the bf16 tensors.
    fn error(&self, first: usize) -> tilewright::Result<f64> {
        let p = &self.problem;
        let per_head = p.n_q * p.d;
        let last = (p.batch * p.heads_q - 1) * per_head;
        let of_head = |x: &Buffer<bf16>| -> tilewright::Result<Vec<f64>> {
            Ok(x.slice(last..last + per_head)?.to_vec()?.into_iter().map(f64::from).collect())
        };
        let [q, k, v] = self.wide.each_ref().map(of_head);
        let head = Problem { batch: 1, heads_q: 1, heads_kv: 1, n_q: p.n_q - first, ..*p };
        let (want, _) = reference::forward(&head, &q?[first * p.d..], &k?, &v?);
        Ok(relative_error(&of_head(&self.o)?[first * p.d..], &want))
    }
}

fn shape(p: &Problem) -> [usize; 4] {
    [p.batch, p.heads_q, p.n_q, p.d]
}

fn scales_shape(p: &Problem) -> [usize; 3] {
    [p.batch, p.heads_q, scaled_blocks(p.n_q)]
}

/// Measures `quantize` of q, k and v, and the forward pass with each of these tiles, or the default ones.
pub fn measure<T: Value + OperandElement<Result = bf16>>(
    common: &Common,
    device: &Device,
    problem: Problem,
    given: &[Tiles],
    recorder: &mut Recorder,
) -> Result<()> {
    let tolerance = TOLERANCE[usize::from(T::DTYPE.name() == "f8e5m2")];
    let (mut full, mut small) = (Inputs::<T>::new(device, problem)?, Inputs::<T>::new(device, small(&problem))?);
    let dims = shape(&problem);
    let row = |kernel: &str, case: &str| Row::new(kernel, &dims, T::DTYPE.name()).case(case);
    let case = if problem.causal { "causal" } else { "full" };
    let measured: Measured = (|| Ok((common.time(device, || full.quantize(device))?, 0.0)))();
    let bytes = full.o.len() as f64 * 3.0 * 3.0;
    recorder.push(row("attention_quantize", "from bf16").measured(&measured, Work::Bytes(bytes, None)))?;
    let heads = (problem.batch * problem.heads_q) as f64;
    let flop = 4.0 * heads * pairs(&problem) * problem.d as f64;
    let choices: Vec<Option<Tiles>> =
        if given.is_empty() { vec![None] } else { given.iter().copied().map(Some).collect() };
    for choice in choices {
        let measured: Measured = (|| {
            small.forward(device, choice)?;
            let error = accept("o", small.error(0)?, tolerance)?;
            let timing = common.time(device, || full.forward(device, choice))?;
            let first = problem.n_q - problem.n_q.min(16);
            Ok((timing, error.max(accept("o", full.error(first)?, tolerance)?)))
        })();
        let [taken, ..] = tiles::taken::<T>(&problem, ["dense", "plain"], None, device, false);
        let text = choice.or(taken).map_or_else(String::new, tiles::text);
        let row = row("attention_fwd", case).tiles(text).measured(&measured, Work::Flop(flop));
        if given.len() > 1 { recorder.push_choice(row, &measured)? } else { recorder.push(row)? }
    }
    Ok(())
}
