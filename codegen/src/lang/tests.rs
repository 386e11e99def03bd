use super::arith;
use super::*;
use crate::text;

#[test]
fn a_recorded_function_prints() {
    let func = record("f", || {
        let x = arange(0usize, 64usize).to::<f32>();
        let y = arith::mul(x, FloatLiteral(2.0));
        let s: Scalar<f32> = sum(y, index::Unset, false);
        device_print("s", (s,));
    })
    .unwrap();
    let printed = text::print(&func);
    assert!(printed.contains("constant {value = 2.0} : tensor<64xf32>"), "{printed}");
}
