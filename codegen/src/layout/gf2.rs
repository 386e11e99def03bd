//! Linear algebra over GF(2): vectors are the bits of a `u64`, addition is XOR.

/// A basis in echelon form: stored vectors have distinct leading bits. Each vector has a `tag`, the set of inserted
/// vectors that sum to it, so that membership in the span comes with a witness.
#[derive(Clone, Default)]
pub(crate) struct Span {
    /// (vector, tag), leading bits strictly descending.
    rows: Vec<(u64, u64)>,
}

impl Span {
    /// The span of `columns`; column `j` has tag `1 << j`. Columns that depend on earlier ones never occur in a
    /// witness, so `solve` returns the numerically smallest preimage: every kernel vector has its highest bit at such a
    /// column.
    pub(crate) fn of_columns(columns: &[u64]) -> Span {
        let mut span = Span::default();
        for (j, &column) in columns.iter().enumerate() {
            span.insert(column, 1 << j);
        }
        span
    }

    /// Adds a vector; returns false if it was in the span.
    pub(crate) fn insert(&mut self, vector: u64, tag: u64) -> bool {
        let (rest, combination) = self.reduce(vector);
        if rest == 0 {
            return false;
        }
        let at = self.rows.partition_point(|&(row, _)| row > rest);
        self.rows.insert(at, (rest, combination ^ tag));
        true
    }

    /// Splits `vector` into a part inside the span (returned as its tag sum) and a canonical remainder. Both
    /// parts are linear functions of `vector`.
    pub(crate) fn reduce(&self, vector: u64) -> (u64, u64) {
        let (mut rest, mut combination) = (vector, 0);
        for &(row, tag) in &self.rows {
            if rest >> row.ilog2() & 1 == 1 {
                rest ^= row;
                combination ^= tag;
            }
        }
        (rest, combination)
    }

    /// The tag sum of the inserted vectors that add up to `vector`, or `None` outside the span.
    pub(crate) fn solve(&self, vector: u64) -> Option<u64> {
        match self.reduce(vector) {
            (0, combination) => Some(combination),
            _ => None,
        }
    }

    pub(crate) fn contains(&self, vector: u64) -> bool {
        self.reduce(vector).0 == 0
    }

    pub(crate) fn rank(&self) -> usize {
        self.rows.len()
    }
}

/// Mask of the columns that depend on earlier columns (the free variables of the map).
pub(crate) fn dependent_columns(columns: &[u64]) -> u64 {
    kernel(columns).iter().fold(0, |mask, step| mask | 1 << step.ilog2())
}

/// A basis of the inputs that the map with these columns sends to zero. The highest bit of each basis vector is a
/// dependent column, each dependent column is the highest bit of one of them, and the other bits are independent
/// columns.
pub(crate) fn kernel(columns: &[u64]) -> Vec<u64> {
    let mut span = Span::default();
    let mut basis = Vec::new();
    for (j, &column) in columns.iter().enumerate() {
        match span.solve(column) {
            Some(earlier) => basis.push(earlier | 1 << j),
            None => {
                span.insert(column, 1 << j);
            }
        }
    }
    basis
}

/// The image of the bits of `input` under the map with these columns.
pub(crate) fn image(columns: &[u64], input: u64) -> u64 {
    columns.iter().enumerate().filter(|&(j, _)| input >> j & 1 == 1).fold(0, |sum, (_, &column)| sum ^ column)
}

/// A basis of the intersection of two spans (Zassenhaus algorithm).
pub(crate) fn intersection(left: &[u64], right: &[u64]) -> Vec<u64> {
    let right_span = Span::of_columns(right);
    let mut remainders = Span::default();
    let mut common = Span::default();
    let mut basis = Vec::new();
    for &vector in left {
        // The tag is the combination of left vectors itself, so a dependency among the remainders yields a vector of
        // `left` that lies in the span of `right`.
        let (rest, inner) = remainders.reduce(right_span.reduce(vector).0);
        if rest != 0 {
            remainders.insert(rest, vector ^ inner);
        } else if common.insert(vector ^ inner, 0) {
            basis.push(vector ^ inner);
        }
    }
    basis
}
