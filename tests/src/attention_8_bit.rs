//! Attention of 8-bit floats against its definition in f64, on the numbers that the 8-bit tensors and their scales mean.

use crate::attention::{Case, input, poisoned_rows};
use crate::numerics::{HostTensor, Random};
use half::bf16;
use tilewright::codegen::ir::DType;
use tilewright::kernels::attention::reference::{self, ModifierTensors};
use tilewright::kernels::attention::{self, Descale, Options};
use tilewright::kernels::{OperandElement, Tensor, TensorMut};
use tilewright::prelude::{Buffer, Device, F8E4M3, F8E5M2};

/// Dequantization scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scales {
    None,
    /// One for each head of keys and of values.
    PerHead,
    /// One for each block of 128 rows.
    PerBlock,
}

/// Checks O and L. P is rounded to numbers of four bits (e4m3), which bounds the error of O.
pub fn check_8_bit(device: &Device, case: Case, scales: Scales, options: &Options) {
    match case.dtype {
        DType::F8E4M3 => check_typed::<F8E4M3>(device, case, scales, options),
        DType::F8E5M2 => check_typed::<F8E5M2>(device, case, scales, options),
        other => panic!("not an 8-bit float: {other}"),
    }
}

/// An 8-bit tensor [batch, heads, rows, d] with its scales [batch, heads, blocks].
struct Scaled {
    tensor: HostTensor,
    scales: Vec<f32>,
    blocks: usize,
}

impl Scaled {
    fn new(case: &Case, shape @ [batch, heads, rows, d]: [usize; 4], scales: Scales, random: &mut Random) -> Scaled {
        // The largest number of a type is 256 times a few.
        let factor = if scales == Scales::None { 1.0 } else { 50.0 };
        let values: Vec<f64> = (0..batch * heads * rows * d).map(|_| random.number() * factor * 3f64.sqrt()).collect();
        // Without rows none, too.
        let blocks = if scales == Scales::PerBlock { rows.div_ceil(128) } else { 1 };
        let heads = if scales == Scales::PerHead { heads } else { batch * heads };
        let scales = (0..heads * blocks).map(|_| ((1.2 + random.number()) / factor) as f32).collect();
        Scaled { tensor: case.tensor(shape, &values), scales, blocks }
    }

    /// The numbers that it means.
    fn values(&self, scales: Scales, [_, heads, rows, d]: [usize; 4]) -> Vec<f64> {
        let scale = |at: usize| {
            let (row, head) = (at / d % rows, at / d / rows);
            f64::from(match scales {
                Scales::None => 1.0,
                Scales::PerHead => self.scales[head % heads],
                Scales::PerBlock => self.scales[head * self.blocks + row / 128],
            })
        };
        self.tensor.values().iter().enumerate().map(|(at, x)| x * scale(at)).collect()
    }
}

fn check_typed<T: OperandElement<Result = bf16>>(device: &Device, case: Case, scales: Scales, options: &Options) {
    let fail = |e: tilewright::Error| -> ! { panic!("{case:?}, {scales:?}: {e}") };
    let p = case.problem;
    let mut random = Random::new(5);
    let shapes = [case.query_shape(), case.key_shape(), case.value_shape()];
    // Queries have scales of blocks only.
    let of = [if scales == Scales::PerHead { Scales::None } else { scales }, scales, scales];
    let inputs = [0, 1, 2].map(|i: usize| Scaled::new(&case, shapes[i], of[i], &mut random));
    let [q, k, v] = [0, 1, 2].map(|i: usize| inputs[i].values(of[i], shapes[i]));
    let (want_o, want_lse) = reference::forward(&p, &q, &k, &v);

    let buffers = inputs.each_ref().map(|x| x.tensor.upload::<T>(device));
    let descales = inputs.each_ref().map(|x| Buffer::from_slice(device, &x.scales).unwrap_or_else(|e| fail(e)));
    let descale = match scales {
        Scales::None => None,
        Scales::PerHead => Some(Descale::per_head(p.batch, descales[1].view(), descales[2].view())),
        Scales::PerBlock => {
            let [q, k, v] = [0, 1, 2].map(|i: usize| {
                let [batch, heads, ..] = shapes[i];
                Tensor::dense(descales[i].view(), [batch, heads, inputs[i].blocks]).unwrap_or_else(|e| fail(e))
            });
            Some(Ok(Descale { q: Some(q), k, v }))
        }
    };
    let descale = descale.transpose().unwrap_or_else(|e| fail(e));
    let tensors = ModifierTensors::new(device, &p).unwrap_or_else(|e| fail(e));
    let (causal, scale) = (p.causal, Some(p.scale as f32));
    let (mask, score, sinks) = (tensors.mask(), tensors.score(), tensors.sinks());
    let options = Options { causal, scale, mask, score, sinks, descale, ..options.clone() };
    let [q, k, v] = [0, 1, 2].map(|i: usize| input(&buffers[i], &inputs[i].tensor));
    let shape = case.result_shape();
    let mut found = HostTensor::poisoned(DType::BF16, &shape, &case.layout.strides(shape));
    let mut o = found.upload::<bf16>(device);
    let mut rows = poisoned_rows(want_lse.len());
    let mut lse = rows.upload::<f32>(device);
    let needed = attention::forward_workspace::<T>(device, q.shape(), k.shape(), v.shape(), &options);
    let mut workspace = Buffer::<f32>::poisoned(device, needed).unwrap_or_else(|e| fail(e));
    let strides: Vec<i64> = found.strides.iter().map(|&s| s as i64).collect();
    let target = TensorMut::strided(o.view_mut(), shape, strides.try_into().expect("four strides"));
    let target = target.unwrap_or_else(|e| fail(e));
    attention::forward_into(device, q, k, v, target, lse.view_mut(), workspace.view_mut(), &options)
        .unwrap_or_else(|e| fail(e));
    found.download(&o);
    let tolerance = if case.dtype == DType::F8E4M3 { 0.04 } else { 0.08 };
    Case { dtype: DType::BF16, ..case }.with_tolerance(tolerance).check("o", &found, &want_o);
    rows.download(&lse);
    // Tensor cores sum products of 8-bit floats with about 14 bits.
    case.with_tolerance(2e-3).check_lse(&rows, &want_lse);
}
