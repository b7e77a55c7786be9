"""kvpress on the cases, in a separate environment with torch, transformers and kvpress, and without kvjax."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

Layer = tuple[Tensor, Tensor]
"""Keys and values [1 h n d]."""

METHODS: dict[str, Callable[[float], kvpress.ScorerPress]] = {
    "snapkv": kvpress.SnapKVPress,
    "tova": kvpress.TOVAPress,
    "streaming_llm": kvpress.StreamingLLMPress,
    "knorm": kvpress.KnormPress,
    "observed_attention": kvpress.ObservedAttentionPress,
    "random": kvpress.RandomPress,  # with a fixed seed every layer would draw the same positions
}


class Together(kvpress.BasePress):
    """All methods at all ratios in one reading of a context; none changes the computation of the reading.

    Args:
        ratios: shares of the context to evict.
    """

    def __init__(self, ratios: list[float]) -> None:
        self.presses = {(name, ratio): make(ratio) for name, make in METHODS.items() for ratio in ratios}
        self.layers: dict[tuple[str, float], list[Layer]] = {key: [] for key in self.presses}
        self.positions: dict[tuple[str, float], list[np.ndarray]] = {key: [] for key in self.presses}

    def compress(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Tensor, kwargs: Any
    ) -> Layer:
        """Return the cache unchanged, and store the positions that each method would have kept."""
        # Values that equal their positions come back as the kept positions: no method reads values.
        places = torch.arange(keys.shape[2], dtype=values.dtype)[None, None, :, None].expand_as(values)
        for key, press in self.presses.items():
            kept, marks = press.compress(module, hidden_states, keys, places, attentions, kwargs)
            index = marks.to(torch.int64)
            self.layers[key].append((kept, values.gather(2, index)))
            self.positions[key].append(index[0, :, :, 0].sort(-1).values.numpy().astype(np.uint16))
        return keys, values


def read(model: PreTrainedModel, context: list[int], press: kvpress.BasePress | None) -> DynamicCache:
    """Read a context into a cache, which a method compresses layer by layer."""
    cache, ids = DynamicCache(), torch.tensor([context])
    if press is None:
        model.model(input_ids=ids, past_key_values=cache)
    else:
        with press(model):
            model.model(input_ids=ids, past_key_values=cache)
    return cache


def cache_of(layers: list[Layer]) -> DynamicCache:
    """Return a cache of these keys and values; later appends do not change them."""
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def logits_of(model: PreTrainedModel, layers: list[Layer], start: int, ids: list[int]) -> Tensor:
    """Return logits [n vocab] after each of some tokens, with the first at position `start`."""
    where = torch.arange(start, start + len(ids))[None]
    return model(input_ids=torch.tensor([ids]), past_key_values=cache_of(layers), position_ids=where).logits[0]


def answer(model: PreTrainedModel, layers: list[Layer], start: int, question: list[int], tokens: int) -> list[int]:
    """Return the greedy answer to a question, as in kvpress's pipeline."""
    cache, ids, made = cache_of(layers), question, list[int]()
    for _ in range(tokens):
        where = torch.arange(start, start + len(ids))[None]
        out = model(input_ids=torch.tensor([ids]), past_key_values=cache, position_ids=where, logits_to_keep=1)
        made.append(int(out.logits[0, -1].argmax()))
        start, ids = start + len(ids), made[-1:]
    return made


def asked(
    model: PreTrainedModel, layers: list[Layer], case: dict[str, Any], tokens: int
) -> tuple[dict[str, Any], Tensor]:
    """Return the row of a case's question and answer, and the logits [n vocab] after each of their tokens."""
    start, question, expected = len(case["context"]), case["question"], case["answer"]
    logits = logits_of(model, layers, start, [*question, *expected])
    nats = -logits[len(question) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(expected)[:, None])
    return {
        "family": case["family"],
        "kept": layers[0][0].shape[2],
        "nats": float(nats.mean()),
        "cache_bytes": sum(each.nbytes for pair in layers for each in pair),
        "expected": case["expected"],
        "answer": answer(model, layers, start, question, tokens) if case["expected"] else [],
    }, logits


def best(run: Callable[[], Any], times: int = 3) -> float:
    """Return the processor seconds of the cheapest of several runs, after one warm-up run."""
    found: list[float] = []
    for _ in range(times + 1):
        began = time.process_time()  # other processes on the machine hardly matter
        run()
        found.append(time.process_time() - began)
    return min(found[1:])


def layers_of(cache: DynamicCache) -> list[Layer]:
    """Return the keys and values of each layer."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def timings(model: PreTrainedModel, case: dict[str, Any], plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return processor seconds: for a context by method at ratio 0.5, for a question and its answer by ratio."""
    context, rows = case["context"], list[dict[str, Any]]()
    for kind in ("sdpa", "eager"):  # only eager attention returns weights, which ObservedAttentionPress needs
        model.set_attn_implementation(kind)
        names = [name for name in METHODS if (name == "observed_attention") == (kind == "eager")]
        ways = {"full": None} | {name: METHODS[name](0.5) for name in names}
        for name, press in ways.items():
            seconds = best(lambda press=press: read(model, context, press))
            rows.append({"kind": "context", "attention": kind, "method": name, "seconds": seconds})
    model.set_attn_implementation("sdpa")
    for ratio in (0.0, 0.75):
        held = layers_of(read(model, context, kvpress.KnormPress(ratio)))
        seconds = best(lambda held=held: answer(model, held, len(context), case["question"], plan["new_tokens"]))
        rows.append({"kind": "answer", "ratio": ratio, "seconds": seconds})
    return rows


@torch.inference_mode()
def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--cases", type=Path, required=True, help="from cases.py")
    parser.add_argument("--out", type=Path, required=True, help="a folder for kvpress.jsonl and kvpress.npz")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plan, *cases = [json.loads(line) for line in options.cases.read_text().splitlines()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    options.out.mkdir(parents=True, exist_ok=True)
    versions = {each.__name__: each.__version__ for each in (torch, transformers)}
    versions["kvpress"] = importlib.metadata.version("kvpress")
    arrays = dict[str, np.ndarray]()
    with (options.out / "kvpress.jsonl").open("w") as file:

        def write(row: dict[str, Any]) -> None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10  # Linux counts in KiB
            print(json.dumps(row | {"peak_bytes": peak}), file=file, flush=True)

        write({"kind": "run", "versions": versions, "threads": options.threads})
        for row in timings(model, cases[0], plan):
            write(row)
        model.set_attn_implementation("eager")
        for number, case in enumerate(cases):
            torch.manual_seed(number)
            together = Together(plan["ratios"])
            whole = layers_of(read(model, case["context"], together))
            for (name, ratio), layers in {("full", 0.0): whole, **together.layers}.items():
                found, logits = asked(model, layers, case, plan["new_tokens"])
                text = tokenizer.decode(found.pop("answer"))
                write({"kind": "case", "case": number, "method": name, "ratio": ratio, **found, "answer": text})
                if name == "full":
                    arrays[f"{number}/logits"] = logits.numpy()
                else:
                    arrays[f"{number}/{name}/{ratio}"] = np.stack(together.positions[name, ratio])
            np.savez(options.out / "kvpress.npz", **arrays)


if __name__ == "__main__":
    main()
