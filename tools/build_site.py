"""Build the site from docs/ and the docstrings; any warning is an error (`make docs-site`).

    python tools/build_site.py build/site

The pages are in build/site/html afterwards. Nothing is imported from hvdlite, and nothing is
fetched, neither now nor by a reader's browser.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from docs_site.public_names import NotFoundError
from docs_site.staging import ROOT, Staging, StagingError


def build(folder: Path, root: Path) -> int:
    """Build the site of a repository into a folder; return the exit status."""
    try:
        Staging(folder / "source", root).write()
    except (StagingError, NotFoundError) as error:
        print(f"docs-site: {error}", file=sys.stderr)
        return 1
    here = str(Path(__file__).parent / "docs_site")
    source, html, kept = (str(folder / name) for name in ("source", "html", "doctrees"))
    options = ["-q", "-a", "-W", "--keep-going", "-c", here, "-d", kept, source, html]
    return subprocess.run([sys.executable, "-m", "sphinx", *options], check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    given = parser.parse_args()
    sys.exit(build(given.folder, given.root.resolve()))
