//! The op table: one row per op of Tile IR.
//!
//! A row gives the op's enum variant and attributes, its mnemonic, the number of its operands and results, its effects,
//! the first stage in which it is legal, and its semantics. Printer, parser, verifier and documentation read the table.
//! The interpreter and the lowerings match [`Op`] exhaustively, so that a new row is a compile error wherever its
//! semantics have to be implemented.

use super::attr::{Attr, AttrValue, Literal, attr_enum};

/// Side effects of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effects {
    /// None: the op can be duplicated, moved, merged and eliminated.
    Pure,
    /// Reads memory.
    Read,
    /// Writes memory, or reads and writes it.
    Write,
    /// Must keep its position for another reason (control flow, synchronization, output).
    Control,
    /// The effects of its regions.
    Regions,
}

/// Stages of the GPU pipeline, in order. An op is legal from its own stage on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// As recorded by the language. No layouts.
    Tile,
    /// Every tensor has a layout; loops carry no views.
    Layout,
    /// Ops of loops have placements: the schedule.
    Schedule,
    /// Shared memory, asynchronous copies, asynchronous MMA and barriers are explicit.
    Async,
}

attr_enum! {
    /// Elementwise functions of one operand. The result has the type of the operand.
    UnaryOp {
        /// −x.
        Neg = "neg",
        /// Bitwise (or logical, for bool) complement.
        Not = "not",
        Abs = "abs",
        Exp = "exp",
        Exp2 = "exp2",
        Log = "log",
        Log2 = "log2",
        Sqrt = "sqrt",
        /// 1/√x.
        Rsqrt = "rsqrt",
        Sin = "sin",
        Cos = "cos",
        Tanh = "tanh",
        /// Gauss error function.
        Erf = "erf",
        Floor = "floor",
        Ceil = "ceil",
        /// Rounds toward zero.
        Trunc = "trunc",
        /// Nearest integer, ties to even.
        Rint = "rint",
    }
}

attr_enum! {
    /// Elementwise functions of two operands of one type, which is also the result's type.
    BinaryOp {
        /// Wraps for integers.
        Add = "add",
        Sub = "sub",
        Mul = "mul",
        /// Truncates toward zero for integers. Integer division by zero gives 0, as does its remainder; the smallest
        /// integer divided by −1 wraps.
        Div = "div",
        /// Integer quotient rounded up, ⌈a / b⌉, without intermediate wrapping. Division by zero gives 0; the smallest
        /// integer divided by −1 wraps. A separate op, because analyses bound it exactly and lowerings choose the
        /// instructions by the known ranges of the operands.
        CeilDiv = "cdiv",
        /// Sign of the dividend, as in C and Rust.
        Rem = "rem",
        /// The smaller operand. If one operand is NaN, the other one.
        Min = "min",
        /// The larger operand. If one operand is NaN, the other one.
        Max = "max",
        And = "and",
        Or = "or",
        Xor = "xor",
        /// A shift by the bit width or more equals repeated shifts by one bit: 0, or copies of the sign for a signed
        /// right shift. A negative amount counts as the bit width or more.
        Shl = "shl",
        /// Arithmetic for signed integers, logical for unsigned ones.
        Shr = "shr",
        /// High half of the full product of two integers.
        MulHi = "mulhi",
        /// The product of floats and factors that are mostly 1: warps whose factors are all 1 may skip it. It is never a part of
        /// a fused multiply-add.
        Rescale = "rescale",
    }
}

impl BinaryOp {
    /// The ops that integers have.
    pub fn of_integers() -> impl Iterator<Item = BinaryOp> {
        BinaryOp::ALL.iter().copied().filter(|&op| op != BinaryOp::Rescale)
    }
}

attr_enum! {
    /// Elementwise comparisons of two operands of one type; bool result. Floats compare ordered, except `cmp_ne`, which
    /// is true if an operand is NaN.
    CmpOp {
        Eq = "cmp_eq",
        Ne = "cmp_ne",
        Lt = "cmp_lt",
        Le = "cmp_le",
        Gt = "cmp_gt",
        Ge = "cmp_ge",
    }
}

attr_enum! {
    /// Value of elements that are read beyond the boundary of a view.
    Padding {
        Zero = "zero",
        Nan = "nan",
    }
}

attr_enum! {
    /// How an access uses the caches: an eviction priority in L1 and L2, or a cache operator of PTX's `ld` and `st`, of
    /// which an access has one at most.
    Eviction {
        Normal = "normal",
        First = "evict_first",
        Last = "evict_last",
        /// Loads: in all levels.
        Ca = "ca",
        /// In L2 only.
        Cg = "cg",
        /// Streaming: probably accessed once.
        Cs = "cs",
        /// Loads: again from memory.
        Cv = "cv",
        /// Stores: write-back in all levels.
        Wb = "wb",
        /// Stores: write-through.
        Wt = "wt",
    }
}

attr_enum! {
    /// Precision of a dot with f32 operands.
    Precision {
        /// Multiplications and sums in f32.
        Ieee = "ieee",
        /// Operands rounded to TF32 (10 mantissa bits).
        Tf32 = "tf32",
        /// 3xTF32: three TF32 multiplications, which together keep the accuracy of f32.
        Tf32x3 = "tf32x3",
    }
}

attr_enum! {
    /// Functions of atomic read-modify-writes.
    AtomicOp {
        Add = "add",
        Min = "min",
        Max = "max",
        And = "and",
        Or = "or",
        Xor = "xor",
        Xchg = "xchg",
    }
}

attr_enum! {
    /// Memory order of an atomic.
    MemSem {
        /// Orders nothing but the atomic's own element.
        Relaxed = "relaxed",
        /// Later accesses of the program see what was released at this element.
        Acquire = "acquire",
        /// Publishes the earlier writes of the program at this element.
        Release = "release",
        AcqRel = "acq_rel",
    }
}

impl MemSem {
    pub fn acquires(self) -> bool {
        matches!(self, MemSem::Acquire | MemSem::AcqRel)
    }

    pub fn releases(self) -> bool {
        matches!(self, MemSem::Release | MemSem::AcqRel)
    }
}

attr_enum! {
    /// The threads for which an atomic is atomic and ordered.
    MemScope {
        /// Those of this program.
        Cta = "cta",
        /// Those of this device.
        Gpu = "gpu",
        /// Those of all devices and of the host.
        Sys = "sys",
    }
}

macro_rules! op_table {
    ($(
        $(#[doc = $doc:literal])*
        $variant:ident $({ $($field:ident : $fty:ty),* $(,)? })? =
            $mnemonic:literal ($min:literal .. $max:tt) -> $results:tt, $effects:ident, $stage:ident;
    )*) => {
        /// An op with its attributes. Operands, results and regions live in [`super::OpData`].
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        pub enum Op {
            /// Elementwise function of one operand; the mnemonic is the function's.
            Unary(UnaryOp),
            /// Elementwise function of two operands; the mnemonic is the function's.
            Binary(BinaryOp),
            /// Elementwise comparison; the mnemonic is the comparison's.
            Cmp(CmpOp),
            $( $(#[doc = $doc])* $variant $({ $($field: $fty),* })? ),*
        }

        /// A row of the op table, for documentation and `tile-opt --ops`.
        #[derive(Clone, Copy, Debug)]
        pub struct OpInfo {
            pub mnemonic: &'static str,
            pub doc: &'static str,
            pub attributes: &'static [&'static str],
            pub stage: Stage,
        }

        impl Op {
            /// Rows of the op table, without the elementwise families.
            pub const TABLE: &'static [OpInfo] = &[$(OpInfo {
                mnemonic: $mnemonic,
                doc: concat!($($doc, "\n"),*),
                attributes: &[$($(stringify!($field)),*)?],
                stage: Stage::$stage,
            }),*];

            /// The op's name in the text.
            pub fn mnemonic(&self) -> &'static str {
                match self {
                    Op::Unary(op) => op.name(),
                    Op::Binary(op) => op.name(),
                    Op::Cmp(op) => op.name(),
                    $( Op::$variant $({ $($field: _),* })? => $mnemonic ),*
                }
            }

            /// Attributes in text order, without those that equal their default.
            pub fn attributes(&self) -> Vec<(&'static str, Attr)> {
                match self {
                    Op::Unary(_) | Op::Binary(_) | Op::Cmp(_) => Vec::new(),
                    $( Op::$variant $({ $($field),* })? => {
                        #[allow(unused_mut)]
                        let mut list: Vec<(&'static str, Attr)> = Vec::new();
                        $( $(
                            if <$fty as AttrValue>::default_value().as_ref() != Some($field) {
                                list.push((stringify!($field), $field.to_attr()));
                            }
                        )* )?
                        list
                    } ),*
                }
            }

            /// The op with this mnemonic. The error names the attribute that is missing, unknown or malformed.
            pub fn from_parts(mnemonic: &str, attributes: &[(String, Attr)]) -> Result<Op, String> {
                let allowed: &[&str] = Op::TABLE.iter().find(|i| i.mnemonic == mnemonic).map_or(&[], |i| i.attributes);
                if let Some((name, _)) = attributes.iter().find(|(name, _)| !allowed.contains(&name.as_str())) {
                    return Err(format!("`{mnemonic}` has no attribute `{name}`"));
                }
                if let Some(op) = UnaryOp::from_name(mnemonic) {
                    return Ok(Op::Unary(op));
                }
                if let Some(op) = BinaryOp::from_name(mnemonic) {
                    return Ok(Op::Binary(op));
                }
                if let Some(op) = CmpOp::from_name(mnemonic) {
                    return Ok(Op::Cmp(op));
                }
                match mnemonic {
                    $( $mnemonic => Ok(Op::$variant $({
                        $($field: read_attribute::<$fty>(mnemonic, stringify!($field), attributes)?),*
                    })?), )*
                    other => Err(format!("unknown op `{other}`")),
                }
            }

            /// Minimum and maximum number of operands; `None` means no maximum.
            pub fn operand_range(&self) -> (usize, Option<usize>) {
                match self {
                    Op::Unary(_) => (1, Some(1)),
                    Op::Binary(_) | Op::Cmp(_) => (2, Some(2)),
                    $( Op::$variant $({ $($field: _),* })? => ($min, op_table!(@bound $max)) ),*
                }
            }

            /// Number of results; `None` means that regions or operands determine it.
            pub fn result_count(&self) -> Option<usize> {
                match self {
                    Op::Unary(_) | Op::Binary(_) | Op::Cmp(_) => Some(1),
                    $( Op::$variant $({ $($field: _),* })? => op_table!(@bound $results) ),*
                }
            }

            pub fn effects(&self) -> Effects {
                match self {
                    Op::Unary(_) | Op::Binary(_) | Op::Cmp(_) => Effects::Pure,
                    $( Op::$variant $({ $($field: _),* })? => Effects::$effects ),*
                }
            }

            /// First stage in which the op may appear.
            pub fn stage(&self) -> Stage {
                match self {
                    Op::Unary(_) | Op::Binary(_) | Op::Cmp(_) => Stage::Tile,
                    $( Op::$variant $({ $($field: _),* })? => Stage::$stage ),*
                }
            }
        }
    };
    (@bound any) => { None };
    (@bound $n:literal) => { Some($n) };
}

fn read_attribute<T: AttrValue>(mnemonic: &str, name: &str, attributes: &[(String, Attr)]) -> Result<T, String> {
    match attributes.iter().find(|(n, _)| n == name) {
        Some((_, attr)) => T::from_attr(attr)
            .ok_or_else(|| format!("`{mnemonic}`: `{name}` should be {}, found `{attr}`", T::expected())),
        None => {
            T::default_value().ok_or_else(|| format!("`{mnemonic}` needs the attribute `{name}`: {}", T::expected()))
        }
    }
}

op_table! {
    // Programs and constants.

    /// Coordinate of this program in the grid: i32.
    ProgramId { axis: u32 } = "program_id" (0..0) -> 1, Pure, Tile;
    /// Extent of the grid: i32.
    NumPrograms { axis: u32 } = "num_programs" (0..0) -> 1, Pure, Tile;
    /// Rank of this CTA in its cluster: i32. The `ctas` CTAs of a cluster share one program: each runs it for its part of the
    /// tiles (`split_ctas`). All of a function's have the same `ctas`.
    CtaRank { ctas: u32 } = "cta_rank" (0..0) -> 1, Pure, Tile;
    /// A number in every element of the result.
    Constant { value: Literal } = "constant" (0..0) -> 1, Pure, Tile;
    /// `start, start + 1, … end − 1` as a one-dimensional i32 tile.
    Arange { start: i64, end: i64 } = "arange" (0..0) -> 1, Pure, Tile;

    // Views (block pointers, tensor descriptors) and pointers.

    /// A view of memory. Operands: base pointer, then rank × shape, rank × strides, rank × offsets, all i64, in
    /// elements. `order` lists the dimensions from the fastest-varying in memory to the slowest.
    MakeView { order: Vec<usize> } = "make_view" (4..any) -> 1, Pure, Tile;
    /// The view moved by one i64 offset per dimension, in elements.
    Advance = "advance" (2..any) -> 1, Pure, Tile;
    /// Reads the block that a view selects. Elements beyond the shape in a dimension of `boundary` read as `padding`;
    /// reading beyond the shape in another dimension is undefined.
    LoadView { boundary: Vec<usize>, padding: Padding, eviction: Eviction } = "load_view" (1..1) -> 1, Read, Tile;
    /// Writes a tile to the block that a view selects. Elements beyond the shape in a dimension of `boundary` are not
    /// written. Operands: view, tile.
    StoreView { boundary: Vec<usize>, eviction: Eviction } = "store_view" (2..2) -> 0, Write, Tile;
    /// `view[i] = op(view[i], value[i])`, atomic per element. Elements beyond the shape in a dimension of `boundary`
    /// are not updated. Operands: view, tile.
    AtomicView { op: AtomicOp, boundary: Vec<usize> } = "atomic_view" (2..2) -> 0, Write, Tile;
    /// Pointer arithmetic in elements. Operands: pointer(s), integer offset(s) of the same shape.
    PtrAdd = "ptr_add" (2..2) -> 1, Pure, Tile;
    /// Reads through pointers. Operands: pointer(s), optionally a bool mask, optionally the value for elements whose
    /// mask is false (default zero).
    Load { eviction: Eviction } = "load" (1..3) -> 1, Read, Tile;
    /// Writes through pointers. Operands: pointer(s), value(s), optionally a bool mask.
    Store { eviction: Eviction } = "store" (2..3) -> 0, Write, Tile;
    /// Atomic read-modify-write per element. Returns the old value (zero where masked off). Operands: pointer(s),
    /// value(s), optionally a bool mask. By default relaxed, device scope.
    AtomicRmw { op: AtomicOp, sem: Option<MemSem>, scope: Option<MemScope> } = "atomic_rmw" (2..3) -> 1, Write, Tile;
    /// Compare and swap. Returns the old value (zero where masked off). Operands: pointer(s), expected, new, optionally
    /// a bool mask. By default acquire-release, device scope.
    AtomicCas { sem: Option<MemSem>, scope: Option<MemScope> } = "atomic_cas" (3..4) -> 1, Write, Tile;
    /// Waits until the counter has a value. Accesses of the program after it see what another program wrote before it set that value
    /// by an `atomic_rmw` that releases. Operands: pointer to an i32, value.
    SemaphoreWait = "semaphore_wait" (2..2) -> 0, Write, Tile;

    // Shape.

    /// Repeats a scalar to every element of a tile.
    Splat = "splat" (1..1) -> 1, Pure, Tile;
    /// Inserts a dimension of extent 1 before `axis`.
    ExpandDims { axis: usize } = "expand_dims" (1..1) -> 1, Pure, Tile;
    /// Repeats along dimensions of extent 1 to the shape of the result type.
    Broadcast = "broadcast" (1..1) -> 1, Pure, Tile;
    /// `result.shape[i] = operand.shape[perm[i]]`.
    Trans { perm: Vec<usize> } = "trans" (1..1) -> 1, Pure, Tile;
    /// The same elements in row-major order under another shape. Only shapes that [`super::parts::reshapes`] accepts.
    Reshape = "reshape" (1..1) -> 1, Pure, Tile;
    /// Joins two tiles of one type along a new last dimension of extent 2.
    Join = "join" (2..2) -> 1, Pure, Tile;
    /// Splits a tile along its last dimension, of extent 2.
    Split = "split" (1..1) -> 2, Pure, Tile;

    /// Picks elements along `axis`: `result[i, j, k] = operand[i, index[i, j, k], k]` for axis 1 of 3. Operands: a tile,
    /// and i32 indices, whose shape is the result's and differs only in the extent of `axis`. An index counts modulo
    /// the extent of the operand.
    Gather { axis: usize } = "gather" (2..2) -> 1, Pure, Tile;

    // Elementwise ops outside the families.

    /// a·b + c with one rounding.
    Fma = "fma" (3..3) -> 1, Pure, Tile;
    /// `condition ? a : b`. Operands: bool, a, b.
    Select = "select" (3..3) -> 1, Pure, Tile;
    /// Numeric conversion to the element type of the result. Floats round to nearest even; only 8-bit floats saturate.
    /// Float to integer truncates and saturates, integers wrap, bool gives 0 or 1, and conversion to bool tests x ≠ 0.
    Cast = "cast" (1..1) -> 1, Pure, Tile;
    /// Reinterprets the bits as another element type of the same width.
    Bitcast = "bitcast" (1..1) -> 1, Pure, Tile;
    /// Inline PTX, one instruction sequence per `pack` elements, with LLVM's constraint syntax.
    InlineAsm { asm: String, constraints: String, pack: usize, pure: bool } = "inline_asm" (0..any) -> any, Control, Tile;

    // Contractions.

    /// `acc + a × b` for a [M, K], b [K, N], acc [M, N]. `precision` applies to f32 operands. `max_imprecise` applies to
    /// 8-bit floats: the maximum number of products that tensor cores may sum before the sum is added in f32.
    Dot { precision: Precision, max_imprecise: Option<u32> } = "dot" (3..3) -> 1, Pure, Tile;
    /// Reduces all operands (of one shape) together along `axis`. Region: 2n scalars (accumulated, then new) → n
    /// scalars. The combine function must be associative and commutative.
    Reduce { axis: usize } = "reduce" (1..any) -> any, Pure, Tile;
    /// Inclusive scan of all operands along `axis`. Region: 2n scalars (left, then right) → n scalars. The combine
    /// function must be associative.
    Scan { axis: usize, reverse: bool } = "scan" (1..any) -> any, Pure, Tile;

    // Control flow.

    /// Counted loop. Operands: lower bound, upper bound, step (one integer type, step > 0), initial values. Region:
    /// index and carried values → carried values. Results: the carried values after the last iteration.
    For { num_stages: Option<u32>, unroll: Option<u32>, warp_specialize: Option<bool>, overlap: Option<bool>, split: Option<bool>, replicas: Option<u32> } = "for" (3..any) -> any, Regions, Tile;
    /// Two regions without parameters, which yield the results. Operand: scalar bool.
    If = "if" (1..1) -> any, Regions, Tile;
    /// Regions *before* (carried → `condition`) and *after* (values forwarded by `condition` → carried). Operands:
    /// initial values.
    While = "while" (0..any) -> any, Regions, Tile;
    /// The iteration that a program runs in place of iteration `index` of a loop `range(start, end, step)`: with warp
    /// specialization the next one that no program has taken, which a counter in memory tells, else this one. All programs
    /// together run each iteration once. Operands: pointer
    /// to the counter (i32, 0 before and after a launch), i32 index, step and end.
    DynamicIndex = "dynamic_index" (4..4) -> 1, Write, Tile;
    /// Ends a region and gives its values.
    Yield = "yield" (0..any) -> 0, Control, Tile;
    /// Ends the *before* region of a `while`. Operands: scalar bool, then the values for *after* or, when the loop
    /// ends, for the results.
    Condition = "condition" (1..any) -> 0, Control, Tile;
    /// Ends the kernel.
    Return = "return" (0..0) -> 0, Control, Tile;

    // Hints and debugging.

    /// The operand with facts that a launch checks. Stated by the user: groups of `contiguous` neighbors along the last
    /// dimension increase by one, and the first of each such run is a multiple of `divisible` (for pointers: of that
    /// many bytes). Without `contiguous`, runs are those of the actual values; along a last dimension of extent 1 each
    /// element is a run. Stated by the compiler (`assume_ranges`): no element is below `at_least`.
    Hint { divisible: Option<i64>, contiguous: Option<i64>, at_least: Option<i64> } = "hint" (1..1) -> 1, Pure, Tile;
    /// States that a scalar bool is true.
    Assume = "assume" (1..1) -> 0, Control, Tile;
    /// Prints `prefix` and the operands' elements.
    DevicePrint { prefix: String } = "device_print" (0..any) -> 0, Control, Tile;
    /// Stops the kernel with `message` if an element of the bool operand is false.
    DeviceAssert { message: String } = "device_assert" (1..1) -> 0, Control, Tile;

    // Layouts and shared memory.

    /// Converts a tile to another layout: moves elements between threads.
    ConvertLayout = "convert_layout" (1..1) -> 1, Pure, Layout;
    /// Allocates a buffer in shared memory; with an operand, filled from that tile.
    LocalAlloc = "local_alloc" (0..1) -> 1, Control, Layout;
    /// Loads a shared buffer into registers.
    LocalLoad = "local_load" (1..1) -> 1, Read, Layout;
    /// Stores a tile to a shared buffer. Operands: buffer, tile.
    LocalStore = "local_store" (2..2) -> 0, Write, Layout;
    /// One buffer of a ring buffer. Operands: ring, i32 index.
    LocalSlot = "local_slot" (2..2) -> 1, Pure, Async;
    /// A shared buffer with permuted dimensions; moves no data.
    LocalTrans { perm: Vec<usize> } = "local_trans" (1..1) -> 1, Pure, Layout;
    /// Starts the asynchronous copy of a view's block to a shared buffer (`cp.async`). Operands: view, buffer,
    /// optionally a bool predicate.
    AsyncCopy { boundary: Vec<usize>, padding: Padding } = "async_copy" (2..3) -> 0, Write, Async;
    /// Starts the asynchronous copy of the elements that a tile of pointers selects to a shared buffer (`cp.async`).
    /// Operands: pointers, buffer, bool predicate, optionally a bool mask; elements whose mask is false become zero. One
    /// copy covers `vector` elements, which are consecutive in global memory and in the buffer, and share their mask.
    AsyncLoad { vector: usize } = "async_load" (3..4) -> 0, Write, Async;
    /// Closes a group of `async_copy` and `async_load` (`cp.async.commit_group`).
    AsyncCommit = "async_commit" (0..0) -> 0, Control, Async;
    /// Waits until at most `pending` groups are in flight (`cp.async.wait_group`).
    AsyncWait { pending: u32 } = "async_wait" (0..0) -> 0, Control, Async;
    /// `acc + a × b` in f32 by `mma.sync`. Operands: a and b in shared memory or in the operand layouts of the
    /// instruction, accumulator. `warps` counts the warps along M and N. a and b are zero from `k_end` on along K, and
    /// b from `n_end` on along N: the lowering may omit these parts.
    MmaSync { precision: Precision, warps: Vec<u32>, k_end: Option<u32>, n_end: Option<u32> } = "mma_sync" (3..3) -> 1, Read, Layout;
    /// `acc + a × b` by FMA; each thread computes its own elements of the accumulator. Operands: a and b in shared
    /// memory, accumulator.
    FmaDot = "fma_dot" (3..3) -> 1, Read, Layout;
    /// Issues an asynchronous `wgmma`. Operands: a (in shared memory, or in registers in the operand layout of the
    /// instruction), b (in shared memory), accumulator. The result must not be used before a `wgmma_wait` that lists
    /// it. `warps` counts the warps along M and N. `k_end` and `n_end` as in `mma_sync`.
    Wgmma { warps: Vec<u32>, k_end: Option<u32>, n_end: Option<u32> } = "wgmma" (3..3) -> 1, Control, Layout;
    /// Waits until at most `pending` asynchronous MMAs are in flight. Operands, results of MMAs, are passed through.
    WgmmaWait { pending: u32 } = "wgmma_wait" (0..any) -> any, Control, Layout;
    /// Orders accesses of shared memory by threads before those by `wgmma` and TMA (the async proxy): writes before reads, and
    /// reads before copies over them.
    FenceAsyncShared = "fence_async_shared" (0..0) -> 0, Control, Async;
    /// `bar.sync` of all threads of the block, or of `threads` threads on named barrier `id`.
    BlockBarrier { id: u32, threads: Option<u32> } = "block_barrier" (0..0) -> 0, Control, Async;
    /// Barrier of all threads of all CTAs of the cluster (`barrier.cluster`).
    ClusterBarrier = "cluster_barrier" (0..0) -> 0, Control, Async;

    /// Stores a tile to a view's block by TMA, or adds it (`op`, of f32): each warp brings its boxes
    /// ([`crate::analysis::warp_box`]) to shared memory one after the other, and starts their copies. Elements beyond
    /// the shape in a dimension of `boundary` are not written. The elements are written as late as the end of the
    /// kernel, so no other op accesses this memory, but for stores of other parts of the same tile, or other
    /// additions. Operands: view, tile.
    TmaStore { boundary: Vec<usize>, op: Option<AtomicOp> } = "tma_store" (2..2) -> 0, Write, Layout;
    /// Brings the block that a view selects into the L2 cache, by TMA, without waiting for it. Memory does not change.
    /// Elements beyond the shape in a dimension of `boundary` are left out. Operands: view, optionally a predicate.
    PrefetchView { boundary: Vec<usize> } = "prefetch_view" (1..2) -> 0, Control, Async;

    // TMA copies, and the mbarriers in shared memory that track their completion.
    //
    // An mbarrier goes through a sequence of phases. A phase completes when the number of arrivals given by
    // `mbarrier_alloc` has been reached and all expected bytes have been written; then the next phase begins. Waits
    // name a phase by its parity: 0 for the first phase, 1 for the second. A wait for the parity of the phase before
    // the first returns immediately. Memory accesses of a thread before its arrival, and the copied bytes, are visible
    // to threads that have waited for the phase.

    /// Mbarriers in shared memory, initialized by one thread; a `block_barrier` separates this from their first use.
    /// They live until `mbarrier_free` or the end of the kernel. `arrivals` arrivals complete a phase.
    MbarrierAlloc { arrivals: u32 } = "mbarrier_alloc" (0..0) -> 1, Control, Async;
    /// Invalidates mbarriers. No thread waits for them afterwards, and no copy that they track is in flight.
    MbarrierFree = "mbarrier_free" (1..1) -> 0, Control, Async;
    /// Arrival of one thread that also expects `bytes` bytes from copies. Operands: mbarriers, i32 index, optionally a
    /// bool predicate.
    MbarrierExpect { bytes: u32 } = "mbarrier_expect" (2..3) -> 0, Control, Async;
    /// Each of the `warps` warps that execute this arrives `lanes` times: once per warp after its threads have
    /// converged (1), or once per thread (32). With `ctas`, at the mbarriers of each of the `ctas` CTAs of the cluster, which
    /// arrive here too. Operands: mbarriers, i32 index, then values to compute before the arrival.
    MbarrierArrive { warps: u32, lanes: u32, ctas: Option<u32> } = "mbarrier_arrive" (2..any) -> 0, Control, Async;
    /// Each of the `threads` threads that execute this arrives when its `async_copy` and `async_load` so far have completed
    /// (`cp.async.mbarrier.arrive`). Operands: mbarriers, i32 index.
    AsyncArrive { threads: u32 } = "async_arrive" (2..2) -> 0, Control, Async;
    /// Waits until the phase of that parity is complete. Operands: mbarriers, i32 index, i32 parity, optionally a bool
    /// predicate.
    MbarrierWait = "mbarrier_wait" (3..4) -> 0, Control, Async;
    /// The producer takes the iteration of a loop that follows `index`, as `dynamic_index` describes: one thread counts it,
    /// stores its index in shared memory, or `end` where none is left, and arrives. The last take resets the counter.
    /// Operands: counter, i32 index, step and end, buffer of one i32, mbarriers, i32 index of the mbarrier.
    TakeIndex = "take_index" (7..7) -> 0, Write, Async;
    /// The index that a `take_index` has stored in a buffer: i32.
    TakenIndex = "taken_index" (1..1) -> 1, Read, Async;
    /// Starts a TMA copy of a view's block to a shared buffer, issued by one thread and tracked by an mbarrier.
    /// Elements beyond the shape in a dimension of `boundary` become zeros. With `ctas`, the `ctas` CTAs of the cluster load
    /// the same block: each copies a part to the buffers of all (multicast), and completes it at the mbarriers of all.
    /// Operands: view, buffer, mbarriers, i32 index, optionally a bool predicate.
    TmaLoad { boundary: Vec<usize>, ctas: Option<u32> } = "tma_load" (4..5) -> 0, Write, Async;
    /// Ping-pong scheduling: waits until the previous consumer warpgroup has arrived. The first warpgroup is the first
    /// to proceed. With operands, programs that share the block take turns: waits until the previous program has arrived.
    /// Operands, five for each pair of mbarriers that track a ring: full mbarriers, empty mbarriers, i32 slot, i32
    /// parity, i64 count. The other programs have then used `count` buffers of the ring, from this slot and parity on.
    PingpongWait = "pingpong_wait" (0..any) -> 0, Control, Async;
    /// Ping-pong scheduling: lets the next consumer warpgroup, or the next program, proceed; the last one is followed
    /// by the first.
    PingpongArrive = "pingpong_arrive" (0..0) -> 0, Control, Async;
    /// Warp specialization: partitions of the block that run concurrently. `warps` warps run the first region (the
    /// consumers), or `warps` warps for each of `replicas` programs, which share the second region: consecutive ones
    /// on axis 0 or, if they take turns, those as many apart as there are blocks. The block has four more warps, of which
    /// `producers` run the second region. `registers` gives the registers per thread of either partition. In the first
    /// region, `block_barrier` and the barriers that the compiler inserts synchronize its own threads only, those of one
    /// program. In the second region, `program_id` is that of the first program.
    WarpSpecialize { warps: u32, producers: u32, registers: Vec<u32>, replicas: Option<u32> } = "warp_specialize" (0..0) -> 0, Regions, Async;
}
