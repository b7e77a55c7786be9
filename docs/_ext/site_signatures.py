"""Signatures as they are written: shapes stay `Float[Array, "b h c"]`, which Sphinx would print otherwise."""

from __future__ import annotations

import inspect
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import stringify_signature
from sphinx.util.typing import ExtensionMetadata


def as_written(
    app: Sphinx, what: str, name: str, described: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str, str | None] | None:
    """A function's or a class's parameters with the text of their annotations."""
    if what not in ("function", "class", "method"):
        return None
    try:
        found = inspect.signature(described)
    except (TypeError, ValueError):
        return None
    parameters = list(found.parameters.values())
    if what == "method" and parameters and parameters[0].name == "self":
        parameters = parameters[1:]
    shown = found.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    result = "" if what == "class" or found.return_annotation is inspect.Signature.empty else found.return_annotation
    return _tidy(stringify_signature(shown)), _tidy(str(result)) or None


def _tidy(text: str) -> str:
    # A shape of one letter begins with a blank for the linter's sake.
    return re.sub(r"(?<=Array, [\"']) ", "", text)


def setup(app: Sphinx) -> ExtensionMetadata:
    """Tell Sphinx."""
    app.connect("autodoc-process-signature", as_written)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
