"""A decode step over slots in one pass: victim selection, replacement and attention."""

from pallas_kernels.decode_step.api import decode_step as decode_step
from pallas_kernels.decode_step.api import one_pass as one_pass
from pallas_kernels.decode_step.types import Hashed as Hashed
from pallas_kernels.decode_step.types import Stepped as Stepped
