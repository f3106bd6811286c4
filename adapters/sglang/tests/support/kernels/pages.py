"""Stands in for the kernels that choose pages, in the releases of SGLang that have no plain ones for a CPU (0.5.21).

SGLang's allocator counts after the kernel whether there were enough pages, and takes nothing if there were
not. So these write nothing then.
"""

from __future__ import annotations

from typing import Any


class _Launched:
    """A function that is called as a kernel of Triton is: with a grid in brackets."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Any:
        return self._function


def _extend(prefixes: Any, lengths: Any, last: Any, free: Any, out: Any, _: int, page: int) -> None:
    from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive

    wanted = (lengths + page - 1) // page - (prefixes + page - 1) // page
    if int(wanted.sum()) <= len(free):
        alloc_extend_naive(prefixes, lengths, last, free, out, page, out.device)


def _decode(lengths: Any, last: Any, free: Any, out: Any, _: int, page: int) -> None:
    """One more token of each request: the place behind its last one, or the first of a new page."""
    new = (lengths - 1) % page == 0
    if int(new.sum()) <= len(free):
        out.copy_(last + 1)
        out[new] = free[: int(new.sum())] * page


def after_imports() -> None:
    """Put them where the allocator looks for its kernels."""
    from sglang.srt.mem_cache.allocator import paged

    if not hasattr(paged, "alloc_decode_naive"):
        paged.alloc_extend_kernel, paged.alloc_decode_kernel = _Launched(_extend), _Launched(_decode)
