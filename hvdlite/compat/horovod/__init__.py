"""The package that `import horovod` finds in a rank under `hvdlite-run --compat`.

Example:
    import horovod.torch as hvd  # is hvdlite.torch
"""

from hvdlite import __version__
from hvdlite.compat.aliases import install
from hvdlite.compat.runner import run

install()

__all__ = ["__version__", "run"]
