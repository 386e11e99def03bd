//! A program without LLVM that launches the kernels that its build script embedded.

use tilewright::precompiled::PrecompiledKernel;
use tilewright::kernel::KernelArg;
use tilewright::prelude::*;

#[path = "../../kernel.rs"]
mod kernel;
#[path = "../../tuned.rs"]
mod tuned;
use kernel::Double;
use tuned::Scale;

tilewright::include_kernels!();

fn main() -> Result<()> {
    let device = Device::cpu();
    let x = Buffer::from_slice(&device, &[1.0f32, 2.0, 3.0])?;
    let mut y = Buffer::<f32>::zeros(&device, 3)?;
    Double { x: &x, y: &mut y, n: 3, tile: 4 }.launch(&device, 1)?;
    println!("embedded: {:?}", y.to_vec()?);
    let refused = Double { x: &x, y: &mut y, n: 4, tile: 4 }.launch(&device, 1);
    println!("refused: {}", refused.unwrap_err());
    let other = Double { x: &x, y: &mut y, n: 3, tile: 8 }.launch(&device, 1);
    println!("other constant: {}", other.unwrap_err());
    let by_name = PrecompiledKernel::embedded(&device, "double")?;
    by_name.launch(1, &mut [KernelArg::In(&x), KernelArg::Out(&mut y), KernelArg::scalar(2i32)])?;
    println!("by name: {:?}", y.to_vec()?);
    let unknown = PrecompiledKernel::embedded(&device, "treble");
    println!("unknown: {}", unknown.unwrap_err());

    let x = Buffer::from_slice(&device, &[1.0f32; 5000])?;
    let mut y = Buffer::<f32>::zeros(&device, 5000)?;
    let mut scale = Scale { x: &x, y: &mut y, a: 3.0, n: 5000, tile: tuned() };
    scale.launch_tuned(&device, |scale| 5000usize.div_ceil(scale.tile))?;
    println!("tuned: tile={}", scale.tile);
    assert_eq!(y.to_vec()?, [3.0; 5000]);

    let x = Buffer::from_slice(&device, &[bf16::ONE; 48])?;
    let mut y = Buffer::<bf16>::zeros(&device, 48)?;
    Scale { x: &x, y: &mut y, a: 3.0, n: 48, tile: 512 }.launch(&device, 1)?;
    println!("assumed: {}", y.to_vec()?[47]);
    // 47 is no multiple of 16, which this variant assumes.
    let failed = Scale { x: &x, y: &mut y, a: 3.0, n: 47, tile: 512 }.launch(&device, 1);
    println!("not assumed: {}", failed.unwrap_err());
    Ok(())
}
