"""The one table of kernels, put together from a list for each operation."""

from __future__ import annotations

from tests.kernel_cases import (
    decode_attention,
    decode_step,
    evict,
    hamming,
    less_kernels,
    paged_attention,
    prefill_scores,
    rotate,
)
from tests.kernels import Case

CASES: tuple[Case, ...] = (
    *decode_attention.CASES,
    *decode_step.CASES,
    *paged_attention.CASES,
    *evict.CASES,
    *hamming.CASES,
    *prefill_scores.CASES,
    *rotate.CASES,
    *less_kernels.CASES,
)
