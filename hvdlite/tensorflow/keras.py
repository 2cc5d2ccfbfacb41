"""`hvdlite.tensorflow.keras` is `hvdlite.keras`, under the name that Horovod's scripts import."""

from __future__ import annotations

import importlib
import sys

_keras = importlib.import_module("hvdlite.keras")
sys.modules[f"{__name__}.callbacks"] = importlib.import_module("hvdlite.keras.callbacks")
sys.modules[f"{__name__}.elastic"] = importlib.import_module("hvdlite.keras.elastic")
sys.modules[__name__] = _keras
