"""Tasks of `kvjax evaluate`, one module per task, for any model, policy and budget."""
