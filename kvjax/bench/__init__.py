"""Speed and memory, measured: `kvjax bench`."""

from kvjax.cli.bench import main as main
