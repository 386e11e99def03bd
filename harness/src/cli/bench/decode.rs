//! `tilewright bench decode`: times attention of a few queries per sequence to a cache of keys and values, in pages or not.

use std::io::Write;

use clap::Args;
use half::{bf16, f16};
use tilewright::kernels::attention::reference::{self, ModifierTensors, Problem};
use tilewright::kernels::attention::{Cache, Descale, Options, Tiles, forward_into, forward_workspace};
use tilewright::kernels::{Tensor, TensorMut};
use tilewright::prelude::Dtype;
use tilewright::{Buffer, Device, F8E4M3, F8E5M2};

use super::attention_modifiers::ModifierArguments;
use super::data::{Number, Value, normal, values};
use super::record::{Measured, Recorder, Row, Work, accept};
use super::{Common, copy, tiles};
use crate::cli::demo::case::{relative_error, tolerance};
use crate::cli::{CliError, Result};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Sequences. Default: 32, or 2 on the CPU
    #[arg(long)]
    batch: Option<usize>,
    /// Query heads. Default: 32, or 4 on the CPU
    #[arg(long)]
    heads: Option<usize>,
    /// Key/value heads, which divide the query heads. Default: a quarter of them
    #[arg(long)]
    heads_kv: Option<usize>,
    /// Queries of each sequence: its last tokens
    #[arg(long, default_value_t = 1)]
    n_q: usize,
    /// Instead of --batch and --n-q: the queries of each sequence, separated by commas, in one tensor (packed lengths)
    #[arg(long, value_delimiter = ',', conflicts_with_all = ["batch", "n_q"])]
    rows: Vec<usize>,
    /// Keys of each sequence. Default: 8192, or 512 on the CPU
    #[arg(long)]
    n_k: Option<usize>,
    /// Head dimension, 1 to 256
    #[arg(long, alias = "head-dim", default_value_t = 128)]
    d: usize,
    /// Head dimension of values and outputs. Default: that of queries and keys
    #[arg(long, value_name = "DIM", value_parser = clap::value_parser!(u16).range(1..=256))]
    head_dim_v: Option<u16>,
    /// Rows of a page, separated by commas; 0 is a cache without pages
    #[arg(long, value_delimiter = ',', default_value = "0,16,64,256")]
    page: Vec<usize>,
    /// Element type: bf16, f16 or f32. Default: bf16, or f32 on the CPU
    #[arg(long, value_parser = ["bf16", "f16", "f32"])]
    dtype: Option<String>,
    #[command(flatten)]
    modifiers: ModifierArguments,
    /// Element type of the cache, with scales: f8e4m3 or f8e5m2. Default: that of the queries
    #[arg(long, value_parser = ["f8e4m3", "f8e5m2"])]
    cache_dtype: Option<String>,
    /// Tiles: q_tile,k_tile,warps,stages, and hints as in the table. May be repeated. Default: those of a launch
    #[arg(long, value_name = "TILES", value_parser = tiles::parse)]
    tiles: Vec<Tiles>,
    /// Maximum number of splits of each loop over keys. Default: that of a launch
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    splits: Option<u32>,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let (device, mut recorder) = arguments.common.open("decode")?;
    let or = |given: Option<usize>, gpu, cpu| given.unwrap_or(if device.is_cuda() { gpu } else { cpu });
    let heads_q = or(arguments.heads, 32, 4);
    let heads_kv = arguments.heads_kv.unwrap_or((heads_q / 4).max(1));
    let (batch, n_k) = (or(arguments.batch, 32, 2), or(arguments.n_k, 8192, 512));
    let rows = &arguments.rows;
    let batch = if rows.is_empty() { batch } else { rows.len() };
    let (n_q, d) = (rows.iter().copied().max().unwrap_or(arguments.n_q), arguments.d);
    let extents = [batch, heads_q, heads_kv, n_q, n_k];
    let all_rows = if rows.is_empty() {
        batch.saturating_mul(n_q)
    } else {
        rows.iter().fold(0_usize, |all, &n| all.saturating_add(n))
    };
    if heads_kv > 0 && !heads_q.is_multiple_of(heads_kv) {
        return Err(CliError::usage(
            format!("--heads {heads_q} is not a multiple of --heads-kv {heads_kv}"),
            "each head of keys and values serves equally many query heads: --heads must be a multiple of --heads-kv",
        ));
    }
    let is_too_large = all_rows.saturating_mul(heads_q).max(n_k.saturating_mul(batch)) > MAX_ROWS;
    if is_too_large || extents.contains(&0) || !(1..=256).contains(&d) {
        return Err(CliError::usage(
            format!(
                "no attention of {batch} sequences, {heads_q} query heads, {heads_kv} of keys, {n_q} queries, {n_k} keys, d = {d}"
            ),
            format!(
                "--batch, --heads, --heads-kv, --n-q, --n-k and some number of --rows must be at least 1, and --d from 1 \
                 to 256; queries of all heads, and keys of all sequences, at most {MAX_ROWS}"
            ),
        ));
    }
    let scale = f64::from(1.0 / (d as f32).sqrt());
    let modifiers = arguments.modifiers.of(n_k, true)?;
    if modifiers.documents.is_some() {
        return Err(CliError::usage("a cache has no packed sequences", "leave the modifier `documents` out"));
    }
    if modifiers.relative && !rows.is_empty() {
        return Err(CliError::usage("--rows has no relative biases", "leave --rows or the modifier `relative` out"));
    }
    let d_v = arguments.head_dim_v.map_or(d, usize::from);
    let problem = Problem { batch, heads_q, heads_kv, n_q, n_k, d, d_v, causal: true, scale, modifiers };
    let copy_gbps = copy::bandwidth(&arguments.common, &device)?;
    for &page in &arguments.page {
        let dtype = arguments.dtype.as_deref().unwrap_or(if device.is_cuda() { "bf16" } else { "f32" });
        let own = arguments.tiles.iter().copied().map(Some);
        for tiles in own.chain(arguments.tiles.is_empty().then_some(None)) {
            let case = Case { arguments, device: &device, problem, page, tiles, copy_gbps };
            match dtype {
                "f16" => case.measure::<f16>(&mut recorder)?,
                "f32" => case.measure::<f32>(&mut recorder)?,
                _ => case.measure::<bf16>(&mut recorder)?,
            }
        }
    }
    recorder.finish(out)
}

/// Queries of all heads, and keys of all sequences, at most.
const MAX_ROWS: usize = 1 << 30;

struct Case<'a> {
    arguments: &'a Arguments,
    device: &'a Device,
    problem: Problem,
    /// Rows of a page; 0 without pages.
    page: usize,
    tiles: Option<Tiles>,
    copy_gbps: f64,
}

impl Case<'_> {
    fn measure<T: Number>(&self, recorder: &mut Recorder) -> Result<()> {
        let Problem { batch, heads_q, heads_kv, n_q, n_k, d, d_v, .. } = self.problem;
        let pages = match self.page {
            0 => "rows".to_string(),
            page => format!("pages of {page}"),
        };
        let row = Row::new("attention_decode", &[batch, heads_q, n_q, n_k, d], T::dtype().name());
        let (stored, size) = match self.arguments.cache_dtype.as_deref() {
            Some(stored) => (format!(" of {stored}"), 1),
            None => (String::new(), size_of::<T>()),
        };
        let rows = match &self.arguments.rows[..] {
            [] => String::new(),
            rows => {
                let equal = rows.chunk_by(|x, y| x == y).map(|run| format!("{} × {}", run.len(), run[0]));
                format!(", queries {}", equal.collect::<Vec<_>>().join(" + "))
            }
        };
        let modifiers = self.arguments.modifiers.text();
        let of_values = if d_v == d { String::new() } else { format!(", d_v={d_v}") };
        let row = row.case(&format!("{heads_kv} key/value heads, {pages}{stored}{of_values}{rows}{modifiers}"));
        let row = match self.tiles {
            Some(tiles) => row.tiles(tiles::text(tiles)),
            None => row,
        };
        // The keys and values that some query of a sequence sees.
        let seen_by = |n_q: usize| {
            let problem = Problem { n_q, ..self.problem };
            let seen = (0..n_q).map(|row| problem.seen(row));
            let (first, end) = seen.fold((n_k, 0), |(first, end), seen| (first.min(seen.start), end.max(seen.end)));
            end.saturating_sub(first)
        };
        let seen: usize = self.rows_of().into_iter().map(seen_by).sum();
        let bytes = (heads_kv * seen * (d + d_v) * size) as f64;
        let timed = match self.arguments.cache_dtype.as_deref() {
            Some("f8e4m3") => self.timed::<T, F8E4M3>(),
            Some(_) => self.timed::<T, F8E5M2>(),
            None => self.timed::<T, T>(),
        };
        recorder.push(row.measured(&timed, Work::Bytes(bytes, Some(self.copy_gbps))))
    }

    /// Queries of each sequence.
    fn rows_of(&self) -> Vec<usize> {
        match &self.arguments.rows[..] {
            [] => vec![self.problem.n_q; self.problem.batch],
            rows => rows.to_vec(),
        }
    }

    fn timed<T: Number, C: Value + Dtype>(&self) -> Measured {
        let Problem { batch, heads_q, heads_kv, n_q, n_k, d, d_v, .. } = self.problem;
        let device = self.device;
        let columns = n_k.div_ceil(self.page.max(1));
        let (entries, rows) = if self.page == 0 { (batch, n_k) } else { (batch * columns, self.page) };
        device.check_memory([entries, heads_kv, rows, d + d_v, size_of::<C>()].map(|n| n as f64).iter().product())?;
        let [k_shape, v_shape] = [d, d_v].map(|d| [entries, heads_kv, rows, d]);
        // Those of all sequences in one batch entry, or not.
        let rows_of = self.rows_of();
        let is_packed = !self.arguments.rows.is_empty();
        let all_rows: usize = rows_of.iter().sum();
        let [q_shape, o_shape] =
            [d, d_v].map(|d| if is_packed { [1, heads_q, all_rows, d] } else { [batch, heads_q, n_q, d] });
        let q = normal::<T>(device, q_shape.iter().product(), 1)?;
        let starts: Vec<i32> = (0..=batch).map(|s| rows_of[..s].iter().sum::<usize>() as i32).collect();
        let starts = Buffer::from_slice(device, &starts)?;
        let row_starts = is_packed.then(|| starts.tensor([batch + 1])).transpose()?;
        let [k, v] =
            [(k_shape, 2), (v_shape, 3)].map(|(shape, seed)| normal::<C>(device, shape.iter().product(), seed));
        let (k, v) = (k?, v?);
        let page_of = |i: usize| i * prime(entries) % entries;
        let table: Vec<i32> = (0..batch * columns).map(|i| page_of(i) as i32).collect();
        let (table, lengths) =
            (Buffer::from_slice(device, &table)?, Buffer::from_slice(device, &vec![n_k as i32; batch])?);
        let table = (self.page > 0).then(|| table.tensor([batch, columns])).transpose()?;
        // Keys and values have other ones, and so have heads.
        let scales =
            [0.5, 0.75].map(|first| (0..heads_kv).map(|head| first + head as f32 / 64.0).collect::<Vec<f32>>());
        let is_scaled = self.arguments.cache_dtype.is_some();
        let scale = |side: usize, head: usize| if is_scaled { f64::from(scales[side][head]) } else { 1.0 };
        let [k_scales, v_scales] = scales.each_ref().map(|scales| Buffer::from_slice(device, scales));
        let (k_scales, v_scales) = (k_scales?, v_scales?);
        let descale = is_scaled.then(|| Descale::per_head(batch, k_scales.view(), v_scales.view())).transpose()?;
        let room = Problem { n_k: if self.page == 0 { n_k } else { columns * self.page }, ..self.problem };
        let modifiers = ModifierTensors::new(device, &room)?;
        let options = Options {
            mask: modifiers.mask(),
            score: modifiers.score(),
            sinks: modifiers.sinks(),
            cache: Some(Cache { table, row_starts, ..Cache::new(lengths.view()) }),
            descale,
            forward_tiles: self.tiles,
            num_splits: self.arguments.splits.map(|splits| splits as usize),
            ..Options::new(true)
        };
        let mut o = Buffer::<T>::poisoned(device, o_shape.iter().product())?;
        let mut lse = Buffer::<f32>::poisoned(device, heads_q * all_rows)?;
        let needed = forward_workspace::<T>(device, q_shape, k_shape, v_shape, &options);
        let mut workspace = Buffer::<f32>::poisoned(device, needed)?;
        let mut launch = || {
            let (q, target) = (Tensor::dense(q.view(), q_shape)?, TensorMut::dense(o.view_mut(), o_shape)?);
            let (k, v) = (Tensor::dense(k.view(), k_shape)?, Tensor::dense(v.view(), v_shape)?);
            forward_into(device, q, k, v, target, lse.view_mut(), workspace.view_mut(), &options)
        };
        launch()?;
        let timing = self.arguments.common.time(device, launch)?;
        // Some sequences, by their definition: the first and the last with queries, and the one with the most.
        let with_rows = |&s: &usize| rows_of[s] > 0;
        let most = (0..batch).max_by_key(|&s| rows_of[s]);
        let ends = [(0..batch).find(with_rows), (0..batch).rfind(with_rows), most];
        let mut checked: Vec<usize> = ends.into_iter().flatten().collect();
        checked.sort_unstable();
        checked.dedup();
        let of_entry = |x: &Buffer<C>, side: usize, entry: usize| -> tilewright::Result<Vec<f64>> {
            let d = [d, d_v][side];
            let mut keys = vec![0.0; heads_kv * n_k * d];
            let (places, len) = (n_k.div_ceil(rows), heads_kv * rows * d);
            for place in 0..places {
                let at = if self.page == 0 { entry } else { page_of(entry * columns + place) };
                let page: Vec<f64> = x.slice(at * len..(at + 1) * len)?.to_vec()?.into_iter().map(C::to_f64).collect();
                let count = rows.min(n_k - place * rows) * d;
                for head in 0..heads_kv {
                    let (to, from) = ((head * n_k + place * rows) * d, head * rows * d);
                    let scaled = page[from..from + count].iter().map(|x| x * scale(side, head));
                    keys[to..to + count].iter_mut().zip(scaled).for_each(|(key, x)| *key = x);
                }
            }
            Ok(keys)
        };
        let (q, o) = (values(&q)?, values(&o)?);
        let mut error = 0.0_f64;
        for entry in checked {
            // The last rows of a sequence see its keys as the last queries do.
            let n_q = rows_of[entry].min(64);
            let end = if is_packed { rows_of[..=entry].iter().sum() } else { rows_of[entry] };
            let [_, heads, all, _] = o_shape;
            let own = |x: &[f64], d: usize| -> Vec<f64> {
                let first = if is_packed { 0 } else { entry };
                let of_head = |head: usize| &x[((first * heads + head) * all + end - n_q) * d..][..n_q * d];
                (0..heads).flat_map(of_head).copied().collect()
            };
            let problem = Problem { batch: 1, n_q, ..self.problem };
            let (k, v) = (of_entry(&k, 0, entry)?, of_entry(&v, 1, entry)?);
            let (want, _) = reference::forward(&problem, &own(&q, d), &k, &v);
            error = error.max(relative_error(&own(&o, d_v), &want));
        }
        Ok((timing, accept("o", error, tolerance(T::dtype()))?))
    }
}

/// A prime that does not divide `n`.
fn prime(n: usize) -> usize {
    [7919, 7907, 7901].into_iter().find(|&prime| !n.is_multiple_of(prime)).unwrap_or(1)
}
