//! What all analyses of values have in common: facts, and the values that they hold of.

/// Facts about a value of the program, ordered by implication: `a ≤ b` where whatever `b` holds of, `a` holds of too.
///
/// Laws, which tests check on random facts and values: [`Lattice::meet`] is commutative, associative and idempotent, and holds
/// of every value that one of its operands holds of. A transfer function gives facts that hold of the op's result for all
/// operands of which the operands' facts hold, and weaker facts for weaker operands.
pub trait Lattice: Clone + PartialEq {
    /// What the facts are about, as the interpreter computes it.
    type Concrete;

    /// The strongest facts that both imply: what is known where control flow joins.
    fn meet(&self, other: &Self) -> Self;

    /// Whether the facts hold of this value (the concretization).
    ///
    /// # Errors
    /// Says which fact does not, and for which element.
    fn check(&self, value: &Self::Concrete) -> Result<(), String>;

    /// Whether `other` implies these facts.
    fn implied_by(&self, other: &Self) -> bool {
        self.meet(other) == *self
    }
}
