//! Invalid signatures of kernels.
use tilewright::prelude::*;

#[kernel]
fn returns(out: Out<f32>) -> i32 {
    3
}

#[kernel]
fn plain_types(x: &[f32], n: usize, m: String, k: Tile<f32>) {}

#[kernel]
fn elements(x: In<String>, y: Out, z: InOut<f32, f32>) {}

#[kernel]
fn generics<T, U: Copy, const N: usize, 'a, V: Float>(x: In<T>) {}

#[kernel]
fn unused<T: Float>(x: In<f32>) {}

#[kernel]
fn scalar_of_parameter<T: Float>(x: In<T>, s: T) {}

#[kernel]
async fn asynchronous(x: In<f32>) {}

#[kernel(fast)]
fn attributes(#[constexpr = [1, 2]] n: usize, #[fast] m: i32) {}

#[kernel]
fn tensors(a: Tensor<f32>, b: Tensor<f32, 2>, c: TensorMut<f32, ()>, d: Tensor<f32, (Vec<n>, m)>, e: Tensor<f32, (n)>) {}

#[kernel]
fn extents(x: Tensor<f32, (n, m)>, n: f32) {}

#[kernel]
fn default_extent(x: Tensor<f32, (n,)>, #[constexpr = 4] n: usize) {}

#[kernel]
fn two_names(x: Tensor<f32, (n,)>, x_stride_n: i64) {}

#[kernel]
fn heuristics(x: In<f32>, #[heuristic] even: bool) {}

#[kernel]
fn given(#[given = maybe] x: Option<In<f32>>, #[given = false] y: In<f32>, #[given] z: Option<In<f32>>) {}

#[kernel]
struct NotAFunction;

fn main() {}
