//! Products of 8-bit matrices.

use half::{bf16, f16};
use tilewright::kernels::TensorMut;
use tilewright::kernels::scaled_matmul::{self as scaled, Scales};
use tilewright::prelude::{Dtype as ElementOf, F8E4M3, F8E5M2, Num};
use tilewright::{Dtype, Element};

use super::Call;
use crate::array::Array;

/// c [m, n] = scales · (a [m, k] · b [k, n]) for 8-bit a and b. Each of `scales`, of a and of b, has one element or one
/// for each row of a and each column of b. c is int32 without scales, which are then for integers, else a float.
pub fn multiply(
    call: Call,
    a: &Array,
    b: &Array,
    scales: Option<[&Array; 2]>,
    c: &Array,
    fast_accumulation: bool,
) -> tilewright::Result<()> {
    match a.dtype {
        Dtype::F8E4M3 => into_type::<F8E4M3>(call, [a, b], scales, c, fast_accumulation),
        Dtype::F8E5M2 => into_type::<F8E5M2>(call, [a, b], scales, c, fast_accumulation),
        Dtype::I8 => into_type::<i8>(call, [a, b], scales, c, fast_accumulation),
        Dtype::U8 => into_type::<u8>(call, [a, b], scales, c, fast_accumulation),
        other => {
            let expected = "elements of type float8_e4m3fn, float8_e5m2, int8 or uint8".into();
            Err(call.arg("a").error(expected, other.to_string()))
        }
    }
}

fn into_type<T: ElementOf + Element>(
    call: Call,
    operands: [&Array; 2],
    scales: Option<[&Array; 2]>,
    c: &Array,
    fast: bool,
) -> tilewright::Result<()> {
    match c.dtype {
        Dtype::F32 => run::<T, f32>(call, operands, scales, c, fast),
        Dtype::Bf16 => run::<T, bf16>(call, operands, scales, c, fast),
        Dtype::F16 => run::<T, f16>(call, operands, scales, c, fast),
        Dtype::I32 => run::<T, i32>(call, operands, scales, c, fast),
        other => Err(call.arg("c").error("elements of type f32, bf16, f16 or i32".into(), other.to_string())),
    }
}

fn run<T: ElementOf + Element, O: Num + Element>(
    call: Call,
    [a, b]: [&Array; 2],
    scales: Option<[&Array; 2]>,
    c: &Array,
    fast: bool,
) -> tilewright::Result<()> {
    let (a, b) = (a.tensor::<T, 2>(call.arg("a"))?, b.tensor::<T, 2>(call.arg("b"))?);
    let scales = match scales {
        None => Scales::None,
        Some([of_a, of_b]) => {
            let [of_a, of_b] = [of_a.tensor::<f32, 1>(call.arg("scale_a"))?, of_b.tensor(call.arg("scale_b"))?];
            match (of_a.shape(), of_b.shape()) {
                ([1], [1]) => Scales::PerTensor(of_a, of_b),
                _ => Scales::Rowwise(of_a, of_b),
            }
        }
    };
    let c: TensorMut<'_, O, 2> = c.tensor_mut(call.arg("c"))?;
    scaled::multiply(call.device, a, b, scales, fast, c)
}
