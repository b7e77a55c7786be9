"""Caches: slots, their storage in memory, and attention over them with its statistics."""
