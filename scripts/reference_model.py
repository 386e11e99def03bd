#!/usr/bin/env python3
"""Runs the training steps of `tilewright train` in PyTorch, and compares the losses.

    tilewright train --steps 50 --out run --export start --precision f32 ...
    python3 scripts/reference_model.py start run/log.jsonl [--device cuda] [--tolerance 1e-3] [--out losses.json]

`start` is the folder that --export wrote: the initial state and all batches. Model and optimizer settings are read from the
metadata of the checkpoint; the model is written below with PyTorch ops. The exit code is 1 if a loss differs by more than the tolerance.
Requires only PyTorch: safetensors files are parsed here.
"""

import argparse
import json
import math
import struct
import sys

import torch
import torch.nn.functional as F

DTYPES = {"F32": torch.float32, "U32": torch.int32}


def read_safetensors(path):
    """Returns the tensors by name, and the metadata. Tokens are stored as u32; they fit into i32."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = bytearray(file.read())
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, info in header.items():
        begin, end = info["data_offsets"]
        flat = torch.frombuffer(data, dtype=DTYPES[info["dtype"]], offset=begin, count=(end - begin) // 4)
        tensors[name] = flat.reshape(info["shape"]).clone()
    return tensors, metadata


class Model:
    """The Transformer of `harness/src/model/mod.rs`."""

    def __init__(self, config, weights, device):
        self.config = config
        self.weights = {
            name: weight.to(device).requires_grad_() for name, weight in weights.items() if not name.startswith("optimizer.")
        }
        d = config.get("d_model", config.get("width")) // config["heads"]
        positions = torch.arange(config["context"], dtype=torch.float64)
        frequencies = float(config["rope_base"]) ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
        angles = torch.outer(positions, frequencies)
        self.cos, self.sin = angles.cos().float().to(device), angles.sin().float().to(device)

    def norm(self, x, name):
        weight, eps = self.weights[f"{name}.weight"], float(self.config["eps"])
        wide = x.float()
        if self.config["norm"] == "layer":
            y = F.layer_norm(wide, wide.shape[-1:], weight, self.weights[f"{name}.bias"], eps)
        else:
            y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight
        return y.to(x.dtype)

    def rotate(self, x):
        """Rotary position embedding of x [batch, heads, length, d]: rotates pairs of adjacent elements."""
        length = x.shape[2]
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def attention(self, x, name):
        batch, length, d_model = x.shape
        heads, heads_kv = self.config["heads"], self.config["heads_kv"]
        d = d_model // heads
        qkv = F.linear(x, self.weights[f"{name}.qkv.weight"].to(x.dtype))
        parts = qkv.split([heads * d, heads_kv * d, heads_kv * d], dim=-1)
        q, k, v = (part.reshape(batch, length, -1, d).transpose(1, 2) for part in parts)
        q, k = self.rotate(q), self.rotate(k)
        k, v = (part.repeat_interleave(heads // heads_kv, dim=1) for part in (k, v))
        scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(d)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1).to(x.dtype)
        o = (weights @ v).transpose(1, 2).reshape(batch, length, d_model)
        return F.linear(o, self.weights[f"{name}.out.weight"].to(x.dtype))

    def feed_forward(self, x, name):
        gate, value = F.linear(x, self.weights[f"{name}.gate_up.weight"].to(x.dtype)).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * value, self.weights[f"{name}.down.weight"].to(x.dtype))

    def loss(self, tokens, targets, dtype):
        x = F.embedding(tokens, self.weights["embedding.weight"]).to(dtype)
        for i in range(self.config["layers"]):
            x = x + self.attention(self.norm(x, f"blocks.{i}.attention.norm"), f"blocks.{i}.attention")
            x = x + self.feed_forward(self.norm(x, f"blocks.{i}.mlp.norm"), f"blocks.{i}.mlp")
        head = self.weights["embedding.weight" if self.config["tied"] else "head.weight"]
        logits = F.linear(self.norm(x, "norm"), head.to(dtype)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rate(schedule, step):
    """Learning rate: linear warmup, cosine decay, then the floor, as in `harness/src/optim/schedule.rs`."""
    peak, floor = float(schedule["peak"]), float(schedule["floor"])
    warmup, total = schedule["warmup"], schedule["total"]
    if step <= warmup:
        return peak * step / warmup
    if step >= total:
        return floor
    return floor + 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) * (peak - floor)


def optimizer(model, options):
    """AdamW with two parameter groups: matrices have weight decay, norms have none.

    Embeddings have weight decay only with `decay_embeddings`.
    """
    decays = lambda name, weight: weight.dim() == 2 and (options["decay_embeddings"] or "embed" not in name)
    named = model.weights.items()
    groups = [
        {"params": [w for n, w in named if decays(n, w)], "weight_decay": float(options["weight_decay"])},
        {"params": [w for n, w in named if not decays(n, w)], "weight_decay": 0.0},
    ]
    adamw = options["adamw"]
    betas = (float(adamw["beta1"]), float(adamw["beta2"]))
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=float(adamw["eps"]))


def train(folder, device, dtype, steps):
    weights, metadata = read_safetensors(f"{folder}/start.safetensors")
    batches, _ = read_safetensors(f"{folder}/batches.safetensors")
    header = json.loads(metadata["tilewright"])
    options = header["training"]
    model = Model(header["model"], weights, device)
    # Older runs call the trainer's options `learner`.
    trainer = options.get("trainer") or options["learner"]
    update = optimizer(model, trainer)
    limit = trainer["clip"]
    losses = []
    for step, (tokens, targets) in enumerate(zip(batches["inputs"], batches["targets"]), 1):
        if steps and step > steps:
            break
        loss = model.loss(tokens.to(device).long(), targets.to(device).long(), dtype)
        update.zero_grad(set_to_none=True)
        loss.backward()
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(model.weights.values(), float(limit))
        for group in update.param_groups:
            group["lr"] = rate(trainer["schedule"], step)
        update.step()
        losses.append(loss.item())
    return losses


def logged_losses(path):
    with open(path) as file:
        lines = [json.loads(line) for line in file]
    return [line["loss"] for line in lines if line["what"] == "step"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder that --export wrote")
    parser.add_argument("log", help="log.jsonl of the run")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=0, help="number of steps; all by default")
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--out", help="write both losses to this file as JSON")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch_losses = train(arguments.folder, arguments.device, getattr(torch, arguments.dtype), arguments.steps)
    tilewright_losses = logged_losses(arguments.log)[: len(torch_losses)]
    if not torch_losses or len(tilewright_losses) != len(torch_losses):
        sys.exit(
            f"reference_model: expected as many steps in {arguments.log} as here ({len(torch_losses)}), "
            f"found {len(tilewright_losses)}"
        )
    differences = [abs(a - b) for a, b in zip(tilewright_losses, torch_losses)]
    worst = max(range(len(differences)), key=differences.__getitem__)
    if arguments.out:
        with open(arguments.out, "w") as file:
            json.dump({"tilewright": tilewright_losses, "pytorch": torch_losses}, file)
    print(
        f"{len(torch_losses)} steps, loss {tilewright_losses[0]:.4f} to {tilewright_losses[-1]:.4f}; "
        f"PyTorch {torch.__version__} on {arguments.device}: {torch_losses[0]:.4f} to {torch_losses[-1]:.4f}; "
        f"at most {differences[worst]:.2e} apart (step {worst + 1}, tolerance {arguments.tolerance:g})"
    )
    # Also true for NaN.
    if not differences[worst] <= arguments.tolerance:
        sys.exit(1)


if __name__ == "__main__":
    main()
