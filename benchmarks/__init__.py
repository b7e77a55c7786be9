"""Comparisons with other libraries, and ahead-of-time compilation for other chips. Run them from a checkout."""
