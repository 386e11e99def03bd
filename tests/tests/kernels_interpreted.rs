//! Every kernel against its f64 reference in the interpreter (as recorded, specialized, and after the GPU passes) and
//! on the simulated GPU, at small odd shapes with gaps between the elements. No GPU is needed.

use tilewright::kernels::activation::Activation;
use tilewright::kernels::matmul::{Addend, Bias};
use tilewright::kernels::{column_sum, matmul, rms_norm, softmax, weighted_sum};
use tilewright::prelude::Precision;
use tilewright_codegen::ir::DType;
use tilewright_codegen::target::GpuArch;
use tilewright_tests::consts;
use tilewright_tests::interpret::{self, Arg, Form, Loads, RowLoopCase, SIMULATED, interpret, on_devices, row_loops};
use tilewright_tests::numerics::{HostTensor, Random, dense, gapped, tolerance};
use tilewright_tests::on_device::{ACTIVATIONS, activated};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Rows and columns: one, powers of two, and neither.
const SHAPES: [[usize; 2]; 5] = [[1, 1], [3, 5], [7, 1], [8, 16], [5, 37]];

/// Runs `case` for every type and shape, dense and with gaps.
fn each_case(case: impl Fn(DType, [usize; 2], &[usize])) {
    for dtype in TYPES {
        for shape in SHAPES {
            case(dtype, shape, &dense(&shape));
            case(dtype, shape, &gapped(&shape, 3, 2));
        }
    }
}

/// All forms that run without a GPU.
fn forms() -> impl Iterator<Item = Form> {
    interpret::forms().into_iter().chain(SIMULATED)
}

fn programs(n: usize, tile: usize) -> [u32; 3] {
    [n.div_ceil(tile) as u32, 1, 1]
}

#[test]
fn column_sum_matches() {
    each_case(|dtype, [rows, d], strides| {
        let x = HostTensor::random(dtype, &[rows, d], strides, &mut Random::new(1));
        // One program for all rows, and one per tile of rows.
        for (rows_per_program, chunks) in [(rows.next_multiple_of(4), 1), (4, rows.div_ceil(4))] {
            for form in forms() {
                let mut y = HostTensor::poisoned(DType::F32, &[chunks, d], &[2 * d, 2]);
                let args = &mut [Arg::In(&x), Arg::Out(&mut y), rows_per_program.into()];
                let consts = consts! { rows_tile = 4usize, d_tile = 16usize };
                let grid = [d.div_ceil(16) as u32, chunks as u32, 1];
                interpret(form, &column_sum::COLUMN_SUM, &[dtype, DType::F32], consts, grid, args);
                y.check_gaps("column_sum");
                let sums = HostTensor::of(DType::F32, &[d], &[1], &column_sum::reference(&y.values(), d));
                sums.check("column_sum", &column_sum::reference(&x.values(), d), 1e-5);
            }
        }
    });
}

#[test]
fn weighted_sum_matches() {
    each_case(|dtype, [rows, d], strides| {
        let mut random = Random::new(2);
        let x = HostTensor::random(dtype, &[rows, d], strides, &mut random);
        let w = HostTensor::random(dtype, &[d], &[3], &mut random);
        let want = weighted_sum::reference::forward(&x.values(), &w.values(), rows);
        for form in forms() {
            let mut y = HostTensor::poisoned(DType::F32, &[rows], &[1]);
            let args = &mut [Arg::In(&x), Arg::In(&w), Arg::Out(&mut y)];
            let consts = consts! { rows_tile = 4usize, d_tile = 16usize };
            interpret(form, &weighted_sum::WEIGHTED_SUM_FWD, &[dtype], consts, programs(rows, 4), args);
            y.check("weighted_sum_fwd", &want, 1e-5);
        }
    });
}

/// Rows of several tiles that several warps share: the cross-warp reduction is deferred to the end of the loop.
#[test]
fn weighted_sums_of_long_rows_match() {
    let consts = consts! { rows_tile = 1usize, d_tile = 512usize };
    for (dtype, d) in [(DType::F32, 1300), (DType::BF16, 1536), (DType::F32, 1), (DType::F16, 512)] {
        let (rows, mut random) = (3, Random::new(2));
        let x = HostTensor::random(dtype, &[rows, d], &dense(&[rows, d]), &mut random);
        let w = HostTensor::random(dtype, &[d], &[1], &mut random);
        let want = weighted_sum::reference::forward(&x.values(), &w.values(), rows);
        let simulated = [(GpuArch::Sm80, 4), (GpuArch::Sm90a, 8)].map(|(arch, num_warps)| Form::Simulated {
            arch,
            num_warps,
            num_stages: 2,
        });
        for form in on_devices().into_iter().chain(simulated) {
            let mut y = HostTensor::poisoned(DType::F32, &[rows], &[1]);
            let mut args = vec![Arg::In(&x), Arg::In(&w), Arg::Out(&mut y)];
            interpret(form, &weighted_sum::WEIGHTED_SUM_FWD, &[dtype], consts, programs(rows, 1), &mut args);
            y.check("weighted_sum_fwd", &want, 1e-5);
        }
    }
}

#[test]
fn weighted_sum_gradients_match() {
    each_case(|dtype, [rows, d], strides| {
        let mut random = Random::new(3);
        let x = HostTensor::random(dtype, &[rows, d], strides, &mut random);
        let w = HostTensor::random(dtype, &[d], &[1], &mut random);
        let grad_y = HostTensor::random(DType::F32, &[rows], &[2], &mut random);
        let (want_x, want_w) = weighted_sum::reference::backward(&x.values(), &w.values(), &grad_y.values());
        // A program per tile of rows; and one for all rows, with one stage and with two.
        let cases = |form| [(rows.div_ceil(2), 1usize, form), (1, 1, form), (1, 2, form)];
        for (tiles, stages, form) in forms().flat_map(cases) {
            let mut grad_x = HostTensor::poisoned(dtype, &[rows, d], strides);
            let mut partial = HostTensor::poisoned(DType::F32, &[tiles, d], &[d + 1, 1]);
            let args = &mut [
                Arg::In(&x),
                Arg::In(&w),
                Arg::In(&grad_y),
                Arg::Out(&mut grad_x),
                Arg::Out(&mut partial),
                rows.div_ceil(tiles).next_multiple_of(2).into(),
            ];
            let consts = consts! { rows_tile = 2usize, d_tile = 16usize, stages = stages };
            let grid = [tiles as u32, d.div_ceil(16) as u32, 1];
            interpret(form, &weighted_sum::WEIGHTED_SUM_BWD, &[dtype], consts, grid, args);
            grad_x.check("grad_x", &want_x, tolerance(dtype));
            partial.check_gaps("partial_grad_w");
            let grad_w = HostTensor::of(DType::F32, &[d], &[1], &column_sum::reference(&partial.values(), d));
            grad_w.check("grad_w", &want_w, 1e-5);
        }
    });
}

#[test]
fn softmax_matches() {
    each_case(|dtype, [rows, d], strides| {
        let mut random = Random::new(4);
        // Large enough that exp overflows unless the maximum is subtracted.
        let values: Vec<f64> = (0..rows * d).map(|_| 100.0 * random.number()).collect();
        let x = HostTensor::of(dtype, &[rows, d], strides, &values);
        let want = softmax::reference(&x.values(), d);
        let whole = d.next_power_of_two();
        for (def, d_tile) in [(&softmax::SOFTMAX_ROWS, whole), (&softmax::SOFTMAX_WIDE_ROWS, 8)] {
            for form in forms() {
                let mut y = HostTensor::poisoned(dtype, &[rows, d], strides);
                let args = &mut [Arg::In(&x), Arg::Out(&mut y)];
                let consts = consts! { rows_tile = 2usize, d_tile = d_tile };
                interpret(form, def, &[dtype], consts, programs(rows, 2), args);
                y.check(def.name, &want, tolerance(dtype));
            }
        }
        let weights: Vec<f64> = (0..rows * d).map(|_| random.number().abs()).collect();
        let y = HostTensor::of(dtype, &[rows, d], strides, &weights);
        let grad_y = HostTensor::random(dtype, &[rows, d], strides, &mut random);
        let want = softmax::reference_backward(&y.values(), &grad_y.values(), d);
        for (d_tile, form) in [whole, 8].into_iter().flat_map(|tile| forms().map(move |form| (tile, form))) {
            let mut grad_x = HostTensor::poisoned(dtype, &[rows, d], strides);
            let mut args = vec![Arg::In(&y), Arg::In(&grad_y), Arg::Out(&mut grad_x)];
            let consts = consts! { rows_tile = 2usize, d_tile = d_tile };
            interpret(form, &softmax::SOFTMAX_BWD, &[dtype], consts, programs(rows, 2), &mut args);
            grad_x.check("softmax_bwd", &want, tolerance(dtype));
        }
    });
}

#[test]
fn softmax_of_masked_elements_is_zero() {
    let inf = f64::INFINITY;
    let mut values = vec![-inf; 20];
    values[11] = 1.0;
    values[19] = 1.0;
    for def in [&softmax::SOFTMAX_ROWS, &softmax::SOFTMAX_WIDE_ROWS] {
        let x = HostTensor::of(DType::F32, &[1, 20], &[20, 1], &values);
        let mut y = HostTensor::poisoned(DType::F32, &[1, 20], &[20, 1]);
        let d_tile = if def.name == "softmax_rows" { 32usize } else { 8 };
        let args = &mut [Arg::In(&x), Arg::Out(&mut y)];
        let consts = consts! { rows_tile = 2usize, d_tile = d_tile };
        interpret(Form::Specialized, def, &[DType::F32], consts, [1, 1, 1], args);
        let mut want = vec![0.0; 20];
        (want[11], want[19]) = (0.5, 0.5);
        y.check(def.name, &want, 1e-6);
    }
}

#[test]
fn rms_norm_matches() {
    each_case(|dtype, [rows, d], strides| {
        let mut random = Random::new(5);
        let x = HostTensor::random(dtype, &[rows, d], strides, &mut random);
        let w = HostTensor::random(dtype, &[d], &[2], &mut random);
        let (want_y, want_rstd) = rms_norm::reference::forward(&x.values(), &w.values(), 1e-5);
        let whole = d.next_power_of_two();
        for (whole_rows, reread, d_tile) in [(true, false, whole), (true, true, whole), (false, false, 8)] {
            for form in forms() {
                let mut y = HostTensor::poisoned(dtype, &[rows, d], strides);
                let mut rstd = HostTensor::poisoned(DType::F32, &[rows], &[3]);
                let args = &mut [Arg::In(&x), Arg::In(&w), Arg::Out(&mut y), Arg::Out(&mut rstd), Arg::Float(1e-5)];
                let consts = consts! { rows_tile = 2usize, d_tile = d_tile, whole_rows = whole_rows, reread = reread };
                interpret(form, &rms_norm::RMS_NORM_FWD, &[dtype], consts, programs(rows, 2), args);
                y.check("y", &want_y, tolerance(dtype));
                rstd.check("rstd", &want_rstd, 1e-5);
            }
        }
    });
}

#[test]
fn rms_norm_gradients_match() {
    each_case(|dtype, [rows, d], strides| {
        let mut random = Random::new(6);
        let x = HostTensor::random(dtype, &[rows, d], strides, &mut random);
        let w = HostTensor::random(dtype, &[d], &[1], &mut random);
        let grad_y = HostTensor::random(dtype, &[rows, d], &dense(&[rows, d]), &mut random);
        let (xs, ws) = (x.values(), w.values());
        let rstd = HostTensor::of(DType::F32, &[rows], &[1], &rms_norm::reference::forward(&xs, &ws, 0.1).1);
        let (want_x, want_w) = rms_norm::reference::backward(&xs, &ws, &grad_y.values(), 0.1);
        for RowLoopCase { whole_rows, d_tile, programs, stages } in row_loops([rows, d]) {
            for form in forms() {
                let mut grad_x = HostTensor::poisoned(dtype, &[rows, d], strides);
                let mut partial = HostTensor::poisoned(DType::F32, &[programs, d], &[d, 1]);
                let args = &mut [
                    Arg::In(&x),
                    Arg::In(&w),
                    Arg::In(&rstd),
                    Arg::In(&grad_y),
                    Arg::Out(&mut grad_x),
                    Arg::Out(&mut partial),
                    rows.div_ceil(programs).next_multiple_of(2).into(),
                ];
                let consts = consts! { rows_tile = 2usize, d_tile = d_tile, whole_rows = whole_rows, stages = stages };
                interpret(form, &rms_norm::RMS_NORM_BWD, &[dtype], consts, [programs as u32, 1, 1], args);
                grad_x.check("grad_x", &want_x, tolerance(dtype));
                let grad_w = HostTensor::of(DType::F32, &[d], &[1], &column_sum::reference(&partial.values(), d));
                grad_w.check("grad_w", &want_w, 1e-5);
            }
        }
    });
}

struct MatmulCase {
    dtype: DType,
    /// Of c, if it is not that of a and b.
    result: Option<DType>,
    shape: [usize; 3],
    /// Whether a and b are column-major.
    col_major: [bool; 2],
    bias: Bias,
    activation: Activation,
    precision: Precision,
    /// m_tile, n_tile, k_tile
    tiles: [usize; 3],
    addend: Addend,
    /// Gap between the rows (or columns) of the operands, in elements.
    gap: usize,
    /// The programs of a grid of persistent programs; without it there is one for each tile.
    persistent: Option<usize>,
    /// The programs that share a block and take turns.
    replicas: usize,
}

fn check_matmul(case: &MatmulCase) {
    check_matmul_in(case, forms());
}

fn check_matmul_in(case: &MatmulCase, forms: impl IntoIterator<Item = Form>) {
    let MatmulCase {
        dtype,
        result,
        shape: [m, n, k],
        col_major,
        activation,
        bias,
        precision,
        tiles: [m_tile, n_tile, k_tile],
        addend,
        gap,
        persistent,
        replicas,
    } = *case;
    let result = result.unwrap_or(dtype);
    let mut random = Random::new(7);
    // A column-major operand is a transposed row-major one.
    let strides = |shape: [usize; 2], col_major: bool| {
        if col_major { [1, shape[0] + gap] } else { [shape[1] + gap, 1] }
    };
    let (a_strides, b_strides) = (strides([m, k], col_major[0]), strides([k, n], col_major[1]));
    let a = HostTensor::random(dtype, &[m, k], &a_strides, &mut random);
    let b = HostTensor::random(dtype, &[k, n], &b_strides, &mut random);
    let mut want = matmul::reference(&a.values(), &b.values(), [m, n, k]);
    let (length, stride) = (if bias == Bias::Rows { m } else { n }, 1 + gap);
    let numbers = HostTensor::random(dtype, &[length], &[stride], &mut random);
    let biases = numbers.values();
    for (at, x) in want.iter_mut().enumerate() {
        *x += match bias {
            Bias::None => 0.0,
            Bias::Columns => biases[at % n],
            Bias::Rows => biases[at / n],
        };
    }
    let other = HostTensor::random(result, &[m, n], &[n + gap, 1], &mut random);
    // Without a gap, rows of c are aligned if its extent is, as TMA needs it.
    let pitch = n + if gap == 0 { 8 } else { 2 };
    let before = match addend {
        Addend::Itself | Addend::Atomic => HostTensor::random(result, &[m, n], &[pitch, 1], &mut random),
        Addend::None | Addend::Other => HostTensor::poisoned(result, &[m, n], &[pitch, 1]),
    };
    let added = match addend {
        Addend::None => vec![0.0; m * n],
        Addend::Itself | Addend::Atomic => before.values(),
        Addend::Other => other.values(),
    };
    want.iter_mut().zip(added).for_each(|(x, added)| *x = activated(*x, activation) + added);
    for form in forms {
        let mut c = before.clone();
        let args = &mut [
            Arg::In(&a),
            Arg::In(&b),
            Arg::In(&numbers),
            Arg::In(&other),
            Arg::Out(&mut c),
            stride.into(),
            (n + gap).into(),
            Arg::Int(1),
        ];
        let consts = consts! {
            addend = addend, m_tile = m_tile, n_tile = n_tile, k_tile = k_tile, group = 2usize,
            a_col_major = col_major[0], b_col_major = col_major[1], bias_along = bias, activation = activation,
            precision = precision, persistent = persistent.is_some(), replicas = replicas,
        };
        let tiles = m.div_ceil(m_tile) * n.div_ceil(n_tile);
        let programs = persistent.map_or(tiles, |blocks| replicas * blocks.min(tiles)) as u32;
        interpret(form, &matmul::MATMUL, &[dtype, result], consts, [programs, 1, 1], args);
        let allowed = if precision == Precision::Tf32 { 2e-3 } else { tolerance(result) };
        c.check(&format!("matmul {form:?}"), &want, allowed);
    }
}

#[test]
fn matmul_matches() {
    let base = MatmulCase {
        dtype: DType::F32,
        result: None,
        shape: [1, 1, 1],
        col_major: [false; 2],
        bias: Bias::None,
        activation: Activation::None,
        precision: Precision::Ieee,
        tiles: [16, 16, 16],
        addend: Addend::None,
        gap: 1,
        persistent: None,
        replicas: 1,
    };
    for dtype in TYPES {
        for shape in [[1, 1, 1], [17, 3, 5], [33, 20, 40]] {
            for col_major in [[false, false], [true, false], [false, true], [true, true]] {
                check_matmul(&MatmulCase { dtype, shape, col_major, ..base });
            }
        }
    }
    for activation in ACTIVATIONS {
        check_matmul(&MatmulCase { activation, shape: [5, 6, 7], ..base });
    }
    for (bias, activation) in [(Bias::Columns, Activation::Gelu), (Bias::Rows, Activation::None)] {
        for shape in [[5, 6, 7], [33, 20, 40]] {
            check_matmul(&MatmulCase { bias, activation, shape, ..base });
        }
    }
    for precision in [Precision::Tf32, Precision::Tf32x3] {
        check_matmul(&MatmulCase { precision, shape: [20, 17, 33], ..base });
    }
    // Large enough for wgmma, with several groups of tiles.
    check_matmul(&MatmulCase { dtype: DType::BF16, shape: [200, 40, 30], tiles: [64, 32, 16], ..base });
    // By mma.sync of f64.
    for col_major in [[false, false], [true, true]] {
        let shape = [70, 60, 20];
        check_matmul(&MatmulCase {
            dtype: DType::F64,
            shape,
            col_major,
            tiles: [64, 32, 16],
            bias: Bias::Columns,
            ..base
        });
    }
    // An empty reduction dimension.
    check_matmul(&MatmulCase { shape: [3, 4, 0], ..base });
    for (addend, dtype) in [(Addend::Itself, DType::F32), (Addend::Other, DType::F32), (Addend::Itself, DType::BF16)] {
        check_matmul(&MatmulCase { addend, dtype, activation: Activation::Relu, shape: [18, 20, 7], ..base });
    }
}

/// f32 with wgmma (tf32x3), for every operand layout and every way to load.
#[test]
fn matmul_of_f32_by_wgmma_matches() {
    let base = MatmulCase {
        dtype: DType::F32,
        result: None,
        shape: [80, 48, 80],
        col_major: [false; 2],
        bias: Bias::None,
        activation: Activation::None,
        precision: Precision::Tf32x3,
        tiles: [64, 32, 32],
        addend: Addend::None,
        gap: 0,
        persistent: None,
        replicas: 1,
    };
    let form = |num_warps, loads| Form::WgmmaF32 { num_warps, num_stages: 2, loads, no_overlap: false };
    for col_major in [[false, true], [false, false], [true, false], [true, true]] {
        for loads in [Loads::AllThreads, Loads::Tma, Loads::WarpSpecialized] {
            check_matmul_in(&MatmulCase { col_major, ..base }, [form(4, loads)]);
        }
    }
    let larger = MatmulCase { tiles: [128, 64, 32], addend: Addend::Itself, ..base };
    for loads in [Loads::AllThreads, Loads::WarpSpecialized] {
        check_matmul_in(&larger, [form(8, loads)]);
    }
    // Unaligned rows; and tf32 with operands directly from the shared memory that they were loaded into.
    check_matmul_in(&MatmulCase { gap: 1, shape: [70, 33, 41], ..base }, [form(4, Loads::AllThreads)]);
    for col_major in [[false, true], [true, false]] {
        let case = MatmulCase { col_major, precision: Precision::Tf32, ..base };
        check_matmul_in(&case, [form(4, Loads::AllThreads), form(8, Loads::Tma)]);
    }
}

/// Tile sizes, warps and stages that the host function chooses for large matrices, and strides that are multiples of
/// 16: operands are loaded by asynchronous copies.
#[test]
fn matmul_of_large_tiles_matches() {
    let case = MatmulCase {
        dtype: DType::BF16,
        result: None,
        shape: [144, 160, 208],
        col_major: [false; 2],
        bias: Bias::Columns,
        activation: Activation::None,
        precision: Precision::Ieee,
        tiles: [128, 128, 64],
        addend: Addend::None,
        gap: 0,
        persistent: None,
        replicas: 1,
    };
    let forms = [GpuArch::Sm80, GpuArch::Sm90a].map(|arch| Form::Simulated { arch, num_warps: 8, num_stages: 4 });
    check_matmul_in(&case, on_devices());
    check_matmul_in(&case, forms);
    for col_major in [[true, false], [false, true]] {
        check_matmul_in(
            &MatmulCase { col_major, ..case },
            [forms[1], Form::WarpSpecialized { num_warps: 8, num_stages: 2 }],
        );
    }
    check_matmul_in(
        &case,
        [Form::WarpSpecialized { num_warps: 4, num_stages: 3 }, Form::Tma { num_warps: 8, num_stages: 3 }],
    );
    check_matmul_in(&case, [Form::Solved { num_warps: 8, num_stages: 3 }]);
    // Sums of 16-bit products in f32, as for gradients of weights. The epilogue uses the memory of the rings.
    for addend in [Addend::None, Addend::Itself, Addend::Atomic, Addend::Other] {
        let case = MatmulCase { result: Some(DType::F32), col_major: [true, false], addend, ..case };
        check_matmul_in(&case, [Form::WarpSpecialized { num_warps: 8, num_stages: 4 }]);
        check_matmul_in(&MatmulCase { tiles: [128, 160, 64], ..case }, [forms[1]]);
    }
    // Rows of b are contiguous: the parts of 128, 32 and 16 columns have swizzles of their own.
    for (n_tile, num_warps, replicas) in [(160, 8, 1), (80, 4, 1), (208, 8, 1), (160, 4, 2)] {
        for col_major in [[false, false], [true, false]] {
            let persistent = (replicas == 2).then_some(1);
            let case = MatmulCase { tiles: [128, n_tile, 64], col_major, replicas, persistent, ..case };
            check_matmul_in(&case, [Form::WarpSpecialized { num_warps, num_stages: 3 }]);
        }
    }
}

/// Two programs compute six tiles, the last of them partly outside of c. Aligned results of a warp-specialized kernel are
/// stored by TMA.
#[test]
fn matmul_of_persistent_programs_matches() {
    let base = MatmulCase {
        dtype: DType::BF16,
        result: None,
        shape: [150, 120, 80],
        col_major: [false, true],
        bias: Bias::Columns,
        activation: Activation::Relu,
        precision: Precision::Ieee,
        tiles: [64, 64, 32],
        addend: Addend::None,
        gap: 0,
        persistent: Some(2),
        replicas: 1,
    };
    check_matmul(&base);
    let specialized = Form::WarpSpecialized { num_warps: 4, num_stages: 3 };
    for addend in [Addend::None, Addend::Itself, Addend::Other] {
        for gap in [0, 1] {
            check_matmul_in(&MatmulCase { addend, gap, ..base }, [specialized]);
        }
    }
    // No steps along k, and more programs than tiles.
    check_matmul_in(&MatmulCase { shape: [150, 120, 0], ..base }, [specialized]);
    check_matmul_in(&MatmulCase { persistent: Some(100), ..base }, [specialized]);
    for addend in [Addend::Itself, Addend::Atomic, Addend::Other] {
        check_matmul_in(&MatmulCase { result: Some(DType::F32), addend, ..base }, [specialized]);
    }
    check_matmul_in(
        &MatmulCase { dtype: DType::F32, gap: 1, ..base },
        [Form::Simulated { arch: GpuArch::Sm80, num_warps: 4, num_stages: 2 }],
    );
}

/// Programs of a block that take turns: several rounds, an odd tile at the end, no steps, and one tile alone.
#[test]
fn matmul_of_programs_that_take_turns_matches() {
    let base = MatmulCase {
        dtype: DType::BF16,
        result: None,
        shape: [150, 120, 80],
        col_major: [false, true],
        bias: Bias::Columns,
        activation: Activation::Relu,
        precision: Precision::Ieee,
        tiles: [64, 64, 32],
        addend: Addend::None,
        gap: 0,
        persistent: Some(1),
        replicas: 2,
    };
    check_matmul(&base);
    let specialized = |num_stages: u32| Form::WarpSpecialized { num_warps: 4, num_stages };
    for (shape, replicas, stages) in [
        ([150, 120, 200], 3, 2),
        ([64, 320, 64], 2, 4),
        ([150, 120, 0], 2, 3),
        ([40, 50, 96], 2, 3),
        ([64, 64 * 7, 32], 2, 1),
    ] {
        check_matmul_in(&MatmulCase { shape, replicas, ..base }, [specialized(stages)]);
    }
    check_matmul_in(&MatmulCase { addend: Addend::Itself, gap: 1, ..base }, [specialized(3)]);
    check_matmul_in(&MatmulCase { tiles: [128, 96, 32], shape: [300, 200, 100], ..base }, [specialized(3)]);
    // Sums in f32: TMA stores them or adds them, box by box of each warp.
    for addend in [Addend::None, Addend::Itself, Addend::Atomic, Addend::Other] {
        let case = MatmulCase { result: Some(DType::F32), col_major: [true, false], addend, ..base };
        check_matmul_in(&case, [specialized(3)]);
        check_matmul_in(&MatmulCase { tiles: [128, 48, 32], shape: [304, 200, 96], ..case }, [specialized(3)]);
    }
}

#[test]
fn every_kernel_is_listed_once_and_in_order() {
    let names: Vec<&str> = tilewright::kernels::KERNELS.iter().map(|k| k.name).collect();
    assert!(names.is_sorted() && names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
    for kernel in tilewright::kernels::KERNELS {
        assert!(!kernel.doc.is_empty(), "`{}` has no documentation", kernel.name);
    }
}
