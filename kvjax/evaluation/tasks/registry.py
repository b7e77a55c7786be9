"""The tasks of `kvjax evaluate`, by name."""

from __future__ import annotations

from collections.abc import Mapping

from kvjax.evaluation.tasks.fidelity import FidelityTask
from kvjax.evaluation.tasks.generation import GenerationTask
from kvjax.evaluation.tasks.harness import HarnessTask
from kvjax.evaluation.tasks.perplexity import PerplexityTask
from kvjax.evaluation.tasks.retrieval import RetrievalTask
from kvjax.evaluation.tasks.task import Task

TASKS: Mapping[str, Task] = {
    "perplexity": PerplexityTask(),
    "fidelity": FidelityTask(),
    "retrieval": RetrievalTask(),
    "generation": GenerationTask(),
    "harness": HarnessTask(),
}
