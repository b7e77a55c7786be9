"""Tasks of `kvjax evaluate`, for any model, policy and budget."""

from collections.abc import Mapping

from kvjax.evaluation.tasks.acceptance import AcceptanceTask
from kvjax.evaluation.tasks.harness import HarnessTask
from kvjax.evaluation.tasks.questions import GenerationTask, RetrievalTask
from kvjax.evaluation.tasks.task import Task
from kvjax.evaluation.tasks.texts import FidelityTask, PerplexityTask

TASKS: Mapping[str, Task] = {
    "perplexity": PerplexityTask(),
    "fidelity": FidelityTask(),
    "acceptance": AcceptanceTask(),
    "retrieval": RetrievalTask(),
    "generation": GenerationTask(),
    "harness": HarnessTask(),
}
"""Tasks by the name of their command."""
