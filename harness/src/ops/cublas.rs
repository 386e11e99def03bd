//! Matrix products of cuBLAS on candle's stream.

use std::ffi::{c_int, c_void};

use candle_core::cuda::cudarc::cublas::{result, sys};
use candle_core::{CudaDevice, Result, WithDType};
use tilewright::{ViewMut, kernels};

use super::memory::Elem;

/// c [m, n] = a·b + beta·c, row by row, for a [m, k] and b [k, n] that lie by rows or by columns.
///
/// f32 operands multiply as `candle_core::cuda::gemm_reduced_precision_f32` says: exactly, or rounded to tf32.
///
/// # Errors
/// A matrix that lies neither by rows nor by columns, one with 2³¹ rows or columns, and those of cuBLAS.
pub fn multiply<T: Elem, C: Elem>(
    device: &CudaDevice,
    a: &kernels::Tensor<'_, T, 2>,
    b: &kernels::Tensor<'_, T, 2>,
    c: &mut ViewMut<'_, C>,
    [m, k, n]: [usize; 3],
    beta: f32,
) -> Result<()> {
    if m * n == 0 {
        return Ok(());
    }
    let (a_op, a_ld) = leading(a.strides(), a.shape())?;
    let (b_op, b_ld) = leading(b.strides(), b.shape())?;
    let compute = match (<T as WithDType>::DTYPE, candle_core::cuda::gemm_reduced_precision_f32()) {
        (candle_core::DType::F32, true) => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
    };
    let (alpha, handle) = (1.0_f32, device.cublas_handle());
    let pointer = |address: u64| address as *const c_void;
    // cuBLAS counts by columns: our c by rows is its cᵀ = bᵀ·aᵀ.
    // SAFETY: the operands borrow memory of this device in the sizes and strides that are passed, c exclusively; c has m·n
    // elements; the handle belongs to the device's stream, on which all of them are used.
    unsafe {
        result::gemm_ex(
            *handle.handle(),
            b_op,
            a_op,
            int(n)?,
            int(m)?,
            int(k)?,
            (&raw const alpha).cast(),
            pointer(b.view().address()),
            data_type::<T>()?,
            int(b_ld)?,
            pointer(a.view().address()),
            data_type::<T>()?,
            int(a_ld)?,
            (&raw const beta).cast(),
            c.address() as *mut c_void,
            data_type::<C>()?,
            int(n)?,
            compute,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
        )
    }
    .map_err(|error| candle_core::Error::Msg(format!("cuBLAS failed at a product of {m} x {k} and {k} x {n}: {error}")))
}

/// How a matrix by rows reads as one by columns, and the distance of its rows (or columns, if it lies by those).
fn leading(strides: [i64; 2], shape: [usize; 2]) -> Result<(sys::cublasOperation_t, usize)> {
    match strides {
        [row, 1] => Ok((sys::cublasOperation_t::CUBLAS_OP_N, (row as usize).max(shape[1]))),
        [1, column] => Ok((sys::cublasOperation_t::CUBLAS_OP_T, (column as usize).max(shape[0]))),
        _ => Err(candle_core::Error::RequiresContiguous { op: "matrix product" }.bt()),
    }
}

fn int(n: usize) -> Result<c_int> {
    c_int::try_from(n)
        .map_err(|_| candle_core::Error::Msg(format!("a product with {n} rows or columns is too large for cuBLAS")))
}

fn data_type<T: WithDType>() -> Result<sys::cudaDataType> {
    match <T as WithDType>::DTYPE {
        candle_core::DType::F32 => Ok(sys::cudaDataType_t::CUDA_R_32F),
        candle_core::DType::BF16 => Ok(sys::cudaDataType_t::CUDA_R_16BF),
        candle_core::DType::F16 => Ok(sys::cudaDataType_t::CUDA_R_16F),
        other => Err(candle_core::Error::Msg(format!("cuBLAS does not multiply {}", other.as_str()))),
    }
}
