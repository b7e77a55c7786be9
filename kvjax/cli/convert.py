"""Write a model as an Orbax checkpoint that `kvjax.load` and `--model` accept."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from kvjax.cli.commands import Parser, add_model_options, finish
from kvjax.models.checkpoints.gguf_tokenizer import gguf_tokenizer
from kvjax.models.checkpoints.loading import Checkpoint, read_checkpoint
from kvjax.models.checkpoints.orbax import write_orbax
from kvjax.models.sharding import parse_mesh
from kvjax.models.tokenizer import lazy_tokenizer, unreadable
from kvjax.utils.files import check_regular, damage_named, directory_aside, output_directory

_BESIDE = ("*.json", "*.model", "*.txt", "*.jinja")
"""Patterns of the files of a Hugging Face directory that are not weights."""


def convert(checkpoint: Checkpoint, out: Path) -> None:
    """Write a checkpoint's weights with Orbax, and its config and tokenizer, to a new directory, once complete."""
    with directory_aside(out) as aside:
        if checkpoint.metadata is not None:
            with damage_named(unreadable(checkpoint.place)):
                tokenizer = lazy_tokenizer(*gguf_tokenizer(checkpoint.metadata), checkpoint.place)
                tokenizer.transformers.save_pretrained(aside)
            if checkpoint.sampling.settings:
                content = json.dumps(dict(checkpoint.sampling.settings), indent=2)
                (aside / "generation_config.json").write_text(content + "\n", encoding="utf-8")
        else:
            for file in (file for pattern in _BESIDE for file in checkpoint.place.glob(pattern)):
                if not file.name.endswith(".index.json"):
                    check_regular(file)
                    shutil.copyfile(file, aside / file.name)
        (aside / "config.json").write_text(json.dumps(dict(checkpoint.settings), indent=2) + "\n", encoding="utf-8")
        write_orbax(checkpoint.weights, aside / "weights")


def run(options: argparse.Namespace) -> None:
    """Run the command line."""
    if options.out.exists():
        raise ValueError(f"{options.out} exists already; give a new directory.")
    mesh = None if options.mesh is None else parse_mesh(options.mesh)
    convert(read_checkpoint(options.model, options.dtype, options.revision, mesh=mesh), options.out)
    print(f"{options.out}: kvjax generate --model {options.out} runs it")


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = Parser(prog="kvjax convert", description=__doc__)
    add_model_options(options, dtype="bfloat16", rounded=False, processes=False, kernels=False)
    options.add_argument(
        "--out", type=output_directory, required=True, metavar="DIR", help="new directory for the checkpoint"
    )
    return finish("convert", lambda: run(options.parse_args(argv)))
