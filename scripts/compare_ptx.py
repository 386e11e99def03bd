#!/usr/bin/env python3
"""Compares two folders of PTX, written by `cargo run --release -p tilewright-tests --example write_ptx -- DIR`, up to symbol names.

Usage: compare_ptx.py OLD NEW

Each file is normalized: the kernel name at the start of symbols is replaced by `kernel`, other global symbols are numbered in the order
of their declarations, declarations are sorted, comments are removed. The exit code is 1 if the multisets of normalized files differ.
"""

import collections
import difflib
import pathlib
import re
import sys


def normalize(text):
    entry = re.search(r"\.entry\s+([\w$]+)", text)
    if entry:
        text = re.sub(rf"(?<![\w$]){re.escape(entry[1])}", "kernel", text)
    text = re.sub(r"//[^\n]*", "", text)
    numbers = {}
    for name in re.findall(r"^\s*(?:\.visible |\.extern |\.weak )*\.(?:global|shared|const)\b[^;=\[]*?([\w$]+)\s*[\[=;]", text, re.M):
        numbers.setdefault(name, f"global{len(numbers)}")
    for name, number in numbers.items():
        text = re.sub(rf"(?<![\w$]){re.escape(name)}(?![\w$])", number, text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    declarations = [line for line in lines if re.match(r"\.(reg|extern|global|shared|const|visible \.global)\b", line)]
    rest = [line for line in lines if line not in set(declarations)]
    return "\n".join(sorted(declarations) + rest)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    old, new = ({path.name: normalize(path.read_text()) for path in sorted(pathlib.Path(d).glob("*.ptx"))} for d in sys.argv[1:])
    missing = collections.Counter(old.values()) - collections.Counter(new.values())
    added = collections.Counter(new.values()) - collections.Counter(old.values())
    code = sum(".entry" in text for text in old.values())
    print(f"{len(old)} files before, {code} of them code; {len(new)} after; {sum(missing.values())} without an equal in the other")
    for name, text in old.items():
        if text in missing:
            print(f"only before: {name}")
    for name, text in new.items():
        if text in added:
            print(f"only after: {name}")
    if missing and added:
        a, b = next(iter(missing)), next(iter(added))
        print("\n".join(list(difflib.unified_diff(a.splitlines(), b.splitlines(), lineterm="", n=1))[:40]))
    sys.exit(bool(missing or added or not code))


if __name__ == "__main__":
    main()
