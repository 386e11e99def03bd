//! Attention of a cache of keys and values against its definition. What is no key is NaN, so that a result that depends on it is too.

use crate::attention::{Layout, input, output};
use crate::numerics::{HostTensor, Random, relative_error, tolerance};
use half::{bf16, f16};
use tilewright::codegen::ir::DType;
use tilewright::kernels::attention::reference::{self, ModifierTensors, Modifiers, Problem};
use tilewright::kernels::attention::{self, Cache, Descale, Options};
use tilewright::kernels::{FloatElement, Tensor as AnyTensor};
use tilewright::prelude::{Buffer, Device, Dtype, Element, F8E4M3, F8E5M2};

/// Queries of some batch entries, and a cache with their keys.
#[derive(Clone, Copy, Debug)]
pub struct CacheCase {
    /// Query heads, and those of keys.
    pub heads: [usize; 2],
    /// Queries of each batch entry.
    pub n_q: usize,
    /// Instead of `n_q`: queries of each entry, one after the other, and after them a few of no entry.
    pub rows: Option<&'static [usize]>,
    /// Head dimensions of keys and of values.
    pub d: [usize; 2],
    /// Keys of each batch entry; more than `most`, and fewer than 0, count as that.
    pub lengths: &'static [i32],
    /// Keys that there is room for.
    pub most: usize,
    /// Rows of a page, where the cache has pages.
    pub page: Option<usize>,
    /// Whether the second page of each entry is not there, and counts as zeros.
    pub missing: bool,
    pub causal: bool,
    pub modifiers: Modifiers,
    pub dtype: DType,
    /// Element type of the cache, if it is another one; it has scales then.
    pub cache_dtype: Option<DType>,
    /// The memory of the cache and of the queries.
    pub layout: Layout,
}

impl CacheCase {
    /// Causal attention of bf16, dense.
    pub fn new(heads: [usize; 2], n_q: usize, d: [usize; 2], lengths: &'static [i32], most: usize) -> CacheCase {
        let (modifiers, dtype) = (Modifiers::default(), DType::BF16);
        CacheCase {
            heads,
            n_q,
            rows: None,
            d,
            lengths,
            most,
            page: None,
            missing: false,
            causal: true,
            modifiers,
            dtype,
            cache_dtype: None,
            layout: Layout::Dense,
        }
    }

    pub fn pages_of(mut self, rows: usize) -> CacheCase {
        self.page = Some(rows);
        self
    }

    /// The problem of an entry with `n_q` queries and `n_k` keys.
    fn problem(&self, n_q: usize, n_k: usize) -> Problem {
        let CacheCase { heads: [heads_q, heads_kv], d: [d, d_v], causal, modifiers, .. } = *self;
        let scale = 1.0 / (d as f64).sqrt();
        Problem { batch: 1, heads_q, heads_kv, n_q, n_k, d, d_v, causal, scale, modifiers }
    }

    /// Queries of an entry.
    fn n_q(&self, entry: usize) -> usize {
        self.rows.map_or(self.n_q, |rows| rows[entry])
    }

    /// Batch entries and rows of q.
    fn queries(&self) -> [usize; 2] {
        /// Rows of no entry.
        const REST: usize = 3;
        match self.rows {
            None => [self.lengths.len(), self.n_q],
            Some(rows) => [1, rows.iter().sum::<usize>() + REST],
        }
    }

    /// The batch entry and the first row of q that have the queries of an entry.
    fn first_query(&self, entry: usize) -> [usize; 2] {
        match self.rows {
            None => [entry, 0],
            Some(rows) => [0, rows[..entry].iter().sum()],
        }
    }

    /// Columns of the table, and pages that there are: some belong to no entry.
    fn pages(&self, page: usize) -> [usize; 2] {
        let columns = self.most.div_ceil(page);
        [columns, columns * self.lengths.len() + 3]
    }

    /// The page in a column of an entry's row of the table: their order is a permutation.
    fn page_at(&self, page: usize, entry: usize, column: usize) -> usize {
        let [columns, pages] = self.pages(page);
        // A prime that divides no number of pages here.
        (entry * columns + column) * 7919 % pages
    }

    /// The table of pages, and its columns: those beyond the keys have any number.
    fn table(&self, page: usize) -> (Vec<i32>, usize) {
        let columns = self.pages(page)[0];
        let of_entry = |entry: usize| {
            let used = self.keys(self.lengths[entry]).div_ceil(page);
            let unused = [i32::MAX, -1, i32::MIN];
            let is_there = move |c: usize| c < used && !(self.missing && c == 1);
            (0..columns)
                .map(move |c| if is_there(c) { self.page_at(page, entry, c) as i32 } else { unused[(c + entry) % 3] })
        };
        ((0..self.lengths.len()).flat_map(of_entry).collect(), columns)
    }

    fn check_results(&self, o: &[f64], lse: &[f32], [want_o, want_lse]: [&[f64]; 2]) {
        let error = relative_error(o, want_o);
        assert!(want_o.is_empty() || error <= tolerance(self.dtype), "o of {self:?}: relative error {error:.1e}");
        for (row, (&x, &y)) in lse.iter().zip(want_lse).enumerate() {
            let x = f64::from(x);
            let is_close = x == y || y.is_finite() && (x - y).abs() <= 1e-5 * (1.0 + y.abs()).max(1.0) + 1e-4;
            assert!(is_close, "lse of {self:?}: row {row} has {x}, expected {y}");
        }
    }

    fn keys(&self, length: i32) -> usize {
        usize::try_from(length).unwrap_or(0).min(self.room())
    }

    /// Keys of an entry, at most.
    fn room(&self) -> usize {
        self.page.map_or(self.most, |page| self.pages(page)[0] * page)
    }
}

/// Checks O and L of the forward pass.
pub fn check_cache(device: &Device, case: CacheCase, options: &Options) {
    match case.dtype {
        DType::BF16 => check_queries::<bf16>(device, case, options),
        DType::F16 => check_queries::<f16>(device, case, options),
        DType::F32 => check_queries::<f32>(device, case, options),
        other => panic!("attention does not compute in {other}"),
    }
}

fn check_queries<T: FloatElement>(device: &Device, case: CacheCase, options: &Options) {
    match case.cache_dtype {
        None => check_typed::<T, T>(device, case, options),
        Some(DType::F8E4M3) => check_typed::<T, F8E4M3>(device, case, options),
        Some(DType::F8E5M2) => check_typed::<T, F8E5M2>(device, case, options),
        Some(other) => panic!("a cache has no elements of type {other}"),
    }
}

fn check_typed<T: FloatElement, C: Element + Dtype>(device: &Device, case: CacheCase, options: &Options) {
    let CacheCase { heads: [heads, heads_kv], d: [d, d_v], lengths, most, page, causal, dtype, layout, .. } = case;
    let (batch, [q_batch, q_rows]) = (lengths.len(), case.queries());
    let mut random = Random::new(11);
    let mut tensor = |dtype: DType, shape: [usize; 4]| {
        let values: Vec<f64> = (0..shape.iter().product()).map(|_| random.number() * 3f64.sqrt()).collect();
        HostTensor::of(dtype, &shape, &layout.strides(shape), &values)
    };
    let stored = case.cache_dtype.unwrap_or(dtype);
    let q = tensor(dtype, [q_batch, heads, q_rows, d]);
    let (entries, rows) = page.map_or((batch, most), |page| (case.pages(page)[1], page));
    // Numbers everywhere first, as the reference reads them.
    let cache = [d, d_v].map(|d| tensor(stored, [entries, heads_kv, rows, d]));
    let scales =
        [0.0, 0.6].map(|first: f32| (0..heads_kv).map(|head| (first - 0.3 * head as f32).abs()).collect::<Vec<_>>());
    let scale_of =
        |side: usize, head: usize| if case.cache_dtype.is_some() { f64::from(scales[side][head]) } else { 1.0 };
    let values = cache.each_ref().map(HostTensor::values);
    let mut is_key = vec![false; entries * rows];
    let all_rows = q_batch * heads * q_rows;
    // Rows of no entry see no key, but a sink.
    let unseen = |row: usize| match case.modifiers.sinks {
        true => reference::sink_score(row / q_rows % heads),
        false => f64::NEG_INFINITY,
    };
    let mut want = (vec![0.0; all_rows * d_v], (0..all_rows).map(unseen).collect::<Vec<f64>>());
    let q_values = q.values();
    for (entry, &length) in lengths.iter().enumerate() {
        let n_k = case.keys(length);
        let place = |key: usize| match page {
            Some(page) => (case.page_at(page, entry, key / page), key % page),
            None => (entry, key),
        };
        let is_missing = |key: usize| case.missing && page.is_some_and(|page| key / page == 1);
        let own = [0, 1].map(|side: usize| {
            let d = case.d[side];
            let mut dense = Vec::with_capacity(heads_kv * n_k * d);
            for head in 0..heads_kv {
                for key in 0..n_k {
                    let (at, row) = place(key);
                    let first = ((at * heads_kv + head) * rows + row) * d;
                    let numbers = &values[side][first..first + d];
                    dense.extend(numbers.iter().map(|x| if is_missing(key) { 0.0 } else { *x * scale_of(side, head) }));
                }
            }
            dense
        });
        for (at, row) in (0..n_k).filter(|&key| !is_missing(key)).map(place) {
            is_key[at * rows + row] = true;
        }
        let (n_q, [first_entry, first_row]) = (case.n_q(entry), case.first_query(entry));
        let first_of = |head: usize| (first_entry * heads + head) * q_rows + first_row;
        let of_head = |head: usize| &q_values[first_of(head) * d..][..n_q * d];
        let q: Vec<f64> = (0..heads).flat_map(of_head).copied().collect();
        let (o, lse) = reference::forward(&case.problem(n_q, n_k), &q, &own[0], &own[1]);
        for head in 0..heads {
            let (first, own) = (first_of(head), head * n_q);
            want.0[first * d_v..][..n_q * d_v].copy_from_slice(&o[own * d_v..][..n_q * d_v]);
            want.1[first..][..n_q].copy_from_slice(&lse[own..][..n_q]);
        }
    }
    let poisoned = [0, 1].map(|side: usize| {
        let (d, shape) = (case.d[side], [entries, heads_kv, rows, case.d[side]]);
        let at = |i: usize| (i / (heads_kv * rows * d)) * rows + i / d % rows;
        let numbers: Vec<f64> =
            values[side].iter().enumerate().map(|(i, &x)| if is_key[at(i)] { x } else { f64::NAN }).collect();
        HostTensor::of(stored, &shape, &layout.strides(shape), &numbers)
    });

    let table = page.map(|page| case.table(page));
    let fail = |e: tilewright::Error| -> ! { panic!("{case:?}: {e}") };
    let table = table.map(|(table, columns)| (Buffer::from_slice(device, &table).unwrap_or_else(|e| fail(e)), columns));
    let lengths = Buffer::from_slice(device, lengths).unwrap_or_else(|e| fail(e));
    let table = table.as_ref().map(|(table, columns)| AnyTensor::dense(table.view(), [batch, *columns]));
    let table = table.transpose().unwrap_or_else(|e| fail(e));
    let scales = scales.map(|scales| Buffer::from_slice(device, &scales).unwrap_or_else(|e| fail(e)));
    let descale = case.cache_dtype.map(|_| Descale::per_head(batch, scales[0].view(), scales[1].view()));
    let descale = descale.transpose().unwrap_or_else(|e| fail(e));
    let starts: Option<Vec<i32>> =
        case.rows.map(|_| (0..=batch).map(|entry| case.first_query(entry)[1] as i32).collect());
    let starts = starts.map(|starts| Buffer::from_slice(device, &starts).unwrap_or_else(|e| fail(e)));
    let row_starts = starts.as_ref().map(|starts| starts.tensor([batch + 1])).transpose().unwrap_or_else(|e| fail(e));
    let cache = Cache { table, row_starts, ..Cache::new(lengths.view()) };
    let tensors = ModifierTensors::new(device, &case.problem(case.n_q, case.room())).unwrap_or_else(|e| fail(e));
    let (mask, score, sinks) = (tensors.mask(), tensors.score(), tensors.sinks());
    let options = Options { causal, mask, score, sinks, cache: Some(cache), descale, ..options.clone() };
    let queries = q.upload::<T>(device);
    let buffers = poisoned.each_ref().map(|tensor| tensor.upload::<C>(device));
    let q = input(&queries, &q);
    let [k, v] = [0, 1].map(|side: usize| input(&buffers[side], &poisoned[side]));
    let o_shape = [q_batch, heads, q_rows, d_v];
    let mut found = HostTensor::poisoned(dtype, &o_shape, &layout.strides(o_shape));
    let (mut o, mut lse) =
        (found.upload::<T>(device), Buffer::<f32>::poisoned(device, want.1.len()).unwrap_or_else(|e| fail(e)));
    let needed = attention::forward_workspace::<T>(device, q.shape(), k.shape(), v.shape(), &options);
    let mut workspace = Buffer::<f32>::poisoned(device, needed).unwrap_or_else(|e| fail(e));
    let target = output(&mut o, &found);
    attention::forward_into(device, q, k, v, target, lse.view_mut(), workspace.view_mut(), &options)
        .unwrap_or_else(|e| fail(e));
    found.download(&o);
    found.check_gaps("o");
    case.check_results(&found.values(), &lse.to_vec().unwrap_or_else(|e| fail(e)), [&want.0, &want.1]);
}
