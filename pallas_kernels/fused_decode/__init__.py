"""A decode step over slots in one pass: victim selection, replacement and attention."""

from pallas_kernels.fused_decode.api import Hashed as Hashed
from pallas_kernels.fused_decode.api import Query as Query
from pallas_kernels.fused_decode.api import Ranking as Ranking
from pallas_kernels.fused_decode.api import Slots as Slots
from pallas_kernels.fused_decode.api import Token as Token
from pallas_kernels.fused_decode.api import fused_decode as fused_decode
from pallas_kernels.fused_decode.api import one_pass as one_pass
