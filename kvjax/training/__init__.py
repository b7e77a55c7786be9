"""Training, including checkpoints and progress of runs."""
