"""The claims of five papers, tested by measurements of several models on one page."""

from experiments.papers.report import add_arguments as add_arguments
from experiments.papers.report import run as run
