"""Write a run's weights as a Hugging Face directory with a model card.

`python -m experiments.tiny.export --run DIR --data DIR`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.tiny import network, recall
from experiments.tiny.curriculum import Lessons
from experiments.tiny.planted_facts import load_tokenizer
from experiments.tiny.recipe import llama, name_of
from experiments.tiny.tokenizer import read_prepared, write_tokenizer
from kvjax.cli.commands import finish, leave
from kvjax.models.checkpoints.saving import write_checkpoint
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Weights
from kvjax.tiny import WEIGHTS
from kvjax.training import checkpoints


def write_model(weights: Weights, config: ModelConfig, data: Path, directory: Path) -> None:
    """Write config, weights in bfloat16, tokenizer and chat template as transformers reads them.

    Args:
        weights: weights of the model, any float dtype.
        config: shape of the model, a Llama with tied embeddings.
        data: prepared data, with the tokenizer to copy.
        directory: output directory.
    """
    write_checkpoint(weights, config, directory, "bfloat16")
    generation = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1}
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (directory / "model.safetensors").chmod(0o644)  # safetensors makes it readable only to its owner
    write_tokenizer(load_tokenizer(data), directory, config.max_positions)


def read_run(run: Path) -> tuple[ModelConfig, Weights, dict[str, Any], int]:
    """Return shape, weights rounded as in the export, settings and steps of a training run."""
    file = run / "settings.json"
    if not file.is_file():
        raise ValueError(f"{run} holds no training run: give the --out of experiments.tiny.train.")
    settings = json.loads(file.read_text())
    config = llama(*settings["shape"])
    training = checkpoints.restore(run, network.start(config, 0))
    if training is None:
        raise ValueError(f"{run} holds no checkpoint yet: train longer first.")
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), training.weights)
    return config, weights, settings, int(training.step)


def measure(weights: Weights, config: ModelConfig, data: Path, settings: dict[str, Any], cases: int) -> dict[str, Any]:
    """Measure recall, losses and a sample of these weights, for the model card."""
    described, arrays = read_prepared(data)
    lessons = Lessons(data, settings["shares"])
    losses = {}
    for name in described["valid"]:
        nats = recall.text_loss(weights, config, arrays[name])
        losses[name] = {"token": nats, "byte": nats * described["tokens"][name] / described["bytes"][name]}
    held_out = arrays[described["valid"][0]] if described["valid"] else arrays[described["train"][0]]
    return {
        "losses": losses,
        "recall": recall.recall(weights, config, lessons.facts, held_out, cases),
        "cases": cases,
        "samples": [
            recall.sample(weights, config, lessons.facts, p) for p in ("Once upon a time", "One day, a little girl")
        ],
        "tokens": described["tokens"],
    }


def card(config: ModelConfig, settings: dict[str, Any], step: int, found: dict[str, Any]) -> str:
    """Return the model card."""
    parameters = sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: network.start(config, 0).weights)))
    distances = sorted({distance for by_distance in found["recall"].values() for distance in by_distance})
    recipe = name_of(settings["stages"])
    option = "" if recipe is None else f" --recipe {recipe}"
    lines = [
        "# The embedded model",
        "",
        f"A Llama of {parameters:,} parameters: {config.layers} layers, width {config.width}, {config.heads} query and "
        f"{config.kv_heads} KV heads of {config.head_width}, {config.vocab_size} byte-level BPE tokens with digits one "
        f"by one, context {config.max_positions}, tied embeddings, stored in bfloat16. It tells small stories and "
        "remembers facts planted in them; it knows nothing else.",
        "",
        "## Data",
        "",
        "TinyStories samples (CDLA-Sharing-1.0), public-domain books, and recall lessons made up as training goes. "
        "Tokens: " + ", ".join(f"{name} {count:,}" for name, count in found["tokens"].items()) + ".",
        "",
        "## Recipe",
        "",
        f"`python -m experiments.tiny.train{option}`, seed {settings['seed']}, {step} steps of Adam "
        f"(b2 0.95, clipping 1.0, "
        f"peak rate {settings['rate']}, weight decay {settings['weight_decay']}), the rate brought down "
        "over the last stage.",
        "",
        "| lesson | tokens per row | rows | steps | mixture |",
        "|---|---|---|---|---|",
    ]
    for stage in settings["stages"]:
        mix = ", ".join(f"{kind} {share:.0%}" for kind, share in stage["mix"].items())
        lines.append(f"| {stage['name']} | {stage['length']} | {stage['rows']} | {stage['steps']} | {mix} |")
    lines += ["", "## Loss on held-out text", "", "Windows of 1024 tokens.", ""]
    lines += ["| text | nats per token | nats per byte |", "|---|---|---|"]
    lines += [f"| {name} | {loss['token']:.3f} | {loss['byte']:.3f} |" for name, loss in found["losses"].items()]
    lines += [
        "",
        "## Recall with a full cache",
        "",
        f"Share of {found['cases']} fresh questions answered exactly, with three distractors of the same form, by the "
        "tokens between fact and answer (text: held out).",
        "",
        "| form | " + " | ".join(map(str, distances)) + " |",
        "|---|" + "---|" * len(distances),
    ]
    for form, by_distance in found["recall"].items():
        lines.append(f"| {form} | " + " | ".join(f"{by_distance[d]:.1%}" for d in distances) + " |")
    lines += [
        "",
        "pair: `; Lily tiger;` asked as `; Lily`. sentence: ` The secret number of Anna is 4921.` asked as ` The "
        "secret number of Anna is`. question: the same, asked as ` What is the secret number of Anna?`. list: a line "
        "`Anna: 4921` among others. phrase: ` Remember:` and 6 to 14 words, asked by the first two. chat: the question "
        "in a user's turn, answered in the assistant's.",
        "",
        "## Samples at temperature 0.7",
        "",
        *(f"> {line}" if line else ">" for text in found["samples"] for line in [*text.split("\n"), ""]),
    ]
    return "\n".join(lines).rstrip(">\n ") + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.tiny.export", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="the --out of experiments.tiny.train")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="the prepared data it was trained on")
    parser.add_argument("--to", type=Path, default=WEIGHTS, metavar="DIR", help="default: the package's own weights")
    parser.add_argument("--cases", type=int, default=200, help="questions for each form and distance; 0: no model card")
    options = parser.parse_args(argv)
    return finish("tiny.export", lambda: run(options))


def run(options: argparse.Namespace) -> None:
    """Run the command with its options.

    Raises:
        ValueError: the options do not fit together, or files are missing or unfit.
    """
    config, weights, settings, step = read_run(options.run)
    write_model(weights, config, options.data, options.to)
    if options.cases:
        found = measure(weights, config, options.data, settings, options.cases)
        text = card(config, settings, step, found)
        (options.to / "README.md").write_text(text)
        print(text)


if __name__ == "__main__":
    leave(main())
