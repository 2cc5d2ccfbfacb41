"""Train on many devices what you train on one.

Importing this package imports no framework: use `hvdlite.torch`.
"""

from importlib.metadata import version

from hvdlite.bootstrap.environment import take_token

# Not the core's own: `hvdlite-run --doctor` has to say why a core does not load.
__version__ = version("hvdlite")

# Children of this process have no use for the job's secret.
take_token()

__all__ = ["__version__"]
