"""Perplexity and recall that reports share, each measured once, kept on disk and compared row by row."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.recall import recall
from experiments.store import Store
from kvjax.evaluation.grid import describe
from kvjax.evaluation.perplexity import perplexity
from kvjax.evaluation.texts import Passages
from kvjax.model import Model
from kvjax.models.fingerprint import fingerprint
from kvjax.policies.policy import Policy


@dataclasses.dataclass(frozen=True)
class Run:
    """One policy at one budget.

    Args:
        result: as stored.
        passages: passages that were read.
    """

    result: dict[str, Any]
    passages: Passages

    def rows(self, text: str, beyond: int = 0) -> list[float]:
        """Return mean nats per token of each passage of a text, over predictions beyond `beyond` slots if given."""
        rows = self.result["beyond"][str(beyond)] if beyond else self.result["rows"]
        return rows[self.passages.rows[text]]

    def nats(self, text: str, beyond: int = 0) -> float:
        """Return mean nats per token of a text."""
        return float(np.mean(self.rows(text, beyond)))

    def per_byte(self, text: str) -> float:
        """Return nats per byte of a text: those per token over the mean bytes of its tokens."""
        where, predicted = self.passages.rows[text], self.passages.tokens.shape[1] - 1
        return float(np.sum(self.result["rows"][where]) * predicted / np.sum(self.passages.bytes[where]))

    @property
    def share(self) -> float:
        """Bytes of the cache over those of a full one."""
        return self.result["cache_bytes"] / self.result["full_cache_bytes"]


@dataclasses.dataclass
class Runs:
    """Runs of one model on the same passages.

    Args:
        model: model to run.
        passages: passages to read.
        store: storage of the runs.
        beyond: budgets beyond which further means are taken.
        directory: for figures.
        prefix: tokens prefilled before the rest; see `perplexity`.
        measuring: True to run measurements that are not on disk.
    """

    model: Model
    passages: Passages
    store: Store
    beyond: tuple[int, ...]
    directory: Path
    prefix: int = 1
    measuring: bool = True

    @property
    def texts(self) -> list[str]:
        """Names of the texts."""
        return list(self.passages.rows)

    @contextlib.contextmanager
    def only_stored(self, only: bool) -> Generator[None]:
        """Return a context in which, if `only`, runs that are not on disk return None instead of being measured."""
        before, self.measuring = self.measuring, self.measuring and not only
        try:
            yield
        finally:
            self.measuring = before

    def settings(self, **more: Any) -> dict[str, Any]:
        """Return the settings that every measurement depends on, and `more`."""
        made = {"model": self.model.name, "fingerprint": fingerprint(self.model), "texts": self.passages.digest}
        return made | {"dtype": str(self.model.weights.dtype)} | more

    def keep(self, name: str, settings: dict[str, Any], make: Any) -> Any | None:
        """Return a measurement from disk, or measure it, unless `only_stored` is in effect."""
        if not self.measuring:
            return self.store.stored(name, settings)
        return self.store.measure(name, settings, make)

    def run(self, label: str, policy: Policy, budget: int | float = 1.0, **identity: Any) -> Run | None:
        """Run a policy at a budget on all passages.

        Args:
            label: unique among policies.
            policy: eviction policy.
            budget: slots per head, or a fraction of the text.
            identity: other inputs of the run, such as a digest of kernels.
        """
        described = {"policy": describe(policy), "budget": budget, "beyond": list(self.beyond), "prefix": self.prefix}
        name = f"perplexity: {label}, {budget if isinstance(budget, int) else f'{100 * budget:g}%'}"
        name += " slots" if isinstance(budget, int) else ""
        made = self.keep(name, self.settings(**described, **identity), lambda: self._make(policy, budget))
        return None if made is None else Run(made, self.passages)

    def recall(self, label: str, policy: Policy, budget: int | float, distance: int, **identity: Any) -> float | None:
        """Return the share of facts recalled over a distance, planted in the passages; see `run`."""
        text = self.passages.tokens[: 2 + distance // self.passages.tokens.shape[1]].reshape(-1)
        settings = self.settings(policy=describe(policy), budget=budget, distance=distance, **identity)
        name = f"recall: {label}, {budget:g}, distance {distance}"
        return self.keep(name, settings, lambda: recall(self.model, policy, budget, distance, text=text).mean)

    def _make(self, policy: Policy, budget: int | float) -> dict[str, Any]:
        streamed = perplexity(self.model, policy, self.passages.tokens, budget, prefix=self.prefix)
        return {
            "rows": _rounded(streamed.rows()),
            "beyond": {str(slots): _rounded(streamed.rows(slots)) for slots in self.beyond},
            "cache_bytes": streamed.cache_bytes,
            "full_cache_bytes": streamed.full_cache_bytes,
        }


def _rounded(values: Any) -> list[float]:
    return [round(float(value), 6) for value in values]
