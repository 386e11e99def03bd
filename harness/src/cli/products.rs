//! The experiment `products` of `tilewright numerics`: errors of matrix products by element type, against f64.

use half::{bf16, f16};
use tilewright::codegen::lang::{Dtype, Num, Precision};
use tilewright::kernels::matmul::{self, Options};
use tilewright::kernels::scaled_matmul::{self, Scales};
use tilewright::kernels::{Tensor, TensorMut};
use tilewright::{Buffer, Device, F8E4M3, F8E5M2, Result};

use super::bench::data::{GemmElement, Value, normal, values};
use super::demo::case::relative_error;
use crate::report::{Cell, Column, Report, Table};

/// Rows and columns of the products.
const SIZE: usize = 64;

/// Numbers of products that are summed.
const SUMS: [usize; 3] = [256, 4096, 16384];

/// The relative error ‖found − expected‖ / ‖expected‖ of a product [64, k] · [k, 64] whose operands have a standard normal
/// distribution and are rounded to `T` before; integers are 32 times as large. `multiply` computes it; results have type `O`.
fn error<T: Value, O: Value>(
    device: &Device,
    k: usize,
    multiply: impl Fn(Tensor<T, 2>, Tensor<T, 2>, TensorMut<O, 2>) -> Result<()>,
) -> Result<f64> {
    let (a, b) = (normal::<T>(device, SIZE * k, 1)?, normal::<T>(device, k * SIZE, 2)?);
    let mut c = Buffer::<O>::poisoned(device, SIZE * SIZE)?;
    let c_tensor = TensorMut::dense(c.view_mut(), [SIZE; 2])?;
    multiply(Tensor::dense(a.view(), [SIZE, k])?, Tensor::dense(b.view(), [k, SIZE])?, c_tensor)?;
    let expected = matmul::reference(&values(&a)?, &values(&b)?, [SIZE, SIZE, k]);
    Ok(relative_error(&values(&c)?, &expected))
}

/// Operands of a float type, with sums and results in [`Float::Compute`](tilewright::codegen::lang::Float::Compute).
fn floats<T>(device: &Device, k: usize, precision: Precision) -> Result<f64>
where
    T: GemmElement,
    T::Compute: GemmElement,
{
    let options = Options { precision, ..Options::default() };
    error::<T, T::Compute>(device, k, |a, b, c| matmul::multiply(device, a, b, c, options))
}

/// Operands of 8 bits, with sums and results in `O`.
fn bytes<T: Value + Dtype, O: Value + Num>(device: &Device, k: usize, fast: bool) -> Result<f64> {
    error::<T, O>(device, k, |a, b, c| scaled_matmul::multiply(device, a, b, Scales::None, fast, c))
}

/// Returns a table of the errors on this device.
///
/// # Errors
/// Errors of launches.
pub fn report(device: &Device) -> Result<Report> {
    type Case = (&'static str, &'static str, fn(&Device, usize) -> Result<f64>);
    let cases: [Case; 11] = [
        ("f64", "f64", |device, k| floats::<f64>(device, k, Precision::Ieee)),
        ("f32", "f32 (ieee)", |device, k| floats::<f32>(device, k, Precision::Ieee)),
        ("f32", "f32, three products in tf32 (tf32x3)", |device, k| floats::<f32>(device, k, Precision::Tf32x3)),
        ("f32", "f32, products in tf32 (tf32)", |device, k| floats::<f32>(device, k, Precision::Tf32)),
        ("f16", "f32", |device, k| floats::<f16>(device, k, Precision::Ieee)),
        ("bf16", "f32", |device, k| floats::<bf16>(device, k, Precision::Ieee)),
        ("f8e4m3", "f32, each 128 products", |device, k| bytes::<F8E4M3, f32>(device, k, false)),
        ("f8e4m3", "of the tensor cores (fast)", |device, k| bytes::<F8E4M3, f32>(device, k, true)),
        ("f8e5m2", "f32, each 128 products", |device, k| bytes::<F8E5M2, f32>(device, k, false)),
        ("f8e5m2", "of the tensor cores (fast)", |device, k| bytes::<F8E5M2, f32>(device, k, true)),
        ("i8", "i32", |device, k| bytes::<i8, i32>(device, k, true)),
    ];
    let mut columns = vec![Column::text("operands"), Column::text("sums")];
    columns.extend(SUMS.map(|k| Column::number(&format!("K = {k}")).key(&format!("error_{k}"))));
    let mut table = Table::new("products", "Relative errors of matrix products, against f64", columns);
    for (operands, sums, case) in cases {
        let mut row = vec![Cell::from(operands), Cell::from(sums)];
        for k in SUMS {
            row.push(Cell::from(case(device, k)?));
        }
        table.push(row);
    }
    let name = &device.info().name;
    Ok(Report::new("products", "Matrix products")
        .text(format!(
            "The norm of the error of [{SIZE}, K] · [K, {SIZE}] divided by that of the product, on {name}. The operands have a standard \
             normal distribution, and are rounded to their type before the reference in f64 is computed: what is left are the errors of \
             products and sums. Those in f64 are rounded to f32. Products of operands of 8 and 16 bits are exact in f32; each addition of \
             their sums rounds, or truncates in tensor cores. On a CPU, and on GPUs without the instructions, all sums of floats up to \
             32 bits are in f32, whatever is asked for. A result in 16 bits is rounded once more, by about 2⁻⁹ in bf16 and 2⁻¹² in f16.",
        ))
        .table(table))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_in_f32_are_accurate_and_those_of_integers_exact() {
        let device = Device::cpu();
        let k = 256;
        for error in [
            floats::<f32>(&device, k, Precision::Ieee),
            floats::<bf16>(&device, k, Precision::Ieee),
            bytes::<F8E4M3, f32>(&device, k, false),
            bytes::<F8E5M2, f32>(&device, k, true),
        ] {
            let error = error.unwrap();
            assert!((0.0..1e-6).contains(&error), "{error}");
        }
        let error = floats::<f64>(&device, k, Precision::Ieee).unwrap();
        assert!((0.0..1e-15).contains(&error), "{error}");
        assert_eq!(bytes::<i8, i32>(&device, k, true).unwrap(), 0.0);
    }
}
