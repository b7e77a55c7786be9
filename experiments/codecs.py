"""Quality of slots of 16, 8 and 4 bits at equal bytes: `kvjax evaluate codecs --text FILE`."""

from __future__ import annotations

import argparse
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from experiments.runs import Run, Runs
from experiments.store import open_store
from kvjax import methods
from kvjax.cache.buffers import slot_bytes
from kvjax.cache.slots import empty_slots
from kvjax.cli.options import add_policies, parts_of
from kvjax.evaluation.texts import passages
from kvjax.inference.padding import round_slots
from kvjax.methods.notation import compared
from kvjax.model import Model, load
from kvjax.policies import Policy
from kvjax.utils.files import write_text
from kvjax.utils.markdown import markdown_table

CODES = {"plain": "16 bits", "int8": "8 bits", "int4": "4 bits"}


class Row(NamedTuple):
    """One policy with slots of a number of bits."""

    policy: str
    codec: str
    slots: int
    bytes_of_slot: int
    run: Run
    recalled: float | None


def bytes_of_slot(model: Model, policy: Policy) -> int:
    """Return the bytes of a slot of the first layer under a policy."""
    bound, layer = policy.bind(model), model.config.layer_configs[0]
    limit = jnp.ones((1, layer.kv_heads), jnp.int32)
    empty = functools.partial(empty_slots, bound, layer, 0, slots=1, dtype=model.weights.dtype)
    return slot_bytes(jax.eval_shape(empty, limit=limit))


def equal_slots(model: Model, policy: Policy, codec: str, slots: int) -> int:
    """Return the most slots of a codec whose buffers take at most the bytes of a number of plain ones."""
    plain, coded = (bytes_of_slot(model, methods.replaced(policy, codec=name)) for name in ("plain", codec))
    room = round_slots(slots) * plain
    return max(count for count in range(1, 1 + room // coded) if round_slots(count) * coded <= room)


def measure(runs: Runs, name: str, policy: Policy, codec: str, slots: int, distance: int | None) -> Row | None:
    """Measure perplexity, and recall over a distance, of a policy on slots of a codec."""
    coded = methods.replaced(policy, codec=codec)
    label = f"{name}, {codec}"
    run = runs.run(label, coded, slots, codec=codec)
    if run is None:
        return None
    recalled = None if distance is None else runs.recall(label, coded, slots, distance, codec=codec)
    return Row(name, codec, slots, bytes_of_slot(runs.model, coded), run, recalled)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options of the report."""
    add_policies(parser, "streaming,h2o,keyformer,snapkv")
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 128], help="slots of 16 bits per head")
    parser.add_argument("--prefix", type=int, default=64, help="tokens read at once before the rest, as a prompt")
    parser.add_argument("--recall", type=int, metavar="DISTANCE", help="also ask for facts so many tokens ago")


def run(options: argparse.Namespace) -> None:
    """Measure the missing values, and write `codecs.md`.

    Raises:
        ValueError: a text, a policy or a number of slots does not fit.
    """
    made = compared(options.policies, *parts_of(options))
    model = load(options.model, "bfloat16", options.revision, mesh=options.mesh)
    read = passages(model, options.text, options.rows, options.length)
    runs = Runs(model, read, open_store(options, "codecs"), (), options.out, options.prefix)
    shown = []
    for slots in options.slots:
        rows = []
        for name, policy in made.items():
            for codec in CODES:
                count = equal_slots(model, policy, codec, slots)
                row = measure(runs, name, policy, codec, count, options.recall)
                if row is not None:
                    rows.append(row)
        shown.append(f"## The bytes of {slots} slots of 16 bits\n\n{_table(runs, rows, options.recall)}")
    words = (
        f"# Slots of 16, 8 and 4 bits on {model.name}\n\nMade by `{options.command}`. The model runs in bfloat16; "
        f"{options.prefix} tokens of each passage are the prompt, the others are read token by token with eviction. "
        "A slot holds key, value, position and score; "
        "codes have a scale for each key and each value, and keys also have a factor for each channel from the prompt. "
        "Buffers are multiples of 16 or 64 slots, so codes take at most the bytes of 16 bits and mostly fewer.\n\n"
    )
    write_text(options.out / "codecs.md", words + "\n".join(shown))
    print(options.out / "codecs.md")


def _table(runs: Runs, rows: list[Row], distance: int | None) -> str:
    headings = ["policy", "codec", "slots", "bytes of a slot", "bytes / full", *(f"{t}, nats" for t in runs.texts)]
    headings += [] if distance is None else [f"recall at {distance}"]
    lines = []
    for row in rows:
        nats = [row.run.nats(text) for text in runs.texts]
        line = [row.policy, CODES[row.codec], row.slots, row.bytes_of_slot, f"{row.run.share:.1%}", *nats]
        lines.append(line if distance is None else [*line, row.recalled])
    return markdown_table(headings, lines)
