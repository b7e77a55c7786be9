"""LESS kernels from texts: what eviction takes from a frozen model's attention, and kernels that give it back."""
