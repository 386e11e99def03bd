//! AdamW with one kernel launch per parameter, in place of candle-nn's, which runs about 15 ops per parameter.

use std::collections::HashSet;
use std::sync::PoisonError;

use candle_core::backprop::GradStore;
use candle_core::{DType, Error, Result, Tensor, Var};
use candle_nn::{Optimizer, ParamsAdamW, VarMap};
use tilewright::kernels::adamw::{self, AdamState};
use tilewright::trace::span;

use crate::check::{expect_shape, same_device};
use crate::for_float_type;
use crate::memory::{Elem, Read, kernel_error, same_storage, write};

/// AdamW over candle variables, as `candle_nn::AdamW`: the same options and the same update.
///
/// Moments are f32. A bf16 or f16 variable has an f32 copy (master weights) from the first step on, which is updated; the
/// variable is the copy, rounded ([`FusedAdamW::reload`] after setting it later). A variable without a gradient in a step
/// is left as it is. Moments and the number of the step cannot be saved.
#[derive(Debug)]
pub struct FusedAdamW {
    params: Vec<Param>,
    options: ParamsAdamW,
    steps: u64,
}

#[derive(Debug)]
struct Param {
    /// For messages.
    name: String,
    var: Var,
    /// f32 master weights, if the variable is not f32 and the optimizer has made a step.
    master: Option<Tensor>,
    /// First and second moment, f32.
    moments: [Tensor; 2],
}

impl FusedAdamW {
    /// The optimizer of all float variables of `variables`, sorted by name.
    ///
    /// # Errors
    /// As [`FusedAdamW::new`](Optimizer::new).
    pub fn from_var_map(variables: &VarMap, options: ParamsAdamW) -> Result<FusedAdamW> {
        let mut named: Vec<(String, Var)> = {
            let variables = variables.data().lock().unwrap_or_else(PoisonError::into_inner);
            variables.iter().map(|(name, var)| (name.clone(), var.clone())).collect()
        };
        named.sort_by(|(a, _), (b, _)| a.cmp(b));
        FusedAdamW::with_names(named.into_iter(), options)
    }

    fn with_names(variables: impl Iterator<Item = (String, Var)>, options: ParamsAdamW) -> Result<FusedAdamW> {
        // A variable that is there twice, as that of tied weights, has one update per step.
        let mut seen = HashSet::new();
        let variables = variables.filter(|(_, var)| var.dtype().is_float() && seen.insert(var.as_tensor().id()));
        let params = variables.map(|(name, var)| Param::new(name, var)).collect::<Result<_>>()?;
        let optimizer = FusedAdamW { params, options, steps: 0 };
        // Checks the options.
        optimizer.kernel_options().rates_at_step(1).map_err(kernel_error)?;
        Ok(optimizer)
    }

    /// Names of the parameters in the order of their updates. Variables without names have their index.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.params.iter().map(|param| param.name.as_str())
    }

    /// Makes the values of bf16 and f16 variables the master weights of the next step: call this after setting variables
    /// between steps, as `VarMap::load` does; otherwise the next step continues from the values before.
    pub fn reload(&mut self) {
        for param in &mut self.params {
            param.master = None;
        }
    }

    /// The options.
    pub fn params(&self) -> &ParamsAdamW {
        &self.options
    }

    fn kernel_options(&self) -> adamw::Options {
        let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = self.options;
        adamw::Options { lr, beta1, beta2, eps, weight_decay, grad_scale: 1.0 }
    }
}

impl Param {
    fn new(name: String, var: Var) -> Result<Param> {
        if !var.is_contiguous() {
            return Err(Error::Msg(format!("FusedAdamW: expected a contiguous variable, found `{name}` with strides")));
        }
        if !matches!(var.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            let found = var.dtype().as_str();
            return Err(Error::Msg(format!("FusedAdamW takes f32, bf16 and f16 variables, found `{name}` of {found}")));
        }
        let zeros = || Tensor::zeros(var.shape(), DType::F32, var.device());
        Ok(Param { name, master: None, moments: [zeros()?, zeros()?], var })
    }

    /// # Errors
    /// A gradient of another shape or dtype, or on another device.
    fn check(&self, gradient: &Tensor) -> Result<()> {
        let (op, name) = ("FusedAdamW", format!("the gradient of `{}`", self.name));
        expect_shape(op, &name, gradient, self.var.dims())?;
        same_device(op, self.var.as_tensor(), &name, gradient)?;
        for_float_type!(gradient.dtype(), op, _T => Ok(()))
    }

    fn step(&mut self, gradient: &Tensor, t: u64, options: &adamw::Options) -> Result<()> {
        let op = "FusedAdamW";
        if self.var.dtype() != DType::F32 && self.master.is_none() {
            self.master = Some(self.var.as_detached_tensor().to_dtype(DType::F32)?);
        }
        // The variable is locked while it is written.
        let shared = same_storage(gradient, self.var.as_tensor());
        let gradient = if shared { gradient.force_contiguous()? } else { gradient.contiguous()? };
        for_float_type!(gradient.dtype(), op, G => self.step_typed::<G>(&gradient, t, options))
    }

    fn step_typed<G: Elem + tilewright::kernels::FloatElement>(
        &self,
        gradient: &Tensor,
        t: u64,
        options: &adamw::Options,
    ) -> Result<()> {
        let gradient = Read::<G>::new(gradient)?;
        let [m, v] = &self.moments;
        let values = self.master.as_ref().unwrap_or(self.var.as_tensor());
        write::<f32, ()>(m, |_, m| {
            write::<f32, ()>(v, |_, v| {
                write::<f32, ()>(values, |device, p| {
                    let (state, g) = (AdamState { p, m, v }, gradient.view()?);
                    if self.master.is_none() {
                        return adamw::step(device, state, g, t, options).map_err(kernel_error);
                    }
                    for_float_type!(self.var.dtype(), "FusedAdamW", C => {
                        write::<C, ()>(self.var.as_tensor(), |device, rounded| {
                            adamw::step_with_compute_weights(device, state, g, rounded, t, options)
                                .map_err(kernel_error)
                        })
                    })
                })
            })
        })
    }
}

impl Optimizer for FusedAdamW {
    type Config = ParamsAdamW;

    /// The optimizer of the float variables among `vars`.
    ///
    /// # Errors
    /// An f64 variable, a variable with strides, betas outside of [0, 1), a negative eps, options that are not finite, out of memory.
    fn new(vars: Vec<Var>, options: ParamsAdamW) -> Result<FusedAdamW> {
        FusedAdamW::with_names(vars.into_iter().enumerate().map(|(i, var)| (i.to_string(), var)), options)
    }

    fn step(&mut self, grads: &GradStore) -> Result<()> {
        let _span = span("adamw");
        let options = self.kernel_options();
        options.rates_at_step(self.steps + 1).map_err(kernel_error)?;
        let gradient_of = |param: &Param| grads.get(param.var.as_tensor());
        // Before the first update: a step that is refused changes nothing.
        self.params.iter().try_for_each(|param| gradient_of(param).map_or(Ok(()), |gradient| param.check(gradient)))?;
        self.steps += 1;
        for param in &mut self.params {
            if let Some(gradient) = gradient_of(param) {
                param.step(gradient, self.steps, &options)?;
            }
        }
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.options.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.options.lr = lr;
    }
}
