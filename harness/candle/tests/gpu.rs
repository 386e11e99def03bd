//! Every op on a GPU against the CPU: results and gradients, and errors for tensors on two devices. Without a GPU, or
//! without the feature `cuda`, the tests report that they were skipped.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{Activation, Optimizer, ParamsAdamW};
use tilewright_candle::matmul::{matmul_add, matmul_into, multiply};
use tilewright_candle::{self as ours, AttentionOptions, Epilogue, FusedAdamW, Rope};

/// The GPU, if there is one.
fn gpu() -> Option<Device> {
    match Device::new_cuda(0) {
        Ok(device) => Some(device),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

/// Numbers in [−1, 1] that depend on the seed.
fn numbers(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let values = (0..shape.iter().product::<usize>()).map(|_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    });
    Tensor::from_iter(values, &Device::Cpu).unwrap().reshape(shape).unwrap().to_dtype(dtype).unwrap()
}

fn error(found: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!((found.dims(), found.dtype()), (expected.dims(), expected.dtype()));
    let flat = |x: &Tensor| {
        let x = x.detach().to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
        x.flatten_all().unwrap().to_vec1::<f64>().unwrap()
    };
    let (found, expected) = (flat(found), flat(expected));
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied()).max(1e-30)
}

/// The result of an op and the gradients of Σ y · r for variables with these values, transposed in memory.
fn run(device: &Device, inputs: &[Tensor], op: &dyn Fn(&[Tensor]) -> Result<Tensor>) -> Vec<Tensor> {
    let stored = |x: &Tensor| if x.rank() >= 2 { x.t().unwrap().contiguous().unwrap() } else { x.clone() };
    let vars: Vec<Var> =
        inputs.iter().map(|x| Var::from_tensor(&stored(x).to_device(device).unwrap()).unwrap()).collect();
    let view = |v: &Var| if v.rank() >= 2 { v.t().unwrap() } else { v.as_tensor().clone() };
    let y = op(&vars.iter().map(view).collect::<Vec<_>>()).unwrap();
    let r = numbers(y.dims(), y.dtype(), 9).to_device(device).unwrap();
    let grads = (&y * r).unwrap().sum_all().unwrap().backward().unwrap();
    let gradients = vars.iter().map(|v| grads.get(v).unwrap().clone());
    std::iter::once(y.detach()).chain(gradients).collect()
}

type Op<'a> = Box<dyn Fn(&[Tensor]) -> Result<Tensor> + 'a>;

/// Name, shapes of the inputs, op.
fn ops() -> Vec<(&'static str, Vec<Vec<usize>>, Op<'static>)> {
    let on = |x: &Tensor, ids: &[u32]| Tensor::from_slice(ids, ids.len(), x.device());
    let rope = |x: &Tensor, halves: bool| {
        let rope = Rope::new(64, 1e4, 300, x.device())?;
        ours::rope(x, &if halves { rope.with_halves() } else { rope }, 3)
    };
    vec![
        ("rms_norm", vec![vec![3, 70, 512], vec![512]], Box::new(|x| ours::rms_norm(&x[0], &x[1], 1e-5))),
        (
            "layer_norm",
            vec![vec![201, 300], vec![300], vec![300]],
            Box::new(|x| ours::layer_norm(&x[0], &x[1], &x[2], 1e-5)),
        ),
        ("linear", vec![vec![2, 65, 96], vec![130, 96]], Box::new(|x| ours::linear(&x[0], &x[1]))),
        ("linear_swiglu", vec![vec![2, 65, 96], vec![260, 96]], Box::new(|x| ours::linear_swiglu(&x[0], &x[1]))),
        ("linear_swiglu of rows for TMA", vec![vec![300, 128], vec![512, 128]], {
            Box::new(|x| ours::linear_swiglu(&x[0], &x[1]))
        }),
        ("matmul", vec![vec![77, 96], vec![96, 33]], Box::new(|x| ours::matmul(&x[0], &x[1]))),
        ("gelu", vec![vec![5, 1000]], Box::new(|x| ours::gelu(&x[0]))),
        ("gelu_erf", vec![vec![5, 1000]], Box::new(|x| ours::gelu_erf(&x[0]))),
        ("linear with bias, GELU and residual", vec![vec![2, 65, 96], vec![130, 96], vec![130], vec![2, 65, 130]], {
            Box::new(|x| {
                let epilogue = Epilogue::default().with_bias(&x[2]).with_activation(Activation::Gelu);
                ours::linear_with(&x[0], &x[1], &epilogue.with_residual(&x[3]))
            })
        }),
        ("silu", vec![vec![5, 1000]], Box::new(|x| ours::silu(&x[0]))),
        ("swiglu", vec![vec![5, 1000]], Box::new(|x| ours::swiglu(&x[0]))),
        ("swiglu_pair", vec![vec![5, 333], vec![5, 333]], Box::new(|x| ours::swiglu_pair(&x[0], &x[1]))),
        ("softmax", vec![vec![6, 1500]], Box::new(|x| ours::softmax(&x[0]))),
        ("softmax of wide rows", vec![vec![3, 20_000]], Box::new(|x| ours::softmax(&x[0]))),
        ("rope", vec![vec![2, 4, 37, 64]], Box::new(move |x| rope(&x[0], false))),
        ("rope of halves", vec![vec![2, 4, 37, 64]], Box::new(move |x| rope(&x[0], true))),
        ("embedding", vec![vec![50, 96]], {
            Box::new(move |x| ours::embedding(&on(&x[0], &[3, 0, 49, 3, 3])?, &x[0], x[0].dtype()))
        }),
        ("cross_entropy", vec![vec![4, 999]], {
            Box::new(move |x| ours::cross_entropy(&x[0], &on(&x[0], &[3, 0, 998, 3])?))
        }),
        ("linear_cross_entropy", vec![vec![300, 64], vec![128, 64]], {
            let ids: Vec<u32> = (0..300).map(|i| i * 7 % 128).collect();
            Box::new(move |x| ours::linear_cross_entropy(&x[0], &x[1], &on(&x[0], &ids)?))
        }),
        ("linear_cross_entropy of an odd vocabulary", vec![vec![20, 64], vec![20_001, 64]], {
            let ids: Vec<u32> = (0..20).map(|i| i * 1009 % 20_001).collect();
            Box::new(move |x| ours::linear_cross_entropy(&x[0], &x[1], &on(&x[0], &ids)?))
        }),
        ("attention", vec![vec![2, 4, 150, 64], vec![2, 2, 150, 64], vec![2, 2, 150, 64]], {
            Box::new(|x| ours::flash_attention(&x[0], &x[1], &x[2], &AttentionOptions::new(true)))
        }),
        ("attention in one pass", vec![vec![2, 32, 256, 64], vec![2, 32, 256, 64], vec![2, 32, 256, 64]], {
            let options = AttentionOptions::new(false).with_deterministic(false);
            Box::new(move |x| ours::flash_attention(&x[0], &x[1], &x[2], &options))
        }),
        ("attention of one query", vec![vec![1, 2, 1, 128], vec![1, 1, 700, 128], vec![1, 1, 700, 128]], {
            Box::new(|x| ours::flash_attention(&x[0], &x[1], &x[2], &AttentionOptions::new(true).with_scale(0.2)))
        }),
    ]
}

fn check(dtype: DType, allowed: f64) {
    let Some(gpu) = gpu() else { return };
    let mut failures = Vec::new();
    for (name, shapes, op) in ops() {
        let inputs: Vec<Tensor> = shapes.iter().enumerate().map(|(i, s)| numbers(s, dtype, i as u64 + 1)).collect();
        let (found, expected) = (run(&gpu, &inputs, &*op), run(&Device::Cpu, &inputs, &*op));
        let errors: Vec<f64> = found.iter().zip(&expected).map(|(found, expected)| error(found, expected)).collect();
        let say: Vec<String> = errors.iter().map(|error| format!("{error:.1e}")).collect();
        println!("{name} {dtype:?}: y and gradients {}", say.join(" "));
        if errors.iter().any(|error| !(*error < allowed)) {
            failures.push(format!("{name} {dtype:?}: {}", say.join(" ")));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// a·b, base + a·b, and c += a·b in f32 and in the type of a and b, for [m, k, n] of every form: operands transposed or
/// not, rows that TMA takes and others, sums of nothing, with all SMs and with some reserved.
#[test]
fn products_match_those_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let mut failures = Vec::new();
    let sizes = [
        [64, 64, 64],
        [300, 200, 136],
        [77, 33, 50],
        [1, 257, 512],
        [512, 1024, 640],
        [40, 0, 24],
        [129, 7, 1],
        [800, 768, 776],
    ];
    for ([m, k, n], dtype) in sizes.into_iter().flat_map(|s| [DType::BF16, DType::F16, DType::F32].map(|d| (s, d))) {
        for (a_transposed, b_transposed, reserved) in
            [(false, false, 0), (false, true, 0), (true, false, 100), (true, true, 0)]
        {
            let matrix = |rows, columns, transposed, seed| match transposed {
                false => numbers(&[rows, columns], dtype, seed),
                true => numbers(&[columns, rows], dtype, seed).t().unwrap(),
            };
            let (a, b) = (matrix(m, k, a_transposed, 1), matrix(k, n, b_transposed, 2));
            let base = numbers(&[m, n], DType::F32, 3);
            let all = |device: &Device| {
                let on = |x: &Tensor| {
                    let rows = x.is_contiguous();
                    let dense = if rows { x.clone() } else { x.t().unwrap() }.to_device(device).unwrap();
                    if rows { dense } else { dense.t().unwrap() }
                };
                let (a, b, base) = (on(&a), on(&b), on(&base));
                let [sums, same] =
                    [DType::F32, dtype].map(|dtype| base.force_contiguous().unwrap().to_dtype(dtype).unwrap());
                let sums = if dtype == DType::F32 { base.force_contiguous().unwrap() } else { sums };
                matmul_into(&sums, &a, &b, true).unwrap();
                matmul_into(&same, &a, &b, false).unwrap();
                [multiply(&a, &b).unwrap(), matmul_add(&base, &a, &b).unwrap(), sums, same]
            };
            ours::reserve_sms(reserved);
            let found = all(&gpu);
            ours::reserve_sms(0);
            let allowed =
                [1e-5, 6e-3, 8e-4][[DType::F32, DType::BF16, DType::F16].iter().position(|d| *d == dtype).unwrap()];
            for (name, (found, expected)) in
                ["a·b", "base + a·b", "c += a·b", "c = a·b"].into_iter().zip(found.iter().zip(&all(&Device::Cpu)))
            {
                let error = error(found, expected);
                if !(error < allowed) {
                    failures.push(format!(
                        "{name} {dtype:?} [{m}, {k}, {n}] transposed {a_transposed} {b_transposed}: {error:.1e}"
                    ));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn ops_in_f32_match_those_on_the_cpu() {
    check(DType::F32, 2e-5);
}

#[test]
fn ops_in_bf16_match_those_on_the_cpu() {
    check(DType::BF16, 1.5e-2);
}

#[test]
fn ops_in_f16_match_those_on_the_cpu() {
    check(DType::F16, 3e-3);
}

#[test]
fn steps_of_adamw_match_those_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    for (dtype, allowed) in [(DType::F32, 1e-5), (DType::BF16, 1e-2)] {
        let step = |device: &Device| {
            let var = Var::from_tensor(&numbers(&[70, 33], dtype, 1).to_device(device).unwrap()).unwrap();
            let mut optimizer = FusedAdamW::new(vec![var.clone()], ParamsAdamW::default()).unwrap();
            for _ in 0..5 {
                optimizer.backward_step(&var.sqr().unwrap().sum_all().unwrap()).unwrap();
            }
            var.as_detached_tensor()
        };
        assert!(error(&step(&gpu), &step(&Device::Cpu)) < allowed, "{dtype:?}");
    }
}

#[test]
fn tensors_on_two_devices() {
    let Some(gpu) = gpu() else { return };
    let here = numbers(&[2, 4], DType::F32, 1);
    let there = here.to_device(&gpu).unwrap();
    let weight = |x: &Tensor| x.narrow(0, 0, 1).unwrap().squeeze(0).unwrap();
    let ids = Tensor::zeros(2, DType::U32, &Device::Cpu).unwrap();
    let heads = |x: &Tensor| x.reshape((1, 1, 2, 4)).unwrap();
    let results = [
        ours::rms_norm(&there, &weight(&here), 1e-5),
        ours::layer_norm(&here, &weight(&here), &weight(&there), 1e-5),
        ours::linear(&there, &here),
        ours::linear_with(&there, &there, &Epilogue::default().with_residual(&here)),
        ours::swiglu_pair(&there, &here),
        ours::embedding(&ids, &there, DType::F32),
        ours::cross_entropy(&there, &ids),
        ours::linear_cross_entropy(&there, &here, &ids),
        ours::flash_attention(&heads(&there), &heads(&here), &heads(&there), &AttentionOptions::new(true)),
        ours::rope(&heads(&there), &Rope::new(4, 1e4, 8, &Device::Cpu).unwrap(), 0),
        multiply(&here, &there.t().unwrap()),
        multiply(&there, &here.t().unwrap()),
        matmul_add(&numbers(&[2, 2], DType::F32, 2), &there, &there.t().unwrap()),
        matmul_into(&numbers(&[2, 2], DType::F32, 3), &there, &there.t().unwrap(), true).map(|()| here.clone()),
        matmul_into(&there.narrow(1, 0, 2).unwrap().contiguous().unwrap(), &here, &here.t().unwrap(), false)
            .map(|()| here.clone()),
    ];
    for (i, result) in results.into_iter().enumerate() {
        let message = result.err().unwrap_or_else(|| panic!("case {i} did not fail")).to_string();
        assert!(message.contains("Cpu") && message.contains("Cuda"), "{message}");
    }
}

/// A target outside of the vocabulary makes the loss NaN instead of reading other memory; on the CPU it is an error.
#[test]
fn targets_outside_of_the_vocabulary() {
    let Some(gpu) = gpu() else { return };
    let logits = Tensor::zeros((2, 5), DType::F32, &gpu).unwrap();
    let targets = Tensor::new(&[1_u32, 5], &gpu).unwrap();
    assert!(ours::cross_entropy(&logits, &targets).unwrap().to_scalar::<f32>().unwrap().is_nan());
}

/// Empty tensors on a GPU have results and gradients.
#[test]
fn empty_tensors() {
    let Some(gpu) = gpu() else { return };
    let empty = |shape: &[usize]| Var::zeros(shape, DType::F32, &gpu);
    let (Ok(x), Ok(weight)) = (empty(&[0, 4]), empty(&[4])) else {
        println!("skipped: candle has no empty tensors on this device");
        return;
    };
    assert_eq!(ours::rms_norm(&x, &weight, 1e-5).unwrap().dims(), [0, 4]);
    assert_eq!(ours::silu(&x).unwrap().dims(), [0, 4]);
    assert_eq!(ours::softmax(&x).unwrap().dims(), [0, 4]);
}
