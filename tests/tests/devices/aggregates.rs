//! Structs of values in kernels: methods, constants, loops and branches.

use tilewright::codegen::lang::kernel::Specialization;
use tilewright::prelude::*;
use tilewright_tests::on_device::devices;

/// Count, mean and sum of squared differences, as in Welford's algorithm; of the rows of tiles.
#[aggregate]
struct Welford<T: Float> {
    count: Scalar<f32>,
    moments: (Tile<T>, Tile<T>),
    #[constexpr]
    rows: usize,
}

impl<T: Float> Welford<T> {
    #[device_fn]
    fn new(rows: usize) -> Self {
        let zeros = zeros::<T>([rows]);
        Welford { count: scalar::<f32>(0.0), moments: (zeros, zeros), rows: rows }
    }

    #[device_fn]
    fn add(self, x: Tile<T>) -> Self {
        let count = self.count + 1.0;
        let (mean, squares) = self.moments;
        let difference = x - mean;
        let mean = mean + difference / count.to::<T>();
        Welford { count: count, moments: (mean, squares + difference * (x - mean)), rows: self.rows }
    }

    /// The mean (0) or the variance (1).
    #[device_fn]
    fn at(self, which: usize) -> Tile<T> {
        if which == 0 {
            return self.moments.0;
        }
        self.moments.1 / full::<T>([self.rows], 1.0) / self.count.to::<T>()
    }
}

/// A function of functions, which calls itself with numbers that are known at specialization.
#[device_fn]
fn repeated(f: fn(Tile<f32>) -> Tile<f32>, x: Tile<f32>, times: usize) -> Tile<f32> {
    if times == 0 { x } else { repeated(f, f(x), times - 1) }
}

#[device_fn]
fn doubled(x: Tile<f32>) -> Tile<f32> {
    x * 2.0
}

#[kernel]
fn welford_kernel(x: In<f32>, y: Out<f32>, n: i32, #[constexpr] rows: usize) {
    let i = arange(0, rows);
    let mut state = Welford::<f32>::new(rows);
    for k in range(0, n) {
        state = state.add(load(x + k * rows + i));
    }
    let mut at = 0;
    while at < 2 {
        // Those of a branch, and a field that is assigned.
        if n > 3 {
            state.count += 0.0;
        } else {
            state.moments.0 = state.moments.0 + 100.0;
        }
        at += 1;
    }
    store(y + i, state.at(0));
    store(y + rows + i, repeated(doubled, state.at(1), 3));
}

#[test]
fn aggregates_have_methods_and_are_carried() {
    let (n, rows) = (5, 8);
    let x: Vec<f32> = (0..n * rows).map(|at| ((at * 7) % 11) as f32).collect();
    let column = |row: usize| (0..n).map(move |k| k * rows + row);
    let mean = |row: usize| column(row).map(|at| f64::from(x[at])).sum::<f64>() / n as f64;
    let variance = |row: usize| column(row).map(|at| (f64::from(x[at]) - mean(row)).powi(2)).sum::<f64>() / n as f64;
    let want: Vec<f64> = (0..rows).map(mean).chain((0..rows).map(|row| 8.0 * variance(row))).collect();
    for device in devices() {
        let x = Buffer::from_slice(&device, &x).unwrap();
        let mut y = Buffer::<f32>::poisoned(&device, 2 * rows).unwrap();
        WelfordKernel { x: &x, y: &mut y, n: n as i32, rows }.launch(&device, 1).unwrap();
        for (found, want) in y.to_vec().unwrap().into_iter().zip(&want) {
            assert!((f64::from(found) - want).abs() < 1e-4, "{device}: {found}, expected {want}");
        }
    }
}

#[device_fn]
fn increased(x: Tile<f32>) -> Tile<f32> {
    x + 1.0
}

#[device_fn]
fn all_of(functions: [fn(Tile<f32>) -> Tile<f32>; 3], x: Tile<f32>) -> Tile<f32> {
    let mut x = x;
    for i in static_range(0, 3) {
        x = functions[i](x);
    }
    x
}

#[device_fn]
fn first_of_second(functions: (fn(Tile<f32>) -> Tile<f32>, fn(Tile<f32>) -> Tile<f32>), x: Tile<f32>) -> Tile<f32> {
    let (f, g) = functions;
    f(g(x))
}

#[kernel]
fn applies_functions(x: In<f32>, y: Out<f32>) {
    let i = arange(0, 8);
    let x = load(x + i);
    store(y + i, all_of([increased, doubled, increased], x));
    store(y + 8 + i, first_of_second((increased, doubled), x));
    store(y + 16 + i, first_of_second((doubled, increased), x));
}

/// Functions are arguments of device functions, also in arrays and tuples.
#[test]
fn functions_are_in_arrays_and_tuples() {
    let x: Vec<f32> = (0..8).map(|i| i as f32).collect();
    let each = |f: fn(f32) -> f32| x.iter().map(move |&x| f(x));
    let want = each(|x| (x + 1.0) * 2.0 + 1.0).chain(each(|x| x * 2.0 + 1.0)).chain(each(|x| (x + 1.0) * 2.0));
    let want: Vec<f32> = want.collect();
    for device in devices() {
        let mut y = Buffer::<f32>::poisoned(&device, 24).unwrap();
        AppliesFunctions { x: &Buffer::from_slice(&device, &x).unwrap(), y: &mut y }.launch(&device, 1).unwrap();
        assert_eq!(y.to_vec().unwrap(), want, "{device}");
    }
}

/// Derives below the attribute are kept.
#[aggregate]
#[derive(Clone, Copy, Debug)]
struct Step {
    x: Scalar<i32>,
    #[constexpr]
    width: usize,
}

#[kernel]
fn changed_constant(y: Out<i32>, n: i32) {
    let mut step = Step { x: n, width: 1 };
    for i in range(0, n) {
        step = Step { x: step.x + i, width: step.width * 2 };
    }
    store(y, step.x);
}

#[aggregate]
#[derive(Copy)]
struct Outer {
    step: Step,
}

#[kernel]
fn constant_of_a_field(y: Out<i32>, n: i32) {
    let mut outer = Outer { step: Step { x: n, width: 1 } };
    for i in range(0, n) {
        outer = Outer { step: Step { x: outer.step.x + i, width: 2 } };
    }
    store(y, outer.step.x);
}

#[kernel]
fn constants_of_branches(y: Out<i32>, n: i32) {
    let step = if n > 3 { Step { x: n, width: 1 } } else { Step { x: n, width: 2 } };
    store(y, step.x);
}

/// A loop cannot change what is known at specialization.
#[test]
fn constants_of_aggregates_stay() {
    let cases = [
        (&CHANGED_CONSTANT, "the constant `step.width` must be the same before the loop"),
        (&CONSTANT_OF_A_FIELD, "the constant `outer.step.width` must be the same before the loop"),
        (&CONSTANTS_OF_BRANCHES, "the constant `width` of the value of this `if` must be the same in one branch"),
    ];
    for (def, message) in cases {
        let error = def.record(&[], &[], &Specialization::default()).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}
