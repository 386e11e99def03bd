//! A weighted-sum kernel with block pointers, and a snapshot of its recorded Tile IR.

use crate::support::{self, consts};
use tilewright::codegen::ir::DType;
use tilewright::prelude::*;

/// y[r] = Σ_d x[r, d] · w[d]
#[rustfmt::skip]
#[kernel]
pub fn weighted_sum_fwd<T: Float>(
    x: In<T>, w: In<T>, y: Out<f32>,
    x_stride_row: i64, x_stride_d: i64, w_stride: i64, y_stride: i64,
    rows: i32, d: i32,
    #[constexpr] rows_tile: usize, #[constexpr] d_tile: usize,
) {
    let row_tile = program_id(0);
    let mut x_block = make_block_ptr(x, shape = [rows, d], strides = [x_stride_row, x_stride_d],
        offsets = [row_tile * rows_tile, 0], block_shape = [rows_tile, d_tile], order = [1, 0]);
    let mut w_block = make_block_ptr(w, shape = [d], strides = [w_stride],
        offsets = [0], block_shape = [d_tile], order = [0]);
    let y_block = make_block_ptr(y, shape = [rows], strides = [y_stride],
        offsets = [row_tile * rows_tile], block_shape = [rows_tile], order = [0]);
    let mut acc = zeros::<f32>([rows_tile]);
    for _ in range(0, cdiv(d, d_tile)) {
        let xt = load(x_block, boundary_check = [0, 1], padding = zero);
        let wt = load(w_block, boundary_check = [0], padding = zero);
        acc += sum((xt * wt.expand_dims(0)).to::<f32>(), axis = 1);
        x_block = x_block.advance([0, d_tile]);
        w_block = w_block.advance([d_tile]);
    }
    store(y_block, acc, boundary_check = [0]);
}

#[test]
fn weighted_sum_recorded_ir() {
    let text = support::text(&WEIGHTED_SUM_FWD, &[DType::BF16], &consts(&[("rows_tile", 64), ("d_tile", 128)]));
    insta::assert_snapshot!(text);
}
