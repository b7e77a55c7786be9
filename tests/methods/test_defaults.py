"""What policies are when nothing is said: their papers' numbers, where papers have some."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import kvjax
from kvjax.methods import CODECS, PLANS, REGISTRY, RESIDUALS, SELECTIONS, settings_in, settings_of

COMMON: dict[str, Any] = {"sinks": 0, "recent": 0, "special": (), "positions": "original", "evict_every": 1}
OBSERVED: dict[str, Any] = COMMON | {"recent": 32, "kernel": 7, "pooling": "average", "group": "mean"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "full": COMMON | {"memory": "device"},
    "window": COMMON,
    "dilated_window": COMMON | {"dilation": 1},
    "streaming": COMMON | {"sinks": 4, "positions": "cache"},
    "lambda_mask": COMMON | {"sinks": 4},
    "random": COMMON,
    "h2o": COMMON | {"recent": 0.5},
    "keyformer": COMMON
    | {"noise": "gumbel", "tau_init": 1.0, "tau_end": 2.0, "recent": 0.25}
    | {"fresh_noise": False, "shared": False, "damping": 1.0},
    "tova": COMMON | {"recent": 1},
    "scissorhands": COMMON | {"history": 128, "recent": 0.25},
    "snapkv": OBSERVED,
    "pyramidkv": OBSERVED | {"beta": 20.0},
    "lagkv": COMMON | {"sinks": 4, "recent": 32, "lag": 128},
    "leverage": COMMON | {"recent": 32, "sketch": 48, "seed": 0},
    "noncausal": COMMON | {"recent": 32, "chunk": 256},
    "omp": COMMON | {"recent": 32, "queries": 256, "each": 4, "ridge": 1e-2},
    "compactor": COMMON | {"sinks": 8, "recent": 32, "sketch": 48, "seed": 0, "chunk": 256, "blending": None},
    "capkv": COMMON | {"sinks": 4, "recent": 32, "tau": 5.0, "future": 512},
    "kvzip": COMMON
    | {"prompt": "\n\nRepeat the previous context exactly.", "chunk": 2048, "normalized": False, "recent": 32}
    | {"later": "\n\nRepeat the part of the previous context exactly, starting with", "overlap": 8},
    "finch": COMMON | {"recent": 32, "delimiter": None},
    "duoattention": COMMON | {"retrieval": 0.5, "sinks": 128, "recent": 256, "length": 512, "seed": 0},
    "simlayerkv": COMMON | {"threshold": 0.9, "sinks": 4, "recent": 1024},
    "expected_attention": COMMON | {"sinks": 4, "recent": 32, "future": 512, "epsilon": 0.0},
    "lightkv": COMMON
    | {"omega": 4.0, "alpha": None, "window": "exact", "middle": "rest"}
    | {"context_limit": None, "ratio": 3.0, "offload": False},
    "keydiff": COMMON | {"block": 128},
    "cur": COMMON | {"neighbors": 16, "projections": None, "sinks": 4},
    "rkv": COMMON | {"importance": 0.1, "threshold": 0.5, "recent": 8, "kernel": 7, "evict_every": 128},
    "snapkv_decode": COMMON | {"recent": 32, "kernel": 7, "pooling": "average", "evict_every": 128},
    "dropkv": COMMON | {"window": 32, "recent": 32},
    "triattention": COMMON | {"checkpoint": "", "distances": 17, "keep_prompt": True, "evict_every": 128},
    "vase": COMMON | {"large": 0.5, "by": "range", "kernel": 5, "sinks": 4, "recent": 64, "evict_every": 64},
    "l2": COMMON | {"skip_layers": 0},
    "lsh_e": COMMON | {"bits": 16, "prompt": "sequential", "seed": 0, "sinks": 4, "recent": 10},
    "topk_oracle": COMMON | {"k": None},
    "fastgen": COMMON
    | {"threshold": 0.95, "local": 0.3, "frequent": 0.3, "frequent_among": "all"}
    | {"order": ("special", "punctuation", "frequent", "local"), "punctuation": (), "markers": ()}
    | {"spare_special": 8, "spare_punctuation": 0.35},
    "less": {"base": "h2o", "checkpoint": "", "kernels": "learned", "features": 0, "kernel_seed": 0},
    "criticalkv": {"base": "h2o", "epsilon": 1e-4},
    "baseline_plus": {"base": "h2o", "features": 8},
    "chunkkv": {"base": "snapkv", "length": 20},
}
PARTS: dict[str, dict[str, Any]] = {
    "uniform": {"extra_slots": 0},
    "arithmetic": {"extra_slots": 0, "ratio": 3.0},
    "pyramid": {"extra_slots": 0, "beta": 20.0, "window": 0},
    "interleaved": {"extra_slots": 0, "period": 2, "ratio": 4.0},
    "adakv": {"extra_slots": 0, "floor": 0.2, "over": "layer"},
    "topk": {"k": None},
}


@pytest.mark.parametrize("name", REGISTRY)
def test_policies_begin_with_their_papers_numbers(name: str) -> None:
    assert settings_of(name) == DEFAULTS[name]
    if "base" not in DEFAULTS[name]:
        # What a policy's parts hold is what its function was given.
        of_parts = settings_in(kvjax.policy(name))
        assert of_parts == {setting: value for setting, value in DEFAULTS[name].items() if setting in of_parts}
        assert set(DEFAULTS[name]) - set(of_parts) <= {"middle", "window", "evict_every", "memory"}


@pytest.mark.parametrize("name", [*PLANS, *SELECTIONS])
def test_parts_begin_with_their_papers_numbers(name: str) -> None:
    made: Any = (PLANS | SELECTIONS)[name]()
    plain = {"plan"} if name == "adakv" else set()
    assert {f.name: getattr(made, f.name) for f in dataclasses.fields(made) if f.name not in plain} == PARTS[name]


def test_names_of_parts() -> None:
    assert (*RESIDUALS, *CODECS) == ("attention_matching", "less", "momentkv", "fp8", "int4", "int8", "plain")
