"""What `kvjax evaluate` measures on any model, policy and budget: a module for each task."""
