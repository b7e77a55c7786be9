"""Share of the positions that kvjax's prompt methods keep as `kvpress_ranks.py` does, as a table in Markdown."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import flax.struct
import numpy as np

import kvjax
from kvjax.methods.compactor import Leverage

METHODS: dict[str, dict[str, Any]] = {
    "expected_attention": {},
    "expected_attention, epsilon": {"epsilon": 1e-2},
    "lagkv": {},
    "capkv": {},
    "leverage": {},
    "noncausal": {},
    "noncausal, corrected": {},
    "compactor": {"recent": 4},
    "compactor, corrected": {"recent": 4},
    "finch": {"recent": 32},
    "chunkkv": {"base": "l2"},
    "chunkkv, corrected": {"base": "l2"},
    "kvzip": {"sinks": 4},
    "kvzip, normalized": {"sinks": 4, "normalized": True},
    "kvzip, normalized, corrected": {"sinks": 4, "normalized": True},
    "snapkv_decode": {"recent": 32, "evict_every": 64},
    "snapkv_decode, corrected": {"recent": 32, "evict_every": 64},
}

REQUEST = "\n\nRepeat the previous context exactly.\n"
"""What KVzip says before it reads a context again, without a chat template."""


def of_kvpress(policy: kvjax.Policy, projections: np.ndarray) -> kvjax.Policy:
    """Return a policy with the projections that kvpress has drawn."""
    if not isinstance(policy.score, Leverage):
        return policy

    @flax.struct.dataclass
    class Drawn(type(policy.score)):  # type: ignore[misc]
        def bind(self, model: Any) -> Any:
            return dataclasses.replace(self, projections=tuple(projections))

    settings = {field.name: getattr(policy.score, field.name) for field in dataclasses.fields(policy.score)}
    return dataclasses.replace(policy, score=Drawn(**settings))


def held_of(model: kvjax.Model, policy: kvjax.Policy, context: list[int], slots: int, decoding: bool) -> kvjax.State:
    """Return a state after a context, of which only the first `slots` tokens are a prompt if it is `decoding`.

    Then one more token follows, which evicts as many as have come since the last eviction.
    """
    if not decoding:
        return kvjax.prefill(model, policy, [context], slots, max_new_tokens=1)[0]
    state, _ = kvjax.prefill(model, policy, [context[:slots]], slots, max_new_tokens=len(context) - slots + 1)
    for token in [*context[slots:], 0]:
        state, _ = kvjax.decode_step_in_place(state, [token])
    return state


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="whatever kvjax loads")
    parser.add_argument("--cases", type=Path, required=True, help="from cases.py")
    parser.add_argument("--count", type=int, default=6, help="contexts to read")
    parser.add_argument("--kvpress", type=Path, required=True, help="from kvpress_ranks.py")
    given = parser.parse_args()
    plan, *cases = map(json.loads, given.cases.read_text().splitlines())
    model, known = kvjax.load(given.model), dict(np.load(given.kvpress))
    print("| method |", " | ".join(map(str, plan["ratios"])), "|\n| --- |", " --- |" * len(plan["ratios"]))
    for name, settings in METHODS.items():
        if not any(f"|{name}|" in key for key in known):
            continue
        chosen: dict[str, Any] = {"recent": 0} | settings
        if name.startswith("kvzip"):
            chosen["prompt"] = tuple(model.tokenizer.encode(REQUEST, add_special_tokens=False))
        made = kvjax.policy(name.partition(",")[0], **chosen)
        policy, cells = of_kvpress(made, known["projections"]), []
        for ratio in plan["ratios"]:
            shares = []
            for number, case in enumerate(cases[: given.count]):
                theirs = known[f"{number}|{name}|{ratio}"]
                slots, context = int(theirs.mean((0, 1)).sum()), case["context"][: theirs.shape[-1]]
                state = held_of(model, policy, context, slots, name.startswith("snapkv_decode"))
                for layer, held in enumerate(kvjax.held_positions(state)):
                    for head, positions in enumerate(held[0]):
                        kept = theirs[layer, head]
                        here = positions[(positions >= 0) & (positions < len(context))]
                        shares.append(kept[here].sum() / max(kept.sum(), 1))
            cells.append(f"{np.mean(shares):.1%} ({min(shares):.1%})")
        print(f"| `{name}` |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
