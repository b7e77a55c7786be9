"""Speed and memory of kvjax and of llama.cpp on one GGUF file and one CPU: `python -m benchmarks.peers.llama_cpp`."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.peers.report import table
from kvjax.models.checkpoints.locate import locate

Row = dict[str, float]
"""Seconds of the prompt and of a token, and bytes of memory beyond those before the model was loaded."""


class Side:
    """Process that loads the model once and measures one round at a time."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.rows: list[Row] = []
        self._answer()
        self._before = self._resident()
        self._ask()

    def measure(self) -> Row:
        """Return the numbers of a round.

        Raises:
            RuntimeError: the process ended; its error is on standard error.
        """
        self._ask()
        return self._answer() | {"bytes": self._resident() - self._before}

    def _ask(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def _answer(self) -> Row:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # llama.cpp prints lines of its own
                return json.loads(line)
        raise RuntimeError(f"{self._command[0]} ended before it had measured; see its error above.")

    def _resident(self) -> int:
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * resource.getpagesize()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def serve(file: str, weights: str, prompt: list[int], new_tokens: int) -> None:
    """Measure rounds of kvjax: print one line of JSON for each line of standard input."""
    import jax

    import kvjax
    from kvjax.evaluation.bench.race import decoder

    jax.devices()
    tokens = np.array([prompt])
    print("{}", flush=True)  # here the other process looks how much memory is held before loading
    input()
    model = kvjax.load(file, weights="int8" if weights == "int8" else None)
    steps = decoder(model, "full", 1.0, tokens, new_tokens)
    for _ in sys.stdin:
        began = time.perf_counter()
        jax.block_until_ready(kvjax.prefill(model, "full", tokens, 1.0, max_new_tokens=new_tokens)[1])
        read = time.perf_counter()
        steps.run()
        print(json.dumps(dict(prompt=read - began, token=(time.perf_counter() - read) / new_tokens)), flush=True)


def compared(rows: dict[str, list[Row]], file_bytes: int) -> str:
    """Return a table of ratios to llama.cpp: the fastest rounds of each side, the medians in brackets.

    Args:
        rows: rounds of each side, with llama.cpp among them.
        file_bytes: size of the model's file.
    """

    def ratio(name: str, key: str) -> str:
        ours, theirs = ([row[key] for row in rows[side]] for side in (name, "llama.cpp"))
        return f"{min(theirs) / min(ours):.2f} ({np.median(theirs) / np.median(ours):.2f})"

    lines = [
        [name, ratio(name, "token"), ratio(name, "prompt"), f"{max(row['bytes'] for row in found) / file_bytes:.1f}"]
        for name, found in rows.items()
    ]
    return table(["", "decoding speed / llama.cpp", "prompt speed / llama.cpp", "memory / file"], lines)


def processor() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def run(options: argparse.Namespace) -> None:
    """Measure all sides in turn, after a round that is not counted, and print a table."""
    file = str(locate(options.model, None))
    prompt = np.random.default_rng(0).integers(300, 40000, options.prompt_tokens).tolist()
    numbers = [json.dumps(prompt), str(options.new_tokens)]
    side = str(Path(__file__).with_name("llama_cpp_side.py"))
    commands = {
        "llama.cpp": [options.llama_python, side, file, *numbers, str(options.threads)],
        **{
            f"kvjax, {weights}": [
                sys.executable,
                "-m",
                "benchmarks.peers.llama_cpp",
                "--serve",
                file,
                weights,
                *numbers,
            ]
            for weights in ("float32", "int8")
        },
    }
    sides = {name: Side(command) for name, command in commands.items()}
    try:
        for number in range(options.repeats + 1):
            for each in sides.values():
                row = each.measure()
                each.rows += [row] if number else []
    finally:
        for each in sides.values():
            each.close()
    print(f"{processor()}, {options.threads} cores, {options.prompt_tokens} + {options.new_tokens} tokens\n")
    print(compared({name: each.rows for name, each in sides.items()}, Path(file).stat().st_size))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or smollm2")
    parser.add_argument("--llama-python", default=sys.executable, help="the Python of an environment with xllamacpp")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of llama.cpp")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        file, weights, prompt, new_tokens = options.serve
        serve(file, weights, json.loads(prompt), int(new_tokens))
    else:
        run(options)


if __name__ == "__main__":
    main()
