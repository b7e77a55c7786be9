"""Folders of the checkout that tests read from, and the folder in which they start processes."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
