"""Sphinx's settings for the site; see tools/build_site.py."""

from __future__ import annotations

import re
from pathlib import Path

_HERE = Path(__file__).parent
_VERSION = re.compile(r'^version = "(.+)"$', re.MULTILINE)
_SETTINGS = (_HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")

project = "hvdlite"
release = _VERSION.findall(_SETTINGS)[0]
project_copyright = "the authors of hvdlite"
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns = ["repository"]

myst_heading_anchors = 4
myst_heading_slug_func = "myst_parser.slugs.github_slugify"
myst_enable_extensions = ["fieldlist"]
myst_disable_syntax = ["myst_line_comment"]  # A line of a page may begin with "%".
smartquotes_action = "D"  # Quotes stay straight; Sphinx writes dashes as --.

html_theme = "furo"
html_title = f"hvdlite {release}"
html_favicon = str(_HERE / "static" / "icon.svg")
html_static_path = [str(_HERE / "static")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"

add_module_names = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
