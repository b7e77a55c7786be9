"""`python -m kvjax.bench`."""

from kvjax.bench.command import main
from kvjax.commands import leave

if __name__ == "__main__":
    leave(main())
