"""Checkpoints: find, read and write them."""
