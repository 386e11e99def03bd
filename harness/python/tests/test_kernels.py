"""Kernels by name: launches, compilation ahead of time, manifests, and mistakes."""

import json
import os
import subprocess
import sys
import threading
from types import MappingProxyType

import numpy as np
import pytest

import tilewright as tw


def softmax_arguments(rows=37, d=100, dtype=np.float32):
    x = np.random.default_rng(1).standard_normal((rows, d)).astype(dtype)
    y = np.zeros_like(x)
    named = {"x": x, "y": y, "rows": rows, "d": d}
    for name, array in (("x", x), ("y", y)):
        named[f"{name}_stride_rows"], named[f"{name}_stride_d"] = (s // x.itemsize for s in array.strides)
    return named


CONSTANTS = {"rows_tile": 4, "d_tile": 128}


def expected(x):
    e = np.exp(x.astype(np.float64))
    return e / e.sum(-1, keepdims=True)


def check(named):
    np.testing.assert_allclose(named["y"], expected(named["x"]), atol=1e-6)


def test_kernels_describe_themselves():
    names = tw.kernel_names()
    assert names == sorted(names) and "flash_attention_fwd" in names
    for name in names:
        kernel = tw.Kernel(name)
        assert kernel.name == name and kernel.doc
        assert {kind for _, kind, _, _ in kernel.parameters} <= {"in", "out", "inout", "scalar", "constant"}
    softmax = tw.Kernel("softmax_rows")
    assert softmax.parameters[0] == ("x", "in", "T", None)
    assert softmax.types["T"] == ["f16", "bf16", "f32"] or "bf16" in softmax.types["T"]
    assert "softmax_rows" in repr(softmax)


def test_launch_by_name_and_in_order():
    named = softmax_arguments()
    tw.launch("softmax_rows", **named, **CONSTANTS, grid=10)
    check(named)
    kernel = tw.Kernel("softmax_rows")
    again = softmax_arguments()
    order = [again[name] for name, kind, _, _ in kernel.parameters if kind != "constant"]
    kernel(*order, grid=(10,), **CONSTANTS, options={"num_warps": 8})
    check(again)


def test_a_grid_of_zero_does_nothing():
    named = softmax_arguments()
    tw.launch("softmax_rows", **named, **CONSTANTS, grid=0)
    assert not named["y"].any()


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"rows": 38}, tw.Error, "out of bounds: `x` has 3700 elements"),
        ({"y": np.zeros((37, 100), np.float16)}, tw.Error, "`y` expects memory of f32 to write, found memory of f16"),
        ({"x": [1.0, 2.0]}, TypeError, "x: expected an array .* found list"),
        ({"x": np.zeros((37, 100), complex)}, TypeError, "no element type for an array of complex128"),
        ({"x": np.zeros((37, 100), ">f4")}, TypeError, "byte order"),
        ({"rows": 2**31}, ValueError, "`rows` is of type i32: 2147483648 is out of range"),
        ({"rows": 3.5}, TypeError, "`rows` expects a number of type i32, found float"),
        ({"rows": None}, TypeError, "`rows` expects a number of type i32, found NoneType"),
        ({"rows_tile": -4}, TypeError, r"the constant `rows_tile` \(usize\) cannot be -4"),
        ({"rows_tile": 63, "d_tile": 63}, tw.Error, "consists of 36 parts"),
        ({"height": 3}, TypeError, "has no parameter `height`: its parameters are x, y"),
        ({"grid": -1}, tw.Error, "the grid's x extent is -1"),
        ({"grid": "ten"}, TypeError, "grid: expected one to three integers"),
        ({"options": {"num_warps": 3}}, ValueError, "`num_warps` is 3: expected 1, 2, 4, 8, 16 or 32"),
        ({"options": {"warps": 4}}, ValueError, "there is no option `warps`"),
        ({"types": {"U": "f32"}}, ValueError, "no type parameter `U`: it has T"),
        ({"types": "i32"}, ValueError, "`T` cannot be i32: expected one of"),
    ],
)
def test_mistakes_are_exceptions(change, error, message):
    arguments = {**softmax_arguments(), **CONSTANTS, "grid": 10, **change}
    with pytest.raises(error, match=message):
        tw.launch("softmax_rows", **arguments)


def test_more_mistakes():
    with pytest.raises(KeyError, match="there is no kernel `softmaks`"):
        tw.launch("softmaks", grid=1)
    named = softmax_arguments()
    missing = {name: value for name, value in named.items() if name != "rows"}
    with pytest.raises(TypeError, match="`rows` is missing"):
        tw.launch("softmax_rows", **missing, **CONSTANTS, grid=1)
    with pytest.raises(TypeError, match="`x` is given twice"):
        tw.launch("softmax_rows", named["x"], **named, **CONSTANTS, grid=1)
    with pytest.raises(tw.Error, match="the constant `d_tile`"):
        tw.launch("softmax_rows", **named, rows_tile=4, grid=1)
    named["y"] = named["x"]
    with pytest.raises(tw.Error, match="`y`, which it writes, overlaps `x`"):
        tw.launch("softmax_rows", **named, **CONSTANTS, grid=10)


def test_arrays_that_kernels_cannot_use():
    named = softmax_arguments()
    named["y"].flags.writeable = False
    with pytest.raises(tw.Error, match="`y` is read-only"):
        tw.launch("softmax_rows", **named, **CONSTANTS, grid=10)
    packed = np.zeros(38, np.dtype([("a", np.uint8), ("x", np.float32, 100)]))
    named = softmax_arguments() | {"x": packed["x"][:37]}
    with pytest.raises(ValueError, match="x: its strides are not multiples|x: elements of f32 are not aligned"):
        tw.launch("softmax_rows", **named, **CONSTANTS, grid=10)
    named = softmax_arguments()
    named["x"] = named["x"][::-1]
    named["x_stride_rows"] = -100
    with pytest.raises(tw.Error, match="out of bounds|cannot prove") as error:
        tw.launch("softmax_rows", **named, **CONSTANTS, grid=10)
    # Python's way, not Rust's.
    assert "`unchecked=True`" in str(error.value) and "LaunchConfig" not in str(error.value)


def test_compile_for_gpus_without_a_gpu():
    code = tw.compile(
        "softmax_rows", "sm_90a", types="bf16", multiple_of={"d": 16}, equal_to={"x_stride_d": 1}, **CONSTANTS
    )
    assert ".target sm_90a" in code.ptx and code.object is None
    manifest = code.manifest
    assert manifest["kernel"] == "softmax_rows" and manifest["types"] == {"T": "bf16"}
    assert manifest["memory"]["y"] == {"access": "out", "type": "bf16"}
    by_name = {arg["name"]: arg for arg in manifest["args"]}
    assert by_name["d"]["divisible_by"] == 16 and by_name["x_stride_d"]["equal_to"] == 1
    types = MappingProxyType({"T": "bf16"})
    assert tw.compile("softmax_rows", "sm_90a", types=types, **CONSTANTS).manifest["types"] == types
    assert tw.compile("softmax_rows", "sm_90a", types="bfloat16", **CONSTANTS).manifest["types"] == types
    assert tw.compile("softmax_rows", "sm_90a", types=np.float16, **CONSTANTS).manifest["types"] == {"T": "f16"}
    for wrong in (["bf16"], {"T": 3}):
        with pytest.raises(ValueError, match="`T` cannot be"):
            tw.compile("softmax_rows", "sm_90a", types=wrong, **CONSTANTS)
    with pytest.raises(TypeError, match='option of the compiler: pass options={"num_warps"'):
        tw.launch("softmax_rows", **softmax_arguments(), **CONSTANTS, grid=10, num_warps=8)
    with pytest.raises(ValueError, match="there is no target `sm_70`: the targets are sm_80"):
        tw.compile("softmax_rows", "sm_70", types="bf16", **CONSTANTS)
    with pytest.raises(ValueError, match="the type parameter `T` has no element type"):
        tw.compile("softmax_rows", "sm_90a", **CONSTANTS)
    with pytest.raises(ValueError, match="a multiple is of a power of two"):
        tw.compile("softmax_rows", "sm_90a", types="f32", multiple_of={"d": 3}, **CONSTANTS)


def test_compiled_code_is_saved_loaded_and_launched(tmp_path):
    code = tw.compile("softmax_rows", "host", types="f32", **CONSTANTS)
    code.save(tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["manifest.json", "softmax_rows.o"]
    loaded = tw.load(tmp_path / "out")
    assert loaded.object == code.object and loaded.manifest == code.manifest
    named = softmax_arguments()
    loaded(**named, grid=10)
    check(named)
    with pytest.raises(tw.Error, match="out of bounds: `x` has 3700 elements"):
        loaded(**{**named, "rows": 38}, grid=10)
    with pytest.raises(TypeError, match="`x` expects elements of type f32, found f16"):
        loaded(**{**named, "x": named["x"].astype(np.float16)}, grid=10)
    with pytest.raises(TypeError, match="`rows` is missing"):
        loaded(**{name: value for name, value in named.items() if name != "rows"}, grid=10)


def test_code_is_checked_by_its_manifest(tmp_path):
    tw.compile("softmax_rows", "host", types="f32", **CONSTANTS).save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["kernel"] = "unknown_kernel"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    code, named = tw.load(tmp_path), softmax_arguments()
    with pytest.raises(tw.Error, match="`unknown_kernel`.*out of bounds: `x` has 3700 elements"):
        code(**{**named, "rows": 38}, grid=10)
    code(**named, grid=10)
    check(named)
    del manifest["footprint"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    code, named = tw.load(tmp_path), softmax_arguments()
    with pytest.raises(tw.Error, match="(?s)has no access footprint.*unchecked=True"):
        code(**named, grid=10)
    code(**named, grid=10, unchecked=True)
    check(named)


def test_damaged_manifests_are_exceptions(tmp_path):
    with pytest.raises(OSError, match="cannot read .*manifest.json"):
        tw.load(tmp_path)
    code = tw.compile("softmax_rows", "host", types="f32", **CONSTANTS)
    code.save(tmp_path)
    good = (tmp_path / "manifest.json").read_text()
    for text, message in [
        (good[:-20], "manifest of a kernel .* is not valid"),
        (good.replace('"format": 1', '"format": 9'), "its format is 9: this version reads formats 1 to 3"),
        (good.replace('"entry"', '"exit"'), "missing field `entry`"),
        (good.replace('"obj"', '"tile"'), "it names no file with PTX or an object file"),
        (good.replace('"softmax_rows.o"', '"../softmax_rows.o"'), "is not the name of a file in its folder"),
        (good.replace('"inout"', '"?"').replace('"out"', '"?"'), "unknown variant `\\?`"),
        (good.replace('"y": {', '"z": {'), "does not say how the kernel accesses `y`"),
    ]:
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            tw.load(tmp_path)
    (tmp_path / "manifest.json").write_text(good)
    (tmp_path / "softmax_rows.o").write_bytes(b"not an object file")
    with pytest.raises(ValueError, match="of different compilations"):
        tw.load(tmp_path)


def test_code_for_a_gpu_does_not_run_on_the_cpu():
    code = tw.compile("softmax_rows", "sm_80", types="f32", **CONSTANTS)
    with pytest.raises(tw.Error, match="is compiled for sm_80, but the CPU runs"):
        code(**softmax_arguments(), grid=10)


def test_many_threads():
    results, errors = [], []

    def work(rows):
        try:
            for _ in range(20):
                named = softmax_arguments(rows=rows)
                tw.launch("softmax_rows", **named, rows_tile=4, d_tile=128, grid=(rows + 3) // 4)
                results.append(np.abs(named["y"] - expected(named["x"])).max())
                with pytest.raises(tw.Error, match="out of bounds"):
                    tw.launch("softmax_rows", **{**named, "rows": rows + 1}, **CONSTANTS, grid=(rows + 4) // 4)
        except BaseException as error:  # noqa: BLE001 - reported below
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in range(20, 36)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(results) == 320 and max(results) < 1e-6


@pytest.mark.parametrize(
    "lie, message",
    [
        ({"strides": (4,)}, "1 strides and 2 dimensions"),
        ({"shape": (-1, 4)}, "the shape"),
        ({"shape": (1 << 40, 1 << 40)}, "outside of memory"),
    ],
)
def test_array_interfaces_that_lie_are_an_exception(lie, message):
    named = softmax_arguments()

    class Lying:
        __array_interface__ = {**named["x"].__array_interface__, **lie}

    with pytest.raises(ValueError, match=message):
        tw.launch("softmax_rows", **{**named, "x": Lying()}, **CONSTANTS, grid=1)


def test_scalars_of_numpy_are_an_exception():
    """Their array interface names memory that is freed when it is read."""
    named = softmax_arguments()
    with pytest.raises(TypeError, match="NumPy scalar"):
        tw.launch("softmax_rows", **{**named, "x": np.float32(1)}, **CONSTANTS, grid=1)


class OnGpu:
    """Claims to be an array on a GPU."""

    __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}


def test_without_a_driver_arrays_of_a_gpu_are_an_exception():
    script = """
import tilewright as tw
class OnGpu:
    __cuda_array_interface__ = {"shape": (4,), "typestr": "<f4", "data": (4096, False), "version": 3}
try:
    tw.launch("softmax_rows", OnGpu(), OnGpu(), 4, 1, 4, 1, 1, 4, rows_tile=1, d_tile=16, grid=1)
except tw.Error as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0 and ("no CUDA device" in found.stdout or "array's memory" in found.stdout), found


def test_forked_processes_compute():
    """In children of a process that has used its thread pool, while other threads compute."""
    script = """
import os, sys, threading
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import tilewright as tw
from test_kernels import CONSTANTS, check, softmax_arguments
def launch(rows=400):
    named = softmax_arguments(rows=rows)
    tw.launch("softmax_rows", **named, **CONSTANTS, grid=rows // 4)
    check(named)
launch()
stop = threading.Event()
def loop():
    while not stop.is_set():
        launch()
threads = [threading.Thread(target=loop) for _ in range(3)]
for thread in threads: thread.start()
for _ in range(10):
    child = os.fork()
    if child == 0:
        launch()
        grandchild = os.fork()
        if grandchild == 0:
            launch(200)
            os._exit(0)
        os._exit(os.waitpid(grandchild, 0)[1])
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for thread in threads: thread.join()
print("done")
"""
    found = subprocess.run([sys.executable, "-c", script, __file__], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0 and found.stdout.strip() == "done", found


def test_interpreter_exits_while_threads_compute():
    script = """
import sys, os, threading
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import tilewright as tw
from test_kernels import CONSTANTS, softmax_arguments
def loop():
    while True:
        tw.launch("softmax_rows", **softmax_arguments(rows=400), **CONSTANTS, grid=100)
for _ in range(4): threading.Thread(target=loop, daemon=True).start()
import time; time.sleep(0.5)
"""
    found = subprocess.run([sys.executable, "-c", script, __file__], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found
