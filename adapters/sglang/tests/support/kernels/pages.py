"""Stands in for the kernels that choose pages, and for those that SGLang 0.5.21 has no plain ones of for a CPU.

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
    from sglang.srt.mem_cache import allocation
    from sglang.srt.mem_cache.allocator import paged

    plain: Any = allocation
    plain.get_last_loc_triton = allocation.get_last_loc_torch  # SGLang's own, which it takes for some backends
    if not hasattr(paged, "alloc_decode_naive"):
        paged.alloc_extend_kernel, paged.alloc_decode_kernel = _Launched(_extend), _Launched(_decode)
