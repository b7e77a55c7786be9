"""Training of LESS kernels, which recover the attention that a frozen model loses to eviction."""
