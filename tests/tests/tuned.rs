//! The configurations that ship: what `ptxas` makes of them.

use tilewright::autotune::{Autotune, Config, KeyPart, KeyValue, Problem};
use tilewright::kernels::{AUTOTUNED, attention};
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::ConstValue;
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{Code, CompileOptions, GpuArch, Target};
use tilewright_tests::configurations::{PTX_VERSION, well_aligned};
use tilewright_tests::ptxas;

/// A variant of an attention kernel.
struct Variant {
    autotune: &'static Autotune,
    dtype: DType,
    d: i64,
    causal: bool,
    config: Config,
}

impl Variant {
    fn what(&self) -> String {
        format!("{} {} d={} causal={}: {}", self.autotune.def.name, self.dtype, self.d, self.causal, self.config)
    }

    /// As a launch on dense tensors of large, even lengths compiles it.
    fn ptx(&self) -> Result<String, String> {
        let def = self.autotune.def;
        let even = def
            .params
            .iter()
            .map(|p| p.name)
            .find(|name| name.starts_with("even_"))
            .expect("a promise of even lengths");
        let mut constants = self.config.constants.clone();
        constants.push(("d", ConstValue::Int(self.d)));
        constants.push(("d_tile", ConstValue::Int(attention::config::d_tile(self.d as usize) as i64)));
        constants.push(("causal", ConstValue::Bool(self.causal)));
        constants.push((even, ConstValue::Bool(true)));
        let func = def.record(&[self.dtype], &constants, &well_aligned(def)).map_err(|d| d.to_string())?;
        let options = CompileOptions {
            num_warps: self.config.num_warps,
            num_stages: self.config.num_stages,
            max_registers: self.config.max_registers,
            bulk_copies: self.config.bulk_copies,
            warp_specialize: self.config.warp_specialize,
            take_turns: self.config.take_turns,
            overlap: self.config.overlap,
            ptx_version: PTX_VERSION,
            ..CompileOptions::default()
        };
        let artifact =
            pipeline::compile(&func, &Target::Nvptx(GpuArch::Sm90a), &options, &mut ()).map_err(|e| e.to_string())?;
        match artifact.code {
            Code::Ptx(ptx) => Ok(ptx),
            Code::Object(_) => Err("an object file instead of PTX".into()),
        }
    }
}

fn attention_kernels() -> impl Iterator<Item = &'static Autotune> {
    AUTOTUNED.iter().copied().filter(|autotune| autotune.def.name.starts_with("flash_attention"))
}

/// `d`, `causal` and the type of a key.
fn read_key(key: &str) -> (DType, i64, bool) {
    let value = |name: &str| {
        let word = key.split(',').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        word.unwrap_or_else(|| panic!("`{key}` has no {name}"))
    };
    (DType::from_name(value("T")).unwrap(), value("d").parse().unwrap(), value("causal").parse().unwrap())
}

/// What the tables have, and the defaults of the assignment's head dimensions.
fn variants() -> Vec<Variant> {
    let mut variants = Vec::new();
    for autotune in attention_kernels() {
        for (key, config) in autotune.shipped() {
            let (dtype, d, causal) = read_key(&key);
            variants.push(Variant { autotune, dtype, d, causal, config });
        }
        for d in [64, 128] {
            for causal in [false, true] {
                let parts = vec![KeyPart { name: "d", value: KeyValue::Exact(ConstValue::Int(d)) }];
                let target = Target::Nvptx(GpuArch::Sm90a);
                let problem = Problem { target, def: autotune.def, dtypes: &[DType::BF16], parts };
                let config = autotune.default_config(&problem);
                variants.push(Variant { autotune, dtype: DType::BF16, d, causal, config });
            }
        }
    }
    variants
}

#[test]
fn tables_are_read_and_have_entries_of_their_kernels() {
    assert!(!tilewright::kernels::tuned::TABLES.is_empty());
    for autotune in AUTOTUNED {
        for text in autotune.tables {
            let table = tilewright::autotune::Table::parse(text).unwrap();
            assert_eq!(table.device.compute_capability.as_deref(), Some("9.0"));
            for entry in table.entries.iter().filter(|entry| entry.kernel == autotune.def.name) {
                autotune.parse_config(&entry.config).unwrap_or_else(|why| panic!("{}: {why}", entry.config));
            }
        }
    }
    let shipped: usize = attention_kernels().map(|autotune| autotune.shipped().len()).sum();
    assert!(shipped >= 2, "{shipped}");
}

/// Products stay in flight, and everything stays in registers.
#[test]
fn shipped_attention_neither_spills_nor_waits_for_its_products() {
    let Some(ptxas) = ptxas::find() else { return };
    let mut failures = Vec::new();
    for variant in variants() {
        match variant.ptx().and_then(|ptx| ptxas::assemble(&ptxas, &ptx, GpuArch::Sm90a.name())) {
            Err(why) => failures.push(format!("{}: {why}", variant.what())),
            Ok(found) if found.spills > 0 || found.serialised => {
                failures.push(format!("{}: {found:?}", variant.what()));
            }
            Ok(_) => {}
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
