"""FastGen's report: what its heads keep, and what that costs."""

from kvjax.evaluate.reports.fastgen.report import add_arguments as add_arguments
from kvjax.evaluate.reports.fastgen.report import run as run
