#!/usr/bin/env python3
"""A ring of shared-memory buffers with two forms of the release, for racecheck.

A producer and a consumer warp synchronize through full and empty mbarriers.

    compute-sanitizer --tool racecheck ./racecheck_arrivals.py lanes     # every lane arrives at the empty barrier
    compute-sanitizer --tool racecheck ./racecheck_arrivals.py leader    # one lane arrives for its warp, after bar.warp.sync

Both are race-free by the PTX memory model ("Memory Consistency Model"). The reads of all lanes precede the barrier of
their warp (bar.warp.sync synchronizes the participating lanes). The barrier precedes the leader's mbarrier.arrive in
program order. That arrival has release semantics, and the producer's mbarrier.try_wait that observes the phase has
acquire semantics. The next copy into the buffer follows that wait in program order. Causality order is transitive, so
each read precedes the copy that overwrites it. Both give correct sums. racecheck tracks an mbarrier only for the
threads that arrive at it: it reports `leader`, and does not report `lanes`. For this reason the compiler has every lane
arrive for rings that threads fill (`MbarrierArrive`, `lanes = 32`).

Requires an NVIDIA driver and a GPU of compute capability 9.0 or later. The exit code is 1 if a sum is wrong.
"""

import ctypes
import struct
import sys

STEPS = 16

PTX = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry ring(.param .u64 input, .param .u64 output)
{
  .reg .pred %p, %q;
  .reg .b32 %lane, %warp, %j, %slot, %parity, %at, %full, %empty, %x, %sum, %buffer, %bars, %next;
  .reg .b64 %in, %out, %from, %state;
  .shared .align 16 .b8 memory[320];
  mov.u32 %buffer, memory;
  add.u32 %bars, %buffer, 256;
  mov.u32 %x, %tid.x;
  and.b32 %lane, %x, 31;
  shr.u32 %warp, %x, 5;
  ld.param.u64 %in, [input];
  ld.param.u64 %out, [output];
  setp.ne.u32 %p, %x, 0;
  @%p bra ready;
  mbarrier.init.shared.b64 [%bars], 32;
  mbarrier.init.shared.b64 [%bars+8], 32;
  mbarrier.init.shared.b64 [%bars+16], COUNT;
  mbarrier.init.shared.b64 [%bars+24], COUNT;
ready:
  bar.sync 0;
  mov.u32 %j, 0;
  mov.u32 %sum, 0;
  setp.ne.u32 %p, %warp, 0;
  @%p bra consumer;
producer:
  and.b32 %slot, %j, 1;
  shr.u32 %parity, %j, 1;
  and.b32 %parity, %parity, 1;
  xor.b32 %parity, %parity, 1;
  shl.b32 %at, %slot, 3;
  add.u32 %full, %bars, %at;
  add.u32 %empty, %full, 16;
wait_empty:
  mbarrier.try_wait.parity.shared.b64 %q, [%empty], %parity;
  @!%q bra wait_empty;
  shl.b32 %at, %slot, 7;
  shl.b32 %x, %lane, 2;
  add.u32 %at, %at, %x;
  add.u32 %at, %at, %buffer;
  shl.b32 %x, %j, 5;
  add.u32 %x, %x, %lane;
  mul.wide.u32 %from, %x, 4;
  add.u64 %from, %from, %in;
  cp.async.ca.shared.global [%at], [%from], 4;
  cp.async.mbarrier.arrive.noinc.shared.b64 [%full];
  add.u32 %j, %j, 1;
  setp.lt.u32 %p, %j, STEPS;
  @%p bra producer;
  cp.async.wait_all;
  ret;
consumer:
  and.b32 %slot, %j, 1;
  shr.u32 %parity, %j, 1;
  and.b32 %parity, %parity, 1;
  shl.b32 %at, %slot, 3;
  add.u32 %full, %bars, %at;
  add.u32 %empty, %full, 16;
wait_full:
  mbarrier.try_wait.parity.shared.b64 %q, [%full], %parity;
  @!%q bra wait_full;
  add.u32 %next, %lane, 1;
  and.b32 %next, %next, 31;
  shl.b32 %at, %slot, 7;
  shl.b32 %x, %next, 2;
  add.u32 %at, %at, %x;
  add.u32 %at, %at, %buffer;
  ld.shared.u32 %x, [%at];
  add.u32 %sum, %sum, %x;
RELEASE
  add.u32 %j, %j, 1;
  setp.lt.u32 %p, %j, STEPS;
  @%p bra consumer;
  mul.wide.u32 %from, %lane, 4;
  add.u64 %from, %from, %out;
  st.global.u32 [%from], %sum;
  ret;
}
"""

VARIANTS = {
    "lanes": (32, "  mbarrier.arrive.shared.b64 %state, [%empty];"),
    "leader": (
        1,
        "  bar.warp.sync 0xffffffff;\n  setp.ne.u32 %p, %lane, 0;\n  @%p bra released;\n"
        "  mbarrier.arrive.shared.b64 %state, [%empty];\nreleased:",
    ),
}


def main(variant):
    count, release = VARIANTS[variant]
    text = PTX.replace("COUNT", str(count)).replace("RELEASE", release).replace("STEPS", str(STEPS))
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name, *args):
        code = getattr(cuda, name)(*args)
        if code != 0:
            sys.exit(f"racecheck_arrivals: {name} gives CUDA error {code}")

    device, context, module, function = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuModuleLoadData", ctypes.byref(module), text.encode() + b"\0")
    call("cuModuleGetFunction", ctypes.byref(function), module, b"ring")
    numbers = [7 * i % 1001 for i in range(32 * STEPS)]
    source, target = ctypes.c_uint64(), ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(source), ctypes.c_size_t(4 * len(numbers)))
    call("cuMemAlloc_v2", ctypes.byref(target), ctypes.c_size_t(128))
    call("cuMemcpyHtoD_v2", source, struct.pack(f"{len(numbers)}I", *numbers), ctypes.c_size_t(4 * len(numbers)))
    args = (ctypes.c_void_p * 2)(ctypes.addressof(source), ctypes.addressof(target))
    call("cuLaunchKernel", function, 1, 1, 1, 64, 1, 1, 0, None, args, None)
    call("cuCtxSynchronize")
    found = ctypes.create_string_buffer(128)
    call("cuMemcpyDtoH_v2", found, target, ctypes.c_size_t(128))
    expected = [sum(numbers[32 * j + (lane + 1) % 32] for j in range(STEPS)) for lane in range(32)]
    if list(struct.unpack("32I", found.raw)) != expected:
        sys.exit(f"racecheck_arrivals: {variant}: expected {expected}, found {struct.unpack('32I', found.raw)}")
    print(f"{variant}: sums are correct")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in VARIANTS:
        sys.exit(f"usage: racecheck_arrivals.py {'|'.join(VARIANTS)}")
    main(sys.argv[1])
