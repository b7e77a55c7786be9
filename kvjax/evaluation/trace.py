"""Traces of a policy: scores, evictions and the attention that is kept, step by step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.evaluation.fidelity import attention_row, held_tokens, watched
from kvjax.evaluation.figures import check_figure, new_figure, save_figure, whole_ticks
from kvjax.inference.budget import Budget
from kvjax.inference.cache import Cache
from kvjax.inference.extend import prefill
from kvjax.inference.state import State
from kvjax.methods.registry import policy as policy_by_name
from kvjax.model import Model
from kvjax.policies.policy import Policy
from kvjax.utils.files import check_writable, write_text


class Trace(NamedTuple):
    """Contents of a cache after a prompt (entry 0) and after each later token (entries 1 to n)."""

    positions: tuple[Int[np.ndarray, "b h entries c"], ...]
    """Position of the token in each slot of each layer; -1 = empty."""
    scores: tuple[Float[np.ndarray, "b h entries c"], ...]
    """Score of each slot of each layer, as the policy ranks them for the next token; NaN for empty slots."""
    attention_kept: Float[np.ndarray, "layers b h entries"]
    """Share of the full cache's attention, from the newest token, on tokens that the cache holds."""

    @property
    def live(self) -> Int[np.ndarray, "layers b h entries"]:
        """Number of slots that hold a token."""
        return np.stack([(layer >= 0).sum(-1) for layer in self.positions])

    def evicted(self, layer: int, row: int, head: int) -> list[list[int]]:
        """Return the positions that a head evicted at each entry; at entry 0 those of the prompt."""
        entries = [{int(p) for p in slots if p >= 0} for slots in self.positions[layer][row, head]]
        length = max((max(entry, default=-1) for entry in entries[:1]), default=-1) + 1
        before = [set(range(length)), *entries[:-1]]
        return [sorted(was - now) for was, now in zip(before, entries, strict=True)]


def trace(
    model: Model,
    policy: Policy | str,
    prompt: Sequence[int],
    continuation: Sequence[int],
    budget: Budget = 1.0,
    *,
    seed: int = 0,
    **settings: Any,
) -> Trace:
    """Run a policy over a prompt and later tokens, and compare it at each step with a full cache.

    Example:
        >>> from kvjax.evaluation.trace import trace
        >>> record = trace(kvjax.load("tiny"), "streaming", range(5, 25), [7, 8, 9], budget=8)
        >>> record.evicted(layer=0, row=0, head=0)[1:]
        [[17], [18], [19]]
        >>> bool((record.live == 8).all())
        True
    """
    ids = jnp.asarray(continuation, jnp.int32).reshape(-1, 1)
    chosen = policy_by_name(policy) if isinstance(policy, str) else policy
    model.config.check_bound(len(prompt) + len(ids))
    planned: dict[str, Any] = dict(max_new_tokens=max(len(ids), 1), key=jax.random.key(seed))
    probed, _ = prefill(model, chosen, [list(prompt)], budget, **planned, **settings)
    full, _ = prefill(model, watched(policy_by_name("full")), [list(prompt)], **planned)
    positions, scores, attention_kept = jax.tree.map(np.asarray, _follow(probed, full, ids))
    positions, scores = ([np.moveaxis(layer, 0, 2) for layer in layers] for layers in (positions, scores))
    return Trace(tuple(positions), tuple(scores), np.stack([np.moveaxis(layer, 0, -1) for layer in attention_kept]))


@jax.jit
def _follow(probed: State, full: State, tokens: Int[Array, "n 1"]) -> Any:
    config, length = full.config, full.cache.slots[0].capacity

    def observe(cache: Cache, full_cache: Cache) -> tuple[list[Array], list[Array], list[Array]]:
        views, full_slots = cache.slots, full_cache.slots
        reading = cache.newest
        scores, attention_kept = [], []
        for index, view, beside in zip(config.storing, views, full_slots, strict=True):
            shape = config.layer(index)
            policy = probed.policy.layer(index)
            score, _ = policy.scores_and_protection(view, reading.ahead(shape, index, probed.weights.dtype))
            scores.append(jnp.where(view.live, score, jnp.nan))
            row, _ = attention_row(shape, full.policy.layer(index), beside, full_cache.position - 1, length, None)
            attention_kept.append(jnp.where(held_tokens(view, length)[:, :, None], row, 0.0).sum(-1).mean(2))
        return [view.position for view in views], scores, attention_kept

    def one(carry: tuple[Cache, Cache], token: Int[Array, " b"]) -> tuple[tuple[Cache, Cache], Any]:
        after = probed.decoder.step(carry[0], token)[0], full.decoder.step(carry[1], token)[0]
        return after, observe(*after)

    caches = probed.cache.replace(key=None), full.cache.replace(key=None)
    first = observe(*caches)
    _, later = jax.lax.scan(one, caches, tokens)
    return jax.tree.map(lambda start, more: jnp.concatenate([start[None], more]), first, later)


def check_file(file: Path) -> None:
    """Refuse a file that `save` cannot write."""
    if file.suffix == ".png":
        check_figure(file)
    elif file.suffix == ".json":
        check_writable(file, ".json")
    else:
        raise ValueError(f"--trace {file} is neither .json nor .png; choose one of these names.")


def save(record: Trace, file: Path, facts: dict[str, Any]) -> None:
    """Write the first row of a trace as JSON or as a picture, by the file's suffix.

    Args:
        facts: policy, budget and similar fields, for the beginning of the JSON and the title of the picture.
    """
    if file.suffix == ".png":
        _draw(record, file, ", ".join(f"{name} {value}" for name, value in facts.items()))
        return
    layers = [
        {
            "live_slots": live[0].tolist(),
            "attention_kept": np.round(attention_kept[0].astype(float), 4).tolist(),
            "evicted": [record.evicted(layer, 0, head) for head in range(live.shape[1])],
        }
        for layer, (live, attention_kept) in enumerate(zip(record.live, record.attention_kept, strict=True))
    ]
    write_text(file, json.dumps({**facts, "layers": layers}) + "\n")


def _draw(record: Trace, file: Path, title: str) -> None:
    figure, panels = new_figure(width=9.0, height=2.5, rows=2)
    images = {"live slots per head": record.live, "attention kept": record.attention_kept}
    for panel, (label, numbers) in zip(panels, images.items(), strict=True):
        image = panel.imshow(numbers[:, 0].mean(1), aspect="auto", interpolation="nearest", cmap="viridis")
        panel.set(ylabel="layer")
        whole_ticks(panel.xaxis, panel.yaxis)
        figure.colorbar(image, ax=panel, label=label)
    panels[1].set(xlabel="tokens written after the prompt")
    figure.suptitle(title, fontsize=10)
    save_figure(figure, file)
