//! Parameters as data-parallel training takes them.

use std::any::Any;

use candle_core::{Device, Result, Tensor};
use tilewright_candle::dist::flat::{FlatParam, FlatParams, GradReady};

use super::{Param, Params};

impl FlatParams for Params {
    fn device(&self) -> &Device {
        Params::device(self)
    }

    fn parameters(&self) -> Vec<FlatParam> {
        let parameter = |param: Param| FlatParam {
            name: param.name().to_string(),
            shape: param.shape().to_vec(),
            range: param.range(),
            requires_grad: param.requires_grad(),
        };
        self.iter().map(parameter).collect()
    }

    fn flat_len(&self) -> usize {
        Params::flat_len(self)
    }

    fn grads(&self) -> Tensor {
        Params::grads(self)
    }

    fn values(&self) -> Vec<Tensor> {
        vec![Params::values(self).clone()]
    }

    fn values_changed(&self) -> Result<()> {
        self.refresh_compute_weights()
    }

    fn make_grads_ipc_shareable(&self) -> Result<bool> {
        Params::make_grads_ipc_shareable(self)
    }

    fn on_grad_ready(&self, callback: GradReady) -> Box<dyn Any + Send + Sync> {
        Box::new(Params::on_grad_ready(self, callback))
    }
}
