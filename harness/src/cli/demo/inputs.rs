//! The demo's inputs, from the file that ships or from the user's.

use std::collections::BTreeMap;
use std::path::Path;

use tilewright::codegen::ir::DType;
use tilewright::{check_host_memory, elements};

use super::data::SHIPPED;
use crate::cli::tensors::{self, Tensor};
use crate::cli::{CliError, Result};

/// Named float tensors.
pub struct Inputs(BTreeMap<String, Tensor>);

impl Inputs {
    /// Reads the user's file, or the file that ships.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(path: Option<&Path>) -> Result<Inputs> {
        let tensors = match path {
            Some(path) => tensors::read(path)?,
            None => tensors::parse(SHIPPED).map_err(CliError::Failure)?,
        };
        Ok(Inputs(tensors.into_iter().collect()))
    }

    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.get(name)
    }

    /// Checks that the tensor, if there is one, has this shape.
    ///
    /// # Errors
    /// The shapes differ; the message has both.
    pub fn expect_shape(&self, name: &str, shape: &[usize]) -> Result<()> {
        match self.get(name) {
            Some(tensor) if tensor.shape != shape => Err(CliError::Failure(format!(
                "`{name}` has shape {:?}: the other tensors imply {shape:?}",
                tensor.shape
            ))),
            Some(_) | None => Ok(()),
        }
    }

    /// Returns the tensor, or a tensor of ones, which is the gradient of the sum of all outputs.
    ///
    /// # Errors
    /// The tensor has another shape.
    pub fn get_or_ones(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.expect_shape(name, shape)?;
        if let Some(tensor) = self.get(name) {
            return Ok(tensor.clone());
        }
        let count = elements(shape)?;
        check_host_memory(12.0 * count as f64)?;
        Ok(Tensor::from_f64(DType::F32, shape, &vec![1.0; count]))
    }

    /// Returns the names of the tensors, for messages.
    pub fn names(&self) -> String {
        let names: Vec<String> = self.0.keys().map(|name| crate::escape::printable(name)).collect();
        if names.is_empty() { "no tensor".to_string() } else { names.join(", ") }
    }
}
