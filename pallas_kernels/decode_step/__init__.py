"""A decode step over slots in one pass: victim selection, replacement and attention."""

from pallas_kernels.decode_step.api import Hashed as Hashed
from pallas_kernels.decode_step.api import Query as Query
from pallas_kernels.decode_step.api import Ranking as Ranking
from pallas_kernels.decode_step.api import Slots as Slots
from pallas_kernels.decode_step.api import Stepped as Stepped
from pallas_kernels.decode_step.api import Token as Token
from pallas_kernels.decode_step.api import decode_step as decode_step
from pallas_kernels.decode_step.api import one_pass as one_pass
