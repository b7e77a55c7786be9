"""FastGen's report: what its heads keep, and what that costs."""

from experiments.fastgen.report import add_arguments as add_arguments
from experiments.fastgen.report import run as run
