"""The modifiers of attention, for both `tilewright.torch` and `tilewright.numpy`."""

from __future__ import annotations

from typing import Any


def check(
    n_q: int,
    n_k: int,
    causal: bool,
    window: int | None,
    prefix: int | None,
    softcap: float | None,
    alibi_slopes: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
) -> None:
    """Raises ValueError for modifiers that cannot be combined, and for numbers that are out of range."""
    for name, number in (("window", window), ("prefix", prefix)):
        if number is not None and not hasattr(number, "__index__"):
            found = type(number).__name__
            raise TypeError(f"{name}: expected a number of keys, or None, found {found} (flash-attn's pair (w, 0) is window=w)")
        if number is not None and number < 0:
            raise ValueError(f"{name}: expected a number of keys of at least 0, found {number}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap: expected a positive number, or None for no softcap, found {softcap}")
    if prefix is not None and not causal:
        raise ValueError("prefix: expected causal=True: without it every row sees all keys")
    if prefix is not None and (window is not None or cu_seqlens_q is not None):
        raise ValueError("prefix: cannot be combined with window or cu_seqlens_q")
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k: expected cu_seqlens_q beside it")
    if cu_seqlens_q is not None and cu_seqlens_k is None and n_q != n_k:
        raise ValueError(f"cu_seqlens_k: is missing: q has {n_q} rows and k {n_k}, so their lengths are not the same")
    if alibi_slopes is not None and cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens_q:
        raise ValueError("alibi_slopes: cannot be combined with cu_seqlens_k: each sequence has as many keys as rows")
