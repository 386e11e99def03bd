//! Clocks that launches record.

use std::collections::HashMap;

use tilewright::Stream;
use tilewright::codegen::target::clocks::{Event, Moment};
use tilewright::prelude::*;
use tilewright_tests::on_device::devices;

/// Each program adds the elements of a tile to itself, n times.
#[kernel]
fn doubled(x: In<f32>, y: Out<f32>, n: i32, #[constexpr] tile: usize) {
    let i = program_id(0) * tile + arange(0, tile);
    let mut sum = load(x + i);
    for _ in range(0, n) {
        sum = sum + sum;
    }
    store(y + i, sum);
}

/// Each iteration of a loop has one event of its beginning, in the warpgroups of the chosen block only.
#[test]
fn iterations_of_the_chosen_block_have_clocks() {
    let (n, tile, programs) = (7, 512, 3);
    let x: Vec<f32> = (0..programs * tile).map(|i| i as f32).collect();
    for device in devices() {
        let x_buffer = Buffer::from_slice(&device, &x).unwrap();
        let run = |block: u32, stream: Option<&Stream>, launches: bool| {
            let mut y = Buffer::<f32>::poisoned(&device, x.len()).unwrap();
            let mut config = LaunchConfig::new(programs as u32).num_warps(8).clocks(block);
            config.stream = stream.cloned();
            let mut kernel = Doubled { x: &x_buffer, y: &mut y, n, tile };
            if launches {
                kernel.launch_with(&device, &config).unwrap_or_else(|error| panic!("{device}: {error}"));
            }
            let events = kernel.compile(&device, &config).unwrap().clocks().unwrap();
            if launches {
                let want: Vec<f32> = x.iter().map(|x| x * f32::from(1_u8 << n)).collect();
                assert_eq!(y.to_vec().unwrap(), want, "{device}");
            }
            events
        };
        assert_eq!(run(0, None, false), Vec::<Vec<Event>>::new(), "{device}: before the first launch");
        let is_cpu = !device.is_cuda() && !device.is_simulated();
        let streams = [device.new_stream().unwrap()];
        for stream in std::iter::once(None).chain(streams.iter().map(Some)) {
            for block in 0..=programs as u32 {
                let events = run(block, stream, true);
                let groups = if is_cpu || block == programs as u32 { 0 } else { 2 };
                assert_eq!(events.len(), groups, "{device}, block {block}: {events:?}");
                for events in events {
                    assert!(events.windows(2).all(|pair| pair[0].clock <= pair[1].clock), "{events:?}");
                    let mut begins: HashMap<u32, i32> = HashMap::new();
                    for event in events.iter().filter(|event| event.moment == Moment::Begin) {
                        *begins.entry(event.op).or_default() += 1;
                    }
                    assert!(begins.values().any(|&count| count == n), "{device}, block {block}: {events:?}");
                }
            }
        }
    }
}
