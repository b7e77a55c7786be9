"""Train LESS kernels for a model, a policy and a budget.

The commands that made the kernels of the embedded model are in kvjax/tiny/less/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.cli.commands import Parser, add_model_options, command
from kvjax.cli.options import add_policy, parts_of, policy_and_config
from kvjax.methods.notation import combined_parts, parse_policy
from kvjax.utils.files import check_not_empty, output_directory
from kvjax.utils.settings import check_options, parse_budget

if TYPE_CHECKING:
    from kvjax.model import Model


def parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    options = Parser(
        prog="kvjax train_less",
        description=(__doc__ or "").splitlines()[0],
        conflict_handler="resolve",  # `--mesh` has another meaning than when a model runs
    )
    add_model_options(options, rounded=False, processes=False)
    add_policy(options, "h2o")
    add = options.add_argument
    add("--budget", default="0.05", help="slots per head, or a fraction of the model's longest text")
    add("--text", type=Path, nargs="+", required=True, help="UTF-8 text files to train on")
    out = "directory for the kernels; resumes a run there"
    add("--out", type=output_directory, required=True, metavar="DIR", help=out)
    add("--sequences", type=int, default=256, help="number of passages (default: 256)")
    add("--length", type=int, help="tokens per passage (default: the model's longest, at most 4096)")
    add("--mask", choices=("decode", "full-softmax"), default="decode", help="attention that the policy sees")
    add("--features", type=int, default=8, help="R, number of features (default: 8)")
    add("--hidden", type=int, default=512, help="R', width of the hidden layer (default: 512)")
    add("--literal", action="store_true", help="equation 2 exactly as printed")
    add("--dropout", type=float, default=0.3)
    add("--epochs", type=int, default=40)
    add("--batch", type=int, default=2, help="passages per step (default: 2)")
    add("--rate", type=float, default=1e-3, help="initial learning rate of Adam (default: 1e-3)")
    add("--halve-every", type=int, default=10, metavar="EPOCHS", help="epochs per halving of the rate (default: 10)")
    add("--seed", type=int, default=0)
    mesh = "devices that train, as data=2,model=4: texts of a batch along data, layers along model; a run may be "
    add("--mesh", metavar="data=D,model=M", help=f"{mesh}continued on others (default: all along model)")
    add("--save-dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the stored kernels")
    add("--keep-features", action="store_true", help="keep the collected features on disk")
    return options


def slots_of(budget: int | float, model: Model) -> int:
    """Return a budget in slots; a fraction is one of the model's longest text, rounded down to even (LESS, Table 1)."""
    return budget if isinstance(budget, int) else max(2, 2 * int(budget * model.config.max_positions / 2 + 1e-9))


def run(options: argparse.Namespace) -> None:
    """Run the command line."""
    from kvjax.model import load
    from kvjax.models.sharding import parse_mesh
    from kvjax.training.less.recipe import Recipe
    from kvjax.training.less.record import check_trainable
    from kvjax.training.less.run import train_kernels
    from kvjax.training.less.train import check_batch, split_texts

    names = {field.name for field in dataclasses.fields(Recipe)}
    recipe = Recipe(**{name: value for name, value in vars(options).items() if name in names})
    policy, _ = policy_and_config(options, "h2o")
    parts, settings = parts_of(options)
    if any(setting.startswith("plan.") for setting in settings):
        raise ValueError("kernels are trained under a plan with its usual settings; leave --set plan.* out.")
    check_options(options, "length")
    budget = parse_budget(options.budget)
    check_not_empty(options.text)
    check_trainable(policy, options.mask)  # before the model is loaded
    split_texts(options.sequences, recipe)
    mesh = None if options.mesh is None else parse_mesh(options.mesh)
    check_batch(recipe.batch, mesh)
    model = load(options.model, options.dtype, options.revision)
    train_kernels(
        model,
        policy,
        slots_of(budget, model),
        options.text,
        options.out,
        recipe,
        length=options.length or min(4096, model.config.max_positions),
        plan=combined_parts(parse_policy(options.policy or "h2o").parts, parts)["plan"],
        mesh=mesh,
        **{name: getattr(options, name) for name in ("sequences", "mask", "save_dtype", "keep_features")},
    )
    print(f"use them with: {serving_line(options)}")


def serving_line(options: argparse.Namespace) -> str:
    """Return the command that generates text with the kernels that this command line trains."""
    name, *suffix = (options.policy or ("" if options.config else "h2o")).partition("[")
    words = ["--model", options.model] if options.model else []
    words += ["--config", options.config] if options.config else []
    words += ["--policy", "".join([f"{name}+less", *suffix])] if name else ["--residual", "less"]
    words += ["--plan", options.plan] if options.plan else []
    words += ["--set", *options.settings] if options.settings else []
    words += ["--less-checkpoint", str(options.out), "--budget", options.budget, "--prompt", "Once upon a time"]
    return shlex.join(["kvjax", "generate", *words])


main = command("train_less", parser, run)
"""Run the command line and return its exit code."""
