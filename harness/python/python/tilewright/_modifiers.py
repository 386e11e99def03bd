"""The modifiers of attention, for both `tilewright.torch` and `tilewright.numpy`."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def check_cache(
    cache_seqlens: Any, block_table: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, relative_bias: Any
) -> None:
    """Raises ValueError for arguments that a cache of keys does not have."""
    if cache_seqlens is None and block_table is not None:
        raise ValueError("block_table: expected cache_seqlens beside it")
    if cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k: cannot be combined with cache_seqlens, which has the numbers of keys")
    if cu_seqlens_q is not None and relative_bias is not None:
        raise ValueError("relative_bias: cannot be combined with cache_seqlens and cu_seqlens_q")


def check(
    n_q: int,
    n_k: int,
    causal: bool,
    window: int | None,
    prefix: int | None,
    softcap: float | None,
    alibi_slopes: Any,
    relative_bias: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
) -> None:
    """Raises ValueError for modifiers that cannot be combined, and for numbers that are out of range."""
    for name, number in (("window", window), ("prefix", prefix)):
        # `int` first: `torch.compile` knows what that is for its symbolic numbers.
        if number is not None and not isinstance(number, int) and not isinstance(number, Integral):
            found = type(number).__name__
            raise TypeError(f"{name}: expected a number of keys, or None, found {found} (flash-attn's pair (w, 0) is window=w)")
        if number is not None and not 0 <= number < 2**63:
            raise ValueError(f"{name}: expected a number of keys of at least 0, found {number}")
    if softcap is not None and not softcap >= 1e-30:
        raise ValueError(f"softcap: expected a number from 1e-30 to 10000, or None for no softcap, found {softcap}")
    if prefix is not None and not causal:
        raise ValueError("prefix: expected causal=True: without it every row sees all keys")
    if prefix is not None and (window is not None or cu_seqlens_q is not None):
        raise ValueError("prefix: cannot be combined with window or cu_seqlens_q")
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise ValueError("cu_seqlens_k: expected cu_seqlens_q beside it")
    if cu_seqlens_q is not None and cu_seqlens_k is None and n_q != n_k:
        raise ValueError(f"cu_seqlens_k: is missing: q has {n_q} rows and k {n_k}, so their lengths are not the same")
    if relative_bias is not None and (softcap is not None or alibi_slopes is not None):
        raise ValueError("relative_bias: cannot be combined with softcap or alibi_slopes")
    for name, numbers in (("alibi_slopes", alibi_slopes), ("relative_bias", relative_bias)):
        if numbers is not None and cu_seqlens_k is not None and cu_seqlens_k is not cu_seqlens_q:
            raise ValueError(
                f"{name}: expected one tensor of lengths for rows and keys: leave cu_seqlens_k out, or pass cu_seqlens_q as it"
            )
        if numbers is not None and cu_seqlens_q is not None and n_q != n_k:
            raise ValueError(f"{name}: expected as many keys as rows of packed sequences, found {n_q} rows and {n_k} keys")
