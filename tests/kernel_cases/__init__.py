"""The one table of kernels, put together from a list for each operation."""

from __future__ import annotations

from tests.kernel_cases import (
    decode_attention,
    evict,
    fused_decode,
    hamming,
    less_memory,
    paged_attention,
    prefill_attention,
    rope,
)
from tests.kernels import Case

CASES: tuple[Case, ...] = (
    *decode_attention.CASES,
    *fused_decode.CASES,
    *paged_attention.CASES,
    *evict.CASES,
    *hamming.CASES,
    *prefill_attention.CASES,
    *rope.CASES,
    *less_memory.CASES,
)
