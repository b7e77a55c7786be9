"""`python -m kvjax.evaluate`."""

from kvjax.evaluate.command import main

if __name__ == "__main__":
    raise SystemExit(main())
