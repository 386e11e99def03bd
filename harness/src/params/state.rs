//! Values by name, for checkpoints and for weights from elsewhere.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Result, Tensor};

use super::{Param, Params};

impl Params {
    /// Every parameter's value by name: views, so that saving copies nothing on the CPU.
    pub fn state(&self) -> Result<BTreeMap<String, Tensor>> {
        self.iter().map(|param| Ok((param.name().to_string(), param.value()?))).collect()
    }

    /// Sets the parameters to the tensors of their names, of any float type and on any device. Either all are set, or none:
    /// everything is checked first.
    ///
    /// # Errors
    /// A parameter without a tensor, a tensor without a parameter, or another shape: names the first of each kind, and how
    /// many there are.
    pub fn load_state(&self, tensors: &HashMap<String, Tensor>) -> Result<()> {
        self.check_state(tensors)?;
        for param in self.iter() {
            if let Some(tensor) = tensors.get(param.name()) {
                param.set_value_alone(tensor)?;
            }
        }
        self.refresh_copy()
    }

    fn check_state(&self, tensors: &HashMap<String, Tensor>) -> Result<()> {
        let missing: Vec<Param> = self.iter().filter(|param| !tensors.contains_key(param.name())).collect();
        let mut unknown: Vec<&String> = tensors.keys().filter(|name| !self.0.by_name.contains_key(*name)).collect();
        unknown.sort();
        if !missing.is_empty() || !unknown.is_empty() {
            let mut parts = Vec::new();
            if let Some(first) = missing.first() {
                parts.push(format!("{} are missing, such as `{}` {:?}", missing.len(), first.name(), first.shape()));
            }
            if let Some(first) = unknown.first() {
                parts.push(format!("{} are unknown, such as `{first}`", unknown.len()));
            }
            let message = format!(
                "these are the weights of another model: of {} parameters, {}",
                self.len(),
                parts.join(", and ")
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
    /// Sets the value, from a tensor of any float type, on any device, of the same shape; the copy for computing too.
    ///
    /// # Errors
    /// Another shape.
    pub fn set_value(&self, tensor: &Tensor) -> Result<()> {
        self.check_shape(tensor)?;
        self.set_value_alone(tensor)?;
        match self.params().copy() {
            None => Ok(()),
            Some(copy) => {
                let value = self.value()?.to_dtype(copy.dtype())?;
                copy.slice_set(&value.flatten_all()?, 0, self.range().start)
            }
        }
    }

    fn set_value_alone(&self, tensor: &Tensor) -> Result<()> {
        let tensor = tensor.to_dtype(DType::F32)?.to_device(&self.params.device)?.flatten_all()?.contiguous()?;
        // A view of the same memory cannot be copied onto it.
        let tensor = tensor.force_contiguous()?;
        self.params.values.slice_set(&tensor, 0, self.range().start)
    }

    fn check_shape(&self, tensor: &Tensor) -> Result<()> {
        if tensor.dims() == self.shape() {
            return Ok(());
        }
        let message =
            format!("the parameter `{}` has the shape {:?}, found {:?}", self.name(), self.shape(), tensor.dims());
        Err(candle_core::Error::Msg(message))
    }
}
