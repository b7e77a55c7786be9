"""What a policy and a budget cost in quality: perplexity, recall, fidelity of attention, and reports of all three."""

from kvjax.evaluate.command import main as main
from kvjax.evaluate.fidelity import fidelity as fidelity
from kvjax.evaluate.perplexity import Streamed as Streamed
from kvjax.evaluate.perplexity import perplexity as perplexity
from kvjax.evaluate.recall import Recalled as Recalled
from kvjax.evaluate.recall import recall as recall
