"""Rank, victim slot, and the new pair written in its place."""

from pallas_kernels.evict.api import evict as evict
from pallas_kernels.evict.reference import exchange as exchange
from pallas_kernels.ranking import Protection as Protection
