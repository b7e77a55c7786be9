"""Fused kernels for attention over a bounded KV cache: one folder per operation, each with an XLA reference."""

import kvjax as kvjax  # first: kvjax.decode imports operations from here, and operations import kvjax.noise
