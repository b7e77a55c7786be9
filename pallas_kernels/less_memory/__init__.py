"""Kernels of LESS: features of queries (phi) and of keys (psi), each a small MLP per head, and a step with both."""

from pallas_kernels.less_memory.api import phi as phi
from pallas_kernels.less_memory.api import psi as psi
from pallas_kernels.less_memory.api import remember as remember
