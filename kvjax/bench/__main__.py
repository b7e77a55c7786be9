"""`python -m kvjax.bench`."""

from kvjax.cli.bench import main
from kvjax.cli.commands import leave

if __name__ == "__main__":
    leave(main())
