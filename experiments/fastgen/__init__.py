"""FastGen's report: the tokens that its heads keep, and their cost."""

from experiments.fastgen.report import add_arguments as add_arguments
from experiments.fastgen.report import run as run
