//! Parameter values by name, for checkpoints and for imported weights.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Result, Tensor};

use super::{Param, Params};

impl Params {
    /// Returns every parameter's value by name. The tensors are views, so saving copies nothing on the CPU.
    pub fn state(&self) -> Result<BTreeMap<String, Tensor>> {
        self.iter().map(|param| Ok((param.name().to_string(), param.value()?))).collect()
    }

    /// Sets all parameters from tensors of their names, of any float dtype and on any device. Checks everything first:
    /// sets all parameters or none.
    ///
    /// # Errors
    /// A parameter without a tensor, a tensor without a parameter, or another shape. The message names the first of
    /// each kind and their number.
    pub fn load_state(&self, tensors: &HashMap<String, Tensor>) -> Result<()> {
        self.check_state(tensors)?;
        for param in self.iter() {
            if let Some(tensor) = tensors.get(param.name()) {
                param.set_master_weights(tensor)?;
            }
        }
        self.refresh_compute_weights()
    }

    fn check_state(&self, tensors: &HashMap<String, Tensor>) -> Result<()> {
        let missing: Vec<Param> = self.iter().filter(|param| !tensors.contains_key(param.name())).collect();
        let mut unknown: Vec<&String> = tensors.keys().filter(|name| !self.0.by_name.contains_key(*name)).collect();
        unknown.sort();
        if !missing.is_empty() || !unknown.is_empty() {
            let mut parts = Vec::new();
            if let Some(first) = missing.first() {
                parts.push(format!("{} missing (such as `{}` {:?})", missing.len(), first.name(), first.shape()));
            }
            if let Some(first) = unknown.first() {
                parts.push(format!("{} unknown (such as `{first}`)", unknown.len()));
            }
            let message = format!(
                "the weights are of another model: expected {} parameters, {}",
                self.len(),
                parts.join(" and ")
            );
            return Err(candle_core::Error::Msg(message));
        }
        for param in self.iter() {
            if let Some(tensor) = tensors.get(param.name()) {
                param.check_shape(tensor)?;
            }
        }
        Ok(())
    }
}

impl Param {
    /// Sets the value, and the compute weights with it, from a tensor of any float dtype, on any device, of the same
    /// shape.
    ///
    /// # Errors
    /// The shape differs.
    pub fn set_value(&self, tensor: &Tensor) -> Result<()> {
        self.check_shape(tensor)?;
        self.set_master_weights(tensor)?;
        match self.params().compute_weights() {
            None => Ok(()),
            Some(weights) => {
                let value = self.value()?.to_dtype(weights.dtype())?;
                weights.slice_set(&value.flatten_all()?, 0, self.range().start)
            }
        }
    }

    fn set_master_weights(&self, tensor: &Tensor) -> Result<()> {
        let tensor = tensor.to_dtype(DType::F32)?.to_device(&self.params.device)?.flatten_all()?.contiguous()?;
        // A view of the same memory cannot be copied onto itself.
        let tensor = tensor.force_contiguous()?;
        self.params.values.slice_set(&tensor, 0, self.range().start)
    }

    fn check_shape(&self, tensor: &Tensor) -> Result<()> {
        if tensor.dims() == self.shape() {
            return Ok(());
        }
        let message = format!(
            "expected the shape {1:?} for the parameter `{0}`, found {2:?}",
            self.name(),
            self.shape(),
            tensor.dims()
        );
        Err(candle_core::Error::Msg(message))
    }
}
