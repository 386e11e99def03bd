#!/usr/bin/env python3
"""Prints short tables of the results of train-check.sh, with a check for each; the exit code is 1 if a check fails.

    train_tables.py curves FOLDER            losses of f32-naive, f32-tiled, f32-flash, bf16-… in FOLDER/NAME/log.jsonl
    train_tables.py model FILE...            reports of `bench model` (JSON), and results of another implementation (JSON lines)
    train_tables.py sums FOLDER...           phases against the step (`profile --out`), bytes against the pool's peak (`memory --out`)
    train_tables.py dist FILE...             reports of `bench ddp` and `bench shard` (JSON): steps against those without communication
    train_tables.py weights ALONE FOLDER...  checkpoints of runs that should have the same weights
"""

import json
import math
import re
import struct
import sys
from array import array
from pathlib import Path

failed = []


def check(good, what):
    print(f"{'ok  ' if good else 'NOT '} {what}")
    if not good:
        failed.append(what)


def losses(folder):
    lines = (json.loads(line) for line in open(Path(folder) / "log.jsonl"))
    return [line["loss"] for line in lines if line["what"] == "step"]


def differences(a, b):
    """The absolute difference of each step; infinity for NaN."""
    values = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return [math.inf if math.isnan(d) else d for d in values]


def curves(folder):
    kinds = ("naive", "tiled", "flash")
    f32, bf16 = ({kind: losses(Path(folder) / f"{dtype}-{kind}") for kind in kinds} for dtype in ("f32", "bf16"))
    seeds = [bf16["flash"]] + [losses(Path(folder) / f"bf16-seed-{seed}") for seed in (1, 2, 3)]
    steps = len(f32["naive"])
    print(f"{steps} steps; f32 flash {f32['flash'][0]:.4f} to {f32['flash'][-1]:.4f}, bf16 {bf16['flash'][0]:.4f} to {bf16['flash'][-1]:.4f}")
    for a, b in (("naive", "tiled"), ("naive", "flash"), ("tiled", "flash")):
        worst = max(differences(f32[a], f32[b]))
        check(worst <= 1e-4, f"f32: {a} and {b} at most {worst:.2e} apart (1e-4)")
    worst = max(differences(f32["flash"], losses(Path(folder) / "tf32x3-flash")))
    check(worst <= 1e-4, f"f32 flash: dots in IEEE f32 and in tf32x3 at most {worst:.2e} apart (1e-4)")
    # Averaged over steps: the seeds of one step may agree by chance.
    spread = sum(max(step) - min(step) for step in zip(*seeds)) / steps
    for kind in kinds:
        mean = sum(differences(bf16[kind], f32[kind])) / steps
        check(mean <= spread, f"bf16 {kind}: {mean:.2e} from f32 on average, spread of {len(seeds)} seeds {spread:.2e}")


NAMES = {"2.7b": "2.7B", "fp32": "f32"}

# Former names of columns, in older reports, with the present ones.
FORMER = {
    "replay": "cuda_graph",
    "wire": "comm_dtype",
    "carried_by": "transport",
    "left_sms": "reserved_sms",
    "left_over_ms": "exposed_ms",
    "of_none": "slowdown",
}


def tables(file):
    """The tables of a report, with the present names of columns."""
    for table in json.loads(Path(file).read_text())["tables"]:
        rows = [{FORMER.get(name, name): value for name, value in row.items()} for row in table["rows"]]
        yield {**table, "rows": rows}


def model(*files):
    rows, notes = {}, []
    for file in files:
        if file.endswith(".jsonl"):
            for row in map(json.loads, open(file)):
                kind = {False: "eager", True: "compiled", "graphs": "graphs"}[row["compiled"]]
                key = (NAMES.get(row["size"], row["size"]), NAMES.get(row["prec"], row["prec"]), row["ctx"])
                rows.setdefault(key, {})[kind] = (row.get("step"), row.get("peak_GiB"))
            continue
        for table in tables(file):
            notes += table.get("notes", [])
            for row in table["rows"]:
                kind = {"no": "ours", "yes": "replay"}.get(row["cuda_graph"], "replay failed")
                step = row["step_ms"] if isinstance(row["step_ms"], (int, float)) else None
                key = (row["size"], row["precision"], int(row["context"]))
                rows.setdefault(key, {})[kind] = (step, row.get("peak_memory_gib"))
    kinds = ("ours", "replay", "eager", "compiled", "graphs")
    # tf32x3 is as accurate as f32, so it is compared with the f32 results of other implementations.
    for size, precision, context in rows:
        if precision == "tf32x3":
            exact = rows.get((size, "f32", context), {})
            rows[size, precision, context].update({kind: exact[kind] for kind in kinds[2:] if kind in exact})
    kinds = [kind for kind in kinds if any(kind in row for row in rows.values())]
    print(f"{'step in ms, peak in GiB':24}" + "".join(f"{kind:>20}" for kind in kinds) + "  best of ours / best of theirs")
    for key, row in rows.items():
        cell = lambda kind: "-" if kind not in row else "OOM" if row[kind][0] is None else f"{row[kind][0]:.2f} {row[kind][1] or 0:6.2f}"
        best = lambda kinds, at: min((row[k][at] for k in kinds if k in row and row[k][0] and row[k][1]), default=None)
        both = [[best(kinds, at) for kinds in (("ours", "replay"), ("eager", "compiled", "graphs"))] for at in (0, 1)]
        ratios = "  ".join(f"{name} {a / b:.2f}" for name, (a, b) in zip(("time", "memory"), both) if a and b)
        print(f"{key[0]:7}{key[1]:7}{key[2]:10}" + "".join(f"{cell(kind):>20}" for kind in kinds) + f"  {ratios}")
        if "replay failed" in row:
            check(False, f"{key}: the CUDA graph was not replayed")
    for note in notes:
        if "not replayed" in note:
            print(note)


def sums(*folders):
    for folder in map(Path, folders):
        for file in folder.glob("*.json"):
            report = json.loads(file.read_text())
            for table in report.get("tables", []) if isinstance(report, dict) else []:
                if table["name"] == "phases":
                    share = next(row["share_percent"] for row in table["rows"] if row["phase"] == "sum")
                    check(abs(share - 100) <= 3, f"{folder.name}: phases are {share:.2f} % of the measured step")
                for note in table.get("notes", []):
                    if found := re.search(r"the events explain ([-\d.]+) %", note):
                        share = float(found[1])
                        check(abs(share - 100) <= 1, f"{folder.name}, {table['name']}: events are {share:.2f} % of the pool's peak")


def dist_ddp(name, rows):
    print(f"{name}: form, bucket (MB), comm dtype, transport, CTAs, reserved SMs, calls | step, communication, exposed (ms) | ratio to the step without")
    for row in rows:
        transport = {"copy engines": "copies"}.get(row.get("transport"), row.get("transport"))
        setting = [row["form"], row.get("bucket_mb"), row.get("comm_dtype"), transport, row.get("ctas")]
        setting += [row.get("reserved_sms"), row["calls"]]
        times = [f"{row[key]:8.2f}" if row[key] is not None else " " * 8 for key in ("step_ms", "communication_ms", "exposed_ms")]
        slowdown = f"{row['slowdown']:.3f}" if row["slowdown"] is not None else ""
        print("  " + " ".join(f"{'' if x is None else x:>8}" for x in setting), *times, slowdown)
    pairs = {}
    for row in rows:
        if row["form"] == "bucketed" and row.get("transport"):
            setting = (row.get("bucket_mb"), row.get("comm_dtype"))
            pairs.setdefault(setting, {}).setdefault(row["transport"], row["step_ms"])
    for (mb, comm_dtype), steps in pairs.items():
        if len(steps) == 2:
            nccl, copies = steps["NCCL"], steps["copy engines"]
            print(f"  {mb} MB, {comm_dtype}: NCCL {nccl:.2f} ms, copy engines {copies:.2f} ms, ratio {copies / nccl:.3f}")
    bucketed = [row["slowdown"] for row in rows if row["form"] == "bucketed"]
    if bucketed:
        check(min(bucketed) <= 1.05, f"{name}: the best bucketed step takes {min(bucketed):.3f} of the step without communication (1.05)")


def dist_shard(name, rows):
    whole = rows[0]["step_ms"]
    for row in rows:
        print(f"  {name}: {row['optimizer_state']}: step {row['step_ms']:.2f} ms, {row['step_ms'] / whole:.3f} of that with unsharded state")
        if row["optimizer_state"].endswith("ZeRO-1"):
            check(row["step_ms"] <= 1.05 * whole, f"{name}: the ZeRO-1 step takes {row['step_ms'] / whole:.3f} of the step with unsharded state (1.05)")
            saved = row["saved_mb"] / row["saved_predicted_mb"]
            check(abs(saved - 1) <= 0.03, f"{name}: ZeRO-1 saves {saved:.3f} of the predicted memory (0.97 to 1.03)")


def dist(*files):
    for file in files:
        for table in tables(file):
            {"ddp": dist_ddp, "shard": dist_shard}[table["name"]](Path(file).stem, table["rows"])


def parameters(folder):
    with open(Path(folder) / "checkpoint.safetensors", "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    tensors = {}
    for name, info in header.items():
        if name != "__metadata__" and not name.startswith("optimizer."):
            begin, end = info["data_offsets"]
            tensors[name] = array("f", data[begin:end])
    return tensors


def weights(alone, *folders):
    expected = parameters(alone)
    for folder in folders:
        found = parameters(folder)
        worst = (0.0, "")
        for name, right in expected.items():
            scale = max(map(abs, right))
            difference = max((math.inf if x != x else abs(x - y) for x, y in zip(found[name], right, strict=True)), default=0.0)
            worst = max(worst, (difference / scale, name))
        check(worst[0] <= 1e-6, f"{Path(folder).name}: weights differ by at most {worst[0]:.2e} of the largest weight ({worst[1]}; 1e-6)")


if __name__ == "__main__":
    commands = {"curves": curves, "model": model, "sums": sums, "dist": dist, "weights": weights}
    if len(sys.argv) < 3 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
    sys.exit(1 if failed else 0)
