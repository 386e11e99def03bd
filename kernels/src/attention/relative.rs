//! The gradient of a relative bias ([`RELATIVE`]).
//!
//! The bias of a head is a number for each distance between a row and a key, and its gradient the sum of the gradients of the scores at
//! that distance, dS = P ∘ (dP − D) ([`super::backward`]). Pairs of tiles that are as far from each other have the same
//! distances at the same places: a program adds the tiles of one such diagonal, and then the elements at the same distance. No addition is
//! atomic, so that the results have the same bits in every run.

use super::backward_rows::row_block;
use super::forward::{assume_group, row_offset};
use super::launch::{Options, Problem, Saved, aligned_rows, expect, expect_len, product, relative_bias_len};
use super::loops::{LoopMask, Rules, Scores, tile_bounds};
use super::modifiers::{DENSE, MaskArgs, MaskMod, RELATIVE, ScoreArgs, ScoreMod, Site};
use super::passes::launch_preprocess;
use crate::blocks::boundary_dims;
use crate::tensor::{FloatElement, Tensor, TensorMut};
use tilewright_codegen::target::Target;
use tilewright_runtime::prelude::*;

/// `sums`[b, head, m, x] = Σ dS over the elements (r, c) with r − c = x − `tile` of the tiles on diagonal m of
/// batch entry b: those of query tile i and key tile i + ⌈n_k / tile⌉ − 1 − m.
///
/// Tensors other than `sums` are those of [`flash_attention_bwd_dq`](super::backward::FlashAttentionBwdDq).
///
/// Grid: (⌈n_q / tile⌉ + ⌈n_k / tile⌉ − 1, heads, batch).
#[kernel(grid = (diagonals, heads, batch))]
pub fn flash_attention_bwd_relative<T: Float>(
    q: Tensor<T, (batch, heads, n_q, d)>,
    k: Tensor<T, (batch, heads_kv, n_k, d)>,
    v: Tensor<T, (batch, heads_kv, n_k, d_v)>,
    d_o: Tensor<T, (batch, heads, n_q, d_v)>,
    lse2: In<f32>,
    delta: In<f32>,
    mask_data: In<i32>,
    score_data: In<f32>,
    sums: TensorMut<f32, (batch, heads, diagonals, two_tiles)>,
    #[no_specialize] n_q: i32,
    #[no_specialize] n_k: i32,
    scale: f32,
    #[no_specialize] mask_number: i32,
    score_number: f32,
    #[constexpr] d: usize,
    #[heuristic(super::config::d_tile(d))] d_tile: usize,
    #[heuristic(d)] d_v: usize,
    #[heuristic(super::config::d_tile(d_v))] d_v_tile: usize,
    #[constexpr] tile: usize,
    #[constexpr = 1]
    #[heuristic((heads / heads_kv.max(1)).max(1))]
    group: usize,
    #[constexpr = false] causal: bool,
    #[constexpr = ieee] precision: Precision,
    #[constexpr = DENSE] mask: &'static MaskMod,
    #[constexpr = RELATIVE] score: &'static ScoreMod,
) {
    assume_group(q.dim(1), k.dim(1), group);
    assume(sums.dim(2) == maximum(cdiv(n_q, tile) + cdiv(n_k, tile) - 1, 0));
    assume(sums.dim(3) == 2 * tile as i32);
    let (diagonal, head, batch) = (program_id(0), program_id(1), program_id(2));
    let (q_tiles, k_tiles) = (cdiv(n_q, tile), cdiv(n_k, tile));
    // Of a key tile from the query tile.
    let offset = k_tiles - 1 - diagonal;
    let (q_head, do_head) = (q.index([batch, head]), d_o.index([batch, head]));
    let (k_head, v_head) = (k.index([batch, head / group]), v.index([batch, head / group]));
    let head_rows = row_offset(head, batch, n_q);
    let (boundary, v_boundary) = (boundary_dims(true, d != d_tile), boundary_dims(true, d_v != d_v_tile));
    let site = Site { batch, head, n_q, n_k, most_keys: n_k, causal };
    let modify = score.bound(ScoreArgs { number: score_number, data: score_data, site });
    let mask_args = MaskArgs { number: mask_number, data: mask_data, site };

    let first = maximum(-offset, 0);
    let mut end = minimum(q_tiles, k_tiles - offset);
    if mask.is_dense() && causal {
        // Whether the last row of a tile sees the first key of the other.
        end = where_(offset * tile < (n_k - n_q) + tile, end, first);
    }
    let mut total = zeros::<f32>([tile, tile]);
    for i in range(first, end) {
        let (first_row, first_key) = (i * tile, maximum(i + offset, 0) * tile);
        let rows = first_row + arange(0, tile);
        let keys = (first_key + arange(0, tile)).expand_dims(0);
        let gradients = |loop_mask: LoopMask| {
            let load_rows =
                |block: BlockPtr<T>, boundary: &'static [usize]| load(block, boundary_check = boundary, padding = zero);
            let qt = load_rows(q_head.block([first_row, 0], [tile, d_tile]), boundary);
            let kt = load_rows(k_head.block([first_key, 0], [tile, d_tile]), boundary);
            let grad_o = load_rows(do_head.block([first_row, 0], [tile, d_v_tile]), v_boundary);
            let vt = load_rows(v_head.block([first_key, 0], [tile, d_v_tile]), v_boundary);
            let lt = load(row_block(lse2 + head_rows, first_row, n_q, tile), boundary_check = [0], padding = zero);
            let dt = load(row_block(delta + head_rows, first_row, n_q, tile), boundary_check = [0], padding = zero);
            let rules = Rules { mask: loop_mask, modify: modify.as_ref(), scale };
            let product = dot(qt, kt.trans(), input_precision = precision);
            let scores = Scores { dot: product, rows: rows.expand_dims(1), keys, rules };
            let dp = dot(grad_o, vt.trans(), input_precision = precision);
            let p = exp2(scores.modified().scores * rules.exponent_scale() - lt.expand_dims(1));
            let p = where_(rows.expand_dims(1) < n_q, scores.keep(p, 0.0), 0.0);
            p * (dp - dt.expand_dims(1))
        };
        if mask.is_dense() {
            total += gradients(LoopMask::Dense(site));
        } else {
            let last_row = minimum(first_row + tile, n_q) - 1;
            let [begin, _, _, seen] = tile_bounds(mask.keys, (first_row, last_row), mask_args, n_k, tile);
            let key_tile = i + offset;
            if (key_tile >= begin) & (key_tile < seen) {
                let (start, end) = (mask.keys)(rows, mask_args);
                total += gradients(LoopMask::Keys(start.expand_dims(1), minimum(end, n_k).expand_dims(1)));
            }
        }
    }

    let rows = arange(0, tile).expand_dims(1);
    let columns = rows + tile - arange(0, 2 * tile).expand_dims(0);
    let skewed = gather(total, clamp(columns, 0, tile - 1), axis = 1);
    let by_distance = sum(where_((columns >= 0) & (columns < tile), skewed, 0.0), axis = 0);
    let target = sums.index([batch, head]).block([diagonal, 0], [1, 2 * tile]);
    store(target, by_distance.expand_dims(0), boundary_check = [0]);
}

/// The gradient of a relative bias, f32 [heads, width = n_q + n_k − 1]: Σ over batch entries, in their order, of
/// the two diagonals of `sums` that have an element's distance.
///
/// `sums` is the result of [`flash_attention_bwd_relative`](FlashAttentionBwdRelative).
///
/// Grid: (diagonals + 1, heads).
#[kernel(grid = (diagonals + 1, heads))]
pub fn flash_attention_bwd_relative_sum(
    sums: Tensor<f32, (batch, heads, diagonals, two_tiles)>,
    gradient: TensorMut<f32, (heads, width)>,
    #[no_specialize] n_k: i32,
    #[constexpr] tile: usize,
) {
    let (m, head) = (program_id(0), program_id(1));
    let columns = arange(0, tile);
    let mut total = zeros::<f32>([tile]);
    for b in range(0, sums.dim(0)) {
        let x = sums.index([b, head]);
        let at = |m: Scalar<i32>, first: usize| {
            let element = m.to::<i64>() * x.stride(0) + (columns + first).to::<i64>() * x.stride(1);
            load(x.ptr() + element, mask = (m >= 0) & (m < x.dim(0)), other = 0.0)
        };
        total += at(m, 0) + at(m - 1, tile);
    }
    // Element x of diagonal m has the distance r − c = (m − ⌈n_k / tile⌉) · tile + x.
    let column = m * tile + columns - cdiv(n_k, tile) * tile + (n_k - 1);
    let y = gradient.index([head]);
    let mask = (column >= 0) & (column < y.dim(0));
    store(y.ptr() + column.to::<i64>() * y.stride(0), total, mask = mask);
}

/// The gradient of the relative bias in `options`, f32 [heads, n_q + n_k − 1], from the results of the forward pass with it, with the
/// same bits in every run.
///
/// # Errors
/// A score function other than [`RELATIVE`]; shapes that do not match; launch errors.
pub fn relative_bias_gradient<T: FloatElement>(
    device: &Device,
    saved: Saved<T>,
    options: &Options,
) -> Result<Buffer<f32>> {
    Problem::of_backward(device, &saved, options)?;
    let [q, k, v] = [saved.q, saved.k, saved.v].map(|tensor| tensor.shape());
    let mut gradient = Buffer::uninit(device, product(&[q[1], relative_bias_len(q[2], k[2])]))?;
    let mut workspace = Buffer::uninit(device, relative_bias_workspace::<T>(device, q, k, v))?;
    options.in_stream_order(device, || {
        relative_bias_gradient_into(device, saved, gradient.view_mut(), workspace.view_mut(), options)
    })?;
    Ok(gradient)
}

/// The number of f32 elements in the workspace of [`relative_bias_gradient_into`], for q, k and v of these shapes: two per query row, and
/// about 2 · (n_q + n_k) per batch entry and head. Saturates.
pub fn relative_bias_workspace<T: Element>(device: &Device, q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> usize {
    let tiling = Tiling::new::<T>(q, k, v, &device.target());
    aligned_rows(q).saturating_mul(2).saturating_add(product(&tiling.sums(q)))
}

/// As [`relative_bias_gradient`], into memory of the caller. `workspace` has at least [`relative_bias_workspace`] elements.
///
/// # Errors
/// As [`relative_bias_gradient`].
pub fn relative_bias_gradient_into<T: FloatElement>(
    device: &Device,
    saved: Saved<T>,
    gradient: ViewMut<f32>,
    workspace: ViewMut<f32>,
    options: &Options,
) -> Result<()> {
    let p = Problem::of_backward(device, &saved, options)?;
    let [q, k, v] = [saved.q, saved.k, saved.v].map(|tensor| tensor.shape());
    let ([_, heads, n_q, _], n_k, function) = (q, k[2], options.score.function);
    expect(std::ptr::eq(function, &RELATIVE), "score", "a relative bias, whose gradient this is", function.name)?;
    let width = relative_bias_len(n_q, n_k);
    let expected = format_args!("{width} numbers for each of {heads} heads");
    expect(gradient.len() == heads * width, "gradient", expected, format_args!("{} numbers", gradient.len()))?;
    expect_len("workspace", workspace.len(), relative_bias_workspace::<T>(device, q, k, v), "")?;
    let tiling = Tiling::new::<T>(q, k, v, &device.target());
    let (shape, tile) = (tiling.sums(q), tiling.tile);
    let (mut delta, rest) = workspace.split_at(aligned_rows(q))?;
    let (mut lse2, rest) = rest.split_at(aligned_rows(q))?;
    let (sums, _) = rest.split_at(product(&shape))?;
    let mut sums = TensorMut::dense(sums, shape)?;
    let mut no_sums = Buffer::uninit(device, 0)?;
    launch_preprocess(&p, saved, [&mut delta, &mut lse2], &mut no_sums.view_mut(), false)?;
    FlashAttentionBwdRelative {
        q: &saved.q,
        k: &saved.k,
        v: &saved.v,
        d_o: &saved.d_o,
        lse2: &lse2,
        delta: &delta,
        mask_data: &p.mask_data,
        score_data: &p.score_data,
        sums: &mut sums,
        scale: p.scale,
        mask_number: options.mask.number,
        score_number: options.score.number,
        tile,
        causal: p.causal,
        precision: p.precision,
        mask: options.mask.function,
        score: function,
    }
    .launch_with(device, &options.base_config().num_warps(tiling.num_warps).num_stages(2))?;
    let sums = Tensor::dense(sums.as_view(), shape)?;
    let mut gradient = TensorMut::dense(gradient, [heads, width])?;
    FlashAttentionBwdRelativeSum { sums: &sums, gradient: &mut gradient, n_k: n_k as i32, tile }
        .launch_with(device, &options.launch_rows())
}

/// The tiles of the kernels.
#[derive(Clone, Copy)]
struct Tiling {
    /// Rows and keys of a tile.
    tile: usize,
    num_warps: u32,
    /// Diagonals of tiles of a head.
    diagonals: usize,
}

impl Tiling {
    /// For q, k and v of these shapes: tiles of q, k, v and dO fit into the shared memory of GPUs with 99 KB, and of those with more in
    /// two stages.
    fn new<T: Element>(q: [usize; 4], k: [usize; 4], v: [usize; 4], target: &Target) -> Tiling {
        let row_bytes = super::config::d_tile(q[3].max(v[3])).saturating_mul(T::DTYPE.size());
        let (tile, num_warps) = match target {
            Target::Nvptx(_) if row_bytes <= 256 => (64, 4),
            Target::Nvptx(_) if row_bytes <= 512 => (32, 4),
            Target::Nvptx(_) => (16, 4),
            _ => (64, 1),
        };
        let diagonals = (q[2].div_ceil(tile) + k[2].div_ceil(tile)).saturating_sub(1);
        Tiling { tile, num_warps, diagonals }
    }

    /// The shape of the sums of each diagonal.
    fn sums(self, [batch, heads, ..]: [usize; 4]) -> [usize; 4] {
        [batch, heads, self.diagonals, 2 * self.tile]
    }
}
