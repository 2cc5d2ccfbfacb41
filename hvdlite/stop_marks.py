"""By what a rank and its launcher know that the rank was asked to stop."""

from __future__ import annotations

EXIT_STOPPED = 75
"""The exit status of a rank that was asked to stop, has saved, and wants to be run again.

It is EX_TEMPFAIL of sysexits.h.
"""
