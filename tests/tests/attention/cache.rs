//! Attention of a cache of keys and values: as native code, and on simulated GPUs.

use tilewright::codegen::ir::DType;
use tilewright::codegen::target::GpuArch;
use tilewright::kernels::Tensor as AnyTensor;
use tilewright::kernels::attention::config::{Keys, decoding_tiles};
use tilewright::kernels::attention::reference::Modifiers;
use tilewright::kernels::attention::{
    Cache, Descale, Options, Score, Tensor, TensorMut, Tiles, backward, forward, forward_into,
};
use tilewright::prelude::{Buffer, Device, F8E4M3};
use tilewright_tests::attention::{Layout, RELATIVE, SINKS};
use tilewright_tests::attention_cache::{CacheCase, check_cache};

/// No keys, one, a whole page and more, all that there is room for, and lengths that count as 0 and as all.
const LENGTHS: &[i32] = &[0, 1, 16, 45, 70, -3, 1000];

#[test]
fn lengths_and_pages() {
    let device = Device::cpu();
    for n_q in [1, 3] {
        let case = CacheCase { dtype: DType::F32, ..CacheCase::new([4, 2], n_q, [16, 24], LENGTHS, 70) };
        let missing = CacheCase { missing: true, ..case.pages_of(16) };
        let cases = [case, case.pages_of(16), missing, case.pages_of(7), case.pages_of(1), case.pages_of(200)];
        for (i, case) in cases.into_iter().enumerate() {
            let forms = [
                case,
                CacheCase { causal: false, layout: Layout::RowsFirst, ..case },
                CacheCase { modifiers: Modifiers { window: Some(20), ..SINKS }, layout: Layout::Gaps, ..case },
            ];
            // Compiling takes most of the time: not every case in every form.
            for (j, form) in forms.into_iter().enumerate() {
                if i < 2 || i % 3 == j {
                    check_cache(&device, form, &Options::default());
                }
            }
        }
    }
}

/// More queries than a tile has rows, and keys of which some rows see none.
#[test]
fn prompts() {
    let case = CacheCase { dtype: DType::F32, ..CacheCase::new([2, 1], 75, [16, 16], &[0, 40, 75, 150], 160) };
    let window = Modifiers { window: Some(30), softcap: Some(2.0), alibi: true, ..Modifiers::default() };
    let prefix = Modifiers { prefix: Some(50), sinks: true, ..Modifiers::default() };
    let cases = [
        case,
        CacheCase { modifiers: prefix, ..case },
        CacheCase { modifiers: window, ..case.pages_of(32) },
        CacheCase { modifiers: RELATIVE, ..case.pages_of(32) },
    ];
    for case in cases {
        check_cache(&Device::cpu(), case, &Options::default());
    }
}

/// Splits of which some begin after an entry's last key.
#[test]
fn splits() {
    let options = Options { num_splits: Some(4), ..Options::default() };
    let window = Modifiers { window: Some(400), ..SINKS };
    for modifiers in [Modifiers::default(), SINKS, window, RELATIVE] {
        let case = CacheCase::new([4, 2], 1, [16, 16], &[0, 3, 300, 900], 1000);
        let case = CacheCase { modifiers, dtype: DType::F32, ..case.pages_of(64) };
        check_cache(&Device::cpu(), case, &options);
        if modifiers == SINKS {
            check_cache(&Device::cpu(), CacheCase { cache_dtype: Some(DType::F8E4M3), ..case }, &options);
        }
    }
}

/// Entries with different numbers of queries: none, one, as many as a tile has and more; all of them, and none, of packed heads.
#[test]
fn rows_of_each_entry() {
    const ROWS: &[usize] = &[1, 0, 20, 64, 1, 130, 3];
    const KEYS: &[i32] = &[33, 5, 50, 0, 1, 140, 1000];
    let window = Modifiers { window: Some(20), softcap: Some(2.0), ..SINKS };
    let alibi = Modifiers { alibi: true, ..Modifiers::default() };
    let case = CacheCase { rows: Some(ROWS), dtype: DType::F32, ..CacheCase::new([4, 2], 0, [16, 24], KEYS, 150) };
    let cases = [
        case,
        CacheCase { modifiers: window, layout: Layout::Gaps, ..case.pages_of(16) },
        CacheCase { modifiers: alibi, layout: Layout::RowsFirst, ..case.pages_of(7) },
        CacheCase { modifiers: Modifiers { prefix: Some(9), ..SINKS }, heads: [2, 2], ..case },
        CacheCase { causal: false, cache_dtype: Some(DType::F8E4M3), missing: true, ..case.pages_of(16) },
    ];
    for case in cases {
        check_cache(&Device::cpu(), case, &Options::default());
    }
    let splits = Options { num_splits: Some(3), ..Options::default() };
    let long = CacheCase { lengths: &[600, 40], rows: Some(&[2, 70]), most: 700, ..case };
    check_cache(&Device::cpu(), long, &splits);
    check_cache(&Device::cpu(), CacheCase { modifiers: window, ..long.pages_of(64) }, &splits);
    // One sequence, and more than a program reads at a time.
    check_cache(&Device::cpu(), CacheCase { lengths: &[40], rows: Some(&[5]), ..case }, &Options::default());
    let many = CacheCase { lengths: &[9; 300], rows: Some(&[2; 300]), most: 9, ..case };
    check_cache(&Device::cpu(), many, &Options::default());
    for arch in [GpuArch::Sm90a, GpuArch::Sm80] {
        let device = Device::simulated(arch);
        let case = CacheCase { dtype: DType::BF16, d: [64, 32], ..case.pages_of(16) };
        check_cache(&device, case, &Options::default());
        // The tiles of prompts, loaded as blocks or by rows, with and without splits.
        let prompts = CacheCase { rows: Some(&[40, 0, 70, 1]), lengths: &[100, 9, 200, 150], most: 256, ..case };
        let prompts = CacheCase { d: [32, 32], ..prompts };
        let check = |case: CacheCase, num_splits| {
            let keys = Keys::of(true, case.page.unwrap_or(0));
            let forward_tiles = Some(decoding_tiles(128, 32, [2, 2], keys, &device.target()));
            check_cache(&device, case, &Options { forward_tiles, num_splits, ..Options::default() });
        };
        check(CacheCase { missing: true, modifiers: SINKS, ..prompts.pages_of(64) }, None);
        if arch == GpuArch::Sm90a {
            let rows = Some(&[2_usize, 20][..]);
            check(CacheCase { lengths: &[300, 64], rows, most: 512, ..prompts.pages_of(64) }, Some(2));
            check(CacheCase { page: None, ..prompts }, None);
            check(CacheCase { rows: Some(&[40, 1]), lengths: &[100, 30], ..prompts.pages_of(50) }, None);
        }
        let few = CacheCase { rows: Some(&[1, 3, 1]), lengths: &[30, 3, 130], ..case };
        check_cache(&device, few, &Options::default());
        check_cache(&device, CacheCase { modifiers: alibi, ..few }, &Options::default());
    }
}

/// Numbers that are no starts give wrong rows, but reach no memory that is not there: the simulated GPU looks, and so does a launch.
/// Sequences that overlap write rows twice, which the simulated GPU refuses.
#[test]
fn row_starts_may_be_anything() {
    let (apart, overlapping) = ([[37; 4], [1000; 4], [-5, 20, 20, 90]], [[9, 3, 30, 1], [i32::MIN, i32::MAX, -1, 5]]);
    let gpu = Device::simulated(GpuArch::Sm90a);
    for (device, starts) in [(Device::cpu(), &overlapping[..]), (Device::cpu(), &apart[..]), (gpu, &apart[..])] {
        let numbers = Buffer::from_slice(&device, &vec![0.5_f32; 1 << 13]).unwrap();
        let (lengths, o) = (Buffer::from_slice(&device, &[20, 20, 20]).unwrap(), [1, 4, 37, 16]);
        for starts in starts {
            let starts = Buffer::from_slice(&device, starts).unwrap();
            let row_starts = Some(starts.tensor([4]).unwrap());
            let cache = Cache { row_starts, ..Cache::new(lengths.view()) };
            let options = Options { cache: Some(cache), ..Options::new(true) };
            let tensor = |shape| Tensor::dense(numbers.view(), shape).unwrap();
            let k = tensor([3, 2, 20, 16]);
            let mut out = Buffer::<f32>::zeros(&device, 4 * 37 * 16).unwrap();
            let mut lse = Buffer::<f32>::zeros(&device, 4 * 37).unwrap();
            let mut none = Buffer::<f32>::zeros(&device, 0).unwrap();
            let target = TensorMut::dense(out.view_mut(), o).unwrap();
            forward_into(&device, tensor(o), k, k, target, lse.view_mut(), none.view_mut(), &options).unwrap();
            assert!(out.to_vec().unwrap().into_iter().all(|x| x == 0.0 || (x - 0.5).abs() < 1e-4));
        }
    }
}

/// 8-bit floats, with scales, also of 0.
#[test]
fn other_types() {
    let case = CacheCase::new([4, 2], 3, [16, 24], LENGTHS, 70);
    for (dtype, stored) in [(DType::F32, DType::F8E4M3), (DType::BF16, DType::F8E5M2)] {
        let case = CacheCase { dtype, cache_dtype: Some(stored), ..case };
        check_cache(&Device::cpu(), case.pages_of(16), &Options::default());
        check_cache(&Device::cpu(), CacheCase { modifiers: SINKS, ..case }, &Options::default());
    }
}

#[test]
fn on_simulated_gpus() {
    for arch in [GpuArch::Sm90a, GpuArch::Sm80] {
        let device = Device::simulated(arch);
        let decoding = CacheCase::new([4, 2], 1, [64, 32], &[0, 1, 130], 150);
        check_cache(&device, decoding.pages_of(16), &Options::default());
        let window = Modifiers { window: Some(70), ..SINKS };
        check_cache(&device, CacheCase { modifiers: window, ..decoding.pages_of(16) }, &Options::default());
        check_cache(&device, CacheCase { dtype: DType::F32, ..decoding }, &Options::default());
        let stored = Some(DType::F8E4M3);
        check_cache(&device, CacheCase { cache_dtype: stored, ..decoding.pages_of(16) }, &Options::default());
        let prompt = CacheCase::new([2, 1], 70, [64, 64], &[70, 133], 140);
        check_cache(&device, prompt.pages_of(64), &Options::default());
        let missing = CacheCase { missing: true, lengths: &[70, 200], most: 256, ..prompt };
        check_cache(&device, missing.pages_of(64), &Options::default());
        check_cache(&device, CacheCase { n_q: 1, ..missing.pages_of(64) }, &Options::default());
        check_cache(
            &device,
            CacheCase { cache_dtype: stored, dtype: DType::F16, ..prompt.pages_of(64) },
            &Options::default(),
        );
        let tiles = Tiles::new(64, 128, 4, 2);
        check_cache(&device, prompt, &Options { forward_tiles: Some(tiles), ..Options::default() });
    }
}

/// Entries without keys give 0, whatever their scales are.
#[test]
fn scales_of_no_keys() {
    let device = Device::cpu();
    let q = Buffer::from_slice(&device, &[1.0_f32; 2 * 16]).unwrap();
    let k = Buffer::<F8E4M3>::zeros(&device, 2 * 8 * 16).unwrap();
    let (lengths, scales) = (Buffer::from_slice(&device, &[0, 8]), Buffer::from_slice(&device, &[f32::NAN, 1.0]));
    let (lengths, scales) = (lengths.unwrap(), scales.unwrap());
    let of = scales.tensor([2, 1, 1]).unwrap();
    let descale = Some(Descale { q: None, k: of, v: of });
    let options = Options { cache: Some(Cache::new(lengths.view())), descale, ..Options::default() };
    let (q, k) = (q.tensor([2, 1, 1, 16]).unwrap(), k.tensor([2, 1, 8, 16]).unwrap());
    let (o, _) = forward(&device, q, k, k, &options).unwrap();
    assert_eq!(o.to_vec().unwrap(), [0.0; 32]);
}

#[test]
fn mistakes_say_what_is_expected() {
    let device = Device::cpu();
    let numbers = Buffer::<f32>::zeros(&device, 1 << 12).unwrap();
    let (lengths, table) = (Buffer::<i32>::zeros(&device, 3).unwrap(), Buffer::<i32>::zeros(&device, 6).unwrap());
    let tensor = |shape| Tensor::dense(numbers.view(), shape).unwrap();
    let message = |n: usize, rows: Option<usize>, keys: [usize; 4], mask: bool| {
        let table = rows.map(|rows| table.tensor([rows, 6 / rows]).unwrap());
        let cache = Cache { table, ..Cache::new(lengths.slice(..n).unwrap()) };
        let mut options = Options { cache: Some(cache), ..Options::new(true) };
        if mask {
            options.mask = tilewright::kernels::attention::Mask::documents(lengths.view(), 1);
        }
        forward(&device, tensor([2, 2, 1, 16]), tensor(keys), tensor(keys), &options).err().map(|e| e.to_string())
    };
    let keys = [2, 2, 8, 16];
    assert_eq!(message(2, None, keys, false), None);
    assert_eq!(message(2, Some(2), [5, 2, 8, 16], false), None);
    // Pages without rows, and no pages.
    assert_eq!(message(2, Some(2), [5, 2, 0, 16], false), None);
    assert_eq!(message(2, Some(2), [0, 2, 8, 16], false), None);
    for (message, words) in [
        (message(3, None, keys, false), ["`lengths`", "each of 2 batch entries", "3"]),
        (message(2, Some(3), keys, false), ["`table`", "each of 2 batch entries", "3"]),
        (message(2, None, [5, 2, 8, 16], false), ["`k`", "[2, 2, 8, 16]", "[5, 2, 8, 16]"]),
        (message(2, Some(2), [5, 2, 8, 32], false), ["`k`", "[5, 2, 8, 16]", "[5, 2, 8, 32]"]),
        (message(2, None, keys, true), ["`mask`", "packed sequences", "`row_starts` of the cache"]),
    ] {
        let message = message.expect("an error");
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }
    // Rows of several sequences in one batch entry.
    let message = |q: [usize; 4], n: usize, starts: usize, score| {
        let row_starts = Some(AnyTensor::dense(table.slice(..starts).unwrap(), [starts]).unwrap());
        let cache = Cache { row_starts, ..Cache::new(lengths.slice(..n).unwrap()) };
        let options = Options { cache: Some(cache), score, ..Options::new(true) };
        forward(&device, tensor(q), tensor(keys), tensor(keys), &options).err().map(|e| e.to_string())
    };
    let plain = Score::default();
    assert_eq!(message([1, 2, 7, 16], 2, 3, plain), None);
    assert_eq!(message([1, 2, 0, 16], 2, 3, plain), None);
    for (message, words) in [
        (
            message([2, 2, 7, 16], 2, 3, plain),
            ["`q`", "one batch entry, whose rows are those of all sequences", "found 2"],
        ),
        (message([1, 2, 7, 16], 2, 2, plain), ["`lengths`", "each of 1 batch entries", "found 2"]),
        (message([1, 2, 7, 16], 0, 1, plain), ["`row_starts`", "each of up to 2^20 - 1 sequences", "found 1 numbers"]),
        (message([1, 2, 7, 16], 1, 2, plain), ["`k`", "[1, 2, 8, 16]", "[2, 2, 8, 16]"]),
        (
            message([1, 2, 7, 16], 2, 3, Score::relative(numbers.slice(..28).unwrap())),
            ["`relative_bias`", "none beside `row_starts`", "found some"],
        ),
    ] {
        let message = message.expect("an error");
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    }
    let bytes = Buffer::<F8E4M3>::zeros(&device, 1 << 12).unwrap();
    let of_scaled_bytes = |cache, descale| {
        let (q, k) = (tensor(keys), bytes.tensor(keys).unwrap());
        forward(&device, q, k, k, &Options { cache, descale, ..Options::default() }).err().map(|e| e.to_string())
    };
    let of_bytes = |cache| of_scaled_bytes(cache, None);
    let cache = Cache::new(lengths.slice(..2).unwrap());
    let error = of_bytes(None).expect("an error");
    assert!(
        error.contains("`k` expects elements of type f32, as for q; beside a cache also 8-bit floats, found f8e4m3"),
        "{error}"
    );
    assert_eq!(of_bytes(Some(cache)), None);
    let integers = Buffer::<i8>::zeros(&device, 1 << 12).unwrap();
    let (q, k) = (tensor(keys), integers.tensor(keys).unwrap());
    let error = forward(&device, q, k, k, &Options { cache: Some(cache), ..Options::default() }).err().unwrap();
    assert!(error.to_string().contains("`k` expects elements of type f32"), "{error}");
    let scales = |n| numbers.slice(..n).unwrap();
    let error = Descale::per_head(2, scales(2), scales(3)).err().unwrap().to_string();
    assert!(error.contains("`v_descale` expects as many scales as `k_descale`, 2, found 3"), "{error}");
    let per_head = |n| Some(Descale::per_head(2, scales(n), scales(n)).unwrap());
    let error = of_scaled_bytes(Some(cache), per_head(3)).unwrap();
    assert!(error.contains("`k_descale` expects scales of 2 batch entries × 2 heads × 1 blocks"), "{error}");
    assert!(error.contains("found 2 × 3 × 1"), "{error}");
    let blocks = numbers.tensor([2, 2, 3]).unwrap();
    let long = [2, 2, 300, 16];
    let options =
        Options { cache: Some(cache), descale: Some(Descale { q: None, k: blocks, v: blocks }), ..Options::default() };
    let many = Buffer::<F8E4M3>::zeros(&device, 2 * 2 * 300 * 16).unwrap();
    let of_many = many.tensor(long).unwrap();
    let error = forward(&device, tensor(keys), of_many, of_many, &options).err().unwrap().to_string();
    assert!(error.contains("`k_descale` expects one scale for all rows of a head, beside a cache, found 3"), "{error}");
    let options = Options { descale: per_head(2), ..Options::default() };
    let error = forward(&device, tensor(keys), tensor(keys), tensor(keys), &options).err().unwrap().to_string();
    assert!(error.contains("`k` expects 8-bit floats, which have scales, found f32"), "{error}");
    let (o, lse) = forward(&device, tensor(keys), tensor(keys), tensor(keys), &Options::default()).unwrap();
    let [q, k, v] = [keys; 3].map(tensor);
    let saved = tilewright::kernels::attention::Saved { q, k, v, o: o.tensor(keys).unwrap(), lse: lse.view(), d_o: q };
    let error = backward(&device, saved, &Options { cache: Some(cache), ..Options::default() }).err().unwrap();
    assert!(error.to_string().contains("no backward pass"), "{error}");
}
