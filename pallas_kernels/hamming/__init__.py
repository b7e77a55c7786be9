"""Hamming distances between packed codes, and the slot that they select for eviction."""

from pallas_kernels.hamming.api import hamming as hamming
from pallas_kernels.hamming.hashing import Hashing as Hashing
from pallas_kernels.hamming.hashing import hashes as hashes
from pallas_kernels.hamming.hashing import pack_bits as pack_bits
from pallas_kernels.hamming.reference import distances as distances
