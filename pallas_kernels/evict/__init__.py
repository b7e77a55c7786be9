"""Eviction: rank the slots, select the victim, and write the new pair in its place."""

from pallas_kernels.evict.api import evict as evict
from pallas_kernels.evict.reference import exchange as exchange
from pallas_kernels.ranking import Protection as Protection
