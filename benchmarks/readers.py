"""Time of prompts in a model whose last layers read the keys and values of earlier ones, as those of Gemma 4 E2B do.

Those layers store nothing, so a prompt needs them for its last token alone. The table compares that with running them
for all tokens, in a random model of E2B's layers (15 that store, then 20 that read) with a thirteenth of its width.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Generator
from typing import Any
from unittest import mock

import jax
import numpy as np

import kvjax
from kvjax.inference import layers
from kvjax.models import ModelConfig, Rope, random_weights
from kvjax.models.config import LayerEmbeddings

LAYERS, STORING = 35, 15
FULL = [(index + 1) % 5 == 0 for index in range(LAYERS)]
"""True for each layer without a window."""


def config(width: int) -> ModelConfig:
    """Return the shape of Gemma 4 E2B (1536 wide) at another width."""
    widths = tuple(width // 3 if full else width // 6 for full in FULL)
    return ModelConfig(
        vocab_size=4096,
        width=width,
        layers=LAYERS,
        heads=8,
        kv_heads=1,
        head_width=width // 6,
        mlp_width=4 * width,
        max_positions=131_072,
        head_widths=widths,
        mlp_widths=tuple(4 * width * (1 + (index >= STORING)) for index in range(LAYERS)),
        sources=tuple(None if index < STORING else STORING - 2 + FULL[index] for index in range(LAYERS)),
        windows=tuple(None if full else 512 for full in FULL),
        ropes=tuple(
            Rope(size, 1e6, scaling="proportional", fraction=0.25) if full else Rope(size)
            for full, size in zip(FULL, widths, strict=True)
        ),
        activation="gelu_tanh",
        attention_scale=1.0,
        layer_embeddings=LayerEmbeddings(width // 6, 4096),
        layer_scales=True,
        post_norms=True,
        query_key_norms=True,
        value_norms=True,
        tied=True,
    )


@contextlib.contextmanager
def at_all_tokens() -> Generator[None]:
    """Run layers that store nothing for all tokens of a prompt."""
    jax.clear_caches()
    with mock.patch.object(layers, "only_last", lambda reading, x: (reading, x)):
        yield
    jax.clear_caches()


def seconds(model: Any, tokens: int, repeats: int) -> tuple[float, np.ndarray]:
    """Return the median time of a prompt under `h2o`, and its logits."""
    text = np.random.default_rng(0).integers(0, model.config.vocab_size, (1, tokens))

    def read() -> np.ndarray:
        return np.asarray(kvjax.prefill(model, "h2o", text, 256, max_new_tokens=16)[1])

    logits, times = read(), []  # the first prompt compiles
    for _ in range(repeats):
        start = time.perf_counter()
        read()
        times.append(time.perf_counter() - start)
    return statistics.median(times), logits


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=120, help="width of hidden states, a multiple of 12")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024], help="lengths of prompts")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each kind, of which the median counts")
    options = parser.parse_args()
    shape = config(options.width)
    model = kvjax.Model(random_weights(shape, jax.random.key(0)), shape, name="readers")
    print("| tokens | last token, s | all tokens, s | ratio |\n|--:|--:|--:|--:|")
    for tokens in options.tokens:
        last, logits = seconds(model, tokens, options.repeats)
        with at_all_tokens():
            whole, expected = seconds(model, tokens, options.repeats)
        np.testing.assert_allclose(logits, expected, atol=1e-3)
        print(f"| {tokens} | {last:.2f} | {whole:.2f} | {whole / last:.2f} |", flush=True)


if __name__ == "__main__":
    main()
