"""Which exchange a reducer has: here each mode that needs one of its own has one line."""

from __future__ import annotations

from collections.abc import Callable

from hvdlite.errors import HvdliteError
from hvdlite.torch.exchange.gradient_bucket import GradientBucket
from hvdlite.torch.exchange.gradient_exchange import GradientExchange
from hvdlite.torch.exchange.low_rank_exchange import LowRankExchange
from hvdlite.torch.exchange.settings import Settings
from hvdlite.torch.optimizers.late_gradients import LateExchange
from hvdlite.torch.power_sgd import PowerSGD


def choose_exchange(
    name: str, settings: Settings, failed: Callable[[GradientBucket, HvdliteError], None]
) -> GradientExchange:
    """Make the exchange of a reducer; `failed` gets the error of a bucket that cannot advance."""
    if isinstance(settings.compression, PowerSGD):
        return LowRankExchange(name, settings, failed)
    if settings.late is not None:
        return LateExchange(name, settings, settings.late)
    return GradientExchange(name, settings)
