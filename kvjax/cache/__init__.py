"""Where tokens are kept: slots, how they lie in memory, and what attention over them tells."""
