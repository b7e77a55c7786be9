"""Checkpoints that `kvjax convert` writes are the models that it was given."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax.cli.main import main
from kvjax.models import LoadError
from kvjax.models.checkpoints.loading import read_checkpoint
from kvjax.models.weights import leaf_name
from kvjax.utils.files import directory_aside, recover_directory
from tests.paths import ROOT


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("convert") / "new" / "tiny"
    assert main(["convert", "--model", "tiny", "--out", str(out), "--dtype", "float32"]) == 0
    return out


def test_a_converted_model_is_the_same(tiny: Path) -> None:
    before, after = kvjax.load("tiny"), kvjax.load(tiny)
    assert after.config == before.config
    jax.tree.map(np.testing.assert_array_equal, after.weights, before.weights)
    text = "<|user|>\nOnce upon 12 times"
    assert after.tokenizer.encode(text) == before.tokenizer.encode(text)
    assert after.tokenizer.chat_template == before.tokenizer.chat_template
    assert not list(tiny.parent.glob(".*")) and not list(tiny.glob("*.safetensors"))
    assert kvjax.load(tiny, "bfloat16").weights.dtype == "bfloat16"


def test_names_of_the_release_before_are_read(tiny: Path, tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    named = {leaf_name(path): leaf for path, leaf in jax.tree.leaves_with_path(kvjax.load(tiny).weights)}
    shutil.copytree(tiny, tmp_path / "old", ignore=shutil.ignore_patterns("weights"))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "old" / "weights", {k.replace(".mlp.", "."): leaf for k, leaf in named.items()})
    again = {leaf_name(path): leaf for path, leaf in jax.tree.leaves_with_path(kvjax.load(tmp_path / "old").weights)}
    assert "layers.0.mlp.up.weight" in again
    jax.tree.map(np.testing.assert_array_equal, again, named)


def test_a_file_is_converted_with_its_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from tests.models.checkpoints.test_gguf import VARIANTS, add, pieces, tensors_of, write_gguf

    described, _ = VARIANTS["llama"]

    def extra(writer: Any) -> None:
        add(writer, pieces())
        writer.add_float32("general.sampling.temp", 0.5)

    write_gguf(tmp_path / "m.gguf", described, tensors_of(described), extra=extra)
    assert main(["convert", "--model", str(tmp_path / "m.gguf"), "--out", str(tmp_path / "out")]) == 0
    before, after = kvjax.load(tmp_path / "m.gguf", "bfloat16"), kvjax.load(tmp_path / "out", "bfloat16")
    assert after.config == before.config
    assert after.sampling_defaults.settings == before.sampling_defaults.settings == {"temperature": 0.5}
    jax.tree.map(np.testing.assert_array_equal, after.weights, before.weights)
    for text in ("ab ab", "b<mark></s>A"):
        assert after.tokenizer.encode(text) == before.tokenizer.encode(text)


def test_a_mesh_gets_its_shards(tiny: Path) -> None:
    """Each device's part is read alone, also of safetensors; in a process with eight devices."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.cli.mesh_loading", str(tiny)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0 and run.stdout.strip() == "all as on one device", run.stderr


def test_what_is_there_is_left_alone(tiny: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["convert", "--model", "tiny", "--out", str(tiny)]) == 2
    assert "tiny exists already; give a new directory." in capsys.readouterr().err


def test_what_a_killed_run_left_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.replace

    def as_windows_does(self: Path, target: Path) -> Path:
        if target.is_dir():
            raise PermissionError(f"{target} is there")
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", as_windows_does)
    monkeypatch.setattr(Path, "rename", None)
    place = tmp_path / "model"
    (tmp_path / ".model.writing").mkdir()  # as by kill -9
    (tmp_path / ".model.writing" / "half").write_text("half")
    for content in ("one", "two"):
        with directory_aside(place) as aside:
            (aside / "file").write_text(content)
        assert [file.name for file in tmp_path.iterdir()] == ["model"]
        assert [(file.name, file.read_text()) for file in place.iterdir()] == [("file", content)]
    with pytest.raises(OSError, match="full"), directory_aside(place) as aside:
        raise OSError("the disk is full")
    assert (place / "file").read_text() == "two"
    place.replace(tmp_path / ".model.before")  # killed between two renames
    recover_directory(place)
    assert (place / "file").read_text() == "two" and len(list(tmp_path.iterdir())) == 1


def test_damage_is_named(tiny: Path) -> None:
    metadata = tiny / "weights" / "_METADATA"
    content = metadata.read_bytes()
    metadata.write_bytes(content[: len(content) // 2])
    with pytest.raises(LoadError, match="weights is damaged or not an Orbax checkpoint"):
        read_checkpoint(tiny)
    metadata.write_bytes(content)
    data = max((file for file in (tiny / "weights").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(LoadError, match="weights is damaged or not an Orbax checkpoint"):
        read_checkpoint(tiny)
