"""The wheel: its type stubs, what it links, and what it exports."""

import importlib.metadata
import inspect
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import tilewright
import tilewright._native as native

FOLDER = pathlib.Path(tilewright.__file__).parent


def test_version_and_markers():
    assert tilewright.__version__ == importlib.metadata.version("tilewright")
    assert (FOLDER / "py.typed").exists()


def test_tag_and_licenses():
    package = importlib.metadata.distribution("tilewright")
    tags = re.findall(r"^Tag: (.*)$", package.read_text("WHEEL"), re.M)
    assert len(tags) == 1 and re.fullmatch(r"cp310-abi3-manylinux_2_\d+_x86_64", tags[0]), tags
    # glibc's newest symbols that it needs are not newer than the tag says.
    if shutil.which("objdump"):
        symbols = subprocess.run(["objdump", "-T", native.__file__], capture_output=True, text=True, check=True).stdout
        newest = max(int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", symbols))
        assert newest <= int(re.search(r"manylinux_2_(\d+)", tags[0]).group(1)), (newest, tags)
    licenses = {path.name for path in package.files if "licenses" in path.parts}
    assert licenses == {"LICENSE-APACHE", "LICENSE-MIT", "LICENSE-THIRD-PARTY"}


def test_stubs_name_what_the_module_has():
    stub = (FOLDER / "_native.pyi").read_text()
    named = set(re.findall(r"^(?:def|class) (\w+)|^(VERSION)", stub, re.M))
    named = {a or b for a, b in named}
    assert named == {name for name in vars(native) if not name.startswith("_")}
    for name in named:
        found = getattr(native, name)
        if inspect.isbuiltin(found):
            parameters = list(inspect.signature(found).parameters)
            declared = re.search(rf"^def {name}\((.*?)\) ->", stub, re.M | re.S).group(1)
            assert re.findall(r"(\w+):", re.sub(r"\[.*?\](?=,|$)", "", declared)) == parameters, name


def test_dependencies_and_exports():
    if not (shutil.which("readelf") and shutil.which("nm")):
        pytest.skip("there is no readelf and no nm")
    library = native.__file__
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    libraries = set(re.findall(r"NEEDED.*\[(.*?)\]", needed))
    # LLVM and libzstd are linked statically, and no library of CUDA is needed to import the package.
    system = ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libz.so.1", "ld-linux-x86-64.so.2"]
    assert not libraries - set(system), libraries
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    exported = [line.split()[-1] for line in symbols.splitlines()]
    # Symbols of LLVM would clash with those of other extension modules that contain it.
    assert exported == ["PyInit__native"], exported[:10]


@pytest.mark.parametrize("first", ["torch", "triton"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_import_orders(first, order):
    pytest.importorskip(first)
    statements = [f"import {first}", "import tilewright"]
    if order == "after":
        statements.reverse()
    script = "; ".join(
        [*statements, "tilewright.compile('softmax_rows', 'sm_80', types='f32', rows_tile=1, d_tile=64)"]
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
