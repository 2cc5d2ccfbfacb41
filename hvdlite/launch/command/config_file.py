"""--config-file: flags from a YAML file, in the format of horovodrun's.

Every flag may stand at the top level by its long name, with underscores or hyphens. The sections of
horovodrun's file work, too: `params`, `autotune`, `timeline`, `stall_check`, `library_options`,
`logging`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

# This prefix makes a flag's name from a key of the section.
_PREFIXES = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall_check": "stall-check-",
    "library_options": "",
    "logging": "log-",
}


class ConfigError(ValueError):
    """A file of flags cannot be used; the message says why."""


def arguments_from(text: str, path: str, parser: argparse.ArgumentParser) -> list[str]:
    """Turn the file's text into arguments, to be put before those of the command line."""
    # Raises ConfigError if the text is not YAML, or has a key that is not a flag.
    import yaml  # Other command lines do not wait for it.

    try:
        content = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must have lines of `flag: value`")
    known = {flag: action for action in parser._actions for flag in action.option_strings}
    arguments: list[str] = []
    for flag, key, value in _flags(content):
        if flag not in known:
            raise ConfigError(f"{path}: {key} is not a flag of hvdlite-run")
        if f"{flag}=0" in known and value in (0, 1, "0", "1"):  # True and False, too
            arguments.append(f"{flag}={int(value)}")
        else:
            arguments += _argument(flag, value, known[flag].nargs)
    return arguments


def _flags(content: Mapping[Any, Any]) -> Iterator[tuple[str, str, Any]]:
    """Give (flag, key as written, value) for each key of the file."""
    for key, value in content.items():
        section = str(key).replace("-", "_")
        if section == "controller":
            continue  # It chooses gloo or mpi; hvdlite has neither.
        if section not in _PREFIXES or not isinstance(value, dict):
            yield _flag("", key), str(key), value
            continue
        for name, inner in value.items():
            if name == "enabled":
                flag = _flag("" if inner else "no-", section)
                yield flag, f"{key}.{name}", True
            else:
                yield _flag(_PREFIXES[section], name), f"{key}.{name}", inner


def _flag(prefix: str, name: object) -> str:
    return f"--{prefix}{str(name).replace('_', '-')}"


def _argument(flag: str, value: Any, nargs: int | str | None) -> list[str]:
    may_stand_alone = nargs in (0, "?")
    if value is None or (may_stand_alone and value is False):
        return []
    if nargs == 0 or (may_stand_alone and value is True):
        return [flag]
    if isinstance(value, list) and isinstance(nargs, int):
        return [flag, *map(str, value)]
    if isinstance(value, list):
        value = ",".join(map(str, value))
    return [flag, str(value)]
