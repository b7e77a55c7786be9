"""LESS's report: the part of the eviction loss that a low-rank memory recovers."""

from experiments.less.report import add_arguments as add_arguments
from experiments.less.report import run as run
