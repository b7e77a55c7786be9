"""Speed and memory, measured: `kvjax bench`."""

from kvjax.bench.command import main as main
