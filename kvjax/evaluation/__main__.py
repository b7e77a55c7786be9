"""`python -m kvjax.evaluation`."""

from kvjax.cli.commands import leave
from kvjax.cli.evaluate import main

if __name__ == "__main__":
    leave(main())
