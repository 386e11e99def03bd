//! The check of a launch accepts causal attention of every length and number of heads, and refuses tensors that are one
//! element short: the order of programs and the tiles that they load are within what the check can prove.

use std::collections::HashMap;
use tilewright::kernels::attention::backward::{FLASH_ATTENTION_BWD_DKDV, FLASH_ATTENTION_BWD_DQ};
use tilewright::kernels::attention::forward::FLASH_ATTENTION_FWD;
use tilewright_codegen::analysis::bounds::{Footprint, Launch, LaunchViolation};
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ArgSpec, ConstValue, KernelDef, ParamKind, Specialization};
use tilewright_codegen::pipeline;
use tilewright_tests::consts;

const TILE: usize = 64;

/// Arguments by their index: integers, and sizes in bytes.
struct Arguments {
    integers: Vec<i128>,
    bytes: Vec<u64>,
}

impl Launch for Arguments {
    fn integer(&self, arg: usize) -> i128 {
        self.integers[arg]
    }
    fn bytes(&self, arg: usize) -> u64 {
        self.bytes[arg]
    }
    fn address(&self, arg: usize) -> u64 {
        (arg as u64 + 1) << 44
    }
}

/// The extents by name.
fn extents(batch: usize, heads: usize, group: usize, n: usize, d: usize) -> HashMap<&'static str, usize> {
    let heads_kv = heads / group;
    let named = [
        ("batch", batch),
        ("entries", batch),
        ("entries_kv", batch),
        ("most", 1),
        ("sequences", batch),
        ("sequences_kv", batch),
        ("num_starts", 0),
        ("q_blocks", 1),
        ("k_blocks", 1),
        ("heads", heads),
        ("heads_kv", heads_kv),
        ("n_q", n),
        ("n_k", n),
        ("v_rows", n),
        ("d", d),
        ("d_v", d),
    ];
    HashMap::from(named)
}

/// Arguments of dense tensors; `short` is a tensor that lacks its last element. What is no tensor has room enough.
fn arguments(def: &KernelDef, extents: &HashMap<&str, usize>, short: Option<&str>) -> Arguments {
    let mut found = Arguments { integers: Vec::new(), bytes: Vec::new() };
    for param in def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. })) {
        let tensor = def.tensors.iter().find(|tensor| tensor.name == param.name);
        let product = |dims: &[usize]| dims.iter().map(|&dim| extents[def.dims[dim]]).product::<usize>();
        let elements = tensor.map(|tensor| product(tensor.dims));
        let missing = usize::from(short == Some(param.name));
        found.bytes.push(elements.map_or(1 << 40, |elements| 2 * (elements - missing) as u64));
        let stride = def.tensors.iter().find_map(|tensor| {
            let dim = tensor.strides.iter().position(|name| *name == param.name)?;
            Some(product(&tensor.dims[dim + 1..]))
        });
        found.integers.push(stride.or(extents.get(param.name).copied()).unwrap_or(0) as i128);
    }
    found
}

fn footprint(def: &KernelDef, group: usize, d: usize, even: bool, split_rows: usize) -> Footprint {
    let passed = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. }));
    // As a launch specializes dense tensors.
    let spec = |name: &str| match name {
        name if name.ends_with("_stride_d") => ArgSpec { divisible_by: 1, equal_to: Some(1) },
        name if name.contains("_stride_") => ArgSpec { divisible_by: 16, equal_to: None },
        _ => ArgSpec::default(),
    };
    let specialization = Specialization { args: passed.map(|p| spec(p.name)).collect() };
    let sizes = consts! {
        d = d, d_tile = d, d_v = d, d_v_tile = d, q_tile = TILE, k_tile = TILE, group = group, split_rows = split_rows,
    };
    let facts = consts! { causal = true, even_keys = even, even_queries = even };
    let consts: Vec<(&str, ConstValue)> =
        sizes.iter().chain(facts).filter(|(name, _)| def.params.iter().any(|p| p.name == *name)).cloned().collect();
    let dtypes = vec![DType::BF16; def.generics.len()];
    pipeline::footprint(&def.record(&dtypes, &consts, &specialization).expect("the kernel records"))
}

#[test]
fn causal_launches_of_every_size_are_in_bounds() {
    let shapes: [(usize, usize, usize, usize, usize); 9] = [
        (1, 16, 1, 16384, 64),
        (1, 16, 1, 8192, 128),
        (1, 16, 1, 4096, 128),
        (4, 16, 1, 4096, 64),
        (16, 16, 4, 1024, 64),
        (1, 32, 8, 8192, 128),
        (3, 6, 2, 65, 64),
        (2, 5, 1, 1, 64),
        (1, 1, 1, 1 << 20, 64),
    ];
    for (def, last) in [(&FLASH_ATTENTION_FWD, "q"), (&FLASH_ATTENTION_BWD_DKDV, "k"), (&FLASH_ATTENTION_BWD_DQ, "q")] {
        for (batch, heads, group, n, d) in shapes {
            let what = format!("{}: batch {batch}, heads {heads}, group {group}, {n} x {d}", def.name);
            let footprint = footprint(def, group, d, n.is_multiple_of(TILE), 0);
            let extents = extents(batch, heads, group, n, d);
            let rows = if last == "k" { heads / group } else { heads };
            let grid = [n.div_ceil(TILE), rows, batch].map(|programs| programs as u32);
            let whole = footprint.check(&arguments(def, &extents, None), grid);
            assert!(whole.is_ok(), "{what}: {whole:?}");
            let refused = footprint.check(&arguments(def, &extents, Some(last)), grid);
            assert!(refused.is_err(), "{what}: {last} lacks an element");
        }
    }
}

/// With fewer entries than batch entries and splits, some splits of the loop would be missing from the sum; with more, no
/// program would write some of them.
#[test]
fn results_have_an_entry_for_each_split() {
    let (batch, n, split_rows) = (2usize, 1000usize, 256usize);
    for def in [&FLASH_ATTENTION_FWD, &FLASH_ATTENTION_BWD_DKDV, &FLASH_ATTENTION_BWD_DQ] {
        for split_rows in [0, split_rows] {
            let footprint = footprint(def, 1, 64, false, split_rows);
            let needed = if split_rows > 0 { batch * n.div_ceil(split_rows) } else { batch };
            for entries in [needed - 1, needed, needed + 1, 2 * needed] {
                let mut extents = extents(batch, 4, 1, n, 64);
                extents.insert("entries", entries);
                let grid = [n.div_ceil(TILE), 4, entries].map(|programs| programs as u32);
                let checked = footprint.check(&arguments(def, &extents, None), grid);
                let what = format!("{}: {entries} entries, split_rows {split_rows}", def.name);
                match (entries == needed, checked) {
                    (true, checked) => assert_eq!(checked, Ok(()), "{what}"),
                    (false, Err(LaunchViolation::Assumption { failed, .. })) => {
                        assert_eq!(failed.comparison, Some(format!("{entries} == {needed}")), "{what}");
                    }
                    (false, checked) => panic!("{what}: {checked:?}"),
                }
            }
        }
    }
}

/// With a larger `group`, programs would read the keys of other heads; with a smaller one, dK and dV would leave out query
/// heads.
#[test]
fn groups_are_those_of_the_tensors() {
    for def in [&FLASH_ATTENTION_FWD, &FLASH_ATTENTION_BWD_DKDV, &FLASH_ATTENTION_BWD_DQ] {
        for group in [1, 2, 4] {
            let footprint = footprint(def, group, 64, true, 0);
            let extents = extents(2, 4, 2, TILE, 64);
            let grid = [1, if def.name == FLASH_ATTENTION_BWD_DKDV.name { 2 } else { 4 }, 2];
            let checked = footprint.check(&arguments(def, &extents, None), grid);
            let what = format!("{}: group {group}", def.name);
            match (group == 2, checked) {
                (true, checked) => assert_eq!(checked, Ok(()), "{what}"),
                (false, Err(LaunchViolation::Assumption { failed, .. })) => {
                    assert_eq!(failed.comparison, Some(format!("4 == {}", 2 * group)), "{what}");
                }
                (false, checked) => panic!("{what}: {checked:?}"),
            }
        }
    }
}
