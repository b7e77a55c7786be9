"""Commands: `kvjax NAME` runs the module of that name."""
