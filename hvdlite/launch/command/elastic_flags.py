"""The flags of elastic jobs: horovodrun's, and hvdlite's own times."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from hvdlite.launch.description import Elastic

_TIMEOUT_VARIABLE = "HOROVOD_ELASTIC_TIMEOUT"
_MAKES_ELASTIC = "--min-np, --max-np or --host-discovery-script make a job elastic"
# These flags, by their names in the options, change nothing alone.
_SETTINGS = {
    "slots_per_host": "--slots-per-host",
    "elastic_timeout": "--elastic-timeout",
    "reset_limit": "--reset-limit",
    "blacklist_cooldown_range": "--blacklist-cooldown-range",
    "elastic_heartbeat": "--elastic-heartbeat",
    "drain_timeout": "--drain-timeout",
}


def describe_elastic(options: argparse.Namespace, environment: Mapping[str, str]) -> Elastic | None:
    """Turn the flags into the description of an elastic job; None for any other job."""
    # Without an elastic job, settings that were given change nothing; the reasons are added to
    # `options.needless`.
    script = options.host_discovery_script
    given = {name: getattr(options, name) for name in _SETTINGS}
    given = {name: value for name, value in given.items() if value is not None}
    if options.min_np is None and options.max_np is None and script is None:
        options.needless = {
            **options.needless,
            **{_SETTINGS[name]: _MAKES_ELASTIC for name in given},
        }
        return None
    if script is None and "slots_per_host" in given:
        why = "it belongs to --host-discovery-script; -H has the slots of its hosts"
        options.needless = {**options.needless, "--slots-per-host": why}
        del given["slots_per_host"]
    standard = Elastic()
    timeout = given.get("elastic_timeout", _timeout_of(environment, standard.timeout))
    shortest, longest = given.get("blacklist_cooldown_range", standard.cooldown)
    return Elastic(
        min_np=options.min_np,
        max_np=options.max_np,
        script=script,
        slots_per_host=given.get("slots_per_host"),
        timeout=timeout,
        reset_limit=given.get("reset_limit"),
        cooldown=(shortest, longest),
        heartbeat=given.get("elastic_heartbeat", standard.heartbeat),
        drain_timeout=given.get("drain_timeout", standard.drain_timeout),
    )


def _timeout_of(environment: Mapping[str, str], standard: float) -> float:
    try:
        return float(environment.get(_TIMEOUT_VARIABLE) or standard)
    except ValueError:
        return standard
