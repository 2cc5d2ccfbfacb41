"""Train on many devices what you train on one.

Importing this package imports no framework: use `hvdlite.torch`.
"""

from hvdlite._core import __version__
from hvdlite.bootstrap.environment import take_token

# Children of this process have no use for the job's secret.
take_token()

__all__ = ["__version__"]
