"""What `hvdlite.rendezvous` was until 0.1.0, for programs that start functions."""

import sys

from hvdlite.rendezvous import assignments, environment

sys.modules[f"{__name__}.environment"] = environment
sys.modules[f"{__name__}.meeting"] = assignments
