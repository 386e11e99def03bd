//! Whole kernels: fusion, reuse of buffers, carried tiles, masks at odd boundaries.

use super::kernels::{argmax, attention, cumsum, matmul, matmul_by_pointers, softmax, weighted_sum};
use super::*;
use crate::ir::{Func, Stage};
use crate::pipeline::Observer;

#[test]
fn weighted_sum_at_odd_sizes() {
    for (rows, d) in [(1, 1), (5, 7), (16, 64), (33, 130), (64, 31)] {
        for elem in [DType::F32, DType::BF16, DType::F16] {
            let buffers =
                [Data::random(elem, rows * (d + 3), 1), Data::random(elem, d, 2), Data::poison(DType::F32, rows + 1)];
            let inputs = [
                Input::Buffer(0),
                Input::Buffer(1),
                Input::Buffer(2),
                Input::Int(d as i64 + 3),
                Input::Int(rows as i64),
                Input::Int(d as i64),
                Input::Int(1),
            ];
            let grid = [rows.div_ceil(16) as u32, 1, 1];
            let func = weighted_sum(elem, 16, 32);
            let out = check_func(&func, &inputs, &buffers, grid, near(DType::F32));
            assert_eq!(out[2].values()[rows], 77.0);
        }
    }
}

#[test]
fn rows_at_odd_sizes() {
    for (rows, columns) in [(1, 1), (3, 17), (9, 64), (8, 33)] {
        let n = rows * columns;
        let buffers = [Data::random(DType::F32, n, 3), Data::poison(DType::F32, n)];
        let indices = [Data::random(DType::F32, n, 3), Data::poison(DType::I32, rows)];
        let inputs =
            [Input::Buffer(0), Input::Buffer(1), Input::Int(rows as i64), Input::Int(columns as i64), Input::Int(1)];
        let grid = [rows.div_ceil(4) as u32, 1, 1];
        check_func(&softmax(4, 64), &inputs, &buffers, grid, near(DType::F32));
        check_func(&cumsum(4, 64), &inputs, &buffers, grid, near(DType::F32));
        check_func(&argmax(4, 64), &inputs, &indices, grid, Tolerance::Exact);
    }
}

#[test]
fn matmul_at_odd_sizes() {
    for (m, n, k) in [(16, 32, 16), (17, 31, 5), (1, 1, 1), (40, 20, 33)] {
        for elem in [DType::F32, DType::BF16] {
            let buffers = [Data::random(elem, m * k, 4), Data::random(elem, k * n, 5), Data::poison(elem, m * n)];
            let mut inputs: Vec<Input> = (0..3).map(Input::Buffer).collect();
            inputs.extend([m, n, k, 1].map(|x| Input::Int(x as i64)));
            let grid = [m.div_ceil(16) as u32, n.div_ceil(32) as u32, 1];
            check_func(&matmul(elem, 16, 32, 16), &inputs, &buffers, grid, near(elem));
        }
    }
}

#[test]
fn attention_with_and_without_mask() {
    let d = 32;
    for (queries, keys) in [(32, 32), (37, 45), (16, 70)] {
        for causal in [false, true] {
            for (elem, transposed) in [(DType::F32, true), (DType::F32, false), (DType::BF16, true)] {
                let heads = 2;
                let buffers = [
                    Data::random(elem, heads * queries * d, 6),
                    Data::random(elem, heads * keys * d, 7),
                    Data::random(elem, heads * keys * d, 8),
                    Data::poison(elem, heads * queries * d),
                    Data::poison(DType::F32, heads * queries),
                ];
                let mut inputs: Vec<Input> = (0..5).map(Input::Buffer).collect();
                inputs.extend([queries, keys, 1].map(|x| Input::Int(x as i64)));
                let grid = [queries.div_ceil(16) as u32, heads as u32, 1];
                let func = attention(elem, 16, 32, d, causal, transposed);
                check_func(&func, &inputs, &buffers, grid, near(elem));
            }
        }
    }
}

/// Keeps the LLVM IR of a compilation.
struct KeepIr(String);

impl Observer for KeepIr {
    fn after(&mut self, _: &'static str, _: Stage, _: &Func) {}
    fn llvm_ir(&mut self, text: &str) {
        self.0 = text.to_string();
    }
}

#[test]
fn pointer_tiles_that_loops_move_stay_contiguous() {
    let (m, n, k) = (32, 64, 48);
    let buffers =
        [Data::random(DType::F32, m * k, 4), Data::random(DType::F32, k * n, 5), Data::poison(DType::F32, m * n)];
    let mut inputs: Vec<Input> = (0..3).map(Input::Buffer).collect();
    inputs.extend([m, n, k].map(|x| Input::Int(x as i64)));
    let func = matmul_by_pointers(16, 32, 16);
    check_func(&func, &inputs, &buffers, [2, 2, 1], near(DType::F32));
    let mut kept = KeepIr(String::new());
    compile_host(&func, &HostCpu::native(), &CompileOptions::default(), &mut kept).unwrap_or_else(|e| panic!("{e}"));
    assert!(!kept.0.contains("gather") && !kept.0.contains("scatter"), "{}", kept.0);
}
