"""LESS (arXiv 2402.09398): a trained low-rank memory of evicted tokens."""
