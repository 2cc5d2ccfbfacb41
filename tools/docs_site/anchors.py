"""The anchors of headings on the site."""

from __future__ import annotations

import re

from myst_parser.slugs import github_slugify

_CODE = re.compile(r"(HVD\d+)\b")


def slug_of(title: str) -> str:
    """Return a heading's anchor: that of git hosts, but for a message its code alone."""
    code = _CODE.match(title)
    return code[1].lower() if code else github_slugify(title)
