//! The kernels on a device, through the host functions.

use crate::case::{Case, Tensor};
use half::{bf16, f16};
use tilewright::codegen::ir::DType;
use tilewright::kernels::attention::{self, Options, Saved, TensorMut};
use tilewright::prelude::{Buffer, Device, Element, Float};

/// An element type, and its numbers as f64.
pub trait Number: Float + Element {
    fn from_number(x: f64) -> Self;
    fn number(self) -> f64;
}

impl Number for f32 {
    fn from_number(x: f64) -> f32 {
        x as f32
    }
    fn number(self) -> f64 {
        f64::from(self)
    }
}

impl Number for f16 {
    fn from_number(x: f64) -> f16 {
        f16::from_f64(x)
    }
    fn number(self) -> f64 {
        self.to_f64()
    }
}

impl Number for bf16 {
    fn from_number(x: f64) -> bf16 {
        bf16::from_f64(x)
    }
    fn number(self) -> f64 {
        self.to_f64()
    }
}

fn upload<T: Number>(device: &Device, tensor: &Tensor) -> Buffer<T> {
    let values: Vec<T> = tensor.memory.iter().map(|&x| T::from_number(x)).collect();
    Buffer::from_slice(device, &values).unwrap()
}

fn numbers<T: Number>(buffer: &Buffer<T>) -> Vec<f64> {
    buffer.to_vec().unwrap().into_iter().map(T::number).collect()
}

/// Runs forward and backward on the device and compares with the definition; outputs start as poison.
pub fn check(device: &Device, case: Case, options: &Options) {
    match case.dtype {
        DType::BF16 => check_typed::<bf16>(device, case, options),
        DType::F16 => check_typed::<f16>(device, case, options),
        DType::F32 => check_typed::<f32>(device, case, options),
        other => panic!("no test for {other}"),
    }
}

fn check_typed<T: Number>(device: &Device, case: Case, options: &Options) {
    let options = &Options { causal: case.problem.causal, scale: Some(case.problem.scale as f32), ..options.clone() };
    let inputs = case.inputs();
    let expected = case.expected(&inputs);
    let [q, k, v, d_o] = [&inputs.q, &inputs.k, &inputs.v, &inputs.d_o].map(|t| upload::<T>(device, t));
    let view = |buffer, like: &Tensor| attention::Tensor::strided(buffer, like.shape, like.strides).unwrap();
    let query = Tensor::poisoned(case.query_shape(), case.layout);
    let key = Tensor::poisoned(case.key_shape(), case.layout);
    let poisoned = |like: &Tensor| Buffer::<T>::poisoned(device, like.memory.len()).unwrap();
    let found = |buffer: &Buffer<T>, like: &Tensor, what: &str| {
        let tensor = Tensor { memory: numbers(buffer), ..like.clone() };
        tensor.check_gaps(what);
        tensor.dense()
    };

    let mut o = poisoned(&query);
    let mut lse = Buffer::<f32>::poisoned(device, expected.lse.len()).unwrap();
    attention::forward_into(
        device,
        view(q.view(), &query),
        view(k.view(), &key),
        view(v.view(), &key),
        TensorMut::strided(o.view_mut(), query.shape, query.strides).unwrap(),
        lse.view_mut(),
        options,
    )
    .unwrap_or_else(|e| panic!("{case:?}: {e}"));
    case.compare("o", &found(&o, &query, "o"), &expected.o);
    case.compare_lse(&numbers(&lse), &expected.lse);

    let (mut dq, mut dk, mut dv) = (poisoned(&query), poisoned(&key), poisoned(&key));
    let mut workspace = Buffer::<f32>::poisoned(device, attention::backward_workspace(query.shape)).unwrap();
    let saved = Saved {
        q: view(q.view(), &query),
        k: view(k.view(), &key),
        v: view(v.view(), &key),
        o: view(o.view(), &query),
        lse: lse.view(),
        d_o: view(d_o.view(), &query),
    };
    attention::backward_into(
        device,
        saved,
        TensorMut::strided(dq.view_mut(), query.shape, query.strides).unwrap(),
        TensorMut::strided(dk.view_mut(), key.shape, key.strides).unwrap(),
        TensorMut::strided(dv.view_mut(), key.shape, key.strides).unwrap(),
        workspace.view_mut(),
        options,
    )
    .unwrap_or_else(|e| panic!("{case:?}: {e}"));
    case.compare("dv", &found(&dv, &key, "dv"), &expected.gradients.dv);
    case.compare("dk", &found(&dk, &key, "dk"), &expected.gradients.dk);
    case.compare("dq", &found(&dq, &query, "dq"), &expected.gradients.dq);
}
