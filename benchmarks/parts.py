"""Time of decoding, part by part: `kvjax bench parts --model smollm2`."""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.cache.layer import LayerCache, MixerInput
from kvjax.cli.bench import say
from kvjax.cli.commands import Parser, add_model_options, finish
from kvjax.cli.options import add_policy, policy_and_config
from kvjax.evaluation.bench import Contender, decoder, model_named, race
from kvjax.generation.detokenize import Pieces
from kvjax.generation.loop import draw
from kvjax.generation.sampling import Sampling
from kvjax.inference.decode import decode_step_in_place
from kvjax.inference.extend import prefill
from kvjax.model import Model
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights, block, embed, layers_of, unembed
from kvjax.policies.policy import Policy
from kvjax.types import TokenBatch
from kvjax.utils.files import output_file, write_text
from kvjax.utils.settings import parse_budget, whole_number

WHOLE, LAYERS, UNEMBEDDING, CACHE = "a step", "layers without a cache", "unembedding", "cache and attention"
SAMPLING, DISPATCH, TEXT = "sampling (top-k and top-p)", "a separate dispatch", "detokenization of a token"


def run(options: argparse.Namespace) -> None:
    """Measure what the command line names, and print and write a table.

    Raises:
        ValueError: a number is out of its range, or there is no such model or policy.
    """
    for name in ("batch", "prompt_tokens", "new_tokens", "repeats"):
        whole_number(f"--{name.replace('_', '-')}", getattr(options, name))
    chosen, config = policy_and_config(options, "h2o")
    words = options.budget or ("0.25" if chosen.bounded and chosen.plan.sizing.mode != "profiled" else "1.0")
    budget = parse_budget(words)
    model = model_named(options.model, options.dtype, options.revision, options.weights)
    tokens = np.random.default_rng(0).integers(3, model.config.vocab_size, (options.batch, options.prompt_tokens))
    say("compiling")
    contenders = parts(model, chosen, budget, tokens, options.new_tokens, options.repeats)
    race(contenders, options.repeats)
    steps = options.new_tokens
    taken = {contender.name: 1e3 * min(contender.seconds) / steps for contender in contenders}
    taken[DISPATCH] -= taken[WHOLE]
    taken[CACHE] = taken[WHOLE] - taken[LAYERS] - taken[UNEMBEDDING]
    order = (WHOLE, LAYERS, UNEMBEDDING, CACHE, SAMPLING, DISPATCH, TEXT)
    rows = [
        {"part": part, "milliseconds": taken[part], "share": taken[part] / taken[WHOLE]}
        for part in order
        if part in taken
    ]
    title = (
        f"{model.name}, {options.dtype}, {options.policy or config.get('policy', 'h2o')} at {words}, "
        f"batch {options.batch}, "
        f"{options.prompt_tokens} prompt tokens, {jax.devices()[0].device_kind}, least of {options.repeats}"
    )
    table(title, rows)
    if options.json:
        write_text(options.json, json.dumps({"title": title, "rows": rows}, indent=1))


def parts(
    model: Model, chosen: Policy, budget: int | float, tokens: np.ndarray, steps: int, repeats: int
) -> list[Contender]:
    """Return the contenders: steps in one program, and each part inside or around them alone."""
    rows, config, weights = len(tokens), model.config, model.weights
    token = jnp.zeros(rows, jnp.int32)
    x, logits = jnp.zeros((rows, 1, config.width), weights.dtype), jnp.zeros((rows, config.vocab_size))
    state, _ = prefill(model, chosen, tokens, budget, max_new_tokens=steps * (repeats + 1))
    keys, seen = jnp.copy(state.key), jnp.zeros(logits.shape, bool)

    def dispatched() -> None:
        nonlocal state  # one text that continues from run to run
        for _ in range(steps):
            state, _ = decode_step_in_place(state, token)
        jax.block_until_ready(state.position)

    def written() -> None:
        for row in tokens:
            pieces = Pieces(model.tokenizer)
            for number in range(steps):
                pieces.add([int(row[number % len(row)])])

    layers = functools.partial(_layers, weights, config, token, x, steps=steps)
    unembedded = functools.partial(_unembedded, weights, config, x, steps=steps)
    whole = decoder(model, chosen, budget, tokens, steps)
    runs: dict[str, Callable[[], Any]] = {
        WHOLE: whole.run,
        LAYERS: lambda: jax.block_until_ready(layers()),
        UNEMBEDDING: lambda: jax.block_until_ready(unembedded()),
        SAMPLING: lambda: jax.block_until_ready(_drawn(keys, logits, seen, steps=steps)),
        DISPATCH: dispatched,
    }
    if model.tokenizer is not None:
        runs[TEXT] = written
    return [Contender(name, "", each) for name, each in runs.items()]


class _Newest(LayerCache):
    """Attention of tokens to themselves alone."""

    def attend(
        self, tokens: MixerInput, q: Array, k: Array, v: Array, sink_logits: Array | None
    ) -> tuple[Array, _Newest]:
        return jnp.broadcast_to(v[:, :, None], (*q.shape[:4], v.shape[-1])), self


@functools.partial(jax.jit, static_argnames=("config", "steps"))
def _layers(
    weights: Weights, config: ModelConfig, token: Int[Array, " b"], x: Float[Array, "b 1 width"], *, steps: int
) -> Float[Array, "b 1 width"]:
    # Every step depends on the one before it, as in a text.
    def one(_: Any, x: Array) -> Array:
        reading = TokenBatch.of_text(token[:, None], jnp.ones(len(token), jnp.int32))
        x = embed(weights, config, reading.token, reading.position) + 1e-6 * x
        for layer in layers_of(weights, config):
            x, _ = block(layer, _Newest(), reading, x)
        return x

    return jax.lax.fori_loop(0, steps, one, x)


@functools.partial(jax.jit, static_argnames=("config", "steps"))
def _unembedded(
    weights: Weights, config: ModelConfig, x: Float[Array, "b 1 width"], *, steps: int
) -> Float[Array, "b 1 width"]:
    def one(_: Any, x: Array) -> Array:
        likeliest = unembed(weights, config, x).argmax(-1)
        return x + 1e-6 * likeliest[..., None].astype(x.dtype)

    return jax.lax.fori_loop(0, steps, one, x)


@functools.partial(jax.jit, static_argnames="steps")
def _drawn(
    keys: Key[Array, " b"], logits: Float[Array, "b vocab"], seen: Bool[Array, "b vocab"], *, steps: int
) -> Bool[Array, "b vocab"]:
    sampling = Sampling(0.8, top_k=40, top_p=0.95)

    def one(position: Array, seen: Array) -> Array:
        return draw(keys, jnp.broadcast_to(position, len(keys)), logits, sampling, seen)[1]

    return jax.lax.fori_loop(0, steps, one, seen)


def table(title: str, rows: list[dict[str, Any]]) -> None:
    """Print the parts with their shares of a step."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title)
    for heading in ("part", "ms a step", "of a step"):
        shown.add_column(heading, justify="left" if heading == "part" else "right")
    for row in rows:
        shown.add_row(row["part"], f"{row['milliseconds']:.3f}", f"{row['share']:.1%}")
    Console(width=110).print(shown)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    options = Parser(prog="kvjax bench parts", description=__doc__)
    add_model_options(options, spread=False)
    add_policy(options, "h2o")
    options.add_argument("--budget", help="slots, or a fraction; 0.25 for policies that have one")
    options.add_argument("--batch", type=int, default=1, help="rows")
    options.add_argument("--prompt-tokens", type=int, default=512, help="that are read before")
    options.add_argument("--new-tokens", type=int, default=16, help="steps of a run")
    options.add_argument("--repeats", type=int, default=7, help="runs, of which the fastest counts")
    options.add_argument("--json", type=output_file, help="also write the numbers to this file")
    return finish("bench parts", lambda: run(options.parse_args(argv)))
