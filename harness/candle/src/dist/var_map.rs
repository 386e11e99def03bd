//! Data parallelism over a `VarMap`.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;

use super::comm::{Communicator, Reduce};
use super::ddp::{Ddp, DdpOptions, Exchange};
use super::error::{Error, Result};
use super::flat::{ALIGNMENT, FlatParam, FlatParams, GradReady, ParamId};

/// Averages the gradients of a `VarMap`'s variables over all ranks, as PyTorch's `DistributedDataParallel` does.
///
/// Every rank has the whole model, and calls [`backward`](DistributedDataParallel::backward) with the loss of its part
/// of the batch. The parameters are the variables of f32, bf16 and f16, sorted by name, so that all ranks agree about
/// their order; those of integers are left alone. Averages are computed in f32 (or sent as
/// [`DdpOptions::comm_dtype`]), in one flat tensor of gradients that this holds.
///
/// candle returns all gradients together, at the end of its backward pass: a bucket is sent while the next one is
/// copied, but not while gradients are computed.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, VarMap};
/// use tilewright_candle::dist::comm::{Communicator, threads::threads};
/// use tilewright_candle::dist::ddp::DdpOptions;
/// use tilewright_candle::dist::DistributedDataParallel;
/// use tilewright_candle::FusedAdamW;
///
/// // Two ranks, as threads. Processes that torchrun or mpirun started call `dist::connect` instead.
/// let run = |comm: Communicator| {
///     std::thread::spawn(move || -> candle_core::Result<Vec<f32>> {
///         let (cpu, rank) = (Device::Cpu, comm.rank());
///         let variables = VarMap::new();
///         let model = candle_nn::linear(4, 1, VarBuilder::from_varmap(&variables, DType::F32, &cpu))?;
///         let ddp = DistributedDataParallel::new(&variables, Arc::new(comm), DdpOptions::default())?;
///         let mut optimizer = FusedAdamW::from_var_map(&variables, ParamsAdamW::default())?;
///         let batch = Tensor::full(1.0 + rank as f32, (8, 4), &cpu)?; // each rank has its own
///         let gradients = ddp.backward(&model.forward(&batch)?.sqr()?.mean_all()?)?;
///         optimizer.step(&gradients)?;
///         model.weight().flatten_all()?.to_vec1()
///     })
/// };
/// let ranks: Vec<_> = threads(2, Default::default())?.into_iter().map(run).collect();
/// let weights: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<_, _>>()?;
/// assert_eq!(weights[0], weights[1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DistributedDataParallel {
    ddp: Ddp,
    variables: Variables,
    /// Per parameter: whether the step so far has a gradient of it.
    used: Mutex<Vec<bool>>,
}

impl DistributedDataParallel {
    /// Replaces the variables of all ranks by rank 0's. All ranks call it, with the same options.
    ///
    /// # Errors
    /// Ranks with other variables or options; an f64 variable, variables on several devices or with strides;
    /// [`Exchange::ReduceScatter`], whose gradients are shards; errors of communication.
    pub fn new(variables: &VarMap, comm: Arc<Communicator>, options: DdpOptions) -> Result<DistributedDataParallel> {
        if options.exchange == Exchange::ReduceScatter {
            return Err(misuse("expected exchange: AllReduce, found ReduceScatter, which gives each rank a shard"));
        }
        let variables = Variables::new(variables)?;
        let used = Mutex::new(vec![false; variables.0.vars.len()]);
        Ok(DistributedDataParallel { ddp: Ddp::new(&variables, comm, options)?, variables, used })
    }

    pub fn communicator(&self) -> &Arc<Communicator> {
        self.ddp.communicator()
    }

    /// The parameters, sorted by name.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.variables.0.params.iter().map(|param| param.name.as_str())
    }

    /// Computes the gradients of `loss` and adds those that [`backward_no_sync`](Self::backward_no_sync) computed since
    /// the last call, then averages the sums over all ranks. Returns `loss.backward()`'s gradients, with the averages in
    /// place of those of the parameters: the same on all ranks, in the parameters' dtypes. A parameter that some rank's
    /// loss depends on has one, and none if no rank's does. All ranks call it.
    ///
    /// # Errors
    /// Those of candle's backward pass and of communication. The gradients of the step are then dropped.
    pub fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        let outcome = self.add_gradients(loss).and_then(|gradients| self.average(gradients));
        self.lock_used().fill(false);
        outcome
    }

    /// Computes the gradients of a micro-batch that is not the last one of a step, and keeps their sum for
    /// [`backward`](Self::backward). Sends nothing.
    ///
    /// # Errors
    /// Those of candle's backward pass. The gradients of the step are then dropped.
    pub fn backward_no_sync(&self, loss: &Tensor) -> Result<()> {
        let outcome = self.add_gradients(loss);
        if outcome.is_err() {
            self.lock_used().fill(false);
        }
        outcome.map(drop)
    }

    fn lock_used(&self) -> std::sync::MutexGuard<'_, Vec<bool>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs backward, and adds the gradients to the flat tensor.
    fn add_gradients(&self, loss: &Tensor) -> Result<GradStore> {
        let gradients = loss.backward()?;
        let (variables, mut used) = (&*self.variables.0, self.lock_used());
        for ((var, param), used) in variables.vars.iter().zip(&variables.params).zip(used.iter_mut()) {
            let Some(gradient) = gradients.get(var).filter(|_| !param.range.is_empty()) else { continue };
            let mut sum = gradient.to_dtype(DType::F32)?.flatten_all()?.contiguous()?;
            if std::mem::replace(used, true) {
                sum = (variables.grads.narrow(0, param.range.start, param.range.len())? + sum)?;
            }
            variables.grads.slice_set(&sum, 0, param.range.start)?;
        }
        Ok(gradients)
    }

    /// Averages the flat tensor, and replaces the gradients.
    fn average(&self, mut gradients: GradStore) -> Result<GradStore> {
        let variables = &*self.variables.0;
        let mut used: Vec<u64> = self.lock_used().iter().map(|&used| u64::from(used)).collect();
        for (id, param) in variables.params.iter().enumerate().rev() {
            if used[id] == 0 && !param.range.is_empty() {
                variables.grads.narrow(0, param.range.start, param.range.len())?.zero_set()?;
            }
            variables.ready(ParamId(id))?;
        }
        self.ddp.finish_gradient_synchronization()?;
        self.communicator().host().all_reduce(&mut used, Reduce::Sum)?;
        for ((var, param), used) in variables.vars.iter().zip(&variables.params).zip(used) {
            if used > 0 {
                let average = variables.grads.narrow(0, param.range.start, param.range.len())?.reshape(var.shape())?;
                // A copy, because the next step overwrites the flat tensor.
                let average =
                    if var.dtype() == DType::F32 { average.copy()? } else { average.to_dtype(var.dtype())? };
                gradients.insert(var, average);
            }
        }
        Ok(gradients)
    }
}

fn misuse(found: &str) -> Error {
    Error::Misuse(format!("DistributedDataParallel: {found}"))
}

/// The float variables of a `VarMap`, sorted by name, with a flat tensor of f32 gradients.
#[derive(Clone)]
struct Variables(Arc<Inner>);

struct Inner {
    device: Device,
    vars: Vec<Var>,
    params: Vec<FlatParam>,
    grads: Tensor,
    /// The callback of the `Ddp`.
    callback: RwLock<Option<Arc<GradReady>>>,
}

impl Variables {
    fn new(variables: &VarMap) -> Result<Variables> {
        let mut named: Vec<(String, Var)> = {
            let variables = variables.data().lock().unwrap_or_else(PoisonError::into_inner);
            variables.iter().map(|(name, var)| (name.clone(), var.clone())).collect()
        };
        named.retain(|(_, var)| var.dtype().is_float());
        named.sort_by(|(a, _), (b, _)| a.cmp(b));
        let Some((first, first_var)) = named.first() else {
            return Err(misuse("expected a VarMap with variables of floats, found none: build the model first"));
        };
        let (first, device) = (first.clone(), first_var.device().clone());
        let (mut end, mut params) = (0_usize, Vec::with_capacity(named.len()));
        for (name, var) in &named {
            if !matches!(var.dtype(), DType::F32 | DType::BF16 | DType::F16) {
                let dtype = var.dtype().as_str();
                return Err(misuse(&format!("expected variables of f32, bf16 or f16, found `{name}` of {dtype}")));
            }
            if !var.device().same_device(&device) {
                return Err(misuse(&format!("expected variables on one device, found `{first}` and `{name}` on two")));
            }
            if !var.is_contiguous() {
                return Err(misuse(&format!("expected contiguous variables, found `{name}` with strides")));
            }
            let range = end..end + var.elem_count();
            end = range.end.next_multiple_of(ALIGNMENT);
            params.push(FlatParam { name: name.clone(), shape: var.dims().to_vec(), range, requires_grad: true });
        }
        let grads = Tensor::zeros(end.max(ALIGNMENT), DType::F32, &device)?;
        let vars = named.into_iter().map(|(_, var)| var).collect();
        Ok(Variables(Arc::new(Inner { device, vars, params, grads, callback: RwLock::default() })))
    }
}

impl Inner {
    /// Reports that a gradient is complete.
    fn ready(&self, id: ParamId) -> Result<()> {
        let callback = self.callback.read().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(callback.map_or(Ok(()), |callback| callback(id))?)
    }
}

impl FlatParams for Variables {
    fn device(&self) -> &Device {
        &self.0.device
    }

    fn parameters(&self) -> Vec<FlatParam> {
        self.0.params.clone()
    }

    fn flat_len(&self) -> usize {
        self.0.grads.elem_count()
    }

    fn grads(&self) -> Tensor {
        self.0.grads.clone()
    }

    fn values(&self) -> Vec<Tensor> {
        self.0.vars.iter().map(|var| var.as_detached_tensor()).collect()
    }

    fn values_changed(&self) -> candle_core::Result<()> {
        Ok(())
    }

    fn make_grads_ipc_shareable(&self) -> candle_core::Result<bool> {
        // Only gradients of two bytes are read from peer memory.
        Ok(false)
    }

    fn on_grad_ready(&self, callback: GradReady) -> Box<dyn Any + Send + Sync> {
        *self.0.callback.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(callback));
        Box::new(Registered(self.clone()))
    }
}

/// Removes the callback when dropped.
struct Registered(Variables);

impl Drop for Registered {
    fn drop(&mut self) {
        *self.0.0.callback.write().unwrap_or_else(PoisonError::into_inner) = None;
    }
}
