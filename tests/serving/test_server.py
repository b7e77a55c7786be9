"""The server whole: a process as users start it, asked over HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest

import kvjax
from tests.compiling import fast_environment
from tests.paths import ROOT

PROMPT = "Once upon a time there was a little dragon"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves the embedded model on two rows, and its address."""
    words = "serve --model tiny --policy h2o --budget 64 --rows 2 --chunk 64 --port 0 --no-warmup"
    environment = os.environ | fast_environment() | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "kvjax", *words.split()]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "kvjax serve: loading tiny\n"
        said = process.stderr.readline()
        assert "tiny under h2o with 64 slots is ready at http://127.0.0.1:" in said
        yield process, said.split()[-1]
        process.kill()


def test_a_server_writes_what_the_model_does_and_ends_well(server: tuple[subprocess.Popen[str], str]) -> None:
    process, address = server
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=120)
    model = kvjax.load("tiny")
    wanted = model.generate(PROMPT, policy="h2o", budget=64, max_new_tokens=100, temperature=0.0)
    found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=100, temperature=0)
    assert [found.choices[0].text] == wanted
    told = found.model_dump()["kv"]
    assert told["kept"] == min(64, told["seen"]) and told["policy"] == "h2o"
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=900, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    pieces = [next(iter(stream)).choices[0].text]
    process.send_signal(signal.SIGTERM)
    chunks = list(stream)
    pieces += [chunk.choices[0].text for chunk in chunks]
    assert "".join(pieces).startswith(wanted[0]) and chunks[-1].choices[0].finish_reason == "length"
    last = chunks[-1].choices[0].model_dump()["kv"]
    assert last["kept"] == 64 and last["seen"] > 900 and last["bytes"] == told["bytes"]
    assert process.wait(60) == 0
    assert process.stderr is not None
    logged = [line.split() for line in process.stderr]
    asked = [(line[2], line[3], line[4]) for line in logged]
    assert asked == [("POST", "/v1/completions", "200")] * 2
    usage = found.usage
    assert usage is not None
    assert f" {usage.prompt_tokens} tokens in, {usage.completion_tokens} out, " in " ".join(logged[0])
    with pytest.raises(openai.APIConnectionError):
        client.with_options(max_retries=0).models.list()
