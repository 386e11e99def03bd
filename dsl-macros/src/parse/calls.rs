//! The functions of the language that take named arguments, with their parameters.

use syn::{Expr, Ident};

/// The kind of a parameter; decides how an argument is expanded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Unchanged.
    Plain,
    /// A tile, scalar or number: literals take the type of the other operand.
    Operand,
    /// A list of positions or strides: integer types may be mixed.
    Indices,
    /// A shape.
    Extents,
    /// A list of dimensions.
    Dims,
    /// One dimension.
    Axis,
    /// A number of elements, as a type.
    Pack,
    /// A closure of two elements, or the name of a function.
    Combine,
    /// A closure or the name of a function, unchanged.
    Function,
    /// One of a set of keywords.
    Word(&'static EnumWords),
    /// All remaining arguments, as a tuple.
    Rest,
}

/// Keywords that stand for the variants of an enum.
#[derive(Debug, PartialEq, Eq)]
pub struct EnumWords {
    /// Name of the enum in the language module.
    pub enum_name: &'static str,
    pub words: &'static [(&'static str, &'static str)],
}

static PADDING: EnumWords = EnumWords { enum_name: "Padding", words: &[("zero", "Zero"), ("nan", "Nan")] };
static EVICTION: EnumWords = EnumWords {
    enum_name: "Eviction",
    words: &[("normal", "Normal"), ("evict_normal", "Normal"), ("evict_first", "First"), ("evict_last", "Last")],
};
static CACHE: EnumWords = EnumWords {
    enum_name: "Eviction",
    words: &[("normal", "Normal"), ("ca", "Ca"), ("cg", "Cg"), ("cs", "Cs"), ("cv", "Cv"), ("wb", "Wb"), ("wt", "Wt")],
};
static SEM: EnumWords = EnumWords {
    enum_name: "MemSem",
    words: &[("relaxed", "Relaxed"), ("acquire", "Acquire"), ("release", "Release"), ("acq_rel", "AcqRel")],
};
/// As [`SEM`], with another default.
static CAS_SEM: EnumWords = EnumWords {
    enum_name: "MemSem",
    words: &[("acq_rel", "AcqRel"), ("relaxed", "Relaxed"), ("acquire", "Acquire"), ("release", "Release")],
};
static SCOPE: EnumWords = EnumWords { enum_name: "MemScope", words: &[("gpu", "Gpu"), ("cta", "Cta"), ("sys", "Sys")] };
pub static PRECISION: EnumWords =
    EnumWords { enum_name: "Precision", words: &[("ieee", "Ieee"), ("tf32", "Tf32"), ("tf32x3", "Tf32x3")] };
static DOT_FORMAT: EnumWords = EnumWords {
    enum_name: "DotFormat",
    words: &[("e2m1", "E2m1"), ("e4m3", "E4m3"), ("e5m2", "E5m2"), ("bf16", "Bf16"), ("fp16", "Fp16")],
};

/// A parameter of a function.
#[derive(Debug)]
pub struct Param {
    pub name: &'static str,
    pub kind: Kind,
    /// The default of an optional argument, in the language module; `None` makes the argument mandatory.
    pub default: Option<DefaultArg>,
}

/// Defaults of optional arguments.
#[derive(Clone, Copy, Debug)]
pub enum DefaultArg {
    Unset,
    NoDims,
    False,
    True,
    One,
    /// Zero, as an index.
    Start,
    /// Rounds of the random number generator.
    Ten,
    Zero,
    /// The last axis.
    Last,
    Text,
    /// One element.
    Pack,
    Word(&'static EnumWords),
}

/// A function.
#[derive(Debug)]
pub struct Function {
    pub name: &'static str,
    pub params: &'static [Param],
}

macro_rules! functions {
    ($($name:ident($($param:ident : $kind:tt $(($($kind_arg:tt)*))? $(= $default:ident $(($($arg:tt)*))?)?),*);)*) => {
        /// All functions of the language whose arguments the macro expands.
        pub static FUNCTIONS: &[Function] = &[$(Function {
            name: stringify!($name),
            params: &[$(Param {
                name: stringify!($param),
                kind: Kind::$kind $(($($kind_arg)*))?,
                default: functions!(@default $($default $(($($arg)*))?)?),
            }),*],
        }),*];
    };
    (@default) => { None };
    (@default $default:ident $(($($arg:tt)*))?) => { Some(DefaultArg::$default $(($($arg)*))?) };
}

functions! {
    program_id(axis: Plain);
    num_programs(axis: Plain);
    make_block_ptr(base: Plain, shape: Indices, strides: Indices, offsets: Indices, block_shape: Extents,
        order: Dims = NoDims);
    make_tensor_descriptor(base: Plain, shape: Indices, strides: Indices, block_shape: Extents);
    load_tensor_descriptor(descriptor: Plain, offsets: Indices);
    store_tensor_descriptor(descriptor: Plain, offsets: Indices, value: Operand);
    advance(base: Plain, offsets: Indices);
    load(pointer: Plain, mask: Plain = Unset, other: Operand = Unset, boundary_check: Dims = NoDims,
        padding: Word(&PADDING) = Word(&PADDING), eviction: Word(&EVICTION) = Word(&EVICTION),
        cache_modifier: Word(&CACHE) = Word(&CACHE));
    store(pointer: Plain, value: Operand, mask: Plain = Unset, boundary_check: Dims = NoDims,
        eviction: Word(&EVICTION) = Word(&EVICTION), cache_modifier: Word(&CACHE) = Word(&CACHE));
    atomic_add(pointer: Plain, value: Operand, mask: Plain = Unset, boundary_check: Dims = NoDims,
        sem: Word(&SEM) = Word(&SEM), scope: Word(&SCOPE) = Word(&SCOPE));
    atomic_max(pointer: Plain, value: Operand, mask: Plain = Unset, boundary_check: Dims = NoDims,
        sem: Word(&SEM) = Word(&SEM), scope: Word(&SCOPE) = Word(&SCOPE));
    atomic_min(pointer: Plain, value: Operand, mask: Plain = Unset, boundary_check: Dims = NoDims,
        sem: Word(&SEM) = Word(&SEM), scope: Word(&SCOPE) = Word(&SCOPE));
    atomic_and(pointer: Plain, value: Operand, mask: Plain = Unset, boundary_check: Dims = NoDims,
        sem: Word(&SEM) = Word(&SEM), scope: Word(&SCOPE) = Word(&SCOPE));
    atomic_or(pointer: Plain, value: Operand, mask: Plain = Unset, boundary_check: Dims = NoDims,
        sem: Word(&SEM) = Word(&SEM), scope: Word(&SCOPE) = Word(&SCOPE));
    atomic_xor(pointer: Plain, value: Operand, mask: Plain = Unset, boundary_check: Dims = NoDims,
        sem: Word(&SEM) = Word(&SEM), scope: Word(&SCOPE) = Word(&SCOPE));
    atomic_xchg(pointer: Plain, value: Operand, mask: Plain = Unset, boundary_check: Dims = NoDims,
        sem: Word(&SEM) = Word(&SEM), scope: Word(&SCOPE) = Word(&SCOPE));
    atomic_cas(pointer: Plain, expected: Operand, new: Operand, mask: Plain = Unset, sem: Word(&CAS_SEM) = Word(&CAS_SEM),
        scope: Word(&SCOPE) = Word(&SCOPE));
    semaphore_wait(counter: Plain, value: Operand);
    semaphore_release(counter: Plain, value: Operand);
    arange(start: Operand, end: Operand);
    zeros(shape: Extents);
    ones(shape: Extents);
    full(shape: Extents, value: Operand);
    zeros_like(x: Plain);
    full_like(x: Plain, value: Operand);
    scalar(value: Operand);
    expand_dims(x: Plain, axis: Axis);
    broadcast_to(x: Plain, shape: Extents);
    broadcast(x: Plain, y: Plain);
    trans(x: Plain, dims: Dims = NoDims);
    permute(x: Plain, dims: Dims);
    reshape(x: Plain, shape: Extents);
    view(x: Plain, shape: Extents);
    squeeze(x: Plain, axis: Axis);
    gather(x: Plain, index: Plain, axis: Axis);
    flip(x: Plain, axis: Axis = Last);
    sort(x: Plain, axis: Axis = Last, descending: Plain = False);
    topk(x: Plain, k: Plain, axis: Axis = Last);
    histogram(x: Plain, num_bins: Plain, mask: Plain = Unset);
    ravel(x: Plain);
    join(x: Plain, y: Plain);
    split(x: Plain);
    cat(x: Plain, y: Plain, axis: Axis = Zero);
    interleave(x: Plain, y: Plain);
    maximum(x: Operand, y: Operand, propagate_nan: Plain = False);
    minimum(x: Operand, y: Operand, propagate_nan: Plain = False);
    umulhi(x: Operand, y: Operand);
    rescale(x: Operand, factor: Operand);
    cdiv(x: Operand, y: Operand);
    where_(condition: Plain, x: Operand, y: Operand);
    clamp(x: Plain, min: Operand, max: Operand, propagate_nan: Plain = False);
    fma(x: Plain, y: Operand, z: Operand);
    pow(x: Operand, y: Operand);
    atan2(y: Operand, x: Operand);
    hypot(x: Operand, y: Operand);
    copysign(x: Operand, y: Operand);
    fmod(x: Operand, y: Operand);
    div_rn(x: Operand, y: Operand);
    ldexp(x: Plain, n: Operand);
    softmax(x: Plain, axis: Axis = Zero);
    swizzle2d(i: Plain, j: Plain, size_i: Operand, size_j: Operand, size_g: Operand);
    dot(
        a: Plain,
        b: Plain,
        acc: Plain = Unset,
        input_precision: Word(&PRECISION) = Word(&PRECISION),
        max_num_imprecise_acc: Plain = Unset
    );
    dot_scaled(lhs: Plain, lhs_scale: Plain = Unset, lhs_format: Word(&DOT_FORMAT), rhs: Plain, rhs_scale: Plain = Unset,
        rhs_format: Word(&DOT_FORMAT), acc: Plain = Unset, fast_math: Plain = False, lhs_k_pack: Plain = True,
        rhs_k_pack: Plain = True);
    sum(x: Plain, axis: Axis = Unset, keep_dims: Plain = False);
    max(x: Plain, axis: Axis = Unset, keep_dims: Plain = False);
    min(x: Plain, axis: Axis = Unset, keep_dims: Plain = False);
    xor_sum(x: Plain, axis: Axis = Unset, keep_dims: Plain = False);
    reduce_or(x: Plain, axis: Axis = Unset, keep_dims: Plain = False);
    any(x: Plain, axis: Axis = Unset);
    all(x: Plain, axis: Axis = Unset);
    argmax(x: Plain, axis: Axis, keep_dims: Plain = False);
    argmin(x: Plain, axis: Axis, keep_dims: Plain = False);
    max_with_indices(x: Plain, axis: Axis, keep_dims: Plain = False);
    min_with_indices(x: Plain, axis: Axis, keep_dims: Plain = False);
    reduce(x: Plain, axis: Axis = Unset, combine: Combine, keep_dims: Plain = False);
    map_elementwise(x: Plain, function: Function, pack: Pack = Pack);
    cumsum(x: Plain, axis: Axis = Zero, reverse: Plain = False);
    cumprod(x: Plain, axis: Axis = Zero, reverse: Plain = False);
    associative_scan(x: Plain, axis: Axis, combine: Combine, reverse: Plain = False);
    philox(seed: Operand, c0: Plain, c1: Operand, c2: Operand, c3: Operand, n_rounds: Plain = Ten);
    rand(seed: Operand, offset: Plain, n_rounds: Plain = Ten);
    rand4x(seed: Operand, offset: Plain, n_rounds: Plain = Ten);
    randn(seed: Operand, offset: Plain, n_rounds: Plain = Ten);
    randn4x(seed: Operand, offset: Plain, n_rounds: Plain = Ten);
    randint(seed: Operand, offset: Plain, n_rounds: Plain = Ten);
    randint4x(seed: Operand, offset: Plain, n_rounds: Plain = Ten);
    range(start: Operand, end: Operand, step: Operand = One, num_stages: Operand = Unset, unroll: Operand = Unset,
        warp_specialize: Plain = Unset, overlap: Plain = Unset, split: Plain = Unset, replicas: Operand = Unset,
        dynamic: Plain = Unset);
    static_range(start: Operand, end: Operand, step: Operand = One);
    assume(condition: Plain);
    multiple_of(x: Plain, n: Operand);
    max_contiguous(x: Plain, n: Operand);
    device_print(prefix: Plain, values: Rest);
    device_assert(condition: Plain, message: Plain = Text);
    static_assert(condition: Plain, message: Plain = Text);
    static_print(prefix: Plain, values: Rest);
    inline_asm_elementwise(asm: Plain, constraints: Plain, args: Plain, is_pure: Plain = True, pack: Operand = One);
}

/// Kinds of the arguments of methods whose lists need the same expansion as those of the functions.
pub fn method_kinds(name: &str) -> &'static [Kind] {
    match name {
        "advance" | "load" | "index" => &[Kind::Indices],
        "block" => &[Kind::Indices, Kind::Extents],
        "descriptor" => &[Kind::Extents],
        "store" | "atomic_add" | "atomic_min" | "atomic_max" | "atomic_and" | "atomic_or" | "atomic_xor" => {
            &[Kind::Indices, Kind::Operand]
        }
        "reshape" | "view" | "broadcast_to" => &[Kind::Extents],
        "maximum" | "minimum" => &[Kind::Operand],
        "offset" => &[Kind::Operand],
        _ => &[],
    }
}

/// The function with this name.
pub fn function(name: &Ident) -> Option<&'static Function> {
    FUNCTIONS.iter().find(|f| name == f.name)
}

/// The name and value of an argument written `name = value`.
pub fn named_argument(arg: &Expr) -> Option<(&Ident, &Expr)> {
    let Expr::Assign(assign) = arg else { return None };
    let Expr::Path(path) = &*assign.left else { return None };
    path.path.get_ident().map(|name| (name, &*assign.right))
}

/// Maps Triton's argument names to those of the language.
pub fn canonical(name: &str) -> &str {
    match name {
        "padding_option" => "padding",
        "eviction_policy" => "eviction",
        "val" => "value",
        "cmp" => "expected",
        "combine_fn" => "combine",
        "keepdims" => "keep_dims",
        "seed_offset" => "offset",
        "dim" => "axis",
        other => other,
    }
}
