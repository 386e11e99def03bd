//! Rotary position embedding (Su et al., "RoFormer", 2021, equation 34): each pair of adjacent elements (x[2i],
//! x[2i+1]) of a token at position p is rotated by the angle p · θᵢ with θᵢ = base^(−2i/d). GPT-NeoX and Llama pair
//! (x[i], x[i+d/2]) instead ([`Pairs`]):
//!
//! - y[2i] = x[2i] · cos(p·θᵢ) − x[2i+1] · sin(p·θᵢ)
//! - y[2i+1] = x[2i] · sin(p·θᵢ) + x[2i+1] · cos(p·θᵢ)
//!
//! The gradient is the same with −sin, since the transpose of a rotation is its inverse. θ is a table that the caller
//! passes ([`frequencies`]), so that scaled variants are possible. The table and the angles are f64: an angle in f32
//! has an absolute error of up to p · 2⁻²⁴. Full turns are subtracted before sine and cosine, which are then computed
//! in f32 of small arguments.

use crate::blocks::row_block;
use crate::tensor::{FloatElement, IndexElement, Tensor, TensorMut, expect_shape, extent};
use tilewright_runtime::prelude::*;

constexpr_enum! {
    /// The direction of the rotation.
    pub enum Direction {
        /// By the angle p · θᵢ.
        Forward,
        /// By the negative angle, as for gradients.
        Backward,
    }
}

constexpr_enum! {
    /// The elements of a head that form pair i.
    pub enum Pairs {
        /// 2i and 2i + 1.
        Adjacent,
        /// i and i + d/2.
        Halves,
    }
}

/// How pairs are rotated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotation {
    pub direction: Direction,
    pub pairs: Pairs,
}

impl From<Direction> for Rotation {
    /// Rotates pairs of adjacent elements.
    fn from(direction: Direction) -> Rotation {
        Rotation { direction, pairs: Pairs::Adjacent }
    }
}

/// Rotates the pairs of the tokens of program axis 0 in the heads of program axis 1. x and y are [tokens, heads, d],
/// `frequencies` [d/2]; `tile` is (tokens, heads, d).
#[device_fn]
fn rotate<T: Float>(
    x: TensorPtr<T>,
    frequencies: TensorPtr<f64>,
    y: TensorPtr<T>,
    position: Tile<f64>,
    tile: (usize, usize, usize),
    (direction, pairs): (Direction, Pairs),
) {
    let (tokens, heads, d) = (x.dim(0), x.dim(1), x.dim(2));
    let (tokens_tile, heads_tile, d_tile) = tile;
    assume(d <= d_tile);
    let first_token = program_id(0) * tokens_tile;
    let theta = load(frequencies.block([0], [d_tile / 2]), boundary_check = [0], padding = zero);
    let turns = position.expand_dims(1) * (theta * (0.5 / std::f64::consts::PI)).expand_dims(0);
    let fraction = (turns - floor(turns + 0.5)).to::<f32>();
    // At most half a turn. The clamp gives the compiler a bound, which removes the range reduction of sine and cosine.
    let angle = minimum(maximum(fraction, -1.0), 1.0) * (2.0 * std::f32::consts::PI);
    let c = cos(angle);
    let s = match direction {
        Direction::Forward => sin(angle),
        Direction::Backward => -sin(angle),
    };
    let first_head = program_id(1) * heads_tile;
    for head in range(first_head, minimum(first_head + heads_tile, heads)) {
        let (source, target) = (x.permute([1, 0, 2]).index([head]), y.permute([1, 0, 2]).index([head]));
        if pairs == Pairs::Adjacent {
            let x_block = source.block([first_token, 0], [tokens_tile, d_tile]);
            let y_block = target.block([first_token, 0], [tokens_tile, d_tile]);
            let xt = load(x_block, boundary_check = [0, 1], padding = zero).to::<f32>();
            let (even, odd) = split(xt.reshape([tokens_tile, d_tile / 2, 2]));
            let rotated = interleave(even * c - odd * s, even * s + odd * c);
            store(y_block, rotated.to::<T>(), boundary_check = [0, 1]);
        } else {
            let (shape, block) = ((tokens, d / 2), (tokens_tile, d_tile / 2));
            let half = (d / 2).to::<i64>();
            let (x_strides, y_strides) = ((x.stride(0), x.stride(2)), (y.stride(0), y.stride(2)));
            let x_first = row_block(source.ptr(), shape, x_strides, first_token, block);
            let x_second = row_block(source.ptr() + half * x_strides.1, shape, x_strides, first_token, block);
            let y_first = row_block(target.ptr(), shape, y_strides, first_token, block);
            let y_second = row_block(target.ptr() + half * y_strides.1, shape, y_strides, first_token, block);
            let a = load(x_first, boundary_check = [0, 1], padding = zero).to::<f32>();
            let b = load(x_second, boundary_check = [0, 1], padding = zero).to::<f32>();
            store(y_first, (a * c - b * s).to::<T>(), boundary_check = [0, 1]);
            store(y_second, (a * s + b * c).to::<T>(), boundary_check = [0, 1]);
        }
    }
}

/// Rotates the pairs of each token by the angle of position `positions[token]`.
///
/// Grid: (⌈tokens / tokens_tile⌉, ⌈heads / heads_tile⌉). d is even and at most `d_tile`.
#[kernel(grid = (cdiv(tokens, tokens_tile), cdiv(heads, heads_tile)))]
pub fn rope_at<T: Float, I: Int>(
    x: Tensor<T, (tokens, heads, d)>,
    positions: Tensor<I, (tokens,)>,
    frequencies: Tensor<f64, (half_d,)>,
    y: TensorMut<T, (tokens, heads, d)>,
    #[constexpr] tokens_tile: usize,
    #[constexpr] heads_tile: usize,
    #[constexpr] d_tile: usize,
    #[constexpr = Forward] direction: Direction,
    #[constexpr = Adjacent] pairs: Pairs,
) {
    let first_token = program_id(0) * tokens_tile;
    let block = positions.block([first_token], [tokens_tile]);
    let position = load(block, boundary_check = [0], padding = zero).to::<f64>();
    rotate(x, frequencies, y, position, (tokens_tile, heads_tile, d_tile), (direction, pairs));
}

/// Rotates the pairs of each token by the angle of position start + token mod length.
///
/// Grid: (⌈tokens / tokens_tile⌉, ⌈heads / heads_tile⌉). d is even and at most `d_tile`.
#[kernel(grid = (cdiv(tokens, tokens_tile), cdiv(heads, heads_tile)))]
pub fn rope_from<T: Float>(
    x: Tensor<T, (tokens, heads, d)>,
    frequencies: Tensor<f64, (half_d,)>,
    y: TensorMut<T, (tokens, heads, d)>,
    #[no_specialize] start: i32,
    length: i32,
    #[constexpr] tokens_tile: usize,
    #[constexpr] heads_tile: usize,
    #[constexpr] d_tile: usize,
    #[constexpr = Forward] direction: Direction,
    #[constexpr = Adjacent] pairs: Pairs,
) {
    let token = program_id(0) * tokens_tile + arange(0, tokens_tile);
    let position = (token % length + start).to::<f64>();
    rotate(x, frequencies, y, position, (tokens_tile, heads_tile, d_tile), (direction, pairs));
}

/// θᵢ = base^(−2i/d) for the d/2 pairs of a head.
pub fn frequencies(d: usize, base: f64) -> Vec<f64> {
    (0..d / 2).map(|i| base.powf(-2.0 * i as f64 / d as f64)).collect()
}

/// Largest head dimension: a tile holds a whole head.
const MAX_D: usize = 2048;

/// Tile sizes and the launch configuration of a kernel.
struct RopeTiles {
    tokens_tile: usize,
    heads_tile: usize,
    d_tile: usize,
    config: LaunchConfig,
}

/// Chooses tiles such that angles are computed once for several heads.
fn tiles(name: &str, [tokens, heads, d]: [usize; 3]) -> Result<RopeTiles> {
    const ELEMENTS: usize = 2048;
    const HEADS: usize = 8;
    if !d.is_multiple_of(2) || d > MAX_D {
        return Err(Error::Argument {
            kernel: name.into(),
            name: "x",
            expected: format!("an even head dimension of at most {MAX_D}"),
            found: d.to_string(),
        });
    }
    let d_tile = d.max(2).next_power_of_two();
    let tokens_tile = (ELEMENTS / d_tile).min(tokens.max(1).next_power_of_two());
    let grid = (tokens.div_ceil(tokens_tile), heads.div_ceil(HEADS));
    Ok(RopeTiles { tokens_tile, heads_tile: HEADS, d_tile, config: LaunchConfig::new(grid).num_warps(4) })
}

/// Writes y, the rotation of x, both [tokens, heads, d], with `positions` [tokens] and `frequencies` [d/2].
///
/// Tensors of rank 4 are passed with strides: batch and heads of a [batch, heads, length, d] tensor are one dimension,
/// and so are batch and length of a [batch, length, heads, d] tensor.
///
/// # Errors
/// Shapes that do not match; an odd d or one above 2048; tensors on another device; launch errors.
pub fn rotate_at<T: FloatElement, I: IndexElement>(
    device: &Device,
    x: Tensor<'_, T, 3>,
    positions: Tensor<'_, I, 1>,
    frequencies: Tensor<'_, f64, 1>,
    mut y: TensorMut<'_, T, 3>,
    rotation: impl Into<Rotation>,
) -> Result<()> {
    const NAME: &str = "rope_at";
    let Rotation { direction, pairs } = rotation.into();
    let RopeTiles { tokens_tile, heads_tile, d_tile, config } = tiles(NAME, x.shape())?;
    expect_shape(NAME, "frequencies", frequencies.shape(), [x.shape()[2] / 2])?;
    RopeAt {
        x: &x,
        positions: &positions,
        frequencies: &frequencies,
        y: &mut y,
        tokens_tile,
        heads_tile,
        d_tile,
        direction,
        pairs,
    }
    .launch_with(device, &config)
}

/// As [`rotate_at`], with token t at position start + t mod length: consecutive sequences of `length` tokens, each of
/// which starts at position `start`.
///
/// # Errors
/// As [`rotate_at`]; also a `length` of 0, or positions beyond i32.
pub fn rotate_from<T: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 3>,
    start: usize,
    length: usize,
    frequencies: Tensor<'_, f64, 1>,
    mut y: TensorMut<'_, T, 3>,
    rotation: impl Into<Rotation>,
) -> Result<()> {
    const NAME: &str = "rope_from";
    let Rotation { direction, pairs } = rotation.into();
    let RopeTiles { tokens_tile, heads_tile, d_tile, config } = tiles(NAME, x.shape())?;
    expect_shape(NAME, "frequencies", frequencies.shape(), [x.shape()[2] / 2])?;
    if length == 0 && x.shape()[0] > 0 {
        return Err(Error::Argument {
            kernel: NAME.into(),
            name: "length",
            expected: "a positive number of tokens per sequence".into(),
            found: "0".into(),
        });
    }
    // The last position is start + length − 1.
    extent(NAME, "start", start.saturating_add(length))?;
    RopeFrom {
        x: &x,
        frequencies: &frequencies,
        y: &mut y,
        start: extent(NAME, "start", start)?,
        length: extent(NAME, "length", length)?,
        tokens_tile,
        heads_tile,
        d_tile,
        direction,
        pairs,
    }
    .launch_with(device, &config)
}

/// The reference in f64: x is dense and row-major [tokens, heads, d]; each pair is a complex number.
pub fn reference(
    x: &[f64],
    positions: &[i64],
    heads: usize,
    d: usize,
    base: f64,
    rotation: impl Into<Rotation>,
) -> Vec<f64> {
    let Rotation { direction, pairs } = rotation.into();
    let mut y = vec![0.0; x.len()];
    for k in 0..x.len() / 2 {
        let (token, i) = (k / (heads * d / 2), k % (d / 2));
        let (first, second) = match pairs {
            Pairs::Adjacent => (2 * k, 2 * k + 1),
            Pairs::Halves => (2 * (k - i) + i, 2 * (k - i) + i + d / 2),
        };
        let angle = positions[token] as f64 / base.powf(2.0 * i as f64 / d as f64);
        let angle = if matches!(direction, Direction::Forward) { angle } else { -angle };
        let (radius, phase) = (x[first].hypot(x[second]), x[second].atan2(x[first]) + angle);
        (y[first], y[second]) = (radius * phase.cos(), radius * phase.sin());
    }
    y
}
