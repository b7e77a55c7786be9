"""Decode attention over pages: heads with caches of different sizes in one pool."""

from pallas_kernels.paged_attention.api import PagedResult as PagedResult
from pallas_kernels.paged_attention.api import paged_attention as paged_attention
