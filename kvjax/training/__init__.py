"""Training, whatever is trained: checkpoints of runs and their progress."""
