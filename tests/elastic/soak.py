"""A long test of elastic training: `python tests/elastic/soak.py --resets 1000 --chaos 180`.

It stands in for the launcher, so that workers come back at once. Two workers stay, while others
join and die: their memory, descriptors, mappings and threads must stay flat. Then chaos: every half
second a worker is killed, stopped, terminated, raises, joins or leaves. All workers must agree on
the epoch and the sum of every step, and the job must never pause for longer than it may.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import multiprocessing
import os
import random
import secrets
import signal
import struct
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hvdlite import _core, basics
from hvdlite.elastic import ObjectState, run
from hvdlite.launch.elastic.job import elastic_variables
from hvdlite.launch.elastic.messages import EpochFormed, Event, Evict, Failed, Limits
from hvdlite.launch.elastic.registrar import Registrar
from hvdlite.launch.hosts import Start, place_as
from hvdlite.launch.process import job_environment
from hvdlite.objects import broadcast_object
from hvdlite.rendezvous import epochs
from hvdlite.rendezvous.handshake import Job

HEARTBEAT = 1.5
ANCHORS = 2
MOST = 5
LONGEST_PAUSE = HEARTBEAT + 2.0
PATIENCE = 30.0
MOST_WORKERS = 8192
ELEMENTS = 4096
RESOURCES = ("rss_kib", "fds", "threads", "maps")  # as `resources` returns them
_TIME = struct.Struct("d")


def train_for_ever(folder: str, environment: dict[str, str], logs: bool) -> None:
    """Be a worker until something ends it."""
    os.environ.update(environment)
    worker = int(environment["HVDLITE_WORKER"])
    signal.signal(signal.SIGUSR2, _raise)
    errors = os.open(f"{folder}/stderr.{worker}", os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    os.close(errors)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    log = os.open(f"{folder}/worker.{worker}", flags) if logs else -1
    with open(f"{folder}/beats", "r+b") as file:
        beats = mmap.mmap(file.fileno(), 0)

    @run
    def train(state: Any) -> None:
        while True:
            epoch, value = _make_step(worker, state.step)
            members = epochs.find(epoch).workers
            right = sum(one + 1 + state.step for one in members)
            assert value == right, f"the sum of step {state.step} is {value}, not {right}"
            if logs:
                numbers = (state.step, epoch, value, *members)
                os.write(log, (" ".join(map(str, numbers)) + "\n").encode())
            state.step += 1
            _TIME.pack_into(beats, _TIME.size * worker, time.monotonic())
            state.check_host_updates()

    basics.init()
    train(ObjectState(broadcast_object, basics.rank, step=0))


def _raise(*_: object) -> NoReturn:
    raise RuntimeError("chaos")


def _make_step(worker: int, step: int) -> tuple[int, int]:
    """Return the epoch of a step, and the sum of its gradients."""
    epochs.begin_step()
    cells = array("q", [worker + 1 + step]) * ELEMENTS
    address = cells.buffer_info()[0]
    tensor = _core.Tensor("g", _core.DTYPES["int64"], [ELEMENTS], address, address)
    total = _core.REDUCE_OPS["sum"]
    handle = basics.engine().allreduce("g", [tensor], total, keep=cells, transaction="s")
    commit = basics.engine().commit("c", "s")
    handle.wait()
    commit.wait()
    epochs.commit_step(commit.epoch)
    assert cells.count(cells[0]) == ELEMENTS, "torn"
    return commit.epoch, cells[0]


class Soak:
    """A job without a launcher; a context manager."""

    def __init__(self, folder: Path, logs: bool) -> None:
        self.folder = folder
        self.alive: dict[int, Any] = {}
        self.members: tuple[int, ...] = ()
        self.epochs = 0
        self._logs = logs
        self._next = 0
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["soak"])
        (folder / "beats").write_bytes(bytes(_TIME.size * MOST_WORKERS))
        with open(folder / "beats", "rb") as file:
            self._beats = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._job = Job(secrets.token_bytes(32), secrets.token_bytes(16), epoch=0)
        limits = Limits(np=ANCHORS, min_np=1, heartbeat=HEARTBEAT, silence=HEARTBEAT)
        self._registrar = Registrar.start(self._job, limits)

    def __enter__(self) -> Soak:
        for _ in range(ANCHORS):
            self.start(joiner=False)
        self.until(lambda: len(self.members) == ANCHORS, "a first epoch")
        self.until(lambda: all(self.beat(one) for one in range(ANCHORS)), "a first step")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.alive.values():
            process.kill()
        self._registrar.close()

    def start(self, joiner: bool = True) -> int:
        """Start a worker, and return its number."""
        number, self._next = self._next, self._next + 1
        placement = place_as([0] * MOST)[number % MOST]
        start = Start(number, "localhost", number % MOST, joiner, placement)
        environment = {
            **job_environment(placement, self._job, self._registrar.address),
            **elastic_variables(start, HEARTBEAT),
            "HVDLITE_HOSTNAME": "localhost",
        }
        self._registrar.expect(number, "localhost", joiner)
        process = self._context.Process(
            target=train_for_ever, args=(str(self.folder), environment, self._logs), daemon=True
        )
        process.start()
        self.alive[number] = process
        return number

    def drain(self, number: int) -> None:
        """Ask a worker to leave."""
        self._registrar.drain(number, "chaos")

    def beat(self, worker: int) -> float:
        """Return when a worker ended its last step; 0 before the first one."""
        (when,) = _TIME.unpack_from(self._beats, _TIME.size * worker)
        return float(when)

    def look(self) -> None:
        """Take the registrar's events, and report who has ended."""
        for event in self._registrar.take():
            self._follow(event)
        for number, process in list(self.alive.items()):
            if process.exitcode is not None:
                del self.alive[number]
                code = process.exitcode
                why = f"died of {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
                process.close()
                self._registrar.ended(number, why, code == 0)

    def _follow(self, event: Event) -> None:
        if isinstance(event, Failed):
            raise AssertionError(f"the job has failed: {event.reason}")
        if isinstance(event, EpochFormed):
            self.members, self.epochs = event.workers, self.epochs + 1
        if isinstance(event, Evict) and event.worker in self.alive:
            self.alive[event.worker].kill()

    def until(self, found: Callable[[], object], what: str) -> None:
        """Look until something is true."""
        deadline = time.monotonic() + PATIENCE
        while not found():
            assert time.monotonic() < deadline, f"after {PATIENCE:g} s there is not {what}"
            self.look()
            time.sleep(0.001)


def resources(pid: int) -> dict[str, int]:
    """Return what a process uses."""
    folder = Path(f"/proc/{pid}")
    pages = int((folder / "statm").read_text().split()[1])
    return {
        "rss_kib": pages * (os.sysconf("SC_PAGE_SIZE") // 1024),
        "fds": len(list((folder / "fd").iterdir())),
        "threads": len(list((folder / "task").iterdir())),
        "maps": len((folder / "maps").read_text().splitlines()),
    }


def soak_resets(resets: int) -> list[dict[str, object]]:
    """Form the world anew so often; return what the workers that stay and the launcher use."""
    samples: dict[str, array[int]] = {}  # compact: this process is one of those measured
    with tempfile.TemporaryDirectory() as name, Soak(Path(name), logs=False) as soak:
        pids = {f"worker {n}": process.pid for n, process in soak.alive.items()}
        pids["launcher"] = os.getpid()
        while soak.epochs < resets:
            number = soak.start()
            soak.until(lambda: number in soak.members and soak.beat(number), "a step of a joiner")  # noqa: B023
            soak.alive[number].kill()
            killed = time.monotonic()
            soak.until(lambda: number not in soak.members, "an epoch after a kill")  # noqa: B023
            anchors = range(ANCHORS)
            soak.until(lambda: min(map(soak.beat, anchors)) > killed + 0.01, "a step")  # noqa: B023
            for who, pid in pids.items():
                row = (soak.epochs, *resources(pid).values())
                samples.setdefault(who, array("q")).extend(row)
    return [row_of_growth(who, own) for who, own in samples.items()]


def row_of_growth(who: str, samples: array[int]) -> dict[str, object]:
    """Compare the second quarter of the samples with the last one."""
    epochs_formed, *values = (samples[n :: 1 + len(RESOURCES)] for n in range(1 + len(RESOURCES)))
    quarter = len(epochs_formed) // 4
    between = epochs_formed[-quarter] - epochs_formed[quarter]
    row: dict[str, object] = {"soak": "resets", "who": who, "resets": epochs_formed[-1]}
    for name, own in zip(RESOURCES, values, strict=True):
        early, late = sum(own[quarter : 2 * quarter]), sum(own[-quarter:])
        row[name] = own[-1]
        row[f"{name}_per_reset"] = round((late - early) / quarter / between, 4)
    return row


def soak_chaos(seconds: float, seed: int) -> dict[str, object]:
    """Disturb a job every half second."""
    chance = random.Random(seed)
    counts: dict[str, int] = {}
    pause, last = 0.0, time.monotonic()
    with tempfile.TemporaryDirectory() as name, Soak(Path(name), logs=True) as soak:
        end, due, resume = time.monotonic() + seconds, time.monotonic(), (0.0, -1)
        while time.monotonic() < end:
            soak.look()
            now = time.monotonic()
            newest = max(soak.beat(one) for one in range(soak._next))
            pause, last = max(pause, now - max(last, newest)), max(last, newest)
            if now > resume[0]:
                signal_worker(soak, resume[1], signal.SIGCONT)
            if now > due:
                due = now + 0.5
                deed = disturb(soak, chance)
                if deed.startswith("stop"):
                    signal_worker(soak, resume[1], signal.SIGCONT)
                    resume = (now + chance.choice((0.2, 0.5, 4.0)), int(deed.split()[1]))
                counts[deed.split()[0]] = counts.get(deed.split()[0], 0) + 1
            time.sleep(0.002)
        epochs_formed = soak.epochs
        for process in list(soak.alive.values()):
            process.kill()
        made = judge(Path(name))
    assert pause <= LONGEST_PAUSE, f"the job paused for {pause:.2f} s"
    return {
        "soak": "chaos",
        "seconds": seconds,
        "seed": seed,
        "deeds": counts,
        "epochs": epochs_formed,
        "steps": made,
        "longest_pause_s": round(pause, 2),
    }


def disturb(soak: Soak, chance: random.Random) -> str:
    """Do one thing to the job, and return what."""
    members = [one for one in soak.members if one in soak.alive]
    if len(members) < 3:
        return "nothing" if len(soak.alive) > MOST else f"join {soak.start()}"
    deed, victim = (
        chance.choice(("kill", "stop", "term", "raise", "join", "leave")),
        chance.choice(members),
    )
    numbers = {
        "kill": signal.SIGKILL,
        "stop": signal.SIGSTOP,
        "term": signal.SIGTERM,
        "raise": signal.SIGUSR2,
    }
    if deed in numbers:
        signal_worker(soak, victim, numbers[deed])
    elif deed == "leave":
        soak.drain(victim)
    elif len(soak.alive) <= MOST:
        soak.start()
    return f"{deed} {victim}"


def signal_worker(soak: Soak, worker: int, number: int) -> None:
    """Send a signal to a worker that lives."""
    if worker in soak.alive:
        with contextlib.suppress(ProcessLookupError):  # It has ended, and is not reaped yet.
            os.kill(soak.alive[worker].pid, number)


def judge(folder: Path) -> int:
    """Check that the workers agree on every step; return how many steps there were."""
    agreed: dict[int, str] = {}
    for path in folder.glob("worker.*"):
        before = -1
        for line in path.read_text().splitlines():
            step = int(line.split()[0])
            assert agreed.setdefault(step, line) == line, f"{path.name}: {line}; {agreed[step]}"
            assert before in (-1, step - 1), f"{path.name} made step {step} after step {before}"
            before = step
    missing = set(range(len(agreed))).difference(agreed)
    assert not missing, f"steps {sorted(missing)[:9]} are missing"
    wrong = [one for path in folder.glob("stderr.*") for one in _wrong_sums(path)]
    assert not wrong, wrong[0]
    return len(agreed)


def _wrong_sums(path: Path) -> list[str]:
    text = path.read_text(errors="replace").splitlines()
    return [f"{path.name}: {line}" for line in text if "AssertionError" in line]


def main() -> int:
    """Run both parts, and print a JSON line for each result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--resets", type=int, default=1000, help="epochs to form (1000)")
    parser.add_argument("--chaos", type=float, default=180.0, help="seconds of chaos (180)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the chaos")
    arguments = parser.parse_args()
    if arguments.resets:
        for row in soak_resets(arguments.resets):
            print(json.dumps(row), flush=True)
    if arguments.chaos:
        print(json.dumps(soak_chaos(arguments.chaos, arguments.seed)), flush=True)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.exit(main())
