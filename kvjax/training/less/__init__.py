"""Training of LESS kernels, which recover the attention that eviction takes from a frozen model."""
