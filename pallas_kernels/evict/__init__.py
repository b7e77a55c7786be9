"""Eviction: rank the slots, select the victim, and replace it with the new pair."""

from pallas_kernels.evict.api import evict as evict
from pallas_kernels.evict.reference import replace_slots as replace_slots
