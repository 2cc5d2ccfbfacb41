"""Typed look-ups in a mapping of environment variables, with errors that name the variable.

This module does not read the environment itself: `environment.py` passes the mapping.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.address import UNIX, split_host


class Variables:
    """A mapping of variables, in which an empty value counts as not set."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values

    def __contains__(self, name: str) -> bool:
        return bool(self._values.get(name))

    def has(self, *names: str) -> bool:
        """Return whether all of these variables are set."""
        return all(name in self for name in names)

    def get(self, name: str) -> str | None:
        """Return the value of a variable; None if it is not set."""
        return self._values.get(name) or None

    def text(self, name: str) -> str:
        """Return the value of a variable that must be set."""
        # Raises BootstrapError if the variable is not set.
        value = self.get(name)
        if value is None:
            raise BootstrapError(
                f"{name} is not set, although other variables say that a launcher started this "
                "process; start it with hvdlite-run, or clear all HVDLITE_ variables"
            )
        return value

    def number(self, name: str, default: int | None = None) -> int:
        """Return a number of at least 0; without a default, the variable must be set."""
        # Raises BootstrapError if the variable is not set, or is not such a number.
        if default is not None and name not in self:
            return default
        value = self.text(name)
        try:
            number = int(value)
        except ValueError:
            number = -1
        if number < 0:
            raise BootstrapError(f"{name}={value} is not a number from 0")
        return number

    def optional_number(self, name: str) -> int | None:
        """Return a number of at least 0; None if the variable is not set."""
        return self.number(name) if name in self else None

    def flag(self, name: str) -> bool:
        """Return whether a variable is 1; it may also be 0 or not be set."""
        # Raises BootstrapError if the variable is something else.
        value = self.get(name)
        if value not in (None, "0", "1"):
            raise BootstrapError(f"{name}={value} cannot be used: give 1 or 0")
        return value == "1"

    def seconds(self, name: str, default: float) -> float:
        """Return a time in seconds of at least 0; `deadline.Deadline` takes 0 for "no limit"."""
        # Raises BootstrapError if the variable is not such a number.
        value = self.get(name)
        if value is None:
            return default
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not seconds >= 0:
            raise BootstrapError(
                f"{name}={value} cannot be used: give a number of seconds, or 0 for no limit"
            )
        return seconds

    def address(self, name: str) -> str | None:
        """Return "unix:NAME" or "host:port"; None if the variable is not set."""
        # Raises BootstrapError if the variable is not an address.
        value = self.get(name)
        if value is not None and not value.startswith(UNIX):
            try:
                split_host(value)
            except BootstrapError as error:
                raise BootstrapError(f"{name} cannot be used: {error}") from None
        return value

    def secret(self, name: str, value: str | None, length: int) -> bytes:
        """Decode `value`, the text of the variable `name`: `length` bytes as hexadecimal digits."""
        # Raises BootstrapError if `value` is missing, or is something else.
        try:
            secret = bytes.fromhex(value or "")
        except ValueError:
            secret = b""
        if len(secret) != length:
            raise BootstrapError(f"{name} is missing or is not {2 * length} hexadecimal digits")
        return secret
