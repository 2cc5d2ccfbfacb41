"""Files without a name."""

from __future__ import annotations

import os
import tempfile


def nameless_file(name: str) -> int:
    """Make an empty file without a name, and return its descriptor, which exec closes."""
    # Raises OSError if it can be neither in memory, which a container may refuse, nor in the
    # temporary folder.
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
