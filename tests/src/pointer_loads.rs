//! Kernels whose dots read tiles that are loaded through tiles of pointers, as Triton's tutorials write them.

use tilewright::prelude::*;

/// c = a·b for matrices with any strides, in elements: the matmul of Triton's third tutorial, line by line. Rows and
/// columns out of bounds wrap around, as in the tutorial, or are masked off.
///
/// A grid of ⌈m/m_tile⌉ · ⌈n/n_tile⌉ programs.
#[kernel]
pub fn pointer_matmul<T: Float>(
    a: In<T>,
    b: In<T>,
    c: Out<T>,
    m: i32,
    n: i32,
    k: i32,
    stride_am: i32,
    stride_ak: i32,
    stride_bk: i32,
    stride_bn: i32,
    stride_cm: i32,
    stride_cn: i32,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr] wrap: bool,
    #[constexpr = 8] group: usize,
) {
    let (m_tiles, n_tiles) = (cdiv(m, m_tile), cdiv(n, n_tile));
    let (i, j) = swizzle2d(program_id(0) / n_tiles, program_id(0) % n_tiles, m_tiles, n_tiles, group);
    let mut offs_am = i * m_tile + arange(0, m_tile);
    let mut offs_bn = j * n_tile + arange(0, n_tile);
    if wrap {
        offs_am = offs_am % m;
        offs_bn = offs_bn % n;
    }
    let (offs_am, offs_bn) = (offs_am.expand_dims(1), offs_bn.expand_dims(0));
    let offs_k = arange(0, k_tile);
    let mut a_ptrs = a + (offs_am * stride_am + offs_k.expand_dims(0) * stride_ak);
    let mut b_ptrs = b + (offs_k.expand_dims(1) * stride_bk + offs_bn * stride_bn);
    let mut acc = zeros::<f32>([m_tile, n_tile]);
    for l in range(0, cdiv(k, k_tile)) {
        let in_k = offs_k < k - l * k_tile;
        let at = load(a_ptrs, mask = in_k.expand_dims(0) & (offs_am < m), other = 0.0);
        let bt = load(b_ptrs, mask = in_k.expand_dims(1) & (offs_bn < n), other = 0.0);
        acc = dot(at, bt, acc);
        a_ptrs = a_ptrs + k_tile * stride_ak;
        b_ptrs = b_ptrs + k_tile * stride_bk;
    }
    let offs_cm = (i * m_tile + arange(0, m_tile)).expand_dims(1);
    let offs_cn = (j * n_tile + arange(0, n_tile)).expand_dims(0);
    store(c + (offs_cm * stride_cm + offs_cn * stride_cn), acc.to::<T>(), mask = (offs_cm < m) & (offs_cn < n));
}

/// `y[i·tile + l] = x[(i·step + l − shift) % n + first]` in arithmetic of i32, which wraps; remainders have the sign of
/// the dividend, and those by 0 are 0.
#[kernel]
pub fn rotated<T: Float>(x: In<T>, y: Out<T>, n: i32, step: i32, shift: i32, first: i32, #[constexpr] tile: usize) {
    let at = program_id(0) * step + arange(0, tile) - shift;
    store(y + (program_id(0) * tile + arange(0, tile)), load(x + (at % n + first)));
}

/// `c = Σ over l of a[:, l·page..] · pages[table[l]]`, for a [m_tile, count·page], pages [_, page, n_tile] and
/// c [m_tile, n_tile], all row-major: a gather through a page table.
#[kernel]
pub fn paged_matmul<T: Float>(
    a: In<T>,
    pages: In<T>,
    table: In<i32>,
    c: Out<f32>,
    count: i32,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] page: usize,
) {
    let (offs_m, offs_n) = (arange(0, m_tile).expand_dims(1), arange(0, n_tile).expand_dims(0));
    let offs_k = arange(0, page);
    let mut acc = zeros::<f32>([m_tile, n_tile]);
    for l in range(0, count) {
        let first = load(table + l) * page;
        let at = load(a + (offs_m * (count * page) + (l * page + offs_k).expand_dims(0)));
        let bt = load(pages + ((first + offs_k).expand_dims(1) * n_tile + offs_n));
        acc = dot(at, bt, acc);
    }
    store(c + (offs_m * n_tile + offs_n), acc);
}

/// As `paged_matmul`, through block pointers, for a [m_tile, k] and pages [rows, n_tile]: the producer of a specialized
/// kernel loads the table. With `add`, its entries are added to each element of c.
#[kernel]
pub fn paged_block_matmul<T: Float>(
    a: In<T>,
    pages: In<T>,
    table: In<i32>,
    c: Out<f32>,
    k: i32,
    rows: i32,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] page: usize,
    #[constexpr] add: bool,
) {
    let mut acc = zeros::<f32>([m_tile, n_tile]);
    for l in range(0, k / page) {
        let id = load(table + l);
        let a_block = make_block_ptr(
            a,
            shape = [m_tile, k],
            strides = [k, 1],
            offsets = [0, l * page],
            block_shape = [m_tile, page],
        );
        let b_block = make_block_ptr(
            pages,
            shape = [rows, n_tile],
            strides = [n_tile, 1],
            offsets = [id * page, 0],
            block_shape = [page, n_tile],
        );
        let at = load(a_block, boundary_check = [0, 1], padding = zero);
        let bt = load(b_block, boundary_check = [0, 1], padding = zero);
        acc = dot(at, bt, acc);
        if add {
            acc += id.to::<f32>();
        }
    }
    let offs = arange(0, m_tile).expand_dims(1) * n_tile + arange(0, n_tile).expand_dims(0);
    store(c + offs, acc);
}

/// `c = a · b[rows]`, for a [m_tile, k], b [_, n_tile] and c [m_tile, n_tile], all row-major: rows of b are gathered by
/// their indices. With `add`, the indices are added to each element of c.
#[kernel]
pub fn gathered_matmul<T: Float>(
    a: In<T>,
    b: In<T>,
    rows: In<i32>,
    c: Out<f32>,
    k: i32,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr] add: bool,
) {
    let (offs_m, offs_n) = (arange(0, m_tile).expand_dims(1), arange(0, n_tile).expand_dims(0));
    let mut acc = zeros::<f32>([m_tile, n_tile]);
    for l in range(0, k, k_tile) {
        let offs_k = l + arange(0, k_tile);
        let at = load(a + (offs_m * k + offs_k.expand_dims(0)), mask = offs_k.expand_dims(0) < k);
        let row = load(rows + offs_k, mask = offs_k < k);
        let bt = load(b + (row.expand_dims(1) * n_tile + offs_n), mask = offs_k.expand_dims(1) < k);
        acc = dot(at, bt, acc);
        if add {
            acc += sum(row).to::<f32>();
        }
    }
    store(c + (offs_m * n_tile + offs_n), acc);
}

/// c = a · b, where with `paged` the rows of b are in pages, of which `table` has the order, and with `bounds` each program
/// reads the end of its loop from memory: the same work with and without.
#[kernel]
pub fn indirect_matmul<T: Float>(
    a: Tensor<T, (m, k)>,
    b: Tensor<T, (k, n)>,
    table: In<i32>,
    ends: In<i32>,
    c: TensorMut<T, (m, n)>,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] page: usize,
    #[constexpr] paged: bool,
    #[constexpr] bounds: bool,
    #[constexpr = 8] group: usize,
) {
    let (m_tiles, n_tiles) = (cdiv(m, m_tile), cdiv(n, n_tile));
    let (i, j) = swizzle2d(program_id(0) / n_tiles, program_id(0) % n_tiles, m_tiles, n_tiles, group);
    let mut acc = zeros::<f32>([m_tile, n_tile]);
    let end = if bounds { load(ends + program_id(0)) } else { k / page };
    for l in range(0, end) {
        let place = if paged { load(table + l) } else { l };
        let at = load(a.block([i * m_tile, l * page], [m_tile, page]), boundary_check = [0, 1], padding = zero);
        let bt = load(b.block([place * page, j * n_tile], [page, n_tile]), boundary_check = [0, 1], padding = zero);
        acc = dot(at, bt, acc);
    }
    store(c.block([i * m_tile, j * n_tile], [m_tile, n_tile]), acc.to::<T>(), boundary_check = [0, 1]);
}

/// `c = a · b[which]`, for a [m_tile, k] and matrices b [_, k, n_tile], of which one has `size` elements. Unless `checked`, nothing
/// is known of `which`.
#[kernel]
pub fn chosen_matmul<T: Float>(
    a: In<T>,
    b: In<T>,
    c: Out<f32>,
    k: i32,
    which: i32,
    size: i32,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr] checked: bool,
) {
    let which = if checked { maximum(which, 0) } else { which };
    let b = b + which.to::<i64>() * size;
    let mut acc = zeros::<f32>([m_tile, n_tile]);
    for l in range(0, k, k_tile) {
        let a_block = make_block_ptr(a, [m_tile, k], [k, 1], offsets = [0, l], block_shape = [m_tile, k_tile]);
        let b_block = make_block_ptr(b, [k, n_tile], [n_tile, 1], offsets = [l, 0], block_shape = [k_tile, n_tile]);
        let at = load(a_block, boundary_check = [0, 1], padding = zero);
        let bt = load(b_block, boundary_check = [0, 1], padding = zero);
        acc = dot(at, bt, acc);
    }
    store(c + (arange(0, m_tile).expand_dims(1) * n_tile + arange(0, n_tile).expand_dims(0)), acc);
}

/// `c = a · b` for a [m_tile, k] and b [k, n_tile], or with `transposed` [n_tile, k], all row-major. Elements of b become those of a.
#[kernel]
pub fn widened_matmul<T: Float, B: Dtype>(
    a: In<T>,
    b: In<B>,
    c: Out<f32>,
    k: i32,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr] transposed: bool,
) {
    let (rows, columns) = (arange(0, m_tile).expand_dims(1), arange(0, n_tile));
    let mut acc = zeros::<f32>([m_tile, n_tile]);
    for l in range(0, k / k_tile) {
        let offs_k = l * k_tile + arange(0, k_tile);
        let at = load(a + (rows * k + offs_k.expand_dims(0)));
        let bt = if transposed {
            load(b + (columns.expand_dims(1) * k + offs_k.expand_dims(0))).to::<T>().trans()
        } else {
            load(b + (offs_k.expand_dims(1) * n_tile + columns.expand_dims(0))).to::<T>()
        };
        acc = dot(at, bt, acc);
    }
    store(c + (rows * n_tile + columns.expand_dims(0)), acc);
}
