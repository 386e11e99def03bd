//! Embedding lookup, whose gradient accumulates directly into the flat gradient.

use candle_core::{DType, Result, Tensor};
use half::bf16;
use tilewright::kernels::{FloatElement, embedding as kernel};

use super::convert;
use super::graph::record1;
use super::memory::{Elem, OutputAlloc, Read, for_float_type, kernel_error, write};
use crate::params::Param;
use crate::profile::span;

/// Returns y [.., d] in `dtype`: the rows of a table [vocabulary, d] that ids (u32, of any shape) select.
///
/// # Errors
/// An id outside of the vocabulary (checked on the CPU only: on a GPU the check would synchronize), ids of another
/// dtype.
pub fn embedding(ids: &Tensor, table: &Param, dtype: DType) -> Result<Tensor> {
    let _span = span("embedding");
    let [_, d] = table.shape() else {
        let message =
            format!("expected a matrix as an embedding: `{}` has the shape {:?}", table.name(), table.shape());
        return Err(candle_core::Error::Msg(message));
    };
    let shape: Vec<usize> = ids.dims().iter().chain([d]).copied().collect();
    let flat_ids = ids.flatten_all()?.contiguous()?;
    let param_use = table.begin_use();
    for_float_type!(dtype, "an embedding", T => {
        let rows = table.compute(dtype)?.index_select(&flat_ids, 0)?;
        let y = OutputAlloc::<T>::copy_of(&rows)?;
        let ids = flat_ids.clone();
        if !table.requires_grad() {
            return Ok(y.into_tensor(shape));
        }
        record1("embedding", table.anchor(), y, shape, move |_, _, grad| {
            if let Some(param_use) = &param_use {
                add_gradient::<T>(&ids, grad, param_use.param())?;
                param_use.finish()?;
            }
            Ok([None])
        })
    })
}

/// Accumulates grad[t, :] into the gradient of row ids[t] of the table.
pub(crate) fn add_gradient<T: Elem + FloatElement>(ids: &Tensor, grad: &Tensor, table: &Param) -> Result<()> {
    let (grad_table, accumulate) = table.grad_to_write()?;
    if grad_table.dtype() == DType::F32 {
        if !accumulate {
            grad_table.zero_set()?;
        }
        return add_in_f32::<T>(ids, grad, &grad_table);
    }
    // Accumulate rows in f32, and round the whole table once.
    let sums = match accumulate {
        true => grad_table.to_dtype(DType::F32)?,
        false => Tensor::zeros(grad_table.shape(), DType::F32, grad_table.device())?,
    };
    add_in_f32::<T>(ids, grad, &sums)?;
    let sums = Read::<f32>::new(&sums)?;
    write::<bf16, ()>(&grad_table, |device, table| convert(device, sums.view()?, table).map_err(kernel_error))
}

fn add_in_f32<T: Elem + FloatElement>(ids: &Tensor, grad: &Tensor, grad_table: &Tensor) -> Result<()> {
    let [vocabulary, d] = [grad_table.dim(0)?, grad_table.dim(1)?];
    let (ids, grad) = (Read::<u32>::new(ids)?, Read::<T>::new(grad)?);
    let (id_list, grad_rows) = (ids.view()?, grad.rows()?);
    write::<f32, ()>(grad_table, |device, mut target| {
        // The kernel scans all tokens for each row. On the CPU a single-threaded loop visits each token once and
        // accumulates in the same order.
        if let (Some(ids), Some(sums)) = (id_list.as_slice(), target.as_mut_slice()) {
            let rows = grad_rows.view().as_slice().unwrap_or_default();
            accumulate_on_cpu(ids, rows, d, sums);
            return Ok(());
        }
        let table = tilewright::kernels::TensorMut::dense(target, [vocabulary, d]).map_err(kernel_error)?;
        let ids = tilewright::kernels::Tensor::dense(id_list, [id_list.len()]).map_err(kernel_error)?;
        kernel::backward(device, ids, grad_rows, table).map_err(kernel_error)
    })
}

fn accumulate_on_cpu<T: Elem>(ids: &[u32], rows: &[T], d: usize, sums: &mut [f32]) {
    let mut row_f32 = vec![0.0; d];
    for (&id, row) in ids.iter().zip(rows.chunks_exact(d.max(1))) {
        T::to_f32s(row, &mut row_f32);
        let start = id as usize * d;
        if let Some(sums) = sums.get_mut(start..start + d) {
            sums.iter_mut().zip(&row_f32).for_each(|(sum, g)| *sum += g);
        }
    }
}
