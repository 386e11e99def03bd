//! The definition of a kernel.

use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::kernel::{ConstDefault, ConstValue, ElemDef, ParamKind, Specialization};
use tilewright::codegen::text;
use tilewright::prelude::*;
use tilewright_tests::on_device::devices;

/// Adds `x` to `y`.
///
/// Shapes: all [n].
#[kernel]
pub fn described<T: Num>(
    /// What is added.
    x: In<T>,
    y: InOut<T>,
    #[no_specialize] n: i32,
    #[constexpr = 64] tile: usize,
    #[constexpr(default = ieee)] precision: Precision,
    #[constexpr] scale: f32,
) {
    let i = program_id(0) * tile + arange(0, tile);
    let mask = i < n;
    store(y + i, load(y + i, mask = mask) + load(x + i, mask = mask), mask = mask);
}

#[test]
fn the_definition_lists_parameters() {
    let def = &DESCRIBED;
    assert_eq!((def.name, def.doc), ("described", "Adds `x` to `y`.\n\nShapes: all [n]."));
    assert!(def.file.ends_with("kernel_def.rs") && def.line == 13, "{}:{}", def.file, def.line);
    assert_eq!(def.generics[0].name, "T");
    assert!(def.generics[0].members().contains(&DType::U8) && !def.generics[0].members().contains(&DType::Bool));
    let kinds: Vec<(&str, ParamKind, bool)> = def.params.iter().map(|p| (p.name, p.kind, p.specialize)).collect();
    let generic = ElemDef::Generic(0);
    let expected = [
        ("x", ParamKind::In(generic), true),
        ("y", ParamKind::InOut(generic), true),
        ("n", ParamKind::Scalar(ElemDef::Fixed(DType::I32)), false),
        ("tile", ParamKind::Constexpr { ty: "usize", default: Some(ConstDefault::Int(64)) }, true),
        (
            "precision",
            ParamKind::Constexpr { ty: "ieee | tf32 | tf32x3", default: Some(ConstDefault::Variant("ieee")) },
            true,
        ),
        ("scale", ParamKind::Constexpr { ty: "f32", default: None }, true),
    ];
    assert_eq!(kinds, expected);
}

#[test]
fn constants_are_checked() {
    let record = |dtypes: &[DType], consts: &[(&str, ConstValue)]| {
        DESCRIBED.record(dtypes, consts, &Specialization::default()).map(|_| ()).map_err(|d| d.message)
    };
    let scale = ("scale", ConstValue::from_text("0.5"));
    assert_eq!(record(&[DType::F32], std::slice::from_ref(&scale)), Ok(()));
    let cases = [
        (record(&[DType::F32], &[]), "kernel `described`: the constant `scale` (f32) is not given"),
        (record(&[], std::slice::from_ref(&scale)), "kernel `described`: expected 1 element types (T), found 0"),
        (
            record(&[DType::Bool], std::slice::from_ref(&scale)),
            "kernel `described`: `T` cannot be bool: expected one of i8, i16, i32, i64, u8, u16, u32, u64, f16, bf16, f32, f64",
        ),
        (
            record(&[DType::F32], &[scale.clone(), ("tiles", ConstValue::Int(4))]),
            "kernel `described`: there is no constexpr parameter `tiles`: there are tile, precision, scale",
        ),
        (
            record(&[DType::F32], &[scale.clone(), ("tile", ConstValue::from_text("wide"))]),
            "kernel `described`: the parameter `tile` cannot be wide: expected usize",
        ),
        (
            record(&[DType::F32], &[scale.clone(), ("precision", ConstValue::from_text("tf16"))]),
            "kernel `described`: the parameter `precision` cannot be tf16: expected ieee | tf32 | tf32x3",
        ),
    ];
    for (found, expected) in cases {
        assert_eq!(found, Err(expected.to_string()));
    }
}

/// A function that a kernel applies.
struct Activation {
    name: &'static str,
    apply: fn(Tile<f32>) -> Tile<f32>,
}

static RELU: Activation = Activation { name: "relu", apply: relu };
static SQUARE: Activation = Activation { name: "square", apply: square };
/// Unknown to the kernel's crate; not the same as `SQUARE`.
static CUBE: Activation = Activation { name: "square", apply: cube };

impl ConstexprItem for Activation {
    const TYPE: &'static str = "relu | square";
    const KNOWN: &'static [&'static Activation] = &[&RELU, &SQUARE];
    fn name(&self) -> &'static str {
        self.name
    }
}

#[device_fn]
fn relu(x: Tile<f32>) -> Tile<f32> {
    maximum(x, 0.0)
}

#[device_fn]
fn square(x: Tile<f32>) -> Tile<f32> {
    x * x
}

#[device_fn]
fn cube(x: Tile<f32>) -> Tile<f32> {
    x * x * x
}

#[kernel(grid = 1)]
fn activate(x: In<f32>, y: Out<f32>, #[constexpr = RELU] activation: &'static Activation) {
    let i = arange(0, 4);
    store(y + i, (activation.apply)(load(x + i)));
}

#[test]
fn statics_are_constants() -> Result<(), Error> {
    for device in devices() {
        let x = Buffer::from_slice(&device, &[-1.0f32, 2.0, -3.0, 0.5])?;
        let mut y = Buffer::<f32>::zeros(&device, 4)?;
        for (activation, want) in
            [(&RELU, [0.0f32, 2.0, 0.0, 0.5]), (&SQUARE, [1.0, 4.0, 9.0, 0.25]), (&CUBE, [-1.0, 8.0, -27.0, 0.125])]
        {
            Activate { x: &x, y: &mut y, activation }.launch(&device)?;
            assert_eq!(y.to_vec()?, want);
        }
        ActivateRequired { x: &x, y: &mut y }.with_defaults().launch(&device)?;
        assert_eq!(y.to_vec()?, [0.0, 2.0, 0.0, 0.5]);
    }
    let named = |name: &str| {
        let constants = [("activation", ConstValue::Variant(name.to_string()))];
        ACTIVATE.record(&[], &constants, &Specialization::default()).map(|func| text::print(&func))
    };
    assert!(named("square").is_ok_and(|text| text.contains("mul")));
    let error = named("tanh").unwrap_err().to_string();
    assert!(error.contains("relu | square"), "{error}");
    Ok(())
}
