//! Kernels of your own as differentiable ops: [`custom_op`].
//!
//! Candle's custom ops have at most three inputs and one output. An op with more becomes a chain: ops that join up to
//! three inputs each into a *link*, a tensor of one element that carries no number but the dependency; the op itself; and
//! one op per output. In the backward pass each part of the chain passes gradients to the next through [`Slots`], and
//! gives candle a gradient for the link, so that candle visits the next part.
//!
//! A backward pass can fail between two parts, in another op. What its parts have passed on must not reach the next
//! backward pass: the gradient of an output counts only while candle holds the gradient of the link that came with it,
//! and candle drops all gradients of a pass that fails ([`Slots`]).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::ThreadId;

use candle_core::{Device, Error, Result, Shape, Tensor};

use crate::check::{bad_argument, same_device};
use crate::graph::{AnyOutput, grad_enabled, keep_alive, record1_any, record2_any, record3_any};
use crate::memory::{Elem, OutputAlloc};

/// A result of a forward pass: memory that kernels have written, and its shape.
pub struct Output(AnyOutput);

impl Output {
    /// # Errors
    /// The shape has another number of elements than the memory.
    pub fn new<T: Elem>(memory: OutputAlloc<T>, shape: impl Into<Shape>) -> Result<Output> {
        AnyOutput::new("a custom op", memory, shape.into()).map(Output)
    }
}

/// What a backward closure gets.
pub struct Backward<'a, S> {
    /// The inputs, in their order.
    pub inputs: &'a [Tensor],
    /// What the forward closure saved.
    pub saved: &'a S,
    /// The outputs, outside of the autograd graph.
    pub outputs: &'a [Tensor],
    /// The gradient of each output, contiguous; zeros for an output that the loss does not depend on.
    pub grads: &'a [Tensor],
    /// Whether each input is tracked: gradients of the others are dropped.
    pub needs_grad: &'a [bool],
}

/// Runs kernels as one op of the autograd graph, with any number of inputs and outputs.
///
/// `forward` runs once, now, and returns the outputs and what backward needs besides inputs and outputs. `backward`
/// runs once per backward pass, if an input is tracked, and returns the gradient of each input, in the shape and dtype of
/// the input; `None` for an input without a gradient. All inputs and outputs are on one device.
///
/// ```
/// use candle_core::{Device, Result, Tensor, Var};
/// use tilewright_candle::custom::{Output, custom_op};
/// use tilewright_candle::memory::{OutputAlloc, Read, kernel_error};
/// use tilewright::prelude::*;
///
/// /// y = a · x.
/// #[kernel]
/// fn scale(x: In<f32>, y: Out<f32>, a: f32, n: i32) {
///     let at = program_id(0) * 256 + arange(0, 256);
///     store(y + at, load(x + at, mask = at < n) * a, mask = at < n);
/// }
///
/// fn run(x: &Tensor, a: f32) -> Result<OutputAlloc<f32>> {
///     let n = x.elem_count();
///     let mut y = OutputAlloc::<f32>::new(x.device(), n)?;
///     let x = Read::<f32>::new(x)?;
///     Scale { x: &x.view()?, y: &mut y.view()?, a, n: n as i32 }
///         .launch(x.device(), n.div_ceil(256))
///         .map_err(kernel_error)?;
///     Ok(y)
/// }
///
/// let x = Var::new(&[1_f32, 2.0], &Device::Cpu)?;
/// let y = custom_op(
///     "scale",
///     &[&x],
///     |inputs| Ok((vec![Output::new(run(inputs[0], 3.0)?, inputs[0].shape())?], ())),
///     |pass| Ok(vec![Some(run(&pass.grads[0], 3.0)?.into_tensor(pass.inputs[0].shape()))]),
/// )?;
/// let grads = y[0].sum_all()?.backward()?;
/// assert_eq!(grads.get(&x).unwrap().to_vec1::<f32>()?, [3.0, 3.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Those of `forward`; no input, no output. Backward fails with those of `backward`, and if it returns another number of
/// gradients, or a gradient of another shape or dtype than its input.
pub fn custom_op<S: Send + Sync + 'static>(
    name: &'static str,
    inputs: &[&Tensor],
    forward: impl FnOnce(&[&Tensor]) -> Result<(Vec<Output>, S)>,
    backward: impl Fn(Backward<'_, S>) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
) -> Result<Vec<Tensor>> {
    let Some(first) = inputs.first() else {
        return Err(bad_argument(name, "inputs", "at least one tensor", "none"));
    };
    inputs.iter().try_for_each(|other| same_device(name, first, "an input", other))?;
    let (results, saved) = forward(inputs)?;
    if results.is_empty() {
        return Err(bad_argument(name, "outputs", "at least one", "none"));
    }
    let needs_grad: Arc<[bool]> = inputs.iter().map(|x| x.track_op()).collect();
    if !(grad_enabled() && needs_grad.contains(&true)) {
        return Ok(results.into_iter().map(|Output(result)| result.into_tensor()).collect());
    }
    let op = Arc::new(Op {
        name,
        inputs: inputs.iter().map(|x| x.detach()).collect(),
        needs_grad: needs_grad.clone(),
        outputs: OnceLock::new(),
        output_grads: Slots::default(),
        input_grads: Slots::default(),
        backward: Box::new(move |inputs, outputs, grads| {
            backward(Backward { inputs, saved: &saved, outputs, grads, needs_grad: &needs_grad })
        }),
    });
    if results.len() == 1 && inputs.len() <= 3 {
        return results.into_iter().map(|Output(result)| op.clone().alone(inputs, result)).collect();
    }
    op.chain(inputs, results)
}

/// One element, whose value is never read.
fn link(device: &Device) -> Result<AnyOutput> {
    AnyOutput::new("a custom op", OutputAlloc::<f32>::new(device, 1)?, Shape::from(1))
}

/// The gradient of a link: its value is never read.
fn link_grad(link_tensor: &Tensor) -> Result<Option<Tensor>> {
    Ok(Some(link(link_tensor.device())?.into_tensor()))
}

type BackwardFn = Box<dyn Fn(&[Tensor], &[Tensor], &[Tensor]) -> Result<Vec<Option<Tensor>>> + Send + Sync>;

/// What the parts of a chain share.
struct Op {
    name: &'static str,
    /// Outside of the autograd graph.
    inputs: Vec<Tensor>,
    /// Which inputs are tracked.
    needs_grad: Arc<[bool]>,
    /// Outside of the autograd graph: they do not refer to the op, so no cycle keeps the graph alive.
    outputs: OnceLock<Vec<Tensor>>,
    output_grads: Slots,
    input_grads: Slots,
    backward: BackwardFn,
}

impl Op {
    /// Records up to three inputs and one output without a chain.
    fn alone(self: Arc<Op>, inputs: &[&Tensor], result: AnyOutput) -> Result<Tensor> {
        let name = self.name;
        match *inputs {
            [a] => record1_any(name, a, result, move |_, y, grad| self.gradients(y, grad)),
            [a, b] => record2_any(name, [a, b], result, move |_, y, grad| self.gradients(y, grad)),
            [a, b, c] => record3_any(name, [a, b, c], result, move |_, y, grad| self.gradients(y, grad)),
            _ => Err(bad_argument(name, "inputs", "one to three", inputs.len())),
        }
    }

    fn gradients<const N: usize>(&self, y: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; N]> {
        let gradients = self.run(&[y.detach()], std::slice::from_ref(grad))?;
        <[_; N]>::try_from(gradients).map_err(|found| self.wrong_count(found.len()))
    }

    fn run(&self, outputs: &[Tensor], grads: &[Tensor]) -> Result<Vec<Option<Tensor>>> {
        let gradients = (self.backward)(&self.inputs, outputs, grads)?;
        if gradients.len() == self.inputs.len() { Ok(gradients) } else { Err(self.wrong_count(gradients.len())) }
    }

    fn wrong_count(&self, found: usize) -> Error {
        let expected = format!("{} gradients, one per input,", self.inputs.len());
        bad_argument(self.name, "the result of backward", expected, found)
    }

    /// Records any number of inputs and outputs.
    fn chain(self: Arc<Op>, inputs: &[&Tensor], results: Vec<Output>) -> Result<Vec<Tensor>> {
        let joined = self.join(inputs)?;
        let op = self.clone();
        let hub =
            record1_any(self.name, &joined, link(joined.device())?, move |[joined], _, _| Ok([op.run_chain(joined)?]))?;
        let mut outputs = Vec::with_capacity(results.len());
        for (i, Output(result)) in results.into_iter().enumerate() {
            let op = self.clone();
            outputs.push(record1_any(self.name, &hub, result, move |[hub], _, grad| {
                let pass = Arc::new(());
                op.output_grads.put([(i, grad.clone())], &pass);
                Ok([Some(keep_alive(hub, link(hub.device())?, pass)?)])
            })?);
        }
        let _ = self.outputs.set(outputs.iter().map(Tensor::detach).collect());
        Ok(outputs)
    }

    /// The backward pass of the hub: after that of all outputs in use, before that of the inputs. Returns the gradient
    /// of the link of the inputs.
    fn run_chain(&self, joined: &Tensor) -> Result<Option<Tensor>> {
        let outputs = self.outputs.get().map(Vec::as_slice).unwrap_or_default();
        let grad_of = |(i, y): (usize, &Tensor)| match self.output_grads.take(i) {
            Some(grad) => Ok(grad),
            None => y.zeros_like(),
        };
        let grads = outputs.iter().enumerate().map(grad_of).collect::<Result<Vec<_>>>()?;
        let gradients = self.run(outputs, &grads)?.into_iter().enumerate();
        let needed = gradients.filter_map(|(i, gradient)| Some((i, gradient.filter(|_| self.needs_grad[i])?)));
        let pass = Arc::new(());
        self.input_grads.put(needed, &pass);
        Ok(Some(keep_alive(joined, link(joined.device())?, pass)?))
    }

    /// A link that depends on all inputs.
    fn join(self: &Arc<Op>, inputs: &[&Tensor]) -> Result<Tensor> {
        let mut links = Vec::new();
        for (chunk, group) in inputs.chunks(3).enumerate() {
            let op = self.clone();
            let take = move |i: usize| op.input_grads.take(3 * chunk + i);
            links.push(join_up_to_three(self.name, group, move |_, i| Ok(take(i)))?);
        }
        while links.len() > 1 {
            let groups = links.chunks(3).map(|group| {
                let group: Vec<&Tensor> = group.iter().collect();
                join_up_to_three(self.name, &group, |link, _| link_grad(link))
            });
            links = groups.collect::<Result<_>>()?;
        }
        links.pop().ok_or_else(|| bad_argument(self.name, "inputs", "at least one tensor", "none"))
    }
}

/// A link that depends on one to three tensors; `gradient` returns the gradient of a tensor, given its index.
fn join_up_to_three(
    name: &'static str,
    tensors: &[&Tensor],
    gradient: impl Fn(&Tensor, usize) -> Result<Option<Tensor>> + Send + Sync + 'static,
) -> Result<Tensor> {
    let result = link(tensors[0].device())?;
    match *tensors {
        [a, b, c] => record3_any(name, [a, b, c], result, move |[a, b, c], _, _| {
            Ok([gradient(a, 0)?, gradient(b, 1)?, gradient(c, 2)?])
        }),
        [a, b] => record2_any(name, [a, b], result, move |[a, b], _, _| Ok([gradient(a, 0)?, gradient(b, 1)?])),
        _ => record1_any(name, tensors[0], result, move |[a], _, _| Ok([gradient(a, 0)?])),
    }
}

/// Gradients on their way from one part of a chain to the next, by index, for each thread that runs backward.
#[derive(Default)]
struct Slots(Mutex<HashMap<(ThreadId, usize), Slot>>);

struct Slot {
    gradient: Tensor,
    /// Lives until candle visits the next part, or the backward pass fails.
    pass: Weak<()>,
}

impl Slots {
    /// Adds gradients of the backward pass that `pass` belongs to. Those of earlier passes, which failed, are dropped.
    fn put(&self, gradients: impl IntoIterator<Item = (usize, Tensor)>, pass: &Arc<()>) {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let here = std::thread::current().id();
        slots.retain(|(thread, _), slot| *thread != here || slot.pass.strong_count() > 0);
        slots.extend(
            gradients.into_iter().map(|(i, gradient)| ((here, i), Slot { gradient, pass: Arc::downgrade(pass) })),
        );
    }

    fn take(&self, index: usize) -> Option<Tensor> {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        slots.remove(&(std::thread::current().id(), index)).map(|slot| slot.gradient)
    }
}
