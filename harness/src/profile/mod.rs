//! Where the time of a training step goes.
//!
//! Code that a profile should name opens a [`span`] around it; a step opens a [`phase`] around each of its parts. Both cost
//! one load of an atomic while nobody records.

pub use tilewright::trace::{Phase, Span, phase, span};
