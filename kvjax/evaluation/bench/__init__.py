"""Benchmarks of speed and memory: `kvjax bench`."""
