"""The five papers' claims, held against measurements of several models on one page."""

from kvjax.evaluate.reports.papers.report import add_arguments as add_arguments
from kvjax.evaluate.reports.papers.report import run as run
