"""Files without a name.

Example:
    >>> with open(nameless_file("example"), "w+b") as file:
    ...     file.write(b"text")
    4
"""

from __future__ import annotations

import os
import tempfile


def nameless_file(name: str) -> int:
    """Make an empty file without a name, and return its descriptor, which exec closes.

    Args:
        name: what /proc shows of it.

    Raises:
        OSError: it can be neither in memory, which a container may refuse, nor in the temporary
            folder.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
