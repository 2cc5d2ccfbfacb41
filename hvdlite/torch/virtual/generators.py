"""The global random generators of the libraries that a script uses."""

from __future__ import annotations

import torch

from hvdlite.virtual import generators as neutral
from hvdlite.virtual.generators import Generator, seed_of


def generators() -> dict[str, Generator]:
    """List the generators of the libraries that the script uses."""
    found = neutral.generators()
    found["torch"] = Generator(
        torch.get_rng_state, torch.set_rng_state, torch.default_generator.manual_seed
    )
    if torch.cuda.is_initialized():
        found["cuda"] = Generator(
            torch.cuda.get_rng_state, torch.cuda.set_rng_state, torch.cuda.manual_seed
        )
    return found


def seed_all(*parts: object) -> None:
    """Seed all generators of this process for what the parts name."""
    number = seed_of(*parts)
    for generator in generators().values():
        generator.seed(number)
