"""The kernels of LESS: features of queries (phi) and of keys (psi), each a small MLP per head."""

from pallas_kernels.less_kernels.api import phi as phi
from pallas_kernels.less_kernels.api import psi as psi
