"""Paged caches, for heads with individual budgets."""
