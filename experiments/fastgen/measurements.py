"""Data and measurements for all sections of FastGen's report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from experiments.runs import Run, Runs
from kvjax import methods
from kvjax.cache.slots import empty_slots
from kvjax.evaluation.grid import describe
from kvjax.inference.extend import prefill
from kvjax.methods.fastgen import PARTS
from kvjax.model import Model
from kvjax.policies.policy import Policy


@dataclasses.dataclass
class Report:
    """Measurements that the sections share, for one definition of frequent tokens.

    Args:
        runs: perplexity runs.
        thresholds: T of the curves, rising.
        ablated: T of the ablations.
        distances: distances of questions for recall.
        among: tokens from which the frequent ones are selected: `frequent_among` of the policy.
    """

    runs: Runs
    thresholds: tuple[float, ...]
    ablated: tuple[float, ...]
    distances: tuple[int, ...]
    among: str = "all"

    @property
    def suffix(self) -> str:
        """Return a suffix for the measurements and figures of this definition, if it is not the paper's."""
        return "" if self.among == "all" else f"-{self.among}"

    def policy(self, threshold: float, **settings: Any) -> Policy:
        """Return FastGen with this definition."""
        return methods.policy("fastgen", threshold=threshold, frequent_among=self.among, **settings)

    def profile(self, threshold: float, tokens: int) -> dict[str, Any]:
        """Return choices [layer, row, head] and recovered attention [layer, row, head, choice] of prompts."""
        policy = self.policy(threshold)
        settings = self.runs.settings(policy=describe(policy), tokens=tokens)

        def make() -> dict[str, Any]:
            return profile_of(self.runs.model, policy, self.runs.passages.tokens[:, :tokens])

        return self.measured(f"profile{self.suffix}: T {threshold:g}, {tokens} tokens", settings, make)

    def slots_set_aside(self, threshold: float) -> dict[str, Any]:
        """Return slots of the passages' heads: by choice as a share of the text, and for the whole pool.

        Returns:
            `share`: by choice, mean slots of a head over the text's tokens, None if no head chose it; `held`: the same
            for the kept part of the prompt; `pool`: slots in pages over those that heads need.
        """
        policy, tokens = self.policy(threshold), self.runs.passages.tokens
        settings = self.runs.settings(policy=describe(policy), prefix=self.runs.prefix)

        def make() -> dict[str, Any]:
            length, prefix = tokens.shape[1], self.runs.prefix
            state, _ = prefill(self.runs.model, policy, tokens[:, :prefix], max_new_tokens=length - prefix)
            assert state.cache.pool is not None
            chosen = np.stack([np.asarray(heads.state.plan.choice) for heads in state.cache.attending])
            limits = np.stack([np.asarray(heads.limit) for heads in state.cache.attending])
            held = np.stack([(positions >= 0).sum(-1) for positions in state.cache.positions()])

            def of_choice(counts: np.ndarray) -> list[float | None]:
                choices = range(len(PARTS) + 1)
                return [float(counts[chosen == i].mean() / length) if (chosen == i).any() else None for i in choices]

            pool = state.cache.pool.position.size / limits.sum()
            return {"share": of_choice(limits), "held": of_choice(held), "pool": float(pool)}

        return self.measured(f"slots{self.suffix}: T {threshold:g}", settings, make)

    def measured(self, name: str, settings: dict[str, Any], make: Callable[[], Any]) -> Any:
        """Read a measurement from disk, or make it now."""
        return self.runs.store.measure(name, settings, make)

    def perplexity(self, label: str, policy: Policy, budget: int | float = 1.0) -> Run:
        """Run a policy on all passages."""
        made = self.runs.run(label, policy, budget)
        assert made is not None
        return made

    def fastgen(self, threshold: float, order: Sequence[str] = PARTS, label: str = "", recent: int = 0) -> Run:
        """Run FastGen on all passages."""
        policy = self.policy(threshold, order=tuple(order), recent=recent)
        return self.perplexity(f"fastgen{self.suffix}{label} T {threshold:g}", policy)

    def slots(self, held: int, tokens: int, policy: Policy) -> int:
        """Return the slots per head of a fixed policy with a number of bytes, for all passages."""
        return slots_within(self.runs.model, held, tokens, policy)


def profile_of(model: Model, policy: Policy, prompts: Int[np.ndarray, "b n"]) -> dict[str, Any]:
    """Return FastGen's choices [layer, row, head] and recovered attention [layer, row, head, choice] of prompts."""
    state, _ = prefill(model, policy, prompts, max_new_tokens=1)
    plans = [heads.state.plan for heads in state.cache.attending]
    found = jax.device_get([(plan.choice, plan.recovered) for plan in plans])
    return {
        "choice": [choice.tolist() for choice, _ in found],
        "recovered": [np.round(shares.astype(float), 5).tolist() for _, shares in found],
    }


def slots_within(model: Model, held: int, tokens: int, policy: Policy) -> int:
    """Return the slots per head of a fixed policy with a number of bytes, for a number of rows."""

    def one() -> list[Any]:
        limit = [jnp.ones((1, shape.kv_heads), jnp.int32) for shape in model.config.layer_configs]
        layers = enumerate(zip(model.config.layer_configs, limit, strict=True))
        dtype = model.weights.dtype
        made = [
            empty_slots(policy, shape, layer, limit=limit, slots=1, dtype=dtype) for layer, (shape, limit) in layers
        ]
        return [(view.kv, view.position, view.slots) for view in made]

    slot = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(one)))
    return max(2, held // (tokens * slot))
