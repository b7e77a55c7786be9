"""`python -m kvjax.evaluate`."""

from kvjax.commands import leave
from kvjax.evaluate.command import main

if __name__ == "__main__":
    leave(main())
