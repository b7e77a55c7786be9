"""Quality under a policy and a budget: perplexity, fidelity of attention, and the tasks of `kvjax evaluate`."""

from kvjax.evaluation.fidelity import fidelity as fidelity
from kvjax.evaluation.perplexity import Costs as Costs
from kvjax.evaluation.perplexity import Streamed as Streamed
from kvjax.evaluation.perplexity import costs as costs
from kvjax.evaluation.perplexity import perplexity as perplexity
