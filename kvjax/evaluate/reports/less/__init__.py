"""LESS's report: what a low-rank memory recovers of what eviction loses."""

from kvjax.evaluate.reports.less.report import add_arguments as add_arguments
from kvjax.evaluate.reports.less.report import run as run
