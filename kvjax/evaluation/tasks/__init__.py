"""Tasks of `kvjax evaluate`, a module each, for any model, policy and budget."""
