"""LESS (arXiv 2402.09398): a trained low-rank memory of evicted tokens."""

from kvjax.methods.less.policy import baseline_plus as baseline_plus
from kvjax.methods.less.policy import less as less
