"""What the sections of FastGen's report share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax import decode, paged, policies
from kvjax.evaluate.reports.claims import Claim
from kvjax.evaluate.runs import Run, Runs, describe
from kvjax.policies.fastgen import PARTS, FastGen


@dataclasses.dataclass
class Report:
    """What the sections share.

    Args:
        runs: of perplexity.
        thresholds: T of the curves, rising.
        ablated: T of the ablations.
        distances: of questions for recall.
    """

    runs: Runs
    thresholds: tuple[float, ...]
    ablated: tuple[float, ...]
    distances: tuple[int, ...]

    def profile(self, threshold: float, tokens: int) -> dict[str, Any]:
        """Choices [layer, row, head] and recovered attention [layer, row, head, choice] of prompts of some tokens."""
        policy = FastGen(threshold=threshold)
        settings = self.runs.settings(policy=describe(policy), tokens=tokens)

        def make() -> dict[str, Any]:
            state, _ = decode.prefill(self.runs.model, policy, self.runs.passages.tokens[:, :tokens], max_new_tokens=1)
            assert isinstance(state.caches, paged.Pool)
            found = jax.device_get([(layer.choice, layer.recovered) for layer in state.caches.state])
            return {
                "choice": [choice.tolist() for choice, _ in found],
                "recovered": [np.round(shares.astype(float), 5).tolist() for _, shares in found],
            }

        return self.measured(f"profile: T {threshold:g}, {tokens} tokens", settings, make)

    def measured(self, name: str, settings: dict[str, Any], make: Callable[[], Any]) -> Any:
        """A measurement, from disk or made now."""
        return self.runs.store.measure(name, settings, make)

    def perplexity(self, label: str, policy: policies.Policy, budget: int | float = 1.0) -> Run:
        """A policy on all passages."""
        made = self.runs.run(label, policy, budget)
        assert made is not None
        return made

    def fastgen(self, threshold: float, order: Sequence[str] = PARTS, label: str = "", recent: int = 0) -> Run:
        """FastGen on all passages."""
        policy = FastGen(threshold=threshold, order=tuple(order), recent=recent)
        return self.perplexity(f"fastgen{label} T {threshold:g}", policy)

    def slots(self, held: int, tokens: int, policy: policies.Policy) -> int:
        """Slots per head that a fixed policy gets for so many bytes, of so many rows."""
        config = self.runs.model.config
        stats = 4 if policy.needs_probs else 0
        slot = 2 * config.head_width * self.runs.model.weights.embedding.dtype.itemsize + 4 + stats
        return max(2, held // (tokens * config.layers * config.kv_heads * slot))


Section = tuple[str, list[Claim], str]
