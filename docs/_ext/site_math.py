"""Formulas as MathML, which browsers draw themselves: nothing is fetched from a network, and no script runs."""

from __future__ import annotations

import html
import re
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata
from sphinx.writers.html5 import HTML5Translator

NAMESPACE = "http://www.w3.org/1998/Math/MathML"
ACCENTS = "ˆˉ˜"


def mathml(formula: str, as_block: bool = False) -> str:
    """A formula of LaTeX as MathML.

    Args:
        formula: what docutils knows of LaTeX.
        as_block: whether it has a line of its own.
    """
    made = tex2mathml(formula, as_block=as_block)
    named = re.sub(r"&(?!lt;|gt;|amp;)\w+;", lambda found: html.unescape(found[0]), made)  # XML knows no others by name
    tree = ElementTree.fromstring(named)
    for node in tree.iter(f"{{{NAMESPACE}}}munderover"):
        letter, index, accent = node
        if accent.text and accent.text in ACCENTS:  # docutils puts the index of an accented letter below it
            node.tag = f"{{{NAMESPACE}}}msub"
            accented = ElementTree.Element(f"{{{NAMESPACE}}}mover", {"accent": "true"})
            accented.extend([letter, accent])
            node[:] = [accented, index]
    ElementTree.register_namespace("", NAMESPACE)
    return ElementTree.tostring(tree, encoding="unicode")


def visit_math(self: HTML5Translator, node: nodes.math) -> None:
    """A formula in a line."""
    self.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def visit_displaymath(self: HTML5Translator, node: nodes.math_block) -> None:
    """A formula in a line of its own, which is moved sideways where the screen is narrower."""
    self.body.append(f'<div class="formula">{mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> ExtensionMetadata:
    """Tell Sphinx."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_displaymath, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
