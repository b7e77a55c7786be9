"""Entry point of `python -m kvjax`, equal to the console script `kvjax`."""

from kvjax.cli.main import main

if __name__ == "__main__":
    main()
