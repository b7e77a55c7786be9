"""Quality of models with rounded weights: `kvjax evaluate weights --text FILE`."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from experiments.store import open_store
from kvjax.evaluation.texts import Passages, passages
from kvjax.model import Model, load
from kvjax.models.fingerprint import fingerprint
from kvjax.utils.files import write_text
from kvjax.utils.markdown import markdown_table


class Variant(NamedTuple):
    """One way to store a model's weights."""

    name: str
    dtype: str
    weights: Literal["int8"] | None = None


VARIANTS = (
    Variant("float32", "float32"),
    Variant("bfloat16", "bfloat16"),
    Variant("int8, float32", "float32", "int8"),
    Variant("int8, bfloat16", "bfloat16", "int8"),
)
"""The first is the reference; int8 applies to linear maps, the dtype after it to the rest."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of the report."""
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="several models, in place of --model")
    parser.set_defaults(rows=4, length=256)


def run(options: argparse.Namespace) -> None:
    """Measure the missing values, and write `weights.md`.

    Raises:
        ValueError: a text does not fit, or a model cannot be loaded.
    """
    store = open_store(options, "weights")
    text = [
        "# Rounded weights",
        "With int8, the weight matrices have 8 bits and a scale for each output channel; embeddings, norms and all "
        "computation have the dtype named after it. Columns are the nats per token of held-out text with a full cache, "
        "the Kullback-Leibler divergence from float32 per token, and the share of tokens whose likeliest is that of "
        "float32. "
        f"Made by `{options.command}`.",
    ]
    for name in options.models or [options.model]:
        loading = functools.partial(load, name, revision=options.revision, mesh=options.mesh)
        whole = loading(VARIANTS[0].dtype)
        read = passages(whole, options.text, options.rows, options.length)
        settings = {"model": fingerprint(whole), "text": read.digest}

        def measure(
            variant: Variant,
            loading: Callable[..., Model] = loading,
            whole: Model = whole,
            read: Passages = read,
        ) -> Any:
            model = whole if variant is VARIANTS[0] else loading(variant.dtype, weights=variant.weights)
            return compared(whole, model, read)

        rows = []
        for variant in VARIANTS:
            found = store.measure(f"{name}: {variant.name}", settings, lambda variant=variant: measure(variant))
            nats = [found["nats"][file] for file in read.rows]
            rows.append([variant.name, f"{found['bytes']:,}", *nats, found["divergence"], f"{found['same']:.1%}"])
        headings = ["weights", "bytes", *(f"{file}, nats" for file in read.rows), "divergence, nats", "same token"]
        text += [f"## {name}", markdown_table(headings, rows).strip()]
    report = "\n\n".join(text) + "\n"
    write_text(options.out / "weights.md", report)
    print(report)


def compared(whole: Model, model: Model, read: Passages) -> dict[str, Any]:
    """Return nats per token by text, divergence from another model's predictions, and the rate of equal top tokens."""
    measured = [errors_of(*(m.logits(row[None])[0] for m in (whole, model)), jnp.asarray(row)) for row in read.tokens]
    nats, divergence, same = (np.asarray(values) for values in zip(*measured, strict=True))
    return {
        "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights)),
        "nats": {file: float(nats[rows].mean()) for file, rows in read.rows.items()},
        "divergence": float(divergence.mean()),
        "same": float(same.mean()),
    }


@jax.jit
def errors_of(
    expected: Float[Array, "n vocab"], logits: Float[Array, "n vocab"], tokens: Int[Array, " n"]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Return nats, divergence from the expected logits and agreement with their largest, for one text."""
    p, q = jax.nn.log_softmax(expected[:-1]), jax.nn.log_softmax(logits[:-1])
    nats = -jnp.take_along_axis(q, tokens[1:, None], -1).mean()
    divergence = jnp.einsum("nv,nv->n", jnp.exp(p), p - q).mean()
    return nats, divergence, (p.argmax(-1) == q.argmax(-1)).mean()
