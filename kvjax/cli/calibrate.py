"""Average a model's queries over a text, for the policy triattention."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvjax.cli.commands import Parser, add_model_options, command, load_model
from kvjax.evaluation.texts import first_tokens
from kvjax.utils.files import check_not_empty, output_directory, read_text
from kvjax.utils.progress import Bar
from kvjax.utils.settings import check_options

if TYPE_CHECKING:
    from kvjax.model import Model


def parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    options = Parser(prog="kvjax calibrate", description=(__doc__ or "").splitlines()[0])
    add_model_options(options, rounded=False, spread=False)
    options.add_argument("--text", type=Path, nargs="+", required=True, help="UTF-8 texts, read from the beginning")
    options.add_argument("--out", type=output_directory, required=True, metavar="DIR", help="directory for the arrays")
    options.add_argument("--tokens", type=int, default=2**15, help="total number of tokens")
    options.add_argument("--length", type=int, help="tokens per prompt (default: the model's longest, at most 2048)")
    return options


def prompts_of(model: Model, files: list[Path], tokens: int, length: int) -> list[np.ndarray]:
    """Return prompts of one length from the start of each file; each file gives an equal part of the tokens."""
    longest = model.config.max_positions
    if not 1 <= length <= longest:
        raise ValueError(f"--length {length} is not a number of tokens from 1 to the model's longest, {longest}.")
    if tokens < length * len(files):
        raise ValueError(f"--tokens {tokens} is less than one prompt of {length} tokens from each text; use more.")
    prompts = []
    for file in files:
        ids = first_tokens(model.tokenizer, read_text(file), tokens // len(files) // length * length)
        if len(ids) < length:
            raise ValueError(f"{file} has {len(ids)} tokens, less than a prompt of {length}; use a smaller --length.")
        prompts += list(np.asarray(ids[: len(ids) // length * length], np.int32).reshape(-1, length))
    return prompts


def run(options: argparse.Namespace) -> None:
    """Run the command line."""
    from kvjax.methods.triattention import save
    from kvjax.training.calibrate import query_means

    check_options(options, "tokens", "length")
    check_not_empty(options.text)
    model = load_model(options)
    length = min(2048, model.config.max_positions) if options.length is None else options.length
    prompts = prompts_of(model, options.text, options.tokens, length)
    with Bar("tokens", sum(map(len, prompts))) as bar:
        means, tokens = query_means(model, prompts, lambda done: bar.update(done, f"{done} tokens read"))
    save(options.out, means, model, tokens)
    line = ["kvjax", "generate", "--model", options.model, "--policy", "triattention"]
    line += ["--set", f"checkpoint={options.out}", "--prompt", "Once upon a time"]
    print(f"{options.out}: mean queries over {tokens} tokens; use them with: {shlex.join(line)}")


main = command("calibrate", parser, run)
"""Run the command line and return its exit code."""
