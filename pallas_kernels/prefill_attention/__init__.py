"""Causal attention of a prompt in blocks, with the sums of the probabilities that each key received."""

from pallas_kernels.prefill_attention.api import QueryTokens as QueryTokens
from pallas_kernels.prefill_attention.api import prefill_attention as prefill_attention
