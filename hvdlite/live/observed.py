"""What a rank tells the people who watch the job: `hvd.observe`, and samples for a view.

The numbers of `observe` stay in this process until a view (`hvdlite-run --live`) asks for them.
Nothing is sent here, and a number on a GPU is read when the view asks, by the view's thread, so
that the training thread never waits for the GPU.

Without a view nothing here starts a thread or imports anything. With one, `hvdlite.live.reporter`
writes to the pipe that the launcher has made. Under another launcher, rank 0 writes a report by
itself if HVDLITE_REPORT names its file.
"""

from __future__ import annotations

import atexit
import numbers
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from hvdlite.errors import ArgumentError
from hvdlite.rendezvous.environment import host_name, live_pipe, report_file

if TYPE_CHECKING:
    from hvdlite.live.reporter import Pipe, Reporter


MOST_NAMES = 64

_lock = threading.RLock()  # It guards the rest; a signal handler may observe, too.
_samples = 0
_values: dict[str, Any] = {}  # A value is a float, or `float` makes one of it.
_fit_samples = 0
_fit_values: dict[str, float] = {}

_reporter: Reporter | None = None
_decided = False  # It is set when it is known if this process writes a report.


def observe(samples: int | None = None, **values: Any) -> None:
    """Tell the live view how many samples this rank has done, and the report the last other values.

    It takes microseconds, sends nothing and never blocks; without a live view it does nothing that
    one could see. Any rank and any thread may call it, at any time. `hvd.shutdown` forgets all.

    Args:
        samples: how many samples (or tokens) this rank has done since its last call.
        values: numbers by name, such as the loss; the last value of each name is shown. A value may
            be a tensor without dimensions. One on a GPU is kept and read when it is shown, so
            choose tensors that are not overwritten.

    Raises:
        ArgumentError: `samples` is not a whole number, a value is not a number, or there are more
            than 64 names.

    Example:
        >>> hvd.observe(samples=len(batch), loss=loss, learning_rate=0.1)
    """
    global _samples
    if samples is not None and (
        isinstance(samples, bool) or not isinstance(samples, numbers.Integral) or samples < 0
    ):
        raise ArgumentError(
            f"observe(samples={samples!r}): give the whole number of samples since the last call"
        )
    kept = {name: _kept(name, value) for name, value in values.items()}
    with _lock:
        if len(_values.keys() | kept.keys()) > MOST_NAMES:
            raise ArgumentError(
                f"observe() was given more than {MOST_NAMES} names, the last ones "
                f"{', '.join(sorted(kept))}; use few names, the same ones in each step"
            )
        _samples += int(samples or 0)
        _values.update(kept)


def observe_fit(samples: int, values: dict[str, float]) -> None:
    """Count what `fit` of Keras does; what the script itself observes comes before it."""
    global _fit_samples
    with _lock:
        _fit_samples += samples
        _fit_values.update(values)


def figures() -> dict[str, Any]:
    """Return what was observed: `{"samples": total, "values": {name: last}}`."""
    with _lock:
        samples, kept = _samples or _fit_samples, {**_fit_values, **_values}
    # Reading waits for values on a GPU. A value that cannot be read is left out.
    read: dict[str, float] = {}
    for name, value in kept.items():
        try:
            read[name] = float(value)
        except Exception:  # Whatever a framework raises, its training thread meets it as well.
            continue
        with _lock:
            if _values.get(name) is value:
                _values[name] = read[name]  # Nothing reads it twice, or keeps its memory.
    return {"samples": samples, "values": read}


def forget() -> None:
    """Forget everything, because the world has ended."""
    global _samples, _fit_samples
    with _lock:
        _samples = _fit_samples = 0
        _values.clear()
        _fit_values.clear()


def follow(engine: Any, rank: int, size: int, epoch: int = 0) -> None:
    """Report on this engine from now on, if a view of the job wants it."""
    global _reporter
    if _reporter is None:
        pipe = _pipe(rank, size)
        if pipe is None:
            return
        from hvdlite.live.reporter import Reporter  # Ordinary jobs do not need it.

        _reporter = Reporter(pipe, host_name(), figures)
        atexit.register(end)
    _reporter.follow(engine, rank, size, epoch)


def follow_unless_busy(engine: Any, rank: int, size: int) -> None:
    """Report on the engine of a process group, if no engine is reported on."""
    if _reporter is None or not _reporter.busy:
        follow(engine, rank, size)


def end() -> None:
    """Write the last sample of the world that ends, and forget what `observe` was told."""
    # What `hvd.observe` has counted belongs to the world, and goes on in the next epoch of an
    # elastic job.
    if _reporter is not None:
        _reporter.end()
    forget()


def _kept(name: str, value: Any) -> Any:
    """Return a number as a float, and a tensor on a GPU as it is, without its graph."""
    if isinstance(value, numbers.Real):
        return float(value)
    shape = getattr(value, "shape", None)
    if shape is None or len(shape) > 0 or not hasattr(type(value), "__float__"):
        raise ArgumentError(
            f"observe({name}=...) takes a number or a tensor without dimensions, not {_kind(value)}"
            "; observe its mean(), and call observe() outside of functions that are traced"
        )
    value = value.detach() if hasattr(value, "detach") else value
    if "cpu" not in str(getattr(value, "device", "cpu")).lower():
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"observe({name}=...): {_kind(value)} is not a number: {error}"
        ) from None


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")


def _pipe(rank: int, size: int) -> Pipe | None:
    """Return what takes the samples of this process; None if nobody wants them."""
    global _decided
    pipe: Pipe | None = None
    descriptor = live_pipe()
    if descriptor is not None:
        from hvdlite.live.reporter import PipeWriter

        pipe = PipeWriter(descriptor)
    first, _decided = not _decided, True
    if rank != 0 or not first:  # A later engine may be that of a process group.
        return pipe
    try:
        path = report_file()
        if path is None or pipe is not None:
            return pipe
        from hvdlite.live.report import OwnReport
        from hvdlite.live.run import About, Run

        report = OwnReport(path, _say)
    except Exception as error:  # It must not end the training.
        _say(f"warning: no report: {error}")
        return pipe
    report.start(Run(), About(tuple(sys.orig_argv), size, (host_name(),), time.time()))
    atexit.register(report.end)  # It is registered before `end`, and runs after it.
    return report


def _say(line: str) -> None:
    print(f"hvdlite [0] {line}", file=sys.stderr, flush=True)
