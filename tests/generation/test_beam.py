"""Beam search against transformers' own on the full cache, and against literal beams that read everything again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.generation.beam import beam_search
from kvjax.generation.generate import generate_ids
from kvjax.model import Model
from tests.cases import PAIRS, POLICIES, slow
from tests.oracles.decoder import Decoder
from tests.small_models import GQA, random_checkpoint, random_model

RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(3, 128, length).tolist() for length in (5, 9, 14)]


def test_finds_what_transformers_finds(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    theirs = random_checkpoint("llama-gqa", tmp_path)
    plain = kvjax.load(tmp_path)
    usual: dict[str, Any] = dict(beams=4, max_new_tokens=12)
    unended = generate_ids(plain, PROMPTS, stop_at_eos=False, **usual).tokens
    assert all(len(tokens) == 12 for tokens in unended)
    eos = unended[0][4], unended[1][2]
    ending = Model(plain.weights, dataclasses.replace(plain.config, eos=eos), plain.name)
    lengths = set()
    for penalty in (1.0, -1.0, 3.0):
        ours = generate_ids(ending, PROMPTS, length_penalty=penalty, **usual).tokens
        for prompt, tokens in zip(PROMPTS, ours, strict=True):
            wanted = theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
                num_beams=4,
                do_sample=False,
                max_new_tokens=12,
                length_penalty=penalty,
                eos_token_id=list(eos),
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            assert tokens == (wanted[:-1] if wanted[-1] in eos else wanted), penalty
            lengths.add(len(tokens))
    assert len(lengths) > 2


@pytest.mark.parametrize("name", ["h2o", slow("streaming"), slow("h2o+adakv"), slow("h2o+int8")])
def test_caches_follow_their_beams(name: str, x64: None) -> None:
    case, steps, width = (POLICIES | PAIRS)[name], 8, 3
    model = random_model(GQA, seed=1, dtype=jnp.float64)
    prompt = RNG.integers(0, GQA.vocab_size, 25).tolist()
    state, logits = kvjax.prefill(
        model, case.make(), [prompt], case.budget, plan=case.plan, max_new_tokens=steps, key=jax.random.key(5)
    )
    found = beam_search(state, logits, width, steps)
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model.weights)

    def read(tokens: tuple[int, ...]) -> np.ndarray:
        decoder = Decoder(weights, model.config, case.oracles(state, 0, len(prompt) + steps), horizon=steps)
        return [decoder.prompt(prompt), *(decoder.step(token) for token in tokens)][-1]

    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    switched = False
    for _ in range(steps):
        longer = []
        for score, tokens in beams:
            known = read(tokens)
            known = known - known.max() - np.log(np.exp(known - known.max()).sum())
            longer += [(score + known[token], (*tokens, token)) for token in range(len(known))]
        best = sorted(longer, reverse=True)[:width]
        switched |= [tokens[:-1] for _, tokens in best] != [tokens for _, tokens in beams]
        beams = best
    assert switched  # or no cache would have had to follow
    assert found.tokens[0] == list(beams[0][1])
    np.testing.assert_allclose(found.scores[0], beams[0][0] / steps, rtol=1e-8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.5}, "temperature=0.5 has no effect on a beam search"),
        ({"top_k": 3}, "top_k=3 has no effect on a beam search"),
        ({"num_samples": 2}, "num_samples=2 has no effect on a beam search"),
        ({"logprobs": 0}, "logprobs=0 has no effect on a beam search"),
        ({"beams": 0}, "beams=0 is not a whole number from 1"),
        ({"beams": 1, "length_penalty": 2.0}, "length_penalty=2.0 has no effect without beams"),
        ({"length_penalty": float("nan")}, "length_penalty=nan is not a finite number"),
        ({"on_tokens": print}, "a beam search knows its text only at the end"),
    ],
)
def test_what_means_nothing_to_beams_is_refused(settings: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"beams": 2} | settings
    with pytest.raises(ValueError, match=message):
        generate_ids(random_model(GQA), [[1, 2]], **given)
