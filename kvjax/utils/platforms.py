"""Platforms that JAX runs on, and a sentence about one that it cannot use."""

from __future__ import annotations

import importlib.metadata
import re

import jax

from kvjax.utils.suggest import choices

_PLUGINS = {
    "cuda": ("jax[cuda12]", "jax-cuda13-plugin", "jax-cuda12-plugin"),
    "gpu": ("jax[cuda12]", "jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin"),
    "rocm": ("jax[rocm7-local]", "jax-rocm7-plugin"),
    "tpu": ("jax[tpu]", "libtpu"),
}
"""JAX's extra for each platform beside the CPU, then the packages that support it."""
_FAILED = re.compile(r"Unable to initialize backend '(.*?)': (.*)", re.DOTALL)


def default_platform() -> str:
    """Return the platform of JAX's default device.

    Raises:
        ValueError: JAX cannot use a platform of JAX_PLATFORMS, or one of its plugins.
    """
    try:
        return jax.default_backend()
    except (RuntimeError, AssertionError) as error:
        if (sentence := platform_failure(error)) is None:
            raise
        raise ValueError(sentence) from None


def platform_failure(error: BaseException) -> str | None:
    """Return a sentence about a platform that JAX could not initialize; None for an error about anything else."""
    match, chosen = _FAILED.match(str(error)), jax.config.values["jax_platforms"]
    if isinstance(error, RuntimeError) and match is not None:
        name = "gpu" if chosen == "gpu" else match[1]
        reason = " ".join(match[2].split())
    elif isinstance(error, AssertionError) and chosen and not _has_devices():
        # JAX skips cuda on a machine without a GPU, then asserts that there is some other platform.
        name, reason = chosen.partition(",")[0], "this machine shows no GPU"
    else:
        return None
    if not chosen:
        return f"JAX cannot use its plugin for {name} ({_bare(reason)}); uninstall it, or set JAX_PLATFORMS=cpu."
    start, unset = f"JAX_PLATFORMS={chosen}, but JAX", "or unset JAX_PLATFORMS."
    if name != "cpu" and name not in _PLUGINS and "not in the list of known backends" in reason:
        names = ["cpu", *(plugin for plugin in _PLUGINS if plugin != "gpu")]
        return f"{start} has no platform {name!r}; {choices(name, names)}"
    extra, *packages = _PLUGINS.get(name, ("", name))
    if extra and not any(map(_is_installed, packages)):
        return f"{start} is installed without support for it; pip install -U '{extra}', {unset}"
    return f"{start} cannot use {name} ({_bare(reason)}); check its driver, {unset}"


def _bare(reason: str) -> str:
    """Return what JAX reports, in at most 300 characters and without its advice in brackets."""
    return re.sub(r" \((set|you may need)\b.*", "", reason)[:300].rstrip(". ")


def _has_devices() -> bool:
    try:
        return bool(jax.devices())
    except (RuntimeError, AssertionError):
        return False


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
