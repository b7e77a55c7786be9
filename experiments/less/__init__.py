"""LESS's report: what a low-rank memory recovers of what eviction loses."""

from experiments.less.report import add_arguments as add_arguments
from experiments.less.report import run as run
