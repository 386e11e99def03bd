//! The kernels' meaning: what the interpreter makes of them, on small and odd shapes.

use crate::case::{Case, Expected, Inputs, Layout, Tensor};
use tilewright::codegen::interp::{self, ArgValue, Memory};
use tilewright::codegen::ir::{DType, Func};
use tilewright::codegen::lang::kernel::{ConstValue, KernelDef, Specialization};
use tilewright::codegen::num;
use tilewright::kernels::attention::backward::{
    FLASH_ATTENTION_BWD_DKDV, FLASH_ATTENTION_BWD_DQ, FLASH_ATTENTION_BWD_PREPROCESS,
};
use tilewright::kernels::attention::forward::FLASH_ATTENTION_FWD;

fn to_bytes(dtype: DType, values: &[f64]) -> Vec<u8> {
    let width = dtype.bytes();
    values.iter().flat_map(|&x| num::encode(dtype, x).to_le_bytes()[..width].to_vec()).collect()
}

fn from_bytes(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let width = dtype.bytes();
    let number = |chunk: &[u8]| {
        let mut word = [0; 8];
        word[..width].copy_from_slice(chunk);
        num::decode(dtype, u64::from_le_bytes(word))
    };
    bytes.chunks(width).map(number).collect()
}

/// A launch under construction: arguments in order.
struct Launch<'m> {
    memory: &'m mut Memory,
    dtype: DType,
    args: Vec<ArgValue>,
    strides: Vec<ArgValue>,
}

impl<'m> Launch<'m> {
    fn new(memory: &'m mut Memory, dtype: DType) -> Launch<'m> {
        Launch { memory, dtype, args: Vec::new(), strides: Vec::new() }
    }

    fn tensor(&mut self, tensor: &Tensor) -> interp::BufferId {
        let id = self.memory.add(to_bytes(self.dtype, &tensor.memory));
        self.args.push(id.into());
        self.strides.extend(tensor.strides.map(ArgValue::Int));
        id
    }

    fn vector(&mut self, values: &[f64]) -> interp::BufferId {
        let id = self.memory.add(to_bytes(DType::F32, values));
        self.args.push(id.into());
        id
    }

    fn run(mut self, func: &Func, scalars: &[ArgValue], grid: [usize; 3]) {
        self.args.append(&mut self.strides);
        self.args.extend(scalars);
        let outcome = interp::run(func, &self.args, grid.map(|n| n as u32), self.memory);
        outcome.unwrap_or_else(|e| panic!("{e}"));
    }
}

fn record(def: &KernelDef, case: &Case, consts: &[(&str, ConstValue)]) -> Func {
    let func = def.record(&[case.dtype], consts, &Specialization::default());
    func.unwrap_or_else(|d| panic!("{d}"))
}

const Q_TILE: usize = 16;
const K_TILE: usize = 32;

fn consts(case: &Case) -> Vec<(&'static str, ConstValue)> {
    let p = &case.problem;
    let int = |n: usize| ConstValue::Int(n as i64);
    vec![
        ("d", int(p.d)),
        ("d_tile", int(p.d.next_power_of_two().max(16))),
        ("q_tile", int(Q_TILE)),
        ("k_tile", int(K_TILE)),
        ("group", int(p.heads_q / p.heads_kv)),
        ("causal", ConstValue::Bool(p.causal)),
    ]
}

fn with(
    mut consts: Vec<(&'static str, ConstValue)>,
    name: &'static str,
    value: bool,
) -> Vec<(&'static str, ConstValue)> {
    consts.push((name, ConstValue::Bool(value)));
    consts
}

fn int(n: usize) -> ArgValue {
    ArgValue::Int(n as i64)
}

fn check_forward(case: Case, inputs: &Inputs, expected: &Expected) {
    let p = &case.problem;
    let mut memory = Memory::new();
    let mut launch = Launch::new(&mut memory, case.dtype);
    let mut o = Tensor::poisoned(case.query_shape(), case.layout);
    for t in [&inputs.q, &inputs.k, &inputs.v] {
        launch.tensor(t);
    }
    let o_id = launch.tensor(&o);
    let lse_id = launch.vector(&vec![f64::NAN; expected.lse.len()]);
    let func = record(&FLASH_ATTENTION_FWD, &case, &with(consts(&case), "even_keys", p.n_k.is_multiple_of(K_TILE)));
    let scalars = [int(p.n_q), int(p.n_k), ArgValue::Float(p.scale)];
    launch.run(&func, &scalars, [p.n_q.div_ceil(Q_TILE), p.heads_q, p.batch]);
    o.memory = from_bytes(case.dtype, memory.bytes(o_id));
    o.check_gaps("o");
    case.compare("o", &o.dense(), &expected.o);
    let lse = from_bytes(DType::F32, memory.bytes(lse_id));
    case.compare_lse(&lse, &expected.lse);
}

fn check_backward(case: Case, inputs: &Inputs, expected: &Expected) {
    let p = &case.problem;
    let rows = expected.lse.len();
    // The kernels see O as the forward pass rounds it.
    let o = Tensor::new(case.query_shape(), case.layout, &expected.o);
    let mut memory = Memory::new();
    let mut launch = Launch::new(&mut memory, case.dtype);
    launch.tensor(&o);
    launch.tensor(&inputs.d_o);
    launch.vector(&expected.lse);
    let delta = launch.vector(&vec![f64::NAN; rows]);
    let lse2 = launch.vector(&vec![f64::NAN; rows]);
    let func = record(&FLASH_ATTENTION_BWD_PREPROCESS, &case, &{
        let mut consts = consts(&case);
        consts.retain(|(name, _)| ["d", "d_tile", "q_tile"].contains(name));
        consts
    });
    launch.run(&func, &[int(p.n_q)], [p.n_q.div_ceil(Q_TILE), p.heads_q, p.batch]);

    let [delta, lse2] = [delta, lse2].map(|id| from_bytes(DType::F32, memory.bytes(id)));
    let scalars = [int(p.n_q), int(p.n_k), ArgValue::Float(p.scale)];
    let gradient = |shape| Tensor::poisoned(shape, case.layout);
    let read = |memory: &Memory, id, shape, what: &str| {
        let mut tensor = gradient(shape);
        tensor.memory = from_bytes(case.dtype, memory.bytes(id));
        tensor.check_gaps(what);
        tensor.dense()
    };

    let mut launch = Launch::new(&mut memory, case.dtype);
    for t in [&inputs.q, &inputs.k, &inputs.v, &inputs.d_o] {
        launch.tensor(t);
    }
    launch.vector(&lse2);
    launch.vector(&delta);
    let dk = launch.tensor(&gradient(case.key_shape()));
    let dv = launch.tensor(&gradient(case.key_shape()));
    let even = with(consts(&case), "even_queries", p.n_q.is_multiple_of(Q_TILE));
    let func = record(&FLASH_ATTENTION_BWD_DKDV, &case, &even);
    launch.run(&func, &scalars, [p.n_k.div_ceil(K_TILE), p.heads_kv, p.batch]);
    case.compare("dk", &read(&memory, dk, case.key_shape(), "dk"), &expected.gradients.dk);
    case.compare("dv", &read(&memory, dv, case.key_shape(), "dv"), &expected.gradients.dv);

    let mut launch = Launch::new(&mut memory, case.dtype);
    for t in [&inputs.q, &inputs.k, &inputs.v, &inputs.d_o] {
        launch.tensor(t);
    }
    launch.vector(&lse2);
    launch.vector(&delta);
    let dq = launch.tensor(&gradient(case.query_shape()));
    let even = with(consts(&case), "even_keys", p.n_k.is_multiple_of(K_TILE));
    let func = record(&FLASH_ATTENTION_BWD_DQ, &case, &even);
    launch.run(&func, &scalars, [p.n_q.div_ceil(Q_TILE), p.heads_q, p.batch]);
    case.compare("dq", &read(&memory, dq, case.query_shape(), "dq"), &expected.gradients.dq);
}

/// Forward and backward.
fn check(case: Case) {
    let inputs = case.inputs();
    let expected = case.expected(&inputs);
    check_forward(case, &inputs, &expected);
    check_backward(case, &inputs, &expected);
}

#[test]
fn tiles_of_keys_that_all_rows_see() {
    check(Case::new(32, 64, 16));
    check(Case::new(32, 64, 16).dtype(DType::F32));
    check(Case::new(32, 64, 16).dtype(DType::F16));
}

#[test]
fn lengths_that_are_no_multiples_of_the_tiles() {
    for (n_q, n_k) in [(1, 1), (17, 17), (1, 70), (70, 1), (33, 31), (16, 65)] {
        check(Case::new(n_q, n_k, 16).dtype(DType::F32));
    }
}

#[test]
fn the_causal_diagonal_ends_in_the_corner() {
    for (n_q, n_k) in [(64, 64), (1, 1), (45, 45), (20, 75), (16, 64), (1, 40)] {
        check(Case::new(n_q, n_k, 16).causal().dtype(DType::F32));
    }
}

#[test]
fn rows_without_keys_give_zeros() {
    for (n_q, n_k) in [(70, 20), (64, 32), (50, 1), (33, 32)] {
        let case = Case::new(n_q, n_k, 16).causal().dtype(DType::F32);
        let expected = case.expected(&case.inputs());
        assert_eq!(expected.lse[0], f64::NEG_INFINITY);
        check(case);
    }
}

#[test]
fn no_keys_at_all() {
    check(Case::new(20, 0, 16).dtype(DType::F32));
    check(Case::new(20, 0, 16).causal().dtype(DType::F32));
}

#[test]
fn query_heads_share_keys() {
    check(Case::new(20, 40, 16).heads(2, 6, 2).dtype(DType::F32));
    check(Case::new(40, 40, 16).heads(1, 3, 1).causal().dtype(DType::F32));
}

#[test]
fn head_dimensions_that_are_no_powers_of_two() {
    for d in [1, 8, 24, 80, 96] {
        check(Case::new(20, 36, d).causal().dtype(DType::F32));
    }
}

#[test]
fn strides_with_gaps() {
    for layout in [Layout::RowsFirst, Layout::Gaps] {
        check(Case::new(20, 36, 16).heads(2, 4, 2).layout(layout).dtype(DType::F32));
        check(Case::new(36, 36, 24).heads(2, 2, 2).layout(layout).causal());
    }
}

/// Scores of hundreds: exp without the maximum taken out would overflow, and so would P of a padded key.
#[test]
fn large_scores_do_not_overflow() {
    for sign in [1.0, -1.0] {
        // Scores of 400 are off by 1.5e-5, P by as much, and in dQ and dK nearly equal terms of size 10 cancel.
        let case = Case::new(20, 36, 16).dtype(DType::F32).within(1e-2);
        let mut inputs = case.inputs();
        inputs.q.memory.fill(10.0);
        inputs.k.memory.iter_mut().enumerate().for_each(|(i, x)| *x = sign * (10.0 + (i / 16 % 3) as f64 / 8.0));
        let expected = case.expected(&inputs);
        assert!(expected.lse[0].abs() > 300.0);
        check_forward(case, &inputs, &expected);
        check_backward(case, &inputs, &expected);
    }
}
