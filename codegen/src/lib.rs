//! Part of Tilewright.
