"""Causal attention of a prompt in blocks, with the sums of the probabilities that each key received."""

from pallas_kernels.operands import Joined as Joined
from pallas_kernels.prefill_scores.api import Own as Own
from pallas_kernels.prefill_scores.api import PromptAttention as PromptAttention
from pallas_kernels.prefill_scores.api import prefill_scores as prefill_scores
