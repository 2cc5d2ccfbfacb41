"""The package that `import horovod` finds in a rank under `hvdlite-run --compat`.

Example:
    import horovod.torch as hvd  # is hvdlite.torch
"""

from hvdlite.compat import install
from hvdlite.compat.runner import run

install()

__version__ = "0.28.1"  # The release whose API this is: scripts compare it.

__all__ = ["__version__", "run"]
