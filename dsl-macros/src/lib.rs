//! The `#[kernel]` attribute: syntax only.
