#!/usr/bin/env python3
"""Writes harness/python/LICENSE-THIRD-PARTY: the licenses of what the Python package links statically.

third_party_licenses.py          writes the file
third_party_licenses.py --check  fails if the file is not up to date

The texts of Rust crates are those in their packages, each once, below the crates that have it. The first part of the file,
of what is not a crate (LLVM, zstd), is kept.
"""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE = ROOT / "harness/python/LICENSE-THIRD-PARTY"
MARK = "# Rust crates\n"
NAMES = ("license", "licence", "copying", "notice", "unlicense")


def cargo(*arguments):
    return subprocess.run(["cargo", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def crates():
    """Packages that are linked into the extension module, without our own and without procedural macros."""
    target = "x86_64-unknown-linux-gnu"
    edges = ["--edges=normal,no-proc-macro", f"--target={target}", "--prefix=none"]
    tree = cargo("tree", "--locked", "--package=tilewright-python", *edges, "--format={p}")
    linked = {tuple(line.split()[:2]) for line in tree.splitlines()}
    packages = json.loads(cargo("metadata", "--format-version=1", "--locked", f"--filter-platform={target}"))["packages"]
    found = [x for x in packages if x["source"] and (x["name"], "v" + x["version"]) in linked]
    return sorted(found, key=lambda package: (package["name"], package["version"]))


def texts(package):
    folder = pathlib.Path(package["manifest_path"]).parent
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name.lower().startswith(NAMES)]
    # Of a choice of licenses, MIT's text is the shortest.
    short = [path for path in files if "mit" in path.name.lower()]
    return [path.read_text(encoding="utf-8", errors="replace").strip() for path in short or files]


def main():
    old = FILE.read_text(encoding="utf-8")
    sections = {}
    for package in crates():
        name = f"{package['name']} {package['version']} ({package['license'] or 'see below'})"
        for text in texts(package) or [f"{package['license']}, without a text in its package; {package['repository']}"]:
            sections.setdefault(text, []).append(name)
    parts = [", ".join(names) + "\n\n" + text for text, names in sections.items()]
    new = old.split(MARK)[0].rstrip() + "\n\n" + MARK + "\n" + ("\n\n" + "-" * 80 + "\n\n").join(parts) + "\n"
    if "--check" in sys.argv[1:]:
        if new != old:
            sys.exit(f"{FILE.relative_to(ROOT)} is not up to date: run scripts/third_party_licenses.py")
    else:
        FILE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
