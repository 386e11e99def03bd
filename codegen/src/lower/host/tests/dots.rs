//! Dots of every shape class and type, with operands in every orientation.

use super::*;
use crate::ir::DType;

fn dot_kernel(m: usize, n: usize, k: usize, elem: DType, acc: DType, trans_a: bool, trans_b: bool) -> String {
    let (a_shape, b_shape) = (if trans_a { [k, m] } else { [m, k] }, if trans_b { [n, k] } else { [k, n] });
    let flip = |name: &str, flip: bool, rows: usize, columns: usize| -> (String, String) {
        if flip {
            let line = format!("  %{name}_f = trans %{name}_t {{perm = [1, 0]}} : tensor<{rows}x{columns}x{elem}>\n");
            (line, format!("%{name}_f"))
        } else {
            (String::new(), format!("%{name}_t"))
        }
    };
    let (a_line, a) = flip("a", trans_a, m, k);
    let (b_line, b) = flip("b", trans_b, k, n);
    format!(
        "kernel @k(%a: ptr<{elem}>, %b: ptr<{elem}>, %c: ptr<{acc}>, %y: ptr<{acc}>) {{\n{}{}{}{a_line}{b_line}\
         %r = dot {a}, {b}, %c_t {{precision = ieee}} : tensor<{m}x{n}x{acc}>\n{}return\n}}",
        load_dense("a", &a_shape, elem),
        load_dense("b", &b_shape, elem),
        load_dense("c", &[m, n], acc),
        store_dense("y", &[m, n], acc, "%r"),
    )
}

#[test]
fn dots_agree_for_every_type_and_orientation() {
    let all = [(false, false), (true, false), (false, true), (true, true)];
    for (elem, acc, orientations) in [
        (DType::F32, DType::F32, &all[..]),
        (DType::F64, DType::F64, &all[3..]),
        (DType::BF16, DType::F32, &all[1..2]),
        (DType::F16, DType::F32, &all[2..3]),
        (DType::F16, DType::F16, &all[1..2]),
        (DType::I8, DType::I32, &all[2..]),
        (DType::F8E4M3, DType::F32, &all[..1]),
    ] {
        for (m, n, k) in [(16, 16, 16), (1, 1, 1), (2, 64, 8), (64, 2, 4), (32, 128, 32), (1, 32, 64)] {
            for &(trans_a, trans_b) in orientations {
                let text = dot_kernel(m, n, k, elem, acc, trans_a, trans_b);
                let buffers = [
                    Data::random(elem, m * k, 1),
                    Data::random(elem, k * n, 2),
                    Data::random(acc, m * n, 3),
                    Data::poison(acc, m * n),
                ];
                let inputs: Vec<Input> = (0..4).map(Input::Buffer).collect();
                let tolerance = if acc == DType::I32 { Tolerance::Exact } else { near(acc) };
                check(&text, &inputs, &buffers, [1; 3], tolerance);
            }
        }
    }
}
