//! All parameters of a model in two flat tensors: one of values, one of gradients.
//!
//! AdamW, clipping, reductions over ranks and sharding then work on slices of memory, whatever the model looks like, and no
//! gradient is ever allocated. A [`Param`] is a handle: its [`value`](Param::value) and [`grad`](Param::grad) are views of the
//! flat tensors.
//!
//! Gradients are f32, or bf16 where nothing is added up in them: see [`Params::keep_grads`].
//!
//! Candle's own walk has no place for that, so gradients reach the flat tensor from inside custom ops:
//!
//! - [`Param::leaf`] puts a parameter on the tape; its backward adds the gradient of that use.
//! - Ops that know their parameter's gradient, such as [`crate::ops`]' linear layer, take a [`Use`] when they run forward, add
//!   into the flat gradient when they run backward, and call [`Use::finish`].
//!
//! Uses are counted. When the last one of a backward pass is finished, the callbacks of [`Params::on_grad_ready`] hear of it:
//! once per pass, however often a parameter is used or shared.
//!
//! Files in reading order: this one, `spec.rs` (what a parameter starts as), `tape.rs` (uses and leaves), `lend.rs` (what lies in the
//! memory of gradients before they are made), `state.rs` (values by name).

mod lend;
mod spec;
mod state;
mod tape;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use candle_core::{DType, Device, Result, Tensor, Var};
use half::{bf16, f16};

use crate::ops::{convert, memory};

pub use lend::Lent;
use spec::Start;
pub use spec::{Init, ParamSpec};
pub use tape::{Use, grad_enabled, no_grad};

/// Parameters start at multiples of this many elements: 256 bytes in f32, 128 bytes in the half types.
pub const ALIGNMENT: usize = 64;

/// A parameter among those of its [`Params`]: its place in the order of registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// The parameters of one model on one device. Clones are handles to the same parameters.
#[derive(Clone)]
pub struct Params(Arc<Inner>);

/// One parameter. Clones are handles to the same one.
#[derive(Clone)]
pub struct Param {
    params: Arc<Inner>,
    id: ParamId,
}

/// Parameters that an optimizer treats alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Whether weight decay applies.
    pub decay: bool,
    /// Factor of the learning rate.
    pub lr_scale: f64,
    /// The parameters, in order.
    pub ids: Vec<ParamId>,
    /// Their elements in the flat tensors, in order; neighbours are merged, gaps for alignment included.
    pub ranges: Vec<Range<usize>>,
}

/// Stops the callbacks of [`Params::on_grad_ready`] when it is dropped.
#[must_use = "the callback is removed when this is dropped"]
pub struct ReadyHook {
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
    /// Whether other processes may open their memory.
    exposed: AtomicBool,
    /// Gradients that count as zeros, whatever lies in their memory.
    blank: Vec<AtomicBool>,
    /// Gradients in whose memory something else lies.
    lent: Vec<AtomicBool>,
    /// The values in a shorter type, for products.
    copy: RwLock<Option<Tensor>>,
    /// How often `grads` or `copy` became other tensors.
    exchanged: AtomicU64,
    /// Puts ops on the tape whose only gradient is a parameter's.
    anchor: Var,
    /// Uses of each parameter that have run forward and not yet backward.
    pending: Vec<AtomicUsize>,
    callbacks: RwLock<Vec<(u64, Callback)>>,
}

impl Params {
    /// Makes the parameters that `specs` describe, in that order, with starting values that depend on `seed` and the order
    /// alone: not on the device. Their gradients are f32 zeros.
    ///
    /// # Errors
    /// Two parameters of one name, or no memory on the device.
    pub fn new(specs: Vec<ParamSpec>, device: &Device, seed: u64) -> Result<Params> {
        let params = Params::without_grads(specs, device, seed)?;
        params.keep_grads(DType::F32)?;
        Ok(params)
    }

    /// As [`Params::new`], without memory for gradients: for models that only run forward, until [`Params::keep_grads`].
    ///
    /// # Errors
    /// As there.
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
        let values = starting_values(&Start::new(&specs, &ranges, seed), end, device)?;
        let anchor = Var::zeros(1, DType::F32, device)?;
        let pending = specs.iter().map(|_| AtomicUsize::new(0)).collect();
        let [blank, lent] = [0; 2].map(|_| specs.iter().map(|_| AtomicBool::new(false)).collect());
        Ok(Params(Arc::new(Inner {
            device: device.clone(),
            specs,
            by_name,
            ranges,
            values,
            grads: RwLock::new(anchor.as_detached_tensor()),
            exposed: AtomicBool::new(false),
            blank,
            lent,
            copy: RwLock::new(None),
            exchanged: AtomicU64::new(0),
            anchor,
            pending,
            callbacks: RwLock::default(),
        })))
    }

    /// New parameters of the same names, shapes and values, on this or another device: a replica for another rank.
    ///
    /// # Errors
    /// No memory on the device.
    pub fn replicate(&self, device: &Device) -> Result<Params> {
        let zeros = self.0.specs.iter().cloned().map(|spec| ParamSpec { init: Init::Zeros, ..spec });
        let replica = Params::new(zeros.collect(), device, 0)?;
        replica.0.values.slice_set(&self.0.values.force_contiguous()?.to_device(device)?, 0, 0)?;
        if let Some(copy) = self.copy() {
            replica.keep_copy(copy.dtype())?;
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

    /// Number of parameters as papers count them: elements, without the gaps between tensors.
    pub fn numel(&self) -> usize {
        self.0.ranges.iter().map(Range::len).sum()
    }

    /// Elements of the flat tensors, gaps included: a multiple of [`ALIGNMENT`].
    pub fn flat_len(&self) -> usize {
        self.0.values.elem_count()
    }

    /// All values: f32 [flat_len]. Gaps are zeros, and stay so under any update that maps (0, gradient 0) to 0.
    pub fn values(&self) -> &Tensor {
        &self.0.values
    }

    /// All gradients: [flat_len], f32 unless [`Params::keep_grads`] said otherwise. Gaps are zeros. After [`Params::blank_grads`] they
    /// are what this says once [`Params::settle_grads`] was called.
    pub fn grads(&self) -> Tensor {
        self.0.grads()
    }

    /// Keeps gradients in `dtype` from now on, f32 or bf16: all are zeros then, unless they were of that type already.
    ///
    /// In bf16 a gradient takes half of the memory, and every op rounds its part when it is added: that is for passes in which
    /// each parameter has one part, not for gradients that several micro-batches or ranks add up.
    ///
    /// # Errors
    /// Another type, someone who listens for finished gradients and knows where they lie, or no memory.
    pub fn keep_grads(&self, dtype: DType) -> Result<()> {
        let now = self.grads();
        if now.dtype() == dtype && now.elem_count() == self.flat_len() {
            return Ok(());
        }
        drop(now);
        if !matches!(dtype, DType::F32 | DType::BF16) {
            let message = format!("gradients are kept in f32 or bf16, not in {}", dtype.as_str());
            return Err(candle_core::Error::Msg(message));
        }
        if self.has_listeners() {
            let message = "gradients that ranks exchange stay in the type that they had: choose it before";
            return Err(candle_core::Error::Msg(message.into()));
        }
        let mut grads = self.0.grads.write().unwrap_or_else(PoisonError::into_inner);
        // The old ones go before the new ones come.
        *grads = self.0.anchor.as_detached_tensor();
        *grads = Tensor::zeros(self.flat_len(), dtype, self.device())?;
        self.0.exposed.store(false, Ordering::Release);
        self.0.blank.iter().for_each(|blank| blank.store(false, Ordering::Release));
        self.0.exchanged.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// Keeps gradients in memory that other processes may open, from now on, where the device is a GPU; all are zeros then, unless they were
    /// there already. Where somebody listens for finished gradients and knows where they lie, they stay: then it is false.
    ///
    /// # Errors
    /// No memory.
    pub(crate) fn expose_grads(&self) -> Result<bool> {
        if self.0.exposed.load(Ordering::Acquire) || self.has_listeners() {
            return Ok(self.0.exposed.load(Ordering::Acquire));
        }
        let mut grads = self.0.grads.write().unwrap_or_else(PoisonError::into_inner);
        let dtype = grads.dtype();
        // The old ones go before the new ones come.
        *grads = self.0.anchor.as_detached_tensor();
        *grads = match dtype {
            DType::BF16 => memory::exposable_zeros::<bf16>(self.device(), self.flat_len())?,
            _ => memory::exposable_zeros::<f32>(self.device(), self.flat_len())?,
        };
        self.0.exposed.store(true, Ordering::Release);
        self.0.blank.iter().for_each(|blank| blank.store(false, Ordering::Release));
        self.0.exchanged.fetch_add(1, Ordering::AcqRel);
        Ok(true)
    }

    /// A number that is another one when gradients or the copy for computing lie in other memory than before. A recording of work on
    /// them is good for one such number.
    pub fn generation(&self) -> u64 {
        self.0.exchanged.load(Ordering::Acquire)
    }

    /// The parameter of this place in the order of registration.
    ///
    /// # Panics
    /// There are fewer parameters: ids come from these parameters.
    pub fn param(&self, id: ParamId) -> Param {
        assert!(id.0 < self.len(), "parameter {} of {}", id.0, self.len());
        Param { params: self.0.clone(), id }
    }

    /// The parameter of this name.
    ///
    /// # Errors
    /// There is none; says which name is nearest.
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

    /// Sets all gradients to zero. Those in whose memory something lies are blank.
    pub fn zero_grads(&self) -> Result<()> {
        self.blank_grads();
        self.set_blank_to_zero(|param| !param.is_lent())
    }

    /// As [`Params::zero_grads`], without touching memory: what comes first to a gradient is written over what lies there. Whoever reads
    /// [`Params::grads`] calls [`Params::settle_grads`] before.
    pub fn blank_grads(&self) {
        self.0.blank.iter().for_each(|blank| blank.store(true, Ordering::Release));
    }

    /// Sets the gradients to zero that nothing has come to since [`Params::blank_grads`].
    ///
    /// # Errors
    /// A gradient in whose memory something lies for a backward pass that is to come.
    pub fn settle_grads(&self) -> Result<()> {
        self.iter().filter(Param::is_blank).try_for_each(|param| param.check_free())?;
        self.set_blank_to_zero(|_| true)
    }

    fn set_blank_to_zero(&self, which: impl Fn(&Param) -> bool) -> Result<()> {
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for param in self.iter().filter(|param| which(param) && param.take_blank()) {
            match ranges.last_mut() {
                Some(last) if param.range().start < last.end + ALIGNMENT => last.end = param.range().end,
                _ => ranges.push(param.range()),
            }
        }
        let grads = self.grads();
        ranges.into_iter().try_for_each(|range| grads.narrow(0, range.start, range.len())?.zero_set())
    }

    /// The parameters that are trained, grouped by decay and factor of the learning rate, in the order in which groups first
    /// appear.
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

    /// Keeps a copy of all values in `dtype`, one of bf16 and f16, that [`Param::compute`] gives views of. f32 drops the copy.
    ///
    /// # Errors
    /// Another type, or no memory.
    pub fn keep_copy(&self, dtype: DType) -> Result<()> {
        let copy = match dtype {
            DType::F32 => None,
            DType::BF16 | DType::F16 => Some(self.0.values.to_dtype(dtype)?),
            other => {
                let message = format!("parameters compute in f32, bf16 or f16, not in {}", other.as_str());
                return Err(candle_core::Error::Msg(message));
            }
        };
        *self.0.copy.write().unwrap_or_else(PoisonError::into_inner) = copy;
        self.0.exchanged.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// The copy that [`Params::keep_copy`] made: [flat_len]. An optimizer either writes it with the values, or calls
    /// [`Params::refresh_copy`] afterwards.
    pub fn copy(&self) -> Option<Tensor> {
        self.0.copy.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Brings the copy, if there is one, up to date with the values.
    pub fn refresh_copy(&self) -> Result<()> {
        match self.copy() {
            None => Ok(()),
            Some(copy) if copy.dtype() == DType::F16 => self.round_to::<f16>(&copy),
            Some(copy) => self.round_to::<bf16>(&copy),
        }
    }

    fn round_to<T: memory::Elem + tilewright::kernels::FloatElement>(&self, copy: &Tensor) -> Result<()> {
        let values = memory::Read::<f32>::new(&self.0.values)?;
        memory::write::<T, ()>(copy, |device, copy| convert(device, values.view()?, copy).map_err(memory::kernel_error))
    }

    /// Calls `callback` during backward with each parameter whose gradient of this pass is complete: no use of it is left.
    /// It runs on the thread that walks backward, and its errors end the walk.
    ///
    /// A parameter that the loss does not depend on is never reported: whoever waits for all of them looks at the rest when
    /// the walk is over.
    pub fn on_grad_ready(&self, callback: impl Fn(ParamId) -> Result<()> + Send + Sync + 'static) -> ReadyHook {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let key = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut callbacks = self.0.callbacks.write().unwrap_or_else(PoisonError::into_inner);
        callbacks.push((key, Arc::new(callback)));
        ReadyHook { params: self.0.clone(), key }
    }

    /// Whether [`Params::on_grad_ready`] has callbacks.
    pub fn has_listeners(&self) -> bool {
        !self.0.callbacks.read().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}

impl Inner {
    fn grads(&self) -> Tensor {
        self.grads.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Elements that are made on the host at a time for another device.
const PIECE: usize = 1 << 24;

/// The flat tensor of values. For a GPU, the next piece is made while one is on its way.
fn starting_values(start: &Start<'_>, len: usize, device: &Device) -> Result<Tensor> {
    if start.is_zero() {
        return Tensor::zeros(len, DType::F32, device);
    }
    if device.is_cpu() {
        let mut values = vec![0.0; len];
        start.fill(0, &mut values);
        return Tensor::from_vec(values, len, device);
    }
    let values = Tensor::zeros(len, DType::F32, device)?;
    let (mut ready, mut next) = (vec![0.0_f32; len.min(PIECE)], vec![0.0_f32; len.min(PIECE)]);
    start.fill(0, &mut ready);
    for first in (0..len).step_by(PIECE) {
        let (count, after) = (PIECE.min(len - first), first + PIECE);
        std::thread::scope(|scope| {
            if after < len {
                let fill = || start.fill(after, &mut next[..PIECE.min(len - after)]);
                std::thread::Builder::new().spawn_scoped(scope, fill)?;
            }
            values.slice_set(&Tensor::from_slice(&ready[..count], count, device)?, 0, first)
        })?;
        std::mem::swap(&mut ready, &mut next);
    }
    Ok(values)
}

impl Group {
    /// Adds a parameter behind the others; what lies between two neighbours is a gap.
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

    /// Its name: `blocks.3.attention.out.weight`.
    pub fn name(&self) -> &str {
        &self.spec().name
    }

    /// Its shape.
    pub fn shape(&self) -> &[usize] {
        &self.spec().shape
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.spec().numel()
    }

    /// Its elements in the flat tensors. The start is a multiple of [`ALIGNMENT`].
    pub fn range(&self) -> Range<usize> {
        self.params.ranges[self.id.0].clone()
    }

    /// The parameters that this is one of.
    pub fn params(&self) -> Params {
        Params(self.params.clone())
    }

    /// Whether it is trained. Frozen ones get no gradient.
    pub fn requires_grad(&self) -> bool {
        !self.spec().frozen
    }

    /// Whether weight decay applies.
    pub fn decay(&self) -> bool {
        self.spec().decay
    }

    /// Factor of the learning rate.
    pub fn lr_scale(&self) -> f64 {
        self.spec().lr_scale
    }

    fn view(&self, flat: &Tensor) -> Result<Tensor> {
        let range = self.range();
        flat.narrow(0, range.start, range.len())?.reshape(self.shape())
    }

    /// Its value, f32: a view of [`Params::values`].
    pub fn value(&self) -> Result<Tensor> {
        self.view(&self.params.values)
    }

    /// Its gradient: a view of [`Params::grads`].
    ///
    /// # Errors
    /// Something lies in its memory for a backward pass that is to come: see [`Param::lend_grad`].
    pub fn grad(&self) -> Result<Tensor> {
        self.check_free()?;
        let grad = self.view(&self.params.grads())?;
        if self.take_blank() {
            grad.zero_set()?;
        }
        Ok(grad)
    }

    /// Where to put a part of its gradient, and whether that is added to what is there: if not, all of it is to be written over.
    ///
    /// # Errors
    /// As [`Param::grad`].
    pub fn grad_to_write(&self) -> Result<(Tensor, bool)> {
        self.check_free()?;
        Ok((self.view(&self.params.grads())?, !self.take_blank()))
    }

    /// Whether its gradient counts as zeros, whatever lies in its memory.
    fn is_blank(&self) -> bool {
        self.params.blank[self.id.0].load(Ordering::Acquire)
    }

    /// Whether its gradient counts as zeros; from now on it is what lies there.
    fn take_blank(&self) -> bool {
        self.params.blank[self.id.0].swap(false, Ordering::AcqRel)
    }

    /// Its value for computing in `dtype`, off the tape: a view of the values or of their copy where there is one of this
    /// type, else a conversion.
    pub fn compute(&self, dtype: DType) -> Result<Tensor> {
        if dtype == DType::F32 {
            return self.value();
        }
        match self.params().copy() {
            Some(copy) if copy.dtype() == dtype => self.view(&copy),
            _ => self.value()?.to_dtype(dtype),
        }
    }

    /// Adds `gradient`, of any float type and of its shape, to its gradient: in f32, rounded to the gradient's type afterwards.
    pub fn add_grad(&self, gradient: &Tensor) -> Result<()> {
        let gradient = gradient.to_dtype(DType::F32)?;
        let (before, adds) = self.grad_to_write()?;
        let sum = if adds { before.to_dtype(DType::F32)?.add(&gradient)? } else { gradient };
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

impl Drop for ReadyHook {
    fn drop(&mut self) {
        let mut callbacks = self.params.callbacks.write().unwrap_or_else(PoisonError::into_inner);
        callbacks.retain(|(key, _)| *key != self.key);
    }
}
