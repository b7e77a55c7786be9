"""Workloads of the kernels at any sizes, to benchmark them and to compile them for absent chips."""

from pallas_kernels.programs.operations import Sizes as Sizes
from pallas_kernels.programs.operations import decode as decode
from pallas_kernels.programs.operations import eviction as eviction
from pallas_kernels.programs.operations import features as features
from pallas_kernels.programs.operations import hashes as hashes
from pallas_kernels.programs.operations import operand as operand
from pallas_kernels.programs.operations import paged as paged
from pallas_kernels.programs.operations import prefill as prefill
from pallas_kernels.programs.operations import rotating as rotating
from pallas_kernels.programs.operations import stepping as stepping
from pallas_kernels.programs.program import Program as Program
from pallas_kernels.programs.program import Shape as Shape
