"""The programs of docs/python.md run."""

import importlib.util
import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).parent.parent.parent.parent / "docs" / "python.md"


def test_programs(tmp_path, monkeypatch):
    if not PAGE.exists():
        pytest.skip("docs/python.md is not here")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(blocks) >= 4
    names: dict = {}
    for block in blocks:
        if "torch" in block and importlib.util.find_spec("torch") is None:
            continue
        exec(compile(block, str(PAGE), "exec"), names)
