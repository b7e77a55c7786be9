"""Speed and memory of kvjax, llama.cpp and transformers on one GGUF file: `python -m benchmarks.peers.cpu`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import kvjax
from benchmarks.peers.report import table
from kvjax.models.checkpoints.loading import locate
from kvjax.models.checkpoints.saving import write_checkpoint

Row = dict[str, float]
"""Seconds of the prompt and of a token, and bytes beyond those before loading: after the round, and at its peak."""


class Side:
    """Process that loads the model once and measures one round at a time.

    It is ready when it is made: threads of llama.cpp that wait for a busy core take ten times as long.
    """

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()
        self._before = self._resident("VmRSS")
        self._ask()
        self._answer()

    def measure(self) -> Row:
        """Return the numbers of a round.

        Raises:
            RuntimeError: the process ended; its error is on standard error.
        """
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")  # the peak begins anew
        self._ask()
        row = self._answer()
        return row | {"bytes": self._resident("VmRSS") - self._before, "peak": self._resident("VmHWM") - self._before}

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _ask(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def _answer(self) -> Row:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # llama.cpp prints lines of its own
                return json.loads(line)
        raise RuntimeError(f"{' '.join(self._command[:3])} ended before it had measured; see its error above.")

    def _resident(self, field: str) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def compared(rows: dict[str, list[Row]], file_bytes: int) -> str:
    """Return a table of ratios to the first side: its fastest round over that of each side, with medians in brackets.

    Args:
        rows: rounds of each side.
        file_bytes: size of the model's file.
    """
    first = next(iter(rows))

    def ratio(name: str, key: str) -> str:
        theirs, ours = ([row[key] for row in rows[side]] for side in (first, name))
        return f"{min(theirs) / min(ours):.2f} ({np.median(theirs) / np.median(ours):.2f})"

    def size(name: str, key: str) -> str:
        return f"{max(row[key] for row in rows[name]) / file_bytes:.1f}"

    lines = [
        [name, ratio(name, "token"), ratio(name, "prompt"), size(name, "bytes"), size(name, "peak")] for name in rows
    ]
    heads = ["", "decoding speed", "prompt speed", "memory / file", "peak memory / file"]
    return table(heads, lines)


def processor() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def command_of(side: str, options: argparse.Namespace, file: str, folder: Path) -> list[str]:
    """Return the command of a side's process.

    Args:
        side: `llama.cpp`, `transformers`, or a policy of kvjax, `POLICY` or `POLICY:int8` for 8-bit weights.
        options: of the command line.
        file: GGUF file.
        folder: has `prompt.json`, the ids of the prompt, and takes the same weights in the format of transformers.
    """
    sides = Path(__file__).parent
    numbers = [str(folder / "prompt.json"), str(options.new_tokens)]
    if side == "llama.cpp":
        return [options.llama_python, str(sides / "llama_cpp_side.py"), file, *numbers, str(options.threads)]
    if side == "transformers":
        model = kvjax.load(file)
        write_checkpoint(model.weights, model.config, folder)
        return [sys.executable, str(sides / "transformers_side.py"), str(folder), *numbers, str(options.threads)]
    policy, _, weights = side.partition(":")
    budget = ["1.0", ""] if policy == "full" else [options.budget, options.prefill_chunk]
    return [sys.executable, "-m", "benchmarks.peers.cpu_side", file, *numbers, policy, weights, *budget]


def main() -> None:
    """Measure all sides in turn, after a round that is not counted, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or smollm2")
    parser.add_argument(
        "--sides",
        default="llama.cpp,transformers,full,full:int8",
        help="llama.cpp, transformers and policies of kvjax, with :int8 for 8-bit weights; ratios are to the first",
    )
    parser.add_argument("--llama-python", default=sys.executable, help="the Python of an environment with xllamacpp")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--budget", default="512", help="slots or fraction of policies but full (default: 512)")
    parser.add_argument("--prefill-chunk", default="", help="tokens of a chunk of the prompt, for policies but full")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of llama.cpp and transformers")
    options = parser.parse_args()
    file = str(locate(options.model, None))
    prompt = np.random.default_rng(0).integers(300, 40000, options.prompt_tokens).tolist()
    rows: dict[str, list[Row]] = {name: [] for name in options.sides.split(",")}
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as running:
        folder = Path(made)
        (folder / "prompt.json").write_text(json.dumps(prompt))
        sides: dict[str, Side] = {}
        for name in rows:
            sides[name] = Side(command_of(name, options, file, folder))
            running.callback(sides[name].close)
        for number in range(options.repeats + 1):
            for name, side in sides.items():
                row = side.measure()
                rows[name] += [row] if number else []
                seconds = f"prompt {row['prompt']:.2f} s, token {row['token'] * 1e3:.1f} ms"
                print(f"round {number} of {options.repeats}, {name}: {seconds}", file=sys.stderr)
    print(f"{processor()}, {options.threads} cores, {options.prompt_tokens} + {options.new_tokens} tokens\n")
    print(compared(rows, Path(file).stat().st_size))


if __name__ == "__main__":
    main()
