"""A decode step over slots in one pass: victim selection, replacement and attention."""

from pallas_kernels.decode_step.api import decode_step as decode_step
from pallas_kernels.decode_step.api import one_pass as one_pass
from pallas_kernels.decode_step.types import Hashed as Hashed
from pallas_kernels.decode_step.types import Query as Query
from pallas_kernels.decode_step.types import Ranking as Ranking
from pallas_kernels.decode_step.types import Slots as Slots
from pallas_kernels.decode_step.types import Stepped as Stepped
from pallas_kernels.decode_step.types import Token as Token
