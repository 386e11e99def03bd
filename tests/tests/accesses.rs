//! Loads and stores of every element type, masked and unmasked, at the widest vector width, in the interpreter and on
//! the simulated GPU: copies are equal byte for byte.

use tilewright::prelude::*;
use tilewright_codegen::ir::DType;
use tilewright_codegen::num;
use tilewright_codegen::target::GpuArch;
use tilewright_tests::consts;
use tilewright_tests::interpret::{Arg, Form, forms, interpret};
use tilewright_tests::numerics::{HostTensor, Random};

/// Copies through pointers: unmasked, masked to elements below `n`, and masked with eviction policies.
#[kernel]
pub fn copy_pointers<T: Dtype>(x: In<T>, all: Out<T>, some: Out<T>, kept: Out<T>, n: i32, #[constexpr] tile: usize) {
    let i = arange(0, tile);
    store(all + i, load(x + i));
    store(some + i, load(x + i, mask = i < n), mask = i < n);
    store(kept + i, load(x + i, mask = i < n, eviction = evict_first), mask = i < n, eviction = evict_last);
}

/// The same copies through block pointers with the bound `n`.
#[kernel]
pub fn copy_views<T: Dtype>(x: In<T>, all: Out<T>, some: Out<T>, kept: Out<T>, n: i32, #[constexpr] tile: usize) {
    let whole = |p| make_block_ptr(p, shape = [tile], strides = [1], offsets = [0], block_shape = [tile], order = [0]);
    let bounded = |p| make_block_ptr(p, shape = [n], strides = [1], offsets = [0], block_shape = [tile], order = [0]);
    store(whole(all), load(whole(x)));
    store(bounded(some), load(bounded(x), boundary_check = [0], padding = zero), boundary_check = [0]);
    let tile = load(bounded(x), boundary_check = [0], padding = zero, eviction = evict_first);
    store(bounded(kept), tile, boundary_check = [0], eviction = evict_last);
}

#[test]
fn every_type_is_copied_bit_for_bit() {
    let mut random = Random::new(11);
    for dtype in DType::ALL.iter().copied().filter(|&d| d != DType::Bool) {
        for (tile, n) in [(32usize, 32usize), (256, 224), (256, 240), (512, 511), (1024, 0)] {
            let mut x = HostTensor::poisoned(dtype, &[tile], &[1]);
            for bytes in x.bytes.chunks_mut(dtype.bytes()).take(tile) {
                let value = (random.number() * 60.0).round();
                let bits = match dtype.is_float() {
                    true => num::encode(dtype, value),
                    false => num::encode_int(dtype, value as i128),
                };
                bytes.copy_from_slice(&bits.to_le_bytes()[..dtype.bytes()]);
            }
            for def in [&COPY_POINTERS, &COPY_VIEWS] {
                for form in forms().into_iter().chain([
                    Form::Simulated { arch: GpuArch::Sm80, num_warps: 1, num_stages: 1 },
                    Form::Simulated { arch: GpuArch::Sm90a, num_warps: 4, num_stages: 1 },
                ]) {
                    let mut all = HostTensor::poisoned(dtype, &[tile], &[1]);
                    let (mut some, mut kept) = (all.clone(), all.clone());
                    let args =
                        &mut [Arg::In(&x), Arg::Out(&mut all), Arg::Out(&mut some), Arg::Out(&mut kept), n.into()];
                    interpret(form, def, &[dtype], consts! { tile = tile }, [1, 1, 1], args);
                    let what = format!("{} of {dtype}, {n} of {tile}, {form:?}", def.name);
                    assert_eq!(all.bytes, x.bytes, "{what}: all");
                    let bytes = n * dtype.bytes();
                    for (name, copy) in [("masked", &some), ("kept", &kept)] {
                        assert_eq!(copy.bytes[..bytes], x.bytes[..bytes], "{what}: {name}");
                        assert!(copy.bytes[bytes..].iter().all(|&b| b == 0xff), "{what}: {name} wrote beyond");
                    }
                }
            }
        }
    }
}
