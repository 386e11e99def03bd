//! SwiGLU backward that also recomputes the forward result, so that it need not be saved.

use candle_core::{Result, Tensor};
use tilewright::kernels::FloatElement;
use tilewright::prelude::*;

use tilewright_candle::memory::{Elem, OutputAlloc, Read, kernel_error};

/// For gate a and value b, the halves of each row of `gate_up` [rows, 2d], and the gradient of y = silu(a) · b: writes
/// the gradients of a and b, concatenated, to `grads`, and y. All tensors are dense; the arithmetic is f32.
///
/// Grid: (tiles of columns, tiles of rows), one program per tile.
#[kernel]
pub fn swiglu_bwd_recompute<T: Float>(
    gate_up: In<T>,
    grad_y: In<T>,
    grads: Out<T>,
    y: Out<T>,
    #[no_specialize] rows: i32,
    d: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let (column, row) = (program_id(0) * d_tile, program_id(1) * rows_tile);
    let row_stride_2d = d.to::<i64>() * 2;
    let gate = make_block_ptr(
        gate_up,
        shape = [rows, d],
        strides = [row_stride_2d, 1],
        offsets = [row, column],
        block_shape = [rows_tile, d_tile],
        order = [1, 0],
    );
    let value = make_block_ptr(
        gate_up + d,
        shape = [rows, d],
        strides = [row_stride_2d, 1],
        offsets = [row, column],
        block_shape = [rows_tile, d_tile],
        order = [1, 0],
    );
    let grad_gate = make_block_ptr(
        grads,
        shape = [rows, d],
        strides = [row_stride_2d, 1],
        offsets = [row, column],
        block_shape = [rows_tile, d_tile],
        order = [1, 0],
    );
    let grad_value = make_block_ptr(
        grads + d,
        shape = [rows, d],
        strides = [row_stride_2d, 1],
        offsets = [row, column],
        block_shape = [rows_tile, d_tile],
        order = [1, 0],
    );
    let row_stride = d.to::<i64>();
    let grad_ptr = make_block_ptr(
        grad_y,
        shape = [rows, d],
        strides = [row_stride, 1],
        offsets = [row, column],
        block_shape = [rows_tile, d_tile],
        order = [1, 0],
    );
    let result = make_block_ptr(
        y,
        shape = [rows, d],
        strides = [row_stride, 1],
        offsets = [row, column],
        block_shape = [rows_tile, d_tile],
        order = [1, 0],
    );
    let a = load(gate, boundary_check = [0, 1], padding = zero).to::<f32>();
    let b = load(value, boundary_check = [0, 1], padding = zero).to::<f32>();
    let g = load(grad_ptr, boundary_check = [0, 1], padding = zero).to::<f32>();
    let s = sigmoid(a);
    let silu = a * s;
    let silu_grad = s * (1.0 + a * (1.0 - s));
    store(grad_gate, (g * b * silu_grad).to::<T>(), boundary_check = [0, 1]);
    store(grad_value, (g * silu).to::<T>(), boundary_check = [0, 1]);
    store(result, (silu * b).to::<T>(), boundary_check = [0, 1]);
}

/// Returns (∂L/∂x in the shape of x, y), for x [.., 2d] with gate and value concatenated, y = silu(gate) · value and
/// ∂L/∂y [.., d].
///
/// # Errors
/// An x that is not contiguous, a gradient of another size, and those of the launch.
pub(crate) fn swiglu_backward_recompute<T: Elem + FloatElement>(x: &Tensor, grad: &Tensor) -> Result<(Tensor, Tensor)> {
    let d = grad.dims().last().copied().unwrap_or(0);
    let rows = grad.elem_count() / d.max(1);
    if x.elem_count() != 2 * rows * d || rows > i32::MAX as usize / 2 {
        let message =
            format!("expected a gradient of half the size of gate and value {:?}, found {:?}", x.dims(), grad.dims());
        return Err(candle_core::Error::Msg(message));
    }
    let mut grad_x = OutputAlloc::<T>::new(x.device(), 2 * rows * d)?;
    let mut y = OutputAlloc::<T>::new(x.device(), rows * d)?;
    {
        let (gate_up, grad) = (Read::<T>::new(x)?, Read::<T>::new(grad)?);
        let d_tile = d.next_power_of_two().clamp(16, 1024);
        let rows_tile = (2048 / d_tile).min(rows.max(1).next_power_of_two());
        SwigluBwdRecompute {
            gate_up: &gate_up.view()?,
            grad_y: &grad.view()?,
            grads: &mut grad_x.view()?,
            y: &mut y.view()?,
            rows: rows as i32,
            d: d as i32,
            rows_tile,
            d_tile,
        }
        .launch_with(
            gate_up.device(),
            &LaunchConfig::new([d.div_ceil(d_tile), rows.div_ceil(rows_tile), 1]).num_warps(4),
        )
        .map_err(kernel_error)?;
    }
    Ok((grad_x.into_tensor(x.shape()), y.into_tensor(grad.shape())))
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use half::bf16;

    use super::*;
    use tilewright_candle::elementwise::{swiglu_backward, swiglu_forward};

    fn check<T: Elem + FloatElement>(dtype: DType, rows: usize, d: usize) {
        let tensor = |n: usize, columns: usize| {
            let values = (0..n).map(|i| ((i * 7919 + n) % 1009) as f32 / 200.0 - 2.5);
            Tensor::from_iter(values, &Device::Cpu)
                .unwrap()
                .reshape((n / columns, columns))
                .unwrap()
                .to_dtype(dtype)
                .unwrap()
        };
        let (x, grad) = (tensor(2 * rows * d, 2 * d), tensor(rows * d, d));
        let (grad_x, y) = swiglu_backward_recompute::<T>(&x, &grad).unwrap();
        let bits = |x: &Tensor| x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let close = |found: &Tensor, expected: &Tensor| {
            let (found, expected) = (bits(found), bits(expected));
            found.len() == expected.len()
                && found.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1e-6 + 8e-3 * b.abs())
        };
        assert!(close(&grad_x, &swiglu_backward::<T>(&x, &grad).unwrap()), "{dtype:?} [{rows}, {d}]");
        assert!(close(&y, &swiglu_forward::<T>(&x).unwrap().into_tensor((rows, d))), "{dtype:?} [{rows}, {d}]");
    }

    #[test]
    fn matches_backward_and_forward() {
        for (rows, d) in [(1, 1), (5, 33), (70, 64), (3, 3000)] {
            check::<f32>(DType::F32, rows, d);
            check::<bf16>(DType::BF16, rows, d);
        }
        let x = Tensor::zeros((2, 6), DType::F32, &Device::Cpu).unwrap();
        assert!(swiglu_backward_recompute::<f32>(&x, &x).is_err());
    }

    #[test]
    fn compiles_for_gpus() {
        use tilewright::codegen::ir::DType;
        use tilewright::codegen::lang::kernel::{ConstValue, Specialization};
        use tilewright::codegen::pipeline;
        use tilewright::codegen::target::{CompileOptions, GpuArch};

        let consts = [("rows_tile", ConstValue::Int(2)), ("d_tile", ConstValue::Int(1024))];
        let func = SWIGLU_BWD_RECOMPUTE.record(&[DType::BF16], &consts, &Specialization::default()).unwrap();
        for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
            assert!(pipeline::compile_gpu(&func, arch, &CompileOptions::default(), &mut ()).is_ok(), "{arch:?}");
        }
    }
}
