//! Roofline bounds of a launch: its minimum FLOP count and bytes moved, and the time that they take at peak rates.

use tilewright_codegen::ir::DType;
use tilewright_codegen::target::GpuArch;

/// Lower bounds on the work of a launch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Work {
    /// Floating-point operations of matmuls; `None` for kernels without them.
    pub flop: Option<f64>,
    /// Bytes, with every input read once and every output written once.
    pub bytes: Option<f64>,
}

/// Peak rates in FLOP/s and bytes per second, and their source.
#[derive(Clone, Debug, PartialEq)]
pub struct Peaks {
    pub flop: f64,
    pub bytes: f64,
    pub source: String,
}

/// Dense peak rates of a GPU, from its data sheet: FLOP/s by type of the operands, and bytes per second.
struct DataSheet {
    name: &'static str,
    /// bf16 and f16.
    half: f64,
    tf32: f64,
    f32: f64,
    bytes: f64,
}

/// Returns the dense peak rates of a GPU of this architecture, from NVIDIA's data sheets (H200 SXM; A100 SXM 80 GB;
/// A40; L40S).
pub fn data_sheet(arch: GpuArch, dtype: DType, precision: &str) -> Peaks {
    let sheet = match arch {
        GpuArch::Sm80 => DataSheet { name: "A100", half: 312e12, tf32: 156e12, f32: 19.5e12, bytes: 2.039e12 },
        GpuArch::Sm86 => DataSheet { name: "A40", half: 149.7e12, tf32: 74.8e12, f32: 37.4e12, bytes: 0.696e12 },
        GpuArch::Sm89 => DataSheet { name: "L40S", half: 362e12, tf32: 183e12, f32: 91.6e12, bytes: 0.864e12 },
        GpuArch::Sm90a => DataSheet { name: "H200", half: 989e12, tf32: 494e12, f32: 67e12, bytes: 4.8e12 },
    };
    let flop = match (dtype.bytes(), precision) {
        (..=2, _) => sheet.half,
        (_, "tf32") => sheet.tf32,
        // 3xTF32: three tf32 MMAs per f32 MMA.
        (_, "tf32x3") => sheet.tf32 / 3.0,
        _ => sheet.f32,
    };
    Peaks { flop, bytes: sheet.bytes, source: format!("the data sheet of the {}", sheet.name) }
}

impl Work {
    /// Returns the seconds that the FLOPs and the bytes take at peak rates.
    pub fn seconds(&self, peaks: &Peaks) -> [Option<f64>; 2] {
        [self.flop.map(|flop| flop / peaks.flop), self.bytes.map(|bytes| bytes / peaks.bytes)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_types_have_higher_peaks() {
        let of = |dtype, precision| data_sheet(GpuArch::Sm90a, dtype, precision).flop;
        assert!(of(DType::BF16, "ieee") > of(DType::F32, "tf32"));
        assert!(of(DType::F32, "tf32") > of(DType::F32, "tf32x3") && of(DType::F32, "tf32x3") > of(DType::F32, "ieee"));
    }
}
