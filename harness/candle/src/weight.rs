//! Parameters of ops, and where their gradients go.
//!
//! An op such as [`linear`](crate::linear()) takes its weights as [`Weight`]. For a candle `Tensor` or `Var`, the gradient
//! goes through the autograd graph to candle's `GradStore`. A caller that keeps gradients in memory of its own, as
//! data-parallel training does, implements [`Weight`] and [`GradSink`]: ops then accumulate the gradient there, and
//! report when each use has.

use std::sync::Arc;

use candle_core::{DType, Error, Result, Tensor, Var};

/// A parameter of an op.
pub trait Weight {
    /// Name for messages, if it has one.
    fn name(&self) -> Option<&str> {
        None
    }

    /// Shape of the value and of the gradient.
    fn dims(&self) -> &[usize];

    /// The value in `dtype`, outside of the autograd graph.
    ///
    /// # Errors
    /// The value is not available in this dtype.
    fn value(&self, dtype: DType) -> Result<Tensor>;

    /// The tensor that the autograd graph has as the input of the op. It is tracked exactly if the weight is trained.
    fn graph_input(&self) -> &Tensor;

    /// Begins one use of the weight by an op that runs forward. `None` if the gradient goes to
    /// [`Weight::graph_input`], and if there is none.
    fn begin_use(&self) -> Option<Arc<dyn GradSink>>;
}

/// Where one use of a [`Weight`] puts its gradient in the backward pass. An op drops it without [`GradSink::finish`] if
/// the op fails, or if no backward pass reaches it.
pub trait GradSink: Send + Sync {
    /// Returns the memory of the gradient, f32 or bf16, and whether to accumulate. If false, the caller overwrites all
    /// of it.
    ///
    /// # Errors
    /// The memory is not available.
    fn grad_to_write(&self) -> Result<(Tensor, bool)>;

    /// Accumulates `gradient`, of the shape of the weight.
    ///
    /// # Errors
    /// As [`GradSink::grad_to_write`].
    fn add_grad(&self, gradient: &Tensor) -> Result<()>;

    /// Reports that the contribution of this use is complete.
    ///
    /// # Errors
    /// Those of the caller's reaction.
    fn finish(&self) -> Result<()>;
}

impl Weight for Tensor {
    fn dims(&self) -> &[usize] {
        Tensor::dims(self)
    }

    fn value(&self, dtype: DType) -> Result<Tensor> {
        if self.dtype() == dtype {
            return Ok(self.detach());
        }
        Err(Error::Msg(format!(
            "expected a weight of the dtype {} of the input, found {}: convert one of them with `cast`, which keeps the \
             gradient",
            dtype.as_str(),
            self.dtype().as_str()
        )))
    }

    fn graph_input(&self) -> &Tensor {
        self
    }

    fn begin_use(&self) -> Option<Arc<dyn GradSink>> {
        None
    }
}

impl Weight for Var {
    fn dims(&self) -> &[usize] {
        Weight::dims(self.as_tensor())
    }

    fn value(&self, dtype: DType) -> Result<Tensor> {
        self.as_tensor().value(dtype)
    }

    fn graph_input(&self) -> &Tensor {
        self
    }

    fn begin_use(&self) -> Option<Arc<dyn GradSink>> {
        None
    }
}

/// What messages call a weight: its name, or its role in the op.
pub(crate) fn label(weight: &dyn Weight, role: &str) -> String {
    weight.name().map_or_else(|| role.to_string(), |name| format!("`{name}`"))
}

/// One use of a weight by an op.
pub(crate) struct WeightUse(Option<Arc<dyn GradSink>>);

impl WeightUse {
    pub fn begin(weight: &impl Weight) -> WeightUse {
        WeightUse(weight.begin_use())
    }

    /// Whether the weight is trained, for its [`Weight::graph_input`].
    pub fn needs_grad(&self, input: &Tensor) -> bool {
        self.0.is_some() || input.track_op()
    }

    /// Adds a gradient to the sink, or returns it as that of `input`, the weight's [`Weight::graph_input`]. Computes
    /// nothing for a weight that is not trained.
    pub fn deliver(&self, input: &Tensor, gradient: impl FnOnce() -> Result<Tensor>) -> Result<Option<Tensor>> {
        match &self.0 {
            Some(sink) => {
                sink.add_grad(&gradient()?)?;
                sink.finish()?;
                Ok(None)
            }
            None if input.track_op() => Ok(Some(gradient()?.to_dtype(input.dtype())?)),
            None => Ok(None),
        }
    }

    /// As [`WeightUse::deliver`], for an op that can write to the memory of the sink itself.
    pub fn deliver_with(
        &self,
        input: &Tensor,
        write: impl FnOnce(&Tensor, bool) -> Result<()>,
        gradient: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Option<Tensor>> {
        match &self.0 {
            Some(sink) => {
                let (memory, accumulate) = sink.grad_to_write()?;
                write(&memory, accumulate)?;
                sink.finish()?;
                Ok(None)
            }
            None => self.deliver(input, gradient),
        }
    }
}
