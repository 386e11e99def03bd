//! Embedding lookup: rows of a table, and the gradient of the table.

use candle_core::{DType, Result, Tensor};
use half::bf16;
use tilewright::kernels::{FloatElement, embedding as kernel};
use tilewright::trace::span;

use crate::check::{bad_argument, expect_below, expect_dtype, same_device};
use crate::convert::convert;
use crate::for_float_type;
use crate::graph::record1;
use crate::memory::{Elem, OutputAlloc, Read, kernel_error, write};
use crate::weight::{Weight, WeightUse, label};

/// Returns y [.., d] in `dtype`: the rows of a table [vocabulary, d] that ids (u32, of any shape) select.
///
/// The gradient of each row is summed in f32, in the order of the ids: equal inputs give equal bits.
///
/// # Errors
/// An id outside of the vocabulary (checked on the CPU only: on a GPU the check would synchronize), ids of another
/// dtype, a table that is no matrix or has another dtype.
pub fn embedding(ids: &Tensor, table: &impl Weight, dtype: DType) -> Result<Tensor> {
    let _span = span("embedding");
    expect_dtype("embedding", "ids", ids, DType::U32)?;
    let name = label(table, "table");
    same_device("embedding", ids, &name, table.graph_input())?;
    let &[vocabulary, d] = table.dims() else {
        let expected = "a matrix [vocabulary, d]";
        return Err(bad_argument("embedding", &name, expected, format!("the shape {:?}", table.dims())));
    };
    let shape: Vec<usize> = ids.dims().iter().chain([&d]).copied().collect();
    let ids = ids.flatten_all()?.contiguous()?;
    expect_below("embedding", "ids", &ids, vocabulary)?;
    let table_use = WeightUse::begin(table);
    for_float_type!(dtype, "embedding", T => {
        let rows = table.value(dtype)?.contiguous()?.index_select(&ids, 0)?;
        let y = OutputAlloc::<T>::copy_of(&rows)?;
        record1("embedding", table.graph_input(), y, shape, move |[input], _, grad| {
            let gradient = table_use.deliver_with(
                input,
                |memory, accumulate| add_gradient::<T>(&ids, grad, memory, accumulate),
                || {
                    let gradient = Tensor::zeros((vocabulary, d), DType::F32, input.device())?;
                    add_in_f32::<T>(&ids, grad, &gradient)?;
                    Ok(gradient)
                },
            )?;
            Ok([gradient])
        })
    })
}

/// Adds grad[t, :] to row ids[t] of the gradient of a table, f32 or bf16, or with `accumulate` unset to zeros.
///
/// # Errors
/// Shapes and dtypes that do not match.
pub fn add_gradient<T: Elem + FloatElement>(
    ids: &Tensor,
    grad: &Tensor,
    grad_table: &Tensor,
    accumulate: bool,
) -> Result<()> {
    if grad_table.dtype() == DType::F32 {
        if !accumulate {
            grad_table.zero_set()?;
        }
        return add_in_f32::<T>(ids, grad, grad_table);
    }
    // Accumulate rows in f32, and round the whole table once.
    let sums = match accumulate {
        true => grad_table.to_dtype(DType::F32)?,
        false => Tensor::zeros(grad_table.shape(), DType::F32, grad_table.device())?,
    };
    add_in_f32::<T>(ids, grad, &sums)?;
    let sums = Read::<f32>::new(&sums)?;
    write::<bf16, ()>(grad_table, |device, table| convert(device, sums.view()?, table).map_err(kernel_error))
}

fn add_in_f32<T: Elem + FloatElement>(ids: &Tensor, grad: &Tensor, grad_table: &Tensor) -> Result<()> {
    let [vocabulary, d] = [grad_table.dim(0)?, grad_table.dim(1)?];
    if grad.dims().last() != Some(&d) || grad.elem_count() != ids.elem_count() * d {
        let (expected, found) = (format!("{} rows of {d} elements", ids.elem_count()), format!("{:?}", grad.dims()));
        return Err(bad_argument("embedding", "the gradient", expected, found));
    }
    expect_below("embedding", "ids", &ids.flatten_all()?, vocabulary)?;
    let grad = &grad.contiguous()?;
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
