"""Checkpoints: finding, reading and writing them."""
