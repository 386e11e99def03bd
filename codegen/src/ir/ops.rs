//! The op table: every op of Tile IR, once.
//!
//! Each row gives an op its enum variant with its attributes, its mnemonic, how many operands and results it takes, its
//! effects, the first stage in which it is legal, and its meaning. Printer, parser, verifier and documentation read the
//! table; interpreter and lowerings match [`Op`] exhaustively, so that a new row shows up as compile errors in every
//! place that owes it a meaning.

use super::attr::{Attr, AttrValue, Literal, attr_enum};

/// What an op does besides computing its results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Effects {
    /// Nothing: it can be duplicated, moved, merged and dropped.
    Pure,
    /// Reads memory.
    Read,
    /// Writes memory, or reads and writes it.
    Write,
    /// Must stay where it is for another reason (control flow, synchronisation, output).
    Control,
    /// As its regions.
    Regions,
}

/// The stages of the compiler, in order. An op is legal from its own stage on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// What the language records. No layouts.
    Tile,
    /// Every tensor has a layout; views are gone from loop-carried values.
    Laid,
    /// Shared memory, asynchronous copies and products, and barriers are explicit.
    Async,
}

attr_enum! {
    /// Elementwise functions of one operand. The result has the operand's type.
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
    }
}

attr_enum! {
    /// Elementwise functions of two operands of one type, which is also the result's.
    BinaryOp {
        /// Wraps for integers.
        Add = "add",
        Sub = "sub",
        Mul = "mul",
        /// Truncates toward zero for integers. Integer division by zero gives 0, and the same goes for `rem`; the smallest
        /// integer by −1 wraps.
        Div = "div",
        /// The quotient of integers rounded up, ⌈a / b⌉, of which nothing wraps on the way; by zero 0, and the smallest integer by −1
        /// wraps. An op of its own, because analyses bound it exactly, and because which instructions are the shortest depends on
        /// what is known of the operands.
        CeilDiv = "cdiv",
        /// Sign of the dividend, as in C and Rust.
        Rem = "rem",
        /// The smaller operand; of a number and a NaN, the number.
        Min = "min",
        /// The larger operand; of a number and a NaN, the number.
        Max = "max",
        And = "and",
        Or = "or",
        Xor = "xor",
        /// A shift by the width or more gives what shifting bit by bit gives: 0, or, to the right, the sign. A negative amount
        /// counts as one of the width or more.
        Shl = "shl",
        /// Arithmetic for signed integers, logical for unsigned ones.
        Shr = "shr",
        /// High half of the full product of two integers.
        MulHi = "mulhi",
    }
}

attr_enum! {
    /// Elementwise comparisons: two operands of one type, bool result. Floats compare ordered, except `cmp_ne`,
    /// which is true when either side is NaN.
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
    /// What a read beyond the boundary of a view gives.
    Padding {
        Zero = "zero",
        Nan = "nan",
    }
}

attr_enum! {
    /// How long a line should stay in the L2 cache.
    Eviction {
        Normal = "normal",
        First = "evict_first",
        Last = "evict_last",
    }
}

attr_enum! {
    /// How exactly a dot of f32 operands multiplies.
    Precision {
        /// Products and sums in f32.
        Ieee = "ieee",
        /// Operands rounded to TF32 (10 mantissa bits).
        Tf32 = "tf32",
        /// Three TF32 products that together keep f32's accuracy.
        Tf32x3 = "tf32x3",
    }
}

attr_enum! {
    /// Read-modify-write functions.
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

macro_rules! op_table {
    ($(
        $(#[doc = $doc:literal])*
        $variant:ident $({ $($field:ident : $fty:ty),* $(,)? })? =
            $mnemonic:literal ($min:literal .. $max:tt) -> $results:tt, $effects:ident, $stage:ident;
    )*) => {
        /// An op with its attributes. Operands, results and regions live in [`super::OpData`].
        #[derive(Clone, Debug, PartialEq)]
        pub enum Op {
            /// An elementwise function of one operand; the mnemonic is the function's.
            Unary(UnaryOp),
            /// An elementwise function of two operands; the mnemonic is the function's.
            Binary(BinaryOp),
            /// An elementwise comparison; the mnemonic is the comparison's.
            Cmp(CmpOp),
            $( $(#[doc = $doc])* $variant $({ $($field: $fty),* })? ),*
        }

        /// A row of the table, for documentation and `tile-opt --ops`.
        #[derive(Clone, Copy, Debug)]
        pub struct OpInfo {
            pub mnemonic: &'static str,
            pub doc: &'static str,
            pub attributes: &'static [&'static str],
            pub stage: Stage,
        }

        impl Op {
            /// The table's rows, the elementwise families apart.
            pub const TABLE: &'static [OpInfo] = &[$(OpInfo {
                mnemonic: $mnemonic,
                doc: concat!($($doc, "\n"),*),
                attributes: &[$($(stringify!($field)),*)?],
                stage: Stage::$stage,
            }),*];

            /// The word that the text uses for it.
            pub fn mnemonic(&self) -> &'static str {
                match self {
                    Op::Unary(op) => op.name(),
                    Op::Binary(op) => op.name(),
                    Op::Cmp(op) => op.name(),
                    $( Op::$variant $({ $($field: _),* })? => $mnemonic ),*
                }
            }

            /// Attributes in text order; those equal to their default are left out.
            pub fn attributes(&self) -> Vec<(&'static str, Attr)> {
                match self {
                    Op::Unary(_) | Op::Binary(_) | Op::Cmp(_) => Vec::new(),
                    $( Op::$variant $({ $($field),* })? => {
                        #[allow(unused_mut)]
                        let mut list: Vec<(&'static str, Attr)> = Vec::new();
                        $( $(
                            if <$fty as AttrValue>::missing().as_ref() != Some($field) {
                                list.push((stringify!($field), $field.to_attr()));
                            }
                        )* )?
                        list
                    } ),*
                }
            }

            /// The op of that mnemonic. `Err` says which attribute is missing, unknown or malformed.
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

            /// Fewest and most operands; `None` as upper bound means any number.
            pub fn operand_range(&self) -> (usize, Option<usize>) {
                match self {
                    Op::Unary(_) => (1, Some(1)),
                    Op::Binary(_) | Op::Cmp(_) => (2, Some(2)),
                    $( Op::$variant $({ $($field: _),* })? => ($min, op_table!(@bound $max)) ),*
                }
            }

            /// Number of results; `None` means that the regions or operands decide.
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
        None => T::missing().ok_or_else(|| format!("`{mnemonic}` needs the attribute `{name}`: {}", T::expected())),
    }
}

op_table! {
    // Programs and constants.

    /// Coordinate of this program instance in the grid: i32.
    ProgramId { axis: u32 } = "program_id" (0..0) -> 1, Pure, Tile;
    /// Extent of the grid: i32.
    NumPrograms { axis: u32 } = "num_programs" (0..0) -> 1, Pure, Tile;
    /// A number, in every element of the result.
    Constant { value: Literal } = "constant" (0..0) -> 1, Pure, Tile;
    /// `start, start + 1, … end − 1` as an i32 tile of one dimension; `end − start` is a power of two.
    Arange { start: i64, end: i64 } = "arange" (0..0) -> 1, Pure, Tile;

    // Views (block pointers, tensor descriptors) and pointers.

    /// A view of memory. Operands: base pointer, then rank × shape, rank × strides, rank × offsets, all i64, in
    /// elements. `order` lists the dimensions from the fastest-varying in memory to the slowest.
    MakeView { order: Vec<usize> } = "make_view" (4..any) -> 1, Pure, Tile;
    /// The view moved by one i64 offset per dimension.
    Advance = "advance" (2..any) -> 1, Pure, Tile;
    /// Reads the block that a view selects. Elements beyond the shape in a dimension of `boundary` read as
    /// `padding`; reading beyond the shape in another dimension is undefined.
    LoadView { boundary: Vec<usize>, padding: Padding, eviction: Eviction } = "load_view" (1..1) -> 1, Read, Tile;
    /// Writes a tile to the block that a view selects; elements beyond the shape in a dimension of `boundary` are
    /// left out. Operands: view, tile.
    StoreView { boundary: Vec<usize>, eviction: Eviction } = "store_view" (2..2) -> 0, Write, Tile;
    /// `view[i] = op(view[i], value[i])`, each element atomic, elements beyond the shape left out in the dimensions of
    /// `boundary`. Operands: view, tile.
    AtomicView { op: AtomicOp, boundary: Vec<usize> } = "atomic_view" (2..2) -> 0, Write, Tile;
    /// Pointer arithmetic in elements. Operands: pointer(s), integer offset(s) of the same shape.
    PtrAdd = "ptr_add" (2..2) -> 1, Pure, Tile;
    /// Reads through pointers. Operands: pointer(s), then optionally a bool mask, then optionally the value where the
    /// mask is false (zero without it).
    Load { eviction: Eviction } = "load" (1..3) -> 1, Read, Tile;
    /// Writes through pointers. Operands: pointer(s), value(s), optionally a bool mask.
    Store { eviction: Eviction } = "store" (2..3) -> 0, Write, Tile;
    /// Reads, combines and writes each element atomically (relaxed, device scope); gives the old value (zero where
    /// masked). Operands: pointer(s), value(s), optionally a bool mask.
    AtomicRmw { op: AtomicOp } = "atomic_rmw" (2..3) -> 1, Write, Tile;
    /// Compare and swap (acquire-release, device scope); gives the old value. Operands: pointer(s), expected, new.
    AtomicCas = "atomic_cas" (3..3) -> 1, Write, Tile;

    // Shape.

    /// A scalar in every element of a tile.
    Splat = "splat" (1..1) -> 1, Pure, Tile;
    /// Inserts a dimension of extent 1 before `axis`.
    ExpandDims { axis: usize } = "expand_dims" (1..1) -> 1, Pure, Tile;
    /// Repeats along dimensions of extent 1; the result type says how far.
    Broadcast = "broadcast" (1..1) -> 1, Pure, Tile;
    /// `result.shape[i] = operand.shape[perm[i]]`.
    Trans { perm: Vec<usize> } = "trans" (1..1) -> 1, Pure, Tile;
    /// The same elements in row-major order under another shape.
    Reshape = "reshape" (1..1) -> 1, Pure, Tile;
    /// Two tiles of one type side by side in a new last dimension of extent 2.
    Join = "join" (2..2) -> 1, Pure, Tile;
    /// Takes a tile whose last extent is 2 apart.
    Split = "split" (1..1) -> 2, Pure, Tile;

    // Elementwise, besides the families.

    /// a·b + c with one rounding.
    Fma = "fma" (3..3) -> 1, Pure, Tile;
    /// `condition ? a : b`. Operands: bool, a, b.
    Select = "select" (3..3) -> 1, Pure, Tile;
    /// Numeric conversion to the result's element: floats round to nearest even and saturate only where the target
    /// has no infinity, float to integer truncates and saturates, integers wrap, bool is 0 or 1, x → bool is x ≠ 0.
    Cast = "cast" (1..1) -> 1, Pure, Tile;
    /// The same bits under another element of the same width.
    Bitcast = "bitcast" (1..1) -> 1, Pure, Tile;
    /// One inline PTX instruction sequence per `pack` elements. LLVM's constraint syntax.
    InlineAsm { asm: String, constraints: String, pack: usize, pure: bool } = "inline_asm" (0..any) -> any, Control, Tile;

    // Contractions.

    /// `acc + a × b` for a [M, K], b [K, N], acc [M, N]. `precision` applies to f32 operands.
    Dot { precision: Precision } = "dot" (3..3) -> 1, Pure, Tile;
    /// Reduces all operands (of one shape) together along `axis`. Region: 2n scalars (accumulated, then new) → n.
    /// The combination must be associative and commutative.
    Reduce { axis: usize } = "reduce" (1..any) -> any, Pure, Tile;
    /// Inclusive prefix combination of all operands along `axis`. Region: 2n scalars (left, then right) → n. The
    /// combination must be associative.
    Scan { axis: usize, reverse: bool } = "scan" (1..any) -> any, Pure, Tile;

    // Control flow.

    /// Counted loop. Operands: lower bound, upper bound, step (one integer type, step > 0), initial values. Region:
    /// index and carried values → carried values. Results: the carried values after the last iteration.
    For { num_stages: Option<u32>, unroll: Option<u32>, warp_specialize: Option<bool>, overlap: Option<bool> } = "for" (3..any) -> any, Regions, Tile;
    /// Two regions without parameters that yield the results. Operand: scalar bool.
    If = "if" (1..1) -> any, Regions, Tile;
    /// Regions *before* (carried → `condition`) and *after* (what `condition` forwards → carried). Operands: initial values.
    While = "while" (0..any) -> any, Regions, Tile;
    /// Ends a region with its values.
    Yield = "yield" (0..any) -> 0, Control, Tile;
    /// Ends the *before* region of a `while`. Operands: scalar bool, then the values forwarded to *after* or, at the end,
    /// to the results.
    Condition = "condition" (1..any) -> 0, Control, Tile;
    /// Ends the kernel.
    Return = "return" (0..0) -> 0, Control, Tile;

    // Hints and debugging.

    /// The operand, with promises: `contiguous` neighbors along the last dimension follow each other by one, and the first of
    /// each such run is a multiple of `divisible` (for pointers: of that many bytes). Without `contiguous`, runs are as long as
    /// the values make them; along a last dimension of extent 1 every element is a run.
    Hint { divisible: Option<i64>, contiguous: Option<i64> } = "hint" (1..1) -> 1, Pure, Tile;
    /// Promises that a scalar bool is true.
    Assume = "assume" (1..1) -> 0, Control, Tile;
    /// Prints `prefix` and the operands' elements.
    DevicePrint { prefix: String } = "device_print" (0..any) -> 0, Control, Tile;
    /// Stops the kernel with `message` unless every element of the bool operand is true.
    DeviceAssert { message: String } = "device_assert" (1..1) -> 0, Control, Tile;

    // Layouts and shared memory.

    /// The same tile, held by other threads.
    ConvertLayout = "convert_layout" (1..1) -> 1, Pure, Laid;
    /// A buffer in shared memory; with an operand, filled from that tile.
    LocalAlloc = "local_alloc" (0..1) -> 1, Control, Laid;
    /// Reads a shared buffer into registers.
    LocalLoad = "local_load" (1..1) -> 1, Read, Laid;
    /// Writes a tile to a shared buffer. Operands: buffer, tile.
    LocalStore = "local_store" (2..2) -> 0, Write, Laid;
    /// One buffer of a ring. Operands: ring, i32 index.
    LocalSlot = "local_slot" (2..2) -> 1, Pure, Async;
    /// A shared buffer under permuted dimensions; moves nothing.
    LocalTrans { perm: Vec<usize> } = "local_trans" (1..1) -> 1, Pure, Laid;
    /// Starts copying the block that a view selects into a shared buffer (`cp.async`). Operands: view, buffer.
    AsyncCopy { boundary: Vec<usize>, padding: Padding } = "async_copy" (2..3) -> 0, Write, Async;
    /// Closes a group of `async_copy`s.
    AsyncCommit = "async_commit" (0..0) -> 0, Control, Async;
    /// Waits until at most `pending` groups are under way.
    AsyncWait { pending: u32 } = "async_wait" (0..0) -> 0, Control, Async;
    /// `acc + a × b` in f32 by `mma.sync`. Operands: a and b in shared memory or in the layouts of the instruction's
    /// operands, accumulator. `warps` stand along M and N. From `k_end` on along K, a and b are zero, from `n_end` on along N
    /// b is: what is multiplied there need not be.
    MmaSync { precision: Precision, warps: Vec<u32>, k_end: Option<u32>, n_end: Option<u32> } = "mma_sync" (3..3) -> 1, Read, Laid;
    /// `acc + a × b` by multiply-adds, each thread its own elements of the accumulator. Operands: a and b in shared
    /// memory, accumulator.
    FmaDot = "fma_dot" (3..3) -> 1, Read, Laid;
    /// Starts a `wgmma` product. Operands: a (in shared memory, or a tile in the layout of the instruction's operand),
    /// b (in shared memory), accumulator. The result is not to be touched before a `wgmma_wait` that lists it.
    /// `warps` stand along M and N. `late`: the next iteration of its loop is to start it, under its own arithmetic.
    /// `open`: it may stay under way until the next iteration has started its own. (`skew_products` marks both,
    /// `rotate_loops` and `delay_waits` do it.) `k_end` and `n_end` are those of `mma_sync`.
    Wgmma { warps: Vec<u32>, late: Option<bool>, open: Option<bool>, k_end: Option<u32>, n_end: Option<u32> } = "wgmma" (3..3) -> 1, Control, Laid;
    /// Waits until at most `pending` products are under way. Operands are passed through: results of products, and, after
    /// them, what is to be computed before the wait, while they run.
    WgmmaWait { pending: u32 } = "wgmma_wait" (0..any) -> any, Control, Laid;
    /// Orders ordinary writes to shared memory before reads by `wgmma` and TMA.
    FenceAsyncShared = "fence_async_shared" (0..0) -> 0, Control, Async;
    /// `bar.sync`: all threads of the block, or `threads` of them on named barrier `id`.
    BlockBarrier { id: u32, threads: Option<u32> } = "block_barrier" (0..0) -> 0, Control, Async;

    // Bulk copies (TMA), and the barriers in shared memory (mbarriers) that count them.
    //
    // A barrier's life is a row of phases. A phase is complete when as many have arrived as the `mbarrier_alloc` says and
    // as many bytes as were announced have been written; the next one begins at once. Phases are told apart by parity: 0
    // for the first, 1 for the second. A wait for the parity of the phase before the first does not wait. What a thread did
    // before it arrived, and the bytes, are visible to whoever has waited for the phase.

    /// Barriers in shared memory, made ready by one thread: a `block_barrier` stands between this and their first use.
    /// They live until `mbarrier_free`, or the end of the kernel. `arrivals` complete a phase.
    MbarrierAlloc { arrivals: u32 } = "mbarrier_alloc" (0..0) -> 1, Control, Async;
    /// Ends the barriers' life: nobody waits for them any more, and no copy is under way.
    MbarrierFree = "mbarrier_free" (1..1) -> 0, Control, Async;
    /// One thread arrives, and announces that copies will write `bytes`. Operands: barriers, i32 index, optionally a bool
    /// that turns it off.
    MbarrierExpect { bytes: u32 } = "mbarrier_expect" (2..3) -> 0, Control, Async;
    /// Each of the `warps` warps that run this arrives `lanes` times: once for all its threads when they are all there (1), or
    /// each thread for itself (32). Operands: barriers, i32 index, then whatever has to be computed before.
    MbarrierArrive { warps: u32, lanes: u32 } = "mbarrier_arrive" (2..any) -> 0, Control, Async;
    /// Each of the `threads` threads that run this arrives when the `async_copy`s that it has started so far are done.
    /// Operands: barriers, i32 index.
    AsyncArrive { threads: u32 } = "async_arrive" (2..2) -> 0, Control, Async;
    /// Waits until the phase of that parity is complete. Operands: barriers, i32 index, i32 parity, optionally a bool that
    /// turns it off.
    MbarrierWait = "mbarrier_wait" (3..4) -> 0, Control, Async;
    /// Starts copying the block that a view selects into a shared buffer (TMA), started by one thread, its bytes counted by
    /// a barrier. Elements beyond the shape in a dimension of `boundary` become zeros. Operands: view, buffer, barriers,
    /// i32 index, optionally a bool that turns it off.
    TmaLoad { boundary: Vec<usize> } = "tma_load" (4..5) -> 0, Write, Async;
    /// The warpgroups of a role take turns: waits until the one before has passed the turn on. The first to wait is the first
    /// warpgroup.
    TakeTurn = "take_turn" (0..0) -> 0, Control, Async;
    /// Passes the turn on to the next warpgroup of the role, from the last to the first.
    PassTurn = "pass_turn" (0..0) -> 0, Control, Async;
    /// Parts of the block that run side by side: `warps` warps the first region, `producers` further warps, of four that
    /// the block has more, the second. `registers` are what a thread of either has. In the first region
    /// `block_barrier` and the barriers that the compiler places are for its own threads.
    Roles { warps: u32, producers: u32, registers: Vec<u32> } = "roles" (0..0) -> 0, Regions, Async;
}
