"""`python -m kvjax` is the console script `kvjax`."""

from kvjax.cli.main import main

if __name__ == "__main__":
    main()
