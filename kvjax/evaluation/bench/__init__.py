"""Speed and memory, measured: `kvjax bench`."""
