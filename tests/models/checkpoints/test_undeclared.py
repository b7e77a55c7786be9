"""Quantised checkpoints whose settings or weights are not where a Hugging Face directory has them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kvjax.model import load
from tests.models.checkpoints.test_contradictions import declare
from tests.models.checkpoints.test_loading import QUERY, edit, refused, write
from tests.models.checkpoints.test_quantised import GPTQ


@pytest.mark.parametrize("ending", ["qweight", "weight_packed", "weight_scale"])
@pytest.mark.parametrize(
    ("file", "remedy"),
    [
        (None, "add the settings that it was quantised with to config.json as quantization_config"),
        (
            "quantize_config.json",
            "add what quantize_config.json has to config.json as quantization_config, with its quant",
        ),
        ("hf_quant_config.json", "if quant_algo in hf_quant_config.json is FP8, add"),
    ],
)
def test_quantized_tensors_without_settings(ending: str, file: str | None, remedy: str, tmp_path: Path) -> None:
    write(tmp_path)
    if file is not None:
        (tmp_path / file).write_text("{}")
        load(tmp_path)  # the weights are floats, whatever another file says
    name = QUERY.replace("weight", ending)
    edit(tmp_path, lambda tensors: tensors.update({name: np.zeros((4, 32), np.int32)}))
    refused(
        tmp_path,
        rf"is quantised \(tensor {re.escape(name)}\), but its config.json has no quantization_config: {remedy}",
    )
    (tmp_path / "config.json").unlink()
    if file is not None:
        refused(tmp_path, r"is a quantised model without its config\.json: copy that of the model that was quantised")


@pytest.mark.parametrize(
    ("name", "declared", "sentence"),
    [
        (
            "gptq_model-4bit-128g.safetensors",
            False,
            r"but gptq_model-4bit-128g\.safetensors, which is quantised: rename it to model\.safetensors, and add what "
            r"quantize_config\.json has to config\.json as quantization_config, with its quant_method",
        ),
        (
            "weights.safetensors",
            True,
            r"but weights\.safetensors, which is quantised: rename it to model\.safetensors\.$",
        ),
        (
            "gptq_model-4bit-128g.safetensors.index.json",
            True,
            r"which is quantised: rename it to model\.safetensors\.index\.json\.$",
        ),
        (
            "gptq_model-4bit-00001-of-00002.safetensors",
            True,
            r"which is quantised: add the index of its shards as model\.safetensors\.index\.json\.$",
        ),
    ],
)
def test_quantized_files_of_other_names(name: str, declared: bool, sentence: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    if declared:
        declare(tmp_path, GPTQ)
    else:
        (tmp_path / "quantize_config.json").write_text("{}")
    refused(tmp_path, sentence)
