//! Counts a kernel's instructions by class, from its SASS or its PTX.

use std::collections::BTreeMap;

/// An instruction class. An instruction belongs to the first class that has a prefix of its mnemonic.
struct InstructionClass {
    name: &'static str,
    /// Prefixes of SASS mnemonics.
    sass: &'static [&'static str],
    /// Prefixes of PTX mnemonics.
    ptx: &'static [&'static str],
}

const CLASSES: &[InstructionClass] = &[
    InstructionClass {
        name: "tensor core (wgmma)",
        sass: &["HGMMA", "QGMMA", "IGMMA", "BGMMA"],
        ptx: &["wgmma.mma_async"],
    },
    InstructionClass { name: "tensor core (mma.sync)", sass: &["HMMA", "IMMA", "DMMA", "QMMA"], ptx: &["mma.sync"] },
    InstructionClass {
        name: "TMA, bulk async copy",
        sass: &["UTMA", "UBLKCP", "UBLKRED"],
        ptx: &["cp.async.bulk", "cp.reduce.async.bulk"],
    },
    InstructionClass { name: "async copy (cp.async)", sass: &["LDGSTS"], ptx: &["cp.async"] },
    InstructionClass { name: "global load", sass: &["LDG", "LD."], ptx: &["ld.global"] },
    InstructionClass { name: "global store", sass: &["STG", "ST."], ptx: &["st.global"] },
    InstructionClass { name: "atomic", sass: &["RED", "ATOM"], ptx: &["red.", "atom."] },
    InstructionClass { name: "shared load (ldmatrix)", sass: &["LDSM"], ptx: &["ldmatrix"] },
    InstructionClass { name: "shared store (stmatrix)", sass: &["STSM"], ptx: &["stmatrix"] },
    InstructionClass { name: "shared load", sass: &["LDS"], ptx: &["ld.shared"] },
    InstructionClass { name: "shared store", sass: &["STS"], ptx: &["st.shared"] },
    InstructionClass { name: "local memory (spills)", sass: &["LDL", "STL"], ptx: &["ld.local", "st.local"] },
    InstructionClass {
        name: "special function",
        sass: &["MUFU"],
        ptx: &["ex2.", "lg2.", "rcp.", "rsqrt.", "sqrt.", "sin.", "cos.", "tanh."],
    },
    InstructionClass { name: "multiply-add, f32", sass: &["FFMA"], ptx: &["fma.rn.f32"] },
    InstructionClass {
        name: "other f32",
        sass: &["FADD", "FMUL", "FMNMX", "FSEL", "FSET", "FCHK"],
        ptx: &[
            "add.f32",
            "add.rn.f32",
            "sub.f32",
            "sub.rn.f32",
            "mul.f32",
            "mul.rn.f32",
            "max.f32",
            "min.f32",
            "max.NaN.f32",
            "neg.f32",
        ],
    },
    InstructionClass {
        name: "f16 and bf16",
        sass: &["HADD", "HMUL", "HFMA", "HMNMX"],
        ptx: &["fma.rn.bf16", "fma.rn.f16", "add.bf16", "add.f16"],
    },
    InstructionClass { name: "conversion", sass: &["F2F", "F2I", "I2F"], ptx: &["cvt."] },
    InstructionClass { name: "shuffle", sass: &["SHFL"], ptx: &["shfl."] },
    InstructionClass { name: "barrier", sass: &["BAR", "SYNCS", "WARPSYNC"], ptx: &["bar.", "barrier.", "mbarrier."] },
    InstructionClass {
        name: "wait",
        sass: &["WARPGROUP", "LDGDEPBAR", "DEPBAR"],
        ptx: &["wgmma.", "fence.", "membar."],
    },
    InstructionClass {
        name: "branch",
        sass: &["BRA", "BRX", "EXIT", "BSSY", "BSYNC", "CALL", "RET"],
        ptx: &["bra", "ret"],
    },
    InstructionClass { name: "nop", sass: &["NOP"], ptx: &[] },
];
const OTHER: &str = "integers, addresses, predicates";

/// Classes of the instructions in order, and the loops.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Code {
    /// The class of each instruction.
    classes: Vec<&'static str>,
    /// Index of the first and the last instruction of each loop.
    loops: Vec<(usize, usize)>,
}

/// Number of instructions by class.
pub type Counts = BTreeMap<&'static str, usize>;

/// Iterates over the classes in the order of the table.
pub fn classes() -> impl Iterator<Item = &'static str> {
    CLASSES.iter().map(|class| class.name).chain([OTHER])
}

impl Code {
    /// Parses the output of `nvdisasm -c`.
    pub fn from_sass(text: &str) -> Code {
        let mut code = CodeBuilder::new(".L_", "BRA", |class| class.sass);
        for line in text.lines().map(str::trim) {
            if !code.label(line)
                && let Some(statement) = machine_instruction(line)
            {
                code.instruction(statement);
            }
        }
        code.code
    }

    /// Parses PTX.
    pub fn from_ptx(text: &str) -> Code {
        let mut code = CodeBuilder::new("$L_", "bra", |class| class.ptx);
        for line in text.lines().map(str::trim).filter(|line| !line.starts_with("//")) {
            if code.label(line) {
                continue;
            }
            // Our inline assembly has several statements per line, with declarations in a scope.
            for statement in line.split(';').map(|part| part.trim_start_matches(['{', '}', ' ', '\t'])) {
                let is_code = statement.starts_with(|c: char| c.is_ascii_lowercase() || c == '@');
                if is_code && line.contains(';') {
                    code.instruction(statement);
                }
            }
        }
        code.code
    }

    pub fn len(&self) -> usize {
        self.classes.len()
    }

    /// Counts all instructions by class.
    pub fn all(&self) -> Counts {
        count(&self.classes)
    }

    /// Counts the instructions of each innermost loop: loops with the most MMAs first, then the longest.
    pub fn innermost_loops(&self) -> Vec<Counts> {
        let contains =
            |outer: &(usize, usize), inner: &(usize, usize)| outer != inner && outer.0 <= inner.0 && inner.1 <= outer.1;
        let mut found: Vec<Counts> = self
            .loops
            .iter()
            .filter(|outer| !self.loops.iter().any(|inner| contains(outer, inner)))
            .map(|&(first, last)| count(&self.classes[first..=last]))
            .collect();
        let weight = |counts: &Counts| (mma_count(counts), counts.values().sum::<usize>());
        found.sort_by_key(|counts| std::cmp::Reverse(weight(counts)));
        found
    }
}

/// Returns the number of tensor-core instructions.
pub fn mma_count(counts: &Counts) -> usize {
    ["tensor core (wgmma)", "tensor core (mma.sync)"].iter().filter_map(|class| counts.get(class)).sum()
}

fn count(classes: &[&'static str]) -> Counts {
    let mut counts = Counts::new();
    for class in classes {
        *counts.entry(class).or_default() += 1;
    }
    counts
}

/// Selects the SASS or the PTX mnemonics of a class.
type Mnemonics = fn(&InstructionClass) -> &'static [&'static str];

/// Extracts the instruction from `/*0010*/  @!P0 FADD R1, R2, R3 ;`. Encodings are comments on separate lines.
fn machine_instruction(line: &str) -> Option<&str> {
    let (address, rest) = line.strip_prefix("/*")?.split_once("*/")?;
    let rest = rest.trim_start();
    (address.len() <= 6 && !rest.is_empty()).then_some(rest)
}

/// Builds [`Code`] from labels and instructions in order.
struct CodeBuilder {
    code: Code,
    labels: BTreeMap<String, usize>,
    /// Prefix of labels.
    label: &'static str,
    /// Mnemonic of branches.
    branch: &'static str,
    mnemonics: Mnemonics,
}

impl CodeBuilder {
    fn new(label: &'static str, branch: &'static str, mnemonics: Mnemonics) -> CodeBuilder {
        CodeBuilder { code: Code::default(), labels: BTreeMap::new(), label, branch, mnemonics }
    }

    /// Records a label. Returns whether the line is one.
    fn label(&mut self, line: &str) -> bool {
        let name = line.strip_suffix(':').filter(|name| name.starts_with(self.label));
        if let Some(name) = name {
            self.labels.insert(name.to_string(), self.code.classes.len());
        }
        name.is_some()
    }

    fn instruction(&mut self, text: &str) {
        // Skip a leading predicate.
        let word = match text.split_once([' ', '\t']) {
            Some((first, rest)) if first.starts_with('@') => rest.trim_start(),
            _ => text,
        };
        let mnemonic = word.split([' ', '\t', ';', ',']).next().unwrap_or_default();
        if mnemonic.is_empty() {
            return;
        }
        let place = self.code.classes.len();
        if mnemonic.split('.').next() == Some(self.branch)
            && let Some(start) = word.find(self.label)
        {
            let target: String =
                word[start..].chars().take_while(|c| c.is_alphanumeric() || "._$".contains(*c)).collect();
            // Only backward branches form loops. A branch to itself is the padding after the end of the code.
            if let Some(&first) = self.labels.get(&target)
                && first < place
            {
                self.code.loops.push((first, place));
            }
        }
        let fits = |class: &&InstructionClass| (self.mnemonics)(class).iter().any(|begin| mnemonic.starts_with(begin));
        self.code.classes.push(CLASSES.iter().find(fits).map_or(OTHER, |class| class.name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_and_classes_of_machine_code() {
        let text = "
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P2 LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/                   LDS.128 R4, [R1] ;
.L_x_2:
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
                                                                  /* 0x00e00000081879f0 */
        /*0040*/                   MUFU.EX2 R4, R4 ;
        /*0050*/               @P0 BRA `(.L_x_2) ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
        /*0070*/                   EXIT ;
.L_x_3:
        /*0080*/                   BRA `(.L_x_3);
";
        let code = Code::from_sass(text);
        assert_eq!(code.len(), 9);
        let all = code.all();
        assert_eq!((all["async copy (cp.async)"], all["branch"], all[OTHER]), (1, 4, 1));
        let loops = code.innermost_loops();
        assert_eq!(loops.len(), 1, "the outer loop contains another one, and the branch to itself is not a loop");
        assert_eq!(loops[0].values().sum::<usize>(), 3);
        assert_eq!((mma_count(&loops[0]), loops[0]["special function"]), (1, 1));
    }

    #[test]
    fn loops_and_classes_of_ptx() {
        let text = "
.visible .entry kernel(
\t.param .u64 x
)
{
\t.reg .b32 %r<4>;
// %bb.0:
\tmov.u32 %r1, 7;
$L__BB0_1:
\t{.reg .pred add; setp.eq.u32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, add, 1, 1, 0, 0;}
\twgmma.wait_group.sync.aligned 0;
\tcp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}], [%r1];
\tcp.async.cg.shared.global [%r1], [%rd1], 16;
\t@%p1 bra \t$L__BB0_1;
\tret;
}
";
        let code = Code::from_ptx(text);
        let all = code.all();
        assert_eq!((all["TMA, bulk async copy"], all["async copy (cp.async)"], all["wait"]), (1, 1, 1), "{all:?}");
        assert_eq!((code.len(), code.innermost_loops()[0].values().sum::<usize>()), (8, 6));
        assert_eq!(mma_count(&all), 1);
    }
}
