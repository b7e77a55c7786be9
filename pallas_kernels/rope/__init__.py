"""RoPE of one token's queries and keys, which also splits a projection's row into heads."""

from pallas_kernels.rope.api import rope as rope
