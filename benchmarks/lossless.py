"""Speed of lossless decoding against the full cache alone: `kvjax bench lossless --model smollm2 --text FILE`."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache.buffers import allocated_bytes
from kvjax.cli.bench import say
from kvjax.cli.commands import Parser, add_model_options, finish, load_model
from kvjax.generation.adaptive import AdaptiveBatch
from kvjax.generation.generate import begin
from kvjax.generation.loop import Block, PrefilledBatch
from kvjax.generation.speculative import SpeculativeBatch, parts_of
from kvjax.inference.cache import Cache
from kvjax.inference.decoder import Decoder
from kvjax.inference.state import State
from kvjax.utils.compilation import Compiling
from kvjax.utils.files import read_text
from kvjax.utils.markdown import markdown_table
from kvjax.utils.settings import parse_budget, whole_number

REFRESH = "+refresh"
"""After a number of draft tokens: the draft's slots are chosen anew after each verification."""


def run(options: argparse.Namespace) -> None:
    """Measure what the command line names, and print a table.

    Raises:
        ValueError: a number is out of its range, the text is too short, or there is no such model.
    """
    lengths, counts = (_numbers(name, getattr(options, name)) for name in ("lengths", "rows"))
    text, budget = read_text(options.text), parse_budget(options.budget)
    model = load_model(options)
    ids = model.tokenizer.encode(text)
    if len(ids) < max(lengths) + max(counts) * options.stride:
        raise ValueError(f"{options.text} has {len(ids)} tokens, which are too few; give a longer text.")
    table: list[tuple[Any, ...]] = []
    for length in lengths:
        for rows in counts:
            prompts = [ids[row * options.stride :][:length] for row in range(rows)]
            say(f"{rows} x {length} tokens")
            settings: dict[str, Any] = dict(policy=options.policy, budget=budget, temperature=options.temperature)
            settings |= dict(max_new_tokens=options.new_tokens, stop_at_eos=False, draft_tokens="auto")
            refresh = REFRESH in options.draft_tokens
            batch = begin(model, prompts, lossless=True, refresh=refresh, **settings)
            for figures in race(batch, options.draft_tokens.split(",")):
                table.append((length, rows, *figures))
                say(" | ".join(map(str, table[-1])))
    heading = ("tokens", "rows", "F / W", "drafts", "tokens a round", "ratio")
    device = jax.devices()[0].device_kind
    print(f"{model.name}, {options.policy} at {options.budget}, {device}, jax {jax.__version__}\n")
    print(markdown_table(heading, table))


def _numbers(name: str, words: str) -> list[int]:
    return [whole_number(name, int(word)) for word in words.split(",")]


def race(batch: PrefilledBatch, choices: Sequence[str]) -> Iterator[tuple[str, str, str, str]]:
    """Continue a prefilled batch with drafts, in turns with its full cache alone.

    Yield for each of the numbers of draft tokens: the bytes of the full caches over those of the weights; the number;
    the tokens that a round adds; and tokens per second over those of the full cache alone.
    """
    decoder, cache = parts_of(batch.state)
    fields: dict[str, Any] = {field.name: getattr(batch, field.name) for field in dataclasses.fields(PrefilledBatch)}

    def of(kind: type[PrefilledBatch], decoder: Decoder, cache: Cache) -> _Turns:
        started: dict[str, Any] = fields | {"state": State(decoder, jax.tree.map(jnp.copy, cache))}
        return _Turns(kind(**started).blocks())

    alone = of(PrefilledBatch, decoder.full, cache.full)

    def drafts(choice: str) -> _Turns:
        count, refresh = choice.removesuffix(REFRESH), choice.endswith(REFRESH)
        if count == "auto":
            return of(AdaptiveBatch, decoder.replace(refresh=refresh), cache)
        return of(SpeculativeBatch, decoder.replace(draft_tokens=int(count), refresh=refresh), cache)

    drafted = {choice: drafts(choice) for choice in choices}
    while alone.advance() and all(each.advance() for each in drafted.values()):
        pass
    share = allocated_bytes(cache.full.memory) / allocated_bytes(decoder.weights)
    for choice, each in drafted.items():
        per_round = f"{each.verified / each.rounds:.2f}" if each.rounds else ""
        ratio = each.tokens / each.seconds * alone.seconds / alone.tokens
        yield f"{share:.2f}", choice, per_round, f"{ratio:.2f}"


class _Turns:
    """Blocks of a batch, timed without those that compile a program and the first one, which takes no step."""

    def __init__(self, blocks: Iterator[Block]) -> None:
        self._blocks, self.seconds = blocks, 0.0
        self.tokens = self.verified = self.rounds = 0
        next(blocks)

    def advance(self) -> bool:
        with Compiling() as compiling:
            began = time.perf_counter()
            block = next(self._blocks, None)
            seconds = time.perf_counter() - began
        if block is None:
            return False
        if compiling.seconds:
            return True
        self.seconds += seconds
        self.tokens += int(block.counts.sum())
        self.verified += int(block.counts[block.rounds > 0].sum())
        self.rounds += int(block.rounds.sum())
        return True


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = Parser(prog="kvjax bench lossless", description=__doc__)
    add_model_options(options)
    options.add_argument("--text", type=Path, required=True, help="file with the text of the prompts")
    options.add_argument("--policy", default="h2o", help="policy that drafts (default: %(default)s)")
    options.add_argument("--budget", default="0.125", help="its slots, or a fraction (default: %(default)s)")
    options.add_argument("--lengths", default="1024,4096", help="tokens of the prompts (default: %(default)s)")
    options.add_argument("--rows", default="1", help="rows of the batches (default: %(default)s)")
    options.add_argument("--stride", type=int, default=100, help="tokens between the prompts' beginnings")
    options.add_argument("--draft-tokens", default="4,auto", help="also auto, 4+refresh (default: %(default)s)")
    options.add_argument("--new-tokens", type=int, default=128, help="tokens of a text (default: %(default)s)")
    options.add_argument("--temperature", type=float, default=0.0, help="of the texts (default: 0, greedy)")
    return finish("bench lossless", lambda: run(options.parse_args(argv)))
