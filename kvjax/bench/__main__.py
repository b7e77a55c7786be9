"""`python -m kvjax.bench`."""

from kvjax.bench.command import main

if __name__ == "__main__":
    raise SystemExit(main())
