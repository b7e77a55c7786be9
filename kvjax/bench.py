"""Measure speed and memory of policies and budgets: `python -m kvjax.bench decode`, `prefill`; or race `kernels`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import decode, policies
from kvjax.commands import finish
from kvjax.files import written_aside
from kvjax.models import Model, ModelConfig, Rope, load, random_weights
from kvjax.policies.base import Policy
from kvjax.settings import parse_budget, parse_settings

SYNTHETIC = ModelConfig(
    vocab_size=4096,
    width=1024,
    layers=8,
    heads=16,
    kv_heads=4,
    head_width=64,
    mlp_width=2816,
    max_positions=32768,
    rope=Rope(width=64),
)


@dataclasses.dataclass
class Contender:
    """One row of the table: something that can be run again and again."""

    name: str
    budget: str
    run: Callable[[], Any]
    cache_bytes: int | None = None
    slots: float | None = None
    """Slots of a head, on average over rows, layers and heads."""
    temporary_bytes: int | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        """Seconds of the median run."""
        return statistics.median(self.seconds)


def race(contenders: list[Contender], repeats: int) -> None:
    """Run all of them in turn, so that noise hits all alike, after one warm run each."""
    for contender in contenders:
        contender.run()
    for _ in range(repeats):
        for contender in contenders:
            began = time.perf_counter()
            contender.run()
            contender.seconds.append(time.perf_counter() - began)


def model_named(name: str, dtype: str) -> Model:
    """The embedded model, a checkpoint, or `synthetic`: 8 layers, width 1024, four query heads per KV head."""
    if name == "synthetic":
        return Model(random_weights(SYNTHETIC, jax.random.key(0), jnp.dtype(dtype)), SYNTHETIC, name)
    return load(name, dtype=dtype)


def decoder(model: Model, name: str | Policy, budget: int | float, tokens: np.ndarray, steps: int) -> Contender:
    """Greedy decoding of some steps in one program, from a prompt that has been read."""
    state, logits = decode.prefill(model, name, tokens, budget, max_new_tokens=steps)

    @jax.jit
    def run(fixed, moving, token):
        def one(carry, _):
            moving, token = carry
            state, logits = decode.step(decode.join_state(fixed, moving), token)
            return (decode.split_state(state)[1], jnp.argmax(logits, -1).astype(jnp.int32)), None

        return jax.lax.scan(one, (moving, token), None, length=steps)[0]

    fixed, moving = decode.split_state(state)
    token = jnp.argmax(logits, -1).astype(jnp.int32)
    slots = float(np.mean(decode.slot_limits(state)))
    shown = name if isinstance(name, str) else policies.name_of(name)
    return Contender(
        shown, str(budget), lambda: jax.block_until_ready(run(fixed, moving, token)), decode.cache_bytes(state), slots
    )


def reader(model: Model, name: str | Policy, budget: int | float, tokens: np.ndarray) -> Contender:
    """Reading a prompt, with the compiler's own figure for temporary memory."""

    def run():
        state, logits = decode.prefill(model, name, tokens, budget, max_new_tokens=64)
        return jax.block_until_ready((state.caches, logits))

    compiled = decode.lower_prefill(model, name, tokens, budget, max_new_tokens=64).compile()
    memory = compiled.memory_analysis()
    state, _ = decode.prefill(model, name, tokens, budget, max_new_tokens=64)
    temporary = None if memory is None else memory.temp_size_in_bytes
    slots = float(np.mean(decode.slot_limits(state)))
    shown = name if isinstance(name, str) else policies.name_of(name)
    return Contender(shown, str(budget), run, decode.cache_bytes(state), slots, temporary)


def transformers_decoder(model: Model, tokens: np.ndarray, steps: int) -> Contender:
    """Greedy generation by transformers with the same weights, without the time it needs for the prompt.

    Raises:
        ValueError: torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise ValueError("--against transformers needs torch; install it with: pip install 'kvjax[parity]'.") from None
    from transformers import LlamaForCausalLM

    from kvjax.tiny.export import write_checkpoint

    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(model.weights, model.config, Path(directory))
        peer = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor(tokens)
    with torch.inference_mode():
        first = peer(ids[:, :-1], use_cache=True)

    def run():
        import copy

        with torch.inference_mode():
            cache, token = copy.deepcopy(first.past_key_values), ids[:, -1:]
            began = time.perf_counter()
            for _ in range(steps):
                out = peer(token, past_key_values=cache, use_cache=True)
                cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
            contender.seconds.append(time.perf_counter() - began)

    bytes_held = 2 * tokens.shape[1] * len(tokens) * model.config.layers * model.config.kv_heads
    contender = Contender("transformers", "full", run, bytes_held * model.config.head_width * 4)
    return contender


def table(contenders: list[Contender], tokens: int, title: str) -> list[dict[str, Any]]:
    """Print the medians with ratios to the first row and to `streaming` at the same budget; return them."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title)
    for heading in ("policy", "budget", "ms", "tokens/s", "cache MB", "temporary MB", "time / first", "/ streaming"):
        shown.add_column(heading, justify="left" if heading == "policy" else "right")
    rows = []
    streaming = {c.budget: c.median for c in contenders if c.name == "streaming"}
    for c in contenders:
        to_streaming = c.median / streaming[c.budget] if c.budget in streaming else None
        row = dict(
            policy=c.name,
            budget=c.budget,
            milliseconds=1e3 * c.median,
            tokens_per_second=tokens / c.median,
            cache_bytes=c.cache_bytes,
            temporary_bytes=c.temporary_bytes,
            time_over_first=c.median / contenders[0].median,
            time_over_streaming=to_streaming,
        )
        rows.append(row)
        megabytes = ["" if x is None else f"{x / 1e6:.1f}" for x in (c.cache_bytes, c.temporary_bytes)]
        last = "" if to_streaming is None else f"{to_streaming:.2f}"
        shown.add_row(
            c.name, c.budget, f"{1e3 * c.median:.1f}", f"{tokens / c.median:,.0f}", *megabytes,
            f"{row['time_over_first']:.2f}", last,
        )  # fmt: skip
    Console(width=110).print(shown)
    return rows


def policy_with(name: str, settings: dict[str, Any]) -> Policy:
    """A policy with those of the settings that it has."""
    known = policies.settings_of(name) if name in policies.REGISTRY else {}
    return policies.policy(name, **{key: value for key, value in settings.items() if key in known})


def run(options: argparse.Namespace) -> None:
    """Race the contenders that the command line names.

    Raises:
        ValueError: there is no such policy, or a setting does not fit.
    """
    model = model_named(options.model, options.dtype)
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, model.config.vocab_size, (options.batch, options.prompt_tokens))
    names = list(policies.REGISTRY) if options.policies == "all" else options.policies.split(",")
    budgets = [text if text == "same" else parse_budget(text) for text in options.budgets.split(",")]
    settings = parse_settings(options.settings)
    make = {
        "decode": lambda name, budget: decoder(model, name, budget, tokens, options.new_tokens),
        "prefill": lambda name, budget: reader(model, name, budget, tokens),
    }[options.what]
    contenders, own_slots = [make("full", 1.0)], None
    for name in names:
        if name == "full":
            continue
        for budget in budgets:
            try:
                policy = policy_with(name, settings)
                if policy.decides_slots:
                    contenders.append(make(policy, 1.0))
                    own_slots = round(contenders[-1].slots or 1)
                    contenders[-1].budget = f"own: {own_slots}"
                    break
                if budget == "same" and own_slots is None:
                    raise ValueError("budget 'same' follows a policy that decides its slots; name fastgen first.")
                contenders.append(make(policy, own_slots if budget == "same" else budget))
            except ValueError as error:
                if options.policies != "all":
                    raise
                print(f"{name} at {budget} is left out: {error}", file=sys.stderr)
    timed = contenders
    if options.against and options.what == "decode":
        timed = [*contenders, transformers_decoder(model, tokens, options.new_tokens)]
    race(contenders, options.repeats)
    if len(timed) > len(contenders):
        for _ in range(options.repeats + 1):
            timed[-1].run()
        del timed[-1].seconds[0]
    count = options.batch * (options.new_tokens if options.what == "decode" else options.prompt_tokens)
    title = (
        f"{options.what}: {model.name}, batch {options.batch}, {options.prompt_tokens} prompt tokens, "
        f"{jax.devices()[0].device_kind}, medians of {options.repeats}"
    )
    rows = table(timed, count, title)
    if options.json:
        with written_aside(options.json) as file:
            file.write_text(json.dumps({"title": title, "rows": rows}, indent=1))


def main(argv: list[str] | None = None) -> int:
    """The command line; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["kernels"]:
        from kvjax import bench_kernels

        return bench_kernels.main(words[1:])
    options = argparse.ArgumentParser(prog="kvjax bench", description=__doc__, allow_abbrev=False)
    options.add_argument("what", choices=("decode", "prefill", "kernels"), help="kernels has settings of its own")
    options.add_argument("--model", default="synthetic", help="synthetic, tiny, a directory or a hub id")
    options.add_argument("--policies", default="streaming,h2o", help="names with commas between them, or all")
    options.add_argument("--budgets", default="0.25", help="slots, fractions, or `same` as fastgen, with commas")
    options.add_argument("--set", nargs="+", action="extend", default=[], metavar="key=value", dest="settings")
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--prompt-tokens", type=int, default=4096)
    options.add_argument("--new-tokens", type=int, default=16)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options.add_argument("--against", choices=("transformers",), help="race Hugging Face's decoding, too")
    options.add_argument("--json", type=Path, help="also write the numbers to this file")
    return finish("bench", lambda: run(options.parse_args(words)))


if __name__ == "__main__":
    raise SystemExit(main())
