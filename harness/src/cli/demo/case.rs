//! A case of the demo: inputs, launches, and expected outputs.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tilewright::bench::do_bench;
use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::kernel::{ConstValue, KernelDef};
use tilewright::codegen::target::{CompileOptions, Target};
use tilewright::kernel::{launch_erased, specialization};
use tilewright::{Device, LaunchArg, LaunchConfig, elements};

use crate::cli::bind;
use crate::cli::compile::{Request, compile_cached_to};
use crate::cli::tensors::{self, Contents, OnDevice, Tensor};
use crate::cli::{CliError, Result};

/// One computation of the demo.
pub struct Case {
    /// Name in the first column of the table.
    pub kernel: String,
    /// Unique name, with dtype and mask.
    pub name: String,
    /// Shape of the problem, for the table.
    pub shape: String,
    pub dtype: DType,
    pub inputs: BTreeMap<&'static str, Tensor>,
    /// Shapes and dtypes of outputs, and of intermediate tensors between launches.
    pub outputs: BTreeMap<&'static str, (Vec<usize>, DType)>,
    /// Builds the launches; tiles may depend on the target.
    pub calls: Calls,
    /// The outputs that are checked, with their expected values in f64.
    pub expected: Vec<(&'static str, Vec<f64>)>,
    /// Tolerance on the relative error, ‖found − expected‖ / ‖expected‖.
    pub tolerance: f64,
}

/// Builds the launches for a target.
pub type Calls = Box<dyn Fn(&Target) -> Result<Launches>>;

/// The launches of a case.
#[derive(Default)]
pub struct Launches {
    /// Launches that must run first; they are not timed or compiled ahead of time.
    pub setup: Vec<Call>,
    pub calls: Vec<Call>,
}

/// One launch.
pub struct Call {
    pub def: &'static KernelDef,
    pub dtypes: Vec<DType>,
    pub constants: Vec<(&'static str, ConstValue)>,
    /// (parameter, tensor) for memory parameters whose tensor has another name.
    pub renamed: Vec<(&'static str, &'static str)>,
    /// Scalar arguments other than strides and extents of tensor parameters.
    pub scalars: Vec<(&'static str, LaunchArg)>,
    pub grid: [usize; 3],
    pub num_warps: u32,
    pub num_stages: u32,
}

/// The result of a case.
pub struct Outcome {
    /// The largest relative error of the outputs, and the name of that output.
    pub error: f64,
    pub worst: &'static str,
    /// Median time of all launches, in milliseconds.
    pub ms: f64,
}

type Buffers = BTreeMap<&'static str, Box<dyn OnDevice>>;

impl Call {
    /// Returns the tensor that is passed to a memory parameter.
    fn tensor_of(&self, parameter: &'static str) -> &'static str {
        self.renamed.iter().find(|(name, _)| *name == parameter).map_or(parameter, |(_, tensor)| tensor)
    }

    /// Returns all scalar arguments.
    ///
    /// # Errors
    /// An extent does not fit into an i32.
    fn scalars(&self, case: &Case) -> tilewright::Result<BTreeMap<&'static str, LaunchArg>> {
        let mut scalars: BTreeMap<&'static str, LaunchArg> = self.scalars.iter().copied().collect();
        for (tensor, strides) in bind::strides(self.def) {
            let dense = bind::dense_strides(case.shape_of(self.tensor_of(tensor)));
            scalars.extend(strides.params.into_iter().zip(dense.into_iter().map(LaunchArg::I64)));
        }
        for tensor in self.def.tensors {
            for (&dim, &n) in tensor.dims.iter().zip(case.shape_of(self.tensor_of(tensor.name))) {
                let name = self.def.dims[dim];
                let extent = i32::try_from(n).map_err(|_| tilewright::Error::Argument {
                    kernel: self.def.name.into(),
                    name,
                    expected: format!("at most {}", i32::MAX),
                    found: n.to_string(),
                })?;
                scalars.insert(name, LaunchArg::I32(extent));
            }
        }
        Ok(scalars)
    }

    fn with_args<R>(
        &self,
        case: &Case,
        buffers: &mut Buffers,
        f: impl FnOnce(&mut [tilewright::kernel::KernelArg]) -> R,
    ) -> tilewright::Result<R> {
        let parameter_of: BTreeMap<&str, &str> =
            self.def.params.iter().map(|p| (self.tensor_of(p.name), p.name)).collect();
        let mut memory: BTreeMap<&str, &mut Box<dyn OnDevice>> = buffers
            .iter_mut()
            .filter_map(|(tensor, buffer)| parameter_of.get(tensor).map(|parameter| (*parameter, buffer)))
            .collect();
        Ok(f(&mut tensors::kernel_args(self.def, &mut memory, &self.scalars(case)?)))
    }

    fn launch(&self, case: &Case, device: &Device, buffers: &mut Buffers) -> tilewright::Result<()> {
        let [x, y, z] = self.grid;
        let config = LaunchConfig::new([x, y, z]).num_warps(self.num_warps).num_stages(self.num_stages);
        self.with_args(case, buffers, |args| {
            launch_erased(self.def, device, &config, &self.dtypes, args, &self.constants)
        })?
    }
}

impl Case {
    fn shape_of(&self, tensor: &str) -> &[usize] {
        let input = self.inputs.get(tensor).map(|tensor| tensor.shape.as_slice());
        input.or_else(|| self.outputs.get(tensor).map(|(shape, _)| shape.as_slice())).unwrap_or_default()
    }

    /// Copies the inputs to a device, and allocates poisoned outputs.
    fn upload(&self, device: &Device) -> Result<Buffers> {
        let mut buffers = Buffers::new();
        for (name, tensor) in &self.inputs {
            buffers.insert(name, tensors::upload(device, tensor.dtype, Contents::Bytes(&tensor.bytes))?);
        }
        for (name, (shape, dtype)) in &self.outputs {
            buffers.insert(name, tensors::upload(device, *dtype, Contents::Poison(elements(shape)?))?);
        }
        Ok(buffers)
    }

    /// Runs all launches on poisoned outputs, computes the errors, and times `calls`.
    ///
    /// # Errors
    /// A compilation or a launch fails. A wrong result is not an error here.
    pub fn run(&self, device: &Device) -> Result<Outcome> {
        let Launches { setup, calls } = (self.calls)(&device.target())?;
        let mut buffers = self.upload(device)?;
        setup.iter().chain(&calls).try_for_each(|call| call.launch(self, device, &mut buffers))?;
        device.synchronize()?;
        let (mut error, mut worst) = (0.0, "");
        for (name, expected) in &self.expected {
            let (shape, dtype) = &self.outputs[name];
            let found = Tensor { dtype: *dtype, shape: shape.clone(), bytes: buffers[name].download()? };
            let this = relative_error(&found.to_f64(), expected);
            if worst.is_empty() || !(this <= error) {
                (error, worst) = (this, name);
            }
        }
        let timing =
            do_bench(device, 5.0, 40.0, || calls.iter().try_for_each(|call| call.launch(self, device, &mut buffers)))?;
        Ok(Outcome { error, worst, ms: timing.median })
    }

    /// Compiles the launches ahead of time for `target` into `dir`, and returns the path of the code of each. No
    /// written file may be `input`.
    ///
    /// # Errors
    /// A compilation fails, or the folder cannot be written to.
    pub fn compile(&self, target: &Target, dir: &Path, input: Option<&Path>) -> Result<Vec<PathBuf>> {
        // The specialization is derived from real arguments.
        let mut buffers = self.upload(&Device::cpu())?;
        let folder = dir.join(&self.name).join(target.to_string());
        let compile = |call: Call| {
            let request = Request {
                def: call.def,
                dtypes: call.dtypes.clone(),
                constants: call.constants.clone(),
                specialization: call.with_args(self, &mut buffers, |args| specialization(call.def, args))?,
                sizes: Vec::new(),
                target: target.clone(),
                options: CompileOptions {
                    num_warps: call.num_warps,
                    num_stages: call.num_stages,
                    ..CompileOptions::default()
                },
            };
            compile_cached_to(&request, &folder, input)
        };
        (self.calls)(target)?.calls.into_iter().map(compile).collect()
    }
}

/// Returns ‖found − expected‖ / ‖expected‖; NaN if an element is NaN. Where all of `expected` is 0, as a gradient can be, the root of
/// the mean square of `found`: inputs are about 1.
pub fn relative_error(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len(), "internal error: an output of another size; please report this");
    // Equal infinities count as correct: the log-sum-exp of a fully masked row is −∞.
    let difference = |(&f, &e): (&f64, &f64)| if f == e { 0.0 } else { (f - e).powi(2) };
    let distance: f64 = found.iter().zip(expected).map(difference).sum();
    if distance == 0.0 { 0.0 } else { distance.sqrt() / relative_to(expected) }
}

/// What [`relative_error`] divides the norm of a difference by.
pub fn relative_to(expected: &[f64]) -> f64 {
    let norm: f64 = expected.iter().filter(|e| e.is_finite()).map(|e| e * e).sum();
    if norm == 0.0 { (expected.len().max(1) as f64).sqrt() } else { norm.sqrt() }
}

/// Returns the tolerance on the relative error of results in `dtype` that are accumulated in f32.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1e-2,
        DType::F16 => 2e-3,
        DType::F64 => 1e-14,
        _ => 1e-5,
    }
}

/// Returns an integer constant.
pub fn count(name: &'static str, n: usize) -> (&'static str, ConstValue) {
    (name, ConstValue::Int(n as i64))
}

/// Returns an extent as an i32 argument.
///
/// # Errors
/// The extent does not fit into an i32.
pub fn extent(what: &str, n: usize) -> Result<LaunchArg> {
    let extent = i32::try_from(n).map_err(|_| CliError::Failure(format!("{what} is {n}: at most {}", i32::MAX)))?;
    Ok(LaunchArg::I32(extent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_and_nan_is_never_small() {
        assert_eq!(relative_error(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert!((relative_error(&[3.0, 4.5], &[3.0, 4.0]) - 0.1).abs() < 1e-12);
        assert!(relative_error(&[f64::NAN], &[1.0]).is_nan());
        assert!((relative_error(&[0.1, 0.1], &[0.0, 0.0]) - 0.1).abs() < 1e-12);
        assert!(relative_error(&[f64::NAN], &[0.0]).is_nan());
        assert!(relative_error(&[0.0], &[f64::INFINITY]).is_infinite());
        assert_eq!(relative_error(&[f64::NEG_INFINITY, 1.0], &[f64::NEG_INFINITY, 1.0]), 0.0);
        assert!(!(relative_error(&[0.0, 1.0], &[f64::NEG_INFINITY, 1.0]) < 1.0));
        assert_eq!(relative_error(&[], &[]), 0.0);
    }
}
