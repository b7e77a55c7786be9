"""Quality under a policy and a budget: perplexity, recall, fidelity of attention, and reports of all three."""

from kvjax.evaluation.fidelity import fidelity as fidelity
from kvjax.evaluation.perplexity import Streamed as Streamed
from kvjax.evaluation.perplexity import perplexity as perplexity
from kvjax.evaluation.recall import Recalled as Recalled
from kvjax.evaluation.recall import recall as recall
