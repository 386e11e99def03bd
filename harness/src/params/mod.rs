//! Stores all parameters of a model in two flat tensors: values and gradients.
//!
//! AdamW, clipping, all-reduce and sharding work on slices of these tensors, independent of the model. No gradient is
//! allocated during training. A [`Param`] is a handle; its [`value`](Param::value) and [`grad`](Param::grad) are views
//! of the flat tensors.
//!
//! Gradients are f32, or bf16 if nothing accumulates into them: see [`Params::set_grad_dtype`].
//!
//! Candle's backward pass cannot write gradients to a given buffer, so custom ops do it:
//!
//! - [`Param::leaf`] adds a parameter to the autograd graph; its backward accumulates the gradient of that use.
//! - Ops that compute their parameter's gradient, as the linear layer of [`crate::ops`] does, take a [`ParamUse`] in
//!   the forward pass, accumulate into the flat gradient in the backward pass, and call [`ParamUse::finish`].
//!
//! Uses are counted. When the last use of a parameter in a backward pass finishes, the callbacks of
//! [`Params::on_grad_ready`] run: once per pass and parameter, even if the parameter is shared.
//!
//! Files in reading order: this one, `spec.rs` (name, shape and initial values of a parameter), `graph.rs` (uses and
//! leaves), `flat.rs` (gradients for data parallelism), `reuse.rs` (activations that alias gradient buffers), `state.rs` (values by name).

mod flat;
mod graph;
mod reuse;
mod spec;
mod state;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use candle_core::{DType, Device, Result, Tensor, Var};
use half::{bf16, f16};

use tilewright_candle::convert::convert;
use tilewright_candle::memory;

pub use graph::ParamUse;
pub use reuse::SavedActivation;
use spec::InitialValues;
pub use spec::{Init, ParamSpec};
pub use tilewright_candle::dist::flat::{ALIGNMENT, ParamId};
pub use tilewright_candle::{grad_enabled, no_grad};

/// The parameters of one model on one device. Clones share the parameters.
#[derive(Clone)]
pub struct Params(Arc<Inner>);

/// Handle to one parameter. Clones refer to the same parameter.
#[derive(Clone)]
pub struct Param {
    params: Arc<Inner>,
    id: ParamId,
}

/// A parameter group: parameters with the same optimizer options.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Whether weight decay applies.
    pub decay: bool,
    /// Factor on the learning rate.
    pub lr_scale: f64,
    /// The parameters, in registration order.
    pub ids: Vec<ParamId>,
    /// Ranges of the parameters' elements in the flat tensors, in order. Adjacent ranges are merged, including the
    /// padding between them.
    pub ranges: Vec<Range<usize>>,
}

/// Removes a callback of [`Params::on_grad_ready`] when dropped.
#[must_use = "the callback is removed when this is dropped"]
pub struct GradReadyHook {
    params: Arc<Inner>,
    key: u64,
}

type Callback = Arc<dyn Fn(ParamId) -> Result<()> + Send + Sync>;

struct Inner {
    device: Device,
    specs: Vec<ParamSpec>,
    by_name: HashMap<String, ParamId>,
    ranges: Vec<Range<usize>>,
    values: Tensor,
    grads: RwLock<Tensor>,
    /// Whether other processes can map the gradient memory (CUDA IPC).
    ipc_shareable: AtomicBool,
    /// Per parameter: the gradient counts as zeros, whatever its memory contains.
    lazy_zero: Vec<AtomicBool>,
    /// Per parameter: a saved activation aliases the gradient buffer.
    grad_aliased: Vec<AtomicBool>,
    /// The compute weights: values rounded to bf16 or f16, which matmuls read.
    compute_weights: RwLock<Option<Tensor>>,
    /// How often `grads` or `compute_weights` was replaced by another tensor.
    storage_version: AtomicU64,
    /// Tracked input of ops whose only gradient is that of a parameter, so that candle records them.
    anchor: Var,
    /// Per parameter: uses that ran forward and have not finished backward.
    pending: Vec<AtomicUsize>,
    callbacks: RwLock<Vec<(u64, Callback)>>,
}

impl Params {
    /// Creates the parameters that `specs` describe, in that order. Initial values depend on `seed` and the order only,
    /// not on the device. Gradients are f32 zeros.
    ///
    /// # Errors
    /// Two parameters have the same name; the device is out of memory.
    pub fn new(specs: Vec<ParamSpec>, device: &Device, seed: u64) -> Result<Params> {
        let params = Params::without_grads(specs, device, seed)?;
        params.set_grad_dtype(DType::F32)?;
        Ok(params)
    }

    /// Like [`Params::new`], but allocates no gradients until [`Params::set_grad_dtype`]: for inference.
    ///
    /// # Errors
    /// Those of [`Params::new`].
    pub fn without_grads(specs: Vec<ParamSpec>, device: &Device, seed: u64) -> Result<Params> {
        let mut by_name = HashMap::new();
        let mut ranges = Vec::with_capacity(specs.len());
        let mut end = 0_usize;
        for (i, spec) in specs.iter().enumerate() {
            if by_name.insert(spec.name.clone(), ParamId(i)).is_some() {
                return Err(candle_core::Error::Msg(format!("two parameters are named `{}`: rename one", spec.name)));
            }
            ranges.push(end..end + spec.numel());
            end = (end + spec.numel()).next_multiple_of(ALIGNMENT);
        }
        let values = initial_values(&InitialValues::new(&specs, &ranges, seed), end, device)?;
        let anchor = Var::zeros(1, DType::F32, device)?;
        let pending = specs.iter().map(|_| AtomicUsize::new(0)).collect();
        let [lazy_zero, grad_aliased] = [0; 2].map(|_| specs.iter().map(|_| AtomicBool::new(false)).collect());
        Ok(Params(Arc::new(Inner {
            device: device.clone(),
            specs,
            by_name,
            ranges,
            values,
            grads: RwLock::new(anchor.as_detached_tensor()),
            ipc_shareable: AtomicBool::new(false),
            lazy_zero,
            grad_aliased,
            compute_weights: RwLock::new(None),
            storage_version: AtomicU64::new(0),
            anchor,
            pending,
            callbacks: RwLock::default(),
        })))
    }

    /// Copies names, shapes and values to new parameters on this or another device: a replica for another rank.
    ///
    /// # Errors
    /// The device is out of memory.
    pub fn replicate(&self, device: &Device) -> Result<Params> {
        let zeros = self.0.specs.iter().cloned().map(|spec| ParamSpec { init: Init::Zeros, ..spec });
        let replica = Params::new(zeros.collect(), device, 0)?;
        replica.0.values.slice_set(&self.0.values.force_contiguous()?.to_device(device)?, 0, 0)?;
        if let Some(weights) = self.compute_weights() {
            replica.set_compute_dtype(weights.dtype())?;
        }
        Ok(replica)
    }

    /// The device of all parameters.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Number of parameter tensors.
    pub fn len(&self) -> usize {
        self.0.specs.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.specs.is_empty()
    }

    /// Number of elements without padding: the parameter count that papers report.
    pub fn numel(&self) -> usize {
        self.0.ranges.iter().map(Range::len).sum()
    }

    /// Number of elements of the flat tensors with padding: a multiple of [`ALIGNMENT`].
    pub fn flat_len(&self) -> usize {
        self.0.values.elem_count()
    }

    /// All values (master weights): f32 [flat_len]. Padding is zero, and stays zero under any update that maps (value
    /// 0, gradient 0) to 0.
    pub fn values(&self) -> &Tensor {
        &self.0.values
    }

    /// All gradients: [flat_len], f32 unless [`Params::set_grad_dtype`] changed the dtype. Padding is zero. After
    /// [`Params::lazy_zero_grads`] the contents are valid only after [`Params::materialize_zero_grads`].
    pub fn grads(&self) -> Tensor {
        self.0.grads()
    }

    /// Changes the dtype of gradients to f32 or bf16. This sets all gradients to zero unless they have that dtype
    /// already.
    ///
    /// Gradients in bf16 take half the memory, and every op rounds its accumulated result to bf16: use them in steps in
    /// which each parameter gets one contribution, not for accumulation over micro-batches or ranks.
    ///
    /// # Errors
    /// Another dtype; a callback of [`Params::on_grad_ready`] is registered, because it may hold the address of the
    /// gradients; out of memory.
    pub fn set_grad_dtype(&self, dtype: DType) -> Result<()> {
        let now = self.grads();
        if now.dtype() == dtype && now.elem_count() == self.flat_len() {
            return Ok(());
        }
        drop(now);
        if !matches!(dtype, DType::F32 | DType::BF16) {
            let message = format!("expected gradients in f32 or bf16, found {}", dtype.as_str());
            return Err(candle_core::Error::Msg(message));
        }
        if self.has_grad_hooks() {
            let message =
                "cannot change the dtype of gradients that ranks exchange: set it before communication starts";
            return Err(candle_core::Error::Msg(message.into()));
        }
        let mut grads = self.0.grads.write().unwrap_or_else(PoisonError::into_inner);
        // Free the old tensor before the new one is allocated.
        *grads = self.0.anchor.as_detached_tensor();
        *grads = Tensor::zeros(self.flat_len(), dtype, self.device())?;
        self.0.ipc_shareable.store(false, Ordering::Release);
        self.0.lazy_zero.iter().for_each(|lazy_zero| lazy_zero.store(false, Ordering::Release));
        self.0.storage_version.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// On a GPU, moves the gradients to memory that other processes can map (CUDA IPC) and sets them to zero, unless
    /// their memory is shareable already. Returns whether it is shareable: false, without a change, if a callback of
    /// [`Params::on_grad_ready`] is registered, because it may hold the address of the gradients.
    ///
    /// # Errors
    /// The device is out of memory.
    pub(crate) fn make_grads_ipc_shareable(&self) -> Result<bool> {
        if self.0.ipc_shareable.load(Ordering::Acquire) || self.has_grad_hooks() {
            return Ok(self.0.ipc_shareable.load(Ordering::Acquire));
        }
        let mut grads = self.0.grads.write().unwrap_or_else(PoisonError::into_inner);
        let dtype = grads.dtype();
        // Free the old tensor before the new one is allocated.
        *grads = self.0.anchor.as_detached_tensor();
        *grads = match dtype {
            DType::BF16 => memory::ipc_shareable_zeros::<bf16>(self.device(), self.flat_len())?,
            _ => memory::ipc_shareable_zeros::<f32>(self.device(), self.flat_len())?,
        };
        self.0.ipc_shareable.store(true, Ordering::Release);
        self.0.lazy_zero.iter().for_each(|lazy_zero| lazy_zero.store(false, Ordering::Release));
        self.0.storage_version.fetch_add(1, Ordering::AcqRel);
        Ok(true)
    }

    /// Version of the storage: changes whenever the gradients or the compute weights move to other memory. A captured
    /// CUDA graph is valid for one version only.
    pub fn storage_version(&self) -> u64 {
        self.0.storage_version.load(Ordering::Acquire)
    }

    /// Returns the parameter with this index in registration order.
    ///
    /// # Panics
    /// `id` is out of range, so it is not an id of these parameters.
    pub fn param(&self, id: ParamId) -> Param {
        assert!(id.0 < self.len(), "parameter {} of {}", id.0, self.len());
        Param { params: self.0.clone(), id }
    }

    /// Returns the parameter with this name.
    ///
    /// # Errors
    /// No parameter has this name; the message suggests the nearest one.
    pub fn get(&self, name: &str) -> Result<Param> {
        match self.0.by_name.get(name) {
            Some(&id) => Ok(self.param(id)),
            None => Err(candle_core::Error::Msg(self.unknown(name))),
        }
    }

    fn unknown(&self, name: &str) -> String {
        let distance = |other: &&ParamSpec| strsim::levenshtein(name, &other.name);
        match self.0.specs.iter().min_by_key(distance) {
            Some(nearest) => format!("no parameter is named `{name}`: did you mean `{}`?", nearest.name),
            None => format!("no parameter is named `{name}`: there are none"),
        }
    }

    /// All parameters, in the order of registration.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Param> + '_ {
        (0..self.len()).map(|i| self.param(ParamId(i)))
    }

    /// Writes zeros to all gradients. Gradients whose buffers are aliased by saved activations are zeroed lazily.
    pub fn zero_grads(&self) -> Result<()> {
        self.lazy_zero_grads();
        self.materialize_zeros_where(|param| !param.is_grad_aliased())
    }

    /// Marks all gradients as zero without writing memory (lazy `zero_grad`): the first contribution to a gradient
    /// overwrites its buffer. Call [`Params::materialize_zero_grads`] before reading [`Params::grads`].
    pub fn lazy_zero_grads(&self) {
        self.0.lazy_zero.iter().for_each(|lazy_zero| lazy_zero.store(true, Ordering::Release));
    }

    /// Writes zeros to the gradients that got no contribution since [`Params::lazy_zero_grads`].
    ///
    /// # Errors
    /// A saved activation of a pending backward pass aliases the buffer of a gradient.
    pub fn materialize_zero_grads(&self) -> Result<()> {
        self.iter().filter(Param::is_lazy_zero).try_for_each(|param| param.check_grad_not_aliased())?;
        self.materialize_zeros_where(|_| true)
    }

    fn materialize_zeros_where(&self, which: impl Fn(&Param) -> bool) -> Result<()> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for param in self.iter().filter(|param| which(param) && param.take_lazy_zero()) {
            match ranges.last_mut() {
                Some(last) if param.range().start < last.end + ALIGNMENT => last.end = param.range().end,
                _ => ranges.push(param.range()),
            }
        }
        let grads = self.grads();
        ranges.into_iter().try_for_each(|range| grads.narrow(0, range.start, range.len())?.zero_set())
    }

    /// The trainable parameters, grouped by weight decay and learning-rate factor, in order of first appearance.
    pub fn groups(&self) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        for param in self.iter().filter(Param::requires_grad) {
            let (decay, lr_scale) = (param.spec().decay, param.spec().lr_scale);
            let at = groups.iter().position(|g| g.decay == decay && g.lr_scale == lr_scale).unwrap_or_else(|| {
                groups.push(Group { decay, lr_scale, ids: Vec::new(), ranges: Vec::new() });
                groups.len() - 1
            });
            groups[at].push(param.id(), param.range());
        }
        groups
    }

    /// Creates the compute weights: all values rounded to `dtype`, bf16 or f16, of which [`Param::compute`] returns
    /// views. f32 drops them.
    ///
    /// # Errors
    /// Another dtype; out of memory.
    pub fn set_compute_dtype(&self, dtype: DType) -> Result<()> {
        let weights = match dtype {
            DType::F32 => None,
            DType::BF16 | DType::F16 => Some(self.0.values.to_dtype(dtype)?),
            other => {
                let message = format!("expected compute weights in f32, bf16 or f16, found {}", other.as_str());
                return Err(candle_core::Error::Msg(message));
            }
        };
        *self.0.compute_weights.write().unwrap_or_else(PoisonError::into_inner) = weights;
        self.0.storage_version.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// The compute weights that [`Params::set_compute_dtype`] created: [flat_len]. An optimizer either writes them
    /// with the values, or calls [`Params::refresh_compute_weights`] after its update.
    pub fn compute_weights(&self) -> Option<Tensor> {
        self.0.compute_weights.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Writes the values, rounded, to the compute weights, if there are any.
    pub fn refresh_compute_weights(&self) -> Result<()> {
        match self.compute_weights() {
            None => Ok(()),
            Some(weights) if weights.dtype() == DType::F16 => self.round_to::<f16>(&weights),
            Some(weights) => self.round_to::<bf16>(&weights),
        }
    }

    fn round_to<T: memory::Elem + tilewright::kernels::FloatElement>(&self, weights: &Tensor) -> Result<()> {
        let values = memory::Read::<f32>::new(&self.0.values)?;
        memory::write::<T, ()>(weights, |device, weights| {
            convert(device, values.view()?, weights).map_err(memory::kernel_error)
        })
    }

    /// Registers `callback`, which runs during backward once for each parameter, when its last use has finished and its
    /// gradient of the pass is therefore complete. The callback runs on the thread that executes the backward pass; its
    /// error aborts the pass.
    ///
    /// Parameters that the loss does not depend on are never reported. A caller that needs all gradients must check for
    /// the rest after backward.
    pub fn on_grad_ready(&self, callback: impl Fn(ParamId) -> Result<()> + Send + Sync + 'static) -> GradReadyHook {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let key = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut callbacks = self.0.callbacks.write().unwrap_or_else(PoisonError::into_inner);
        callbacks.push((key, Arc::new(callback)));
        GradReadyHook { params: self.0.clone(), key }
    }

    /// Whether [`Params::on_grad_ready`] has callbacks.
    pub fn has_grad_hooks(&self) -> bool {
        !self.0.callbacks.read().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

impl Inner {
    fn grads(&self) -> Tensor {
        self.grads.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Elements that the host initializes at a time for another device.
const CHUNK: usize = 1 << 24;

/// Returns the flat tensor of initial values. For a GPU, the host generates the next chunk while the previous one is
/// copied.
fn initial_values(start: &InitialValues<'_>, len: usize, device: &Device) -> Result<Tensor> {
    if start.is_zero() {
        return Tensor::zeros(len, DType::F32, device);
    }
    if device.is_cpu() {
        let mut values = vec![0.0; len];
        start.fill(0, &mut values);
        return Tensor::from_vec(values, len, device);
    }
    let values = Tensor::zeros(len, DType::F32, device)?;
    let (mut ready, mut next) = (vec![0.0_f32; len.min(CHUNK)], vec![0.0_f32; len.min(CHUNK)]);
    start.fill(0, &mut ready);
    for first in (0..len).step_by(CHUNK) {
        let (count, after) = (CHUNK.min(len - first), first + CHUNK);
        std::thread::scope(|scope| {
            if after < len {
                let fill = || start.fill(after, &mut next[..CHUNK.min(len - after)]);
                std::thread::Builder::new().spawn_scoped(scope, fill)?;
            }
            values.slice_set(&Tensor::from_slice(&ready[..count], count, device)?, 0, first)
        })?;
        std::mem::swap(&mut ready, &mut next);
    }
    Ok(values)
}

impl Group {
    /// Appends a parameter. Space between parameters that are adjacent in registration order is padding, and becomes
    /// part of the range.
    fn push(&mut self, id: ParamId, range: Range<usize>) {
        let next_to = |before: &ParamId| before.0 + 1 == id.0;
        match self.ranges.last_mut() {
            Some(last) if self.ids.last().is_some_and(next_to) => last.end = range.end,
            _ => self.ranges.push(range),
        }
        self.ids.push(id);
    }
}

impl Param {
    pub fn id(&self) -> ParamId {
        self.id
    }

    fn spec(&self) -> &ParamSpec {
        &self.params.specs[self.id.0]
    }

    /// Name, such as `blocks.3.attention.out.weight`.
    pub fn name(&self) -> &str {
        &self.spec().name
    }

    /// Shape of the value and of the gradient.
    pub fn shape(&self) -> &[usize] {
        &self.spec().shape
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.spec().numel()
    }

    /// Range of the parameter's elements in the flat tensors. The start is a multiple of [`ALIGNMENT`].
    pub fn range(&self) -> Range<usize> {
        self.params.ranges[self.id.0].clone()
    }

    /// The [`Params`] that contain this parameter.
    pub fn params(&self) -> Params {
        Params(self.params.clone())
    }

    /// Whether the parameter is trained. Frozen parameters get no gradient.
    pub fn requires_grad(&self) -> bool {
        !self.spec().frozen
    }

    /// Whether weight decay applies.
    pub fn decay(&self) -> bool {
        self.spec().decay
    }

    /// Factor on the learning rate.
    pub fn lr_scale(&self) -> f64 {
        self.spec().lr_scale
    }

    fn view(&self, flat: &Tensor) -> Result<Tensor> {
        let range = self.range();
        flat.narrow(0, range.start, range.len())?.reshape(self.shape())
    }

    /// The value, f32: a view of [`Params::values`].
    pub fn value(&self) -> Result<Tensor> {
        self.view(&self.params.values)
    }

    /// The gradient: a view of [`Params::grads`].
    ///
    /// # Errors
    /// A saved activation of a pending backward pass aliases the gradient buffer: see [`Param::alias_grad`].
    pub fn grad(&self) -> Result<Tensor> {
        self.check_grad_not_aliased()?;
        let grad = self.view(&self.params.grads())?;
        if self.take_lazy_zero() {
            grad.zero_set()?;
        }
        Ok(grad)
    }

    /// Returns the gradient view to write a contribution to, and whether to accumulate. If false, the caller must
    /// overwrite all of it.
    ///
    /// # Errors
    /// As [`Param::grad`].
    pub fn grad_to_write(&self) -> Result<(Tensor, bool)> {
        self.check_grad_not_aliased()?;
        Ok((self.view(&self.params.grads())?, !self.take_lazy_zero()))
    }

    /// Whether the gradient counts as zeros, whatever its memory contains.
    fn is_lazy_zero(&self) -> bool {
        self.params.lazy_zero[self.id.0].load(Ordering::Acquire)
    }

    /// Returns whether the gradient counts as zeros, and clears that state: the memory contents count from now on.
    fn take_lazy_zero(&self) -> bool {
        self.params.lazy_zero[self.id.0].swap(false, Ordering::AcqRel)
    }

    /// The value in `dtype`, outside of the autograd graph: a view of the values, or of the compute weights if they
    /// have this dtype, else a conversion.
    pub fn compute(&self, dtype: DType) -> Result<Tensor> {
        if dtype == DType::F32 {
            return self.value();
        }
        match self.params().compute_weights() {
            Some(weights) if weights.dtype() == dtype => self.view(&weights),
            _ => self.value()?.to_dtype(dtype),
        }
    }

    /// Accumulates `gradient`, which has the shape of the parameter and any float dtype. The sum is computed in f32 and
    /// rounded once to the dtype of the gradients.
    ///
    /// # Errors
    /// As [`Param::grad`].
    pub fn add_grad(&self, gradient: &Tensor) -> Result<()> {
        let gradient = gradient.to_dtype(DType::F32)?;
        let (before, accumulate) = self.grad_to_write()?;
        let sum = if accumulate { before.to_dtype(DType::F32)?.add(&gradient)? } else { gradient };
        let sum = sum.flatten_all()?.contiguous()?.to_dtype(before.dtype())?;
        self.params.grads().slice_set(&sum, 0, self.range().start)
    }
}

impl std::fmt::Debug for Param {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Param({} {:?})", self.name(), self.shape())
    }
}

impl std::fmt::Debug for Params {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Params({} tensors, {} elements)", self.len(), self.numel())
    }
}

impl Drop for GradReadyHook {
    fn drop(&mut self) {
        let mut callbacks = self.params.callbacks.write().unwrap_or_else(PoisonError::into_inner);
        callbacks.retain(|(key, _)| *key != self.key);
    }
}
