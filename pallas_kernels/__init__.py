"""Fused kernels for attention over a bounded KV cache: one folder per operation, each with an XLA reference."""
