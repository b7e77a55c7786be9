"""Attention of one new token per row over the slots of a bounded cache, in one pass."""

from pallas_kernels.decode_attention.api import Decoded as Decoded
from pallas_kernels.decode_attention.api import LowRank as LowRank
from pallas_kernels.decode_attention.api import Places as Places
from pallas_kernels.decode_attention.api import ScoreNoise as ScoreNoise
from pallas_kernels.decode_attention.api import Sinks as Sinks
from pallas_kernels.decode_attention.api import decode_attention as decode_attention
