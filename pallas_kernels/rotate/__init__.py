"""RoPE of one token's queries and keys, whose heads leave the row that products of weights make of them."""

from pallas_kernels.rotate.api import rotate as rotate
