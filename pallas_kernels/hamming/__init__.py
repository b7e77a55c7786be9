"""Hamming distances between packed codes, and the slot that they single out."""

from pallas_kernels.hamming.api import hamming as hamming
from pallas_kernels.hamming.reference import distances as distances
from pallas_kernels.ranking import Protection as Protection
