//! Matrix products of `tilewright bench kernels`.

use tilewright::codegen::lang::Precision;
use tilewright::kernels::matmul::{self, Options};
use tilewright::kernels::{Tensor, TensorMut};
use tilewright::{Buffer, Device};

use super::Common;
use super::data::{Number, normal, values};
use super::record::{Measured, Recorder, Row, Trouble, Work, accept};
use crate::cli::Result;
use crate::cli::demo::case::{relative_error, tolerance};

/// Square products, n × n × n.
struct Product<T: Number> {
    device: Device,
    n: usize,
    a: Buffer<T>,
    b: Buffer<T>,
    c: Buffer<T>,
}

/// Size whose reference is computed; products of this size and larger ones use the same tiles.
const CHECKED: usize = 256;

impl<T: Number> Product<T> {
    fn new(device: &Device, n: usize) -> tilewright::Result<Product<T>> {
        let [a, b] = [normal(device, n * n, 1)?, normal(device, n * n, 2)?];
        Ok(Product { device: device.clone(), n, a, b, c: Buffer::poisoned(device, n * n)? })
    }

    fn run(&mut self, options: Options) -> tilewright::Result<()> {
        let shape = [self.n, self.n];
        let (a, b) = (Tensor::dense(self.a.view(), shape)?, Tensor::dense(self.b.view(), shape)?);
        matmul::multiply(&self.device, a, b, TensorMut::dense(self.c.view_mut(), shape)?, options)
    }

    fn check(&self, tolerance: f64) -> Result<f64, Trouble> {
        let want = matmul::reference(&values(&self.a)?, &values(&self.b)?, [self.n; 3]);
        accept("c", relative_error(&values(&self.c)?, &want), tolerance)
    }
}

/// Measures products of size `n`.
pub fn measure<T: Number>(common: &Common, device: &Device, n: usize, recorder: &mut Recorder) -> Result<()> {
    let wide = T::dtype().bytes() == 4;
    let precisions: &[(Precision, &str, f64)] = match wide && device.is_cuda() {
        // Products of tf32 keep ten bits of each factor.
        true => {
            &[(Precision::Ieee, "ieee", 1e-5), (Precision::Tf32x3, "tf32x3", 1e-5), (Precision::Tf32, "tf32", 2e-3)]
        }
        false => &[(Precision::Ieee, "", 0.0)],
    };
    for &(precision, name, known) in precisions {
        let tolerance = if known > 0.0 { known } else { tolerance(T::dtype()) };
        let options = Options { precision, ..Options::default() };
        let measured = (|| -> Measured {
            let mut small = Product::<T>::new(device, n.min(CHECKED + n % CHECKED))?;
            small.run(options)?;
            let error = small.check(tolerance)?;
            let mut full = Product::<T>::new(device, n)?;
            Ok((common.time(device, || full.run(options))?, error))
        })();
        let row = Row::new("matmul", &[n, n, n], T::dtype().name());
        let row = if name.is_empty() { row } else { row.case(name) };
        recorder.push(row.measured(&measured, Work::Flop(2.0 * (n as f64).powi(3))))?;
    }
    Ok(())
}
