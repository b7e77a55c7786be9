"""Sphinx's settings for kvjax's site: `sphinx-build -W --keep-going docs docs/_build/html`."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import matplotlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax is imported: pages need no accelerator
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

project = "kvjax"
author = "kvjax's authors"
release = version = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
language = "en"
repository = ""  # owner/name on GitHub, once there is one: notebooks then have a badge that opens them in Colab

# site_math, site_pages and site_signatures are in _ext/.
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "site_math", "site_pages", "site_signatures"]
exclude_patterns = ["_build", "results/*/*.md"]

myst_enable_extensions = ["dollarmath", "deflist", "attrs_inline"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks are shown as they were stored

python_maximum_signature_line_length = 80
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
default_role = "code"  # docstrings set names between single backticks

html_math_renderer = "mathml"
html_theme = "sphinx_book_theme"
html_title = f"kvjax {release}"
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto"}
html_static_path = ["_static", str(Path(matplotlib.get_data_path(), "fonts", "ttf", "STIXGeneral.ttf"))]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],
    "show_toc_level": 2,
    "show_navbar_depth": 1,
}
