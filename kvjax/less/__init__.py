"""LESS: what eviction loses, kept in a small low-rank memory (Dong et al. 2024, arXiv 2402.09398)."""

from kvjax.less.kernels import Performer as Performer
from kvjax.less.kernels import Phi as Phi
from kvjax.less.kernels import Psi as Psi
from kvjax.less.kernels import init_kernels as init_kernels
from kvjax.less.kernels import layer_params as layer_params
from kvjax.less.kernels import performer_kernels as performer_kernels
