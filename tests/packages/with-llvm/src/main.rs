//! Runs a kernel on the CPU, compiles it ahead of time into the folder that the command line names, and launches another one
//! with the best known configuration.

use tilewright::prelude::*;

#[path = "../../kernel.rs"]
mod kernel;
#[path = "../../tuned.rs"]
mod tuned;
use kernel::Double;
use tuned::Scale;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let device = Device::cpu();
    let x = Buffer::from_slice(&device, &[1.0f32, 2.0, 3.0])?;
    let mut y = Buffer::<f32>::zeros(&device, 3)?;
    Double { x: &x, y: &mut y, n: 3, tile: 4 }.launch(&device, 1)?;
    println!("CPU: {:?}", y.to_vec()?);

    let folder = std::path::PathBuf::from(std::env::args().nth(1).ok_or("expected a folder")?);
    Double::compile_for(HostCpu::native()).constant("tile", 4usize).compile()?.write(folder)?;

    let x = Buffer::from_slice(&device, &[1.0f32; 5000])?;
    let mut y = Buffer::<f32>::zeros(&device, 5000)?;
    let mut scale = Scale { x: &x, y: &mut y, a: 3.0, n: 5000, tile: tuned() };
    scale.launch_tuned(&device, |scale| 5000usize.div_ceil(scale.tile))?;
    println!("tuned: tile={}", scale.tile);
    assert_eq!(y.to_vec()?, [3.0; 5000]);
    Ok(())
}
