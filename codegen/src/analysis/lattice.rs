//! Common interface of the dataflow analyses of values: a semilattice of facts with a concretization.

/// Facts about a value, ordered by implication: `a ≤ b` if every concrete value that satisfies `b` satisfies `a`.
///
/// Laws, which tests check on random facts and values. [`Lattice::meet`] is commutative, associative and idempotent;
/// every concrete value that satisfies one operand satisfies the result. Transfer functions are sound (if concrete
/// operands satisfy their facts, the result satisfies the resulting facts) and monotone (weaker facts of operands give
/// weaker facts of the result).
pub trait Lattice: Clone + PartialEq {
    /// The concrete value that the facts describe, as the interpreter computes it.
    type Concrete;

    /// The strongest facts that both imply: the facts at a control-flow join.
    fn meet(&self, other: &Self) -> Self;

    /// Whether a concrete value satisfies the facts (the concretization).
    ///
    /// # Errors
    /// Names the violated fact and the element.
    fn check(&self, value: &Self::Concrete) -> Result<(), String>;

    /// Whether `other` implies these facts.
    fn implied_by(&self, other: &Self) -> bool {
        self.meet(other) == *self
    }
}
