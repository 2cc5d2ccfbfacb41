"""Links with a delay between the simulated hosts of tests/multihost, without tc's netem.

Many kernels lack netem. Here each host's network interface is a TAP device, and one process carries
the frames between all of them: it hands a frame on when the frame is as old as the delay. Frames
are as large as TCP's segmentation offload makes them, so the process carries some Gbit/s; its
processor time is missing to all contestants alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

SET_INTERFACE, SET_OFFLOAD, SET_HEADER_SIZE = 0x400454CA, 0x400454D0, 0x400454D8
TAP, WITHOUT_PACKET_INFO, WITH_OFFLOAD_HEADER = 0x0002, 0x1000, 0x4000
CHECKSUM_AND_SEGMENTATION = 0x1 | 0x2 | 0x4
HEADER_BYTES, MAC_BYTES = 12, 6
LONGEST_FRAME = HEADER_BYTES + 14 + (64 << 10)
FRAMES_AT_ONCE = 32
NETWORK_NAMESPACE = 0x40000000


@contextlib.contextmanager
def delayed(bed: Any, seconds: float) -> Iterator[None]:
    """Delay every frame between the hosts of a bed, until the bed ends."""
    places = [f"{bed.space(host)}={address}" for host, address in enumerate(bed.addresses)]
    relay = subprocess.Popen(
        [sys.executable, __file__, str(seconds), *places], stdout=subprocess.PIPE, text=True
    )
    try:
        assert relay.stdout is not None
        if relay.stdout.readline() != "ready\n":
            raise RuntimeError("the process that delays frames has ended")
        yield
    finally:
        relay.terminate()
        relay.wait()


def main(seconds: float, places: list[str]) -> None:
    """Replace the interface of each host, and carry frames until a signal ends this process."""
    ports: dict[bytes, int] = {}
    for number, place in enumerate(places):
        space, _, address = place.partition("=")
        mac = bytes([2, 0, 0, 0, 0, number + 1])
        ip = ["ip", "-n", space]
        subprocess.run([*ip, "link", "del", "eth0"], check=True)
        ports[mac] = open_tap(space)
        link = [*ip, "link", "set", "eth0", "address", mac.hex(":"), "txqueuelen", "4000", "up"]
        subprocess.run(link, check=True)
        subprocess.run([*ip, "addr", "add", f"{address}/24", "dev", "eth0"], check=True)
    print("ready", flush=True)
    carry(ports, seconds)


def open_tap(space: str) -> int:
    """Make the interface eth0 in a network namespace; return the descriptor of its far end."""
    enter = ctypes.CDLL(None, use_errno=True).setns
    flags = TAP | WITHOUT_PACKET_INFO | WITH_OFFLOAD_HEADER
    with open("/proc/self/ns/net") as own, open(f"/run/netns/{space}") as theirs:
        if enter(theirs.fileno(), NETWORK_NAMESPACE) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {space}")
        try:
            tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tap, SET_INTERFACE, struct.pack("16sH22x", b"eth0", flags))
        finally:
            enter(own.fileno(), NETWORK_NAMESPACE)
    fcntl.ioctl(tap, SET_HEADER_SIZE, struct.pack("i", HEADER_BYTES))
    fcntl.ioctl(tap, SET_OFFLOAD, CHECKSUM_AND_SEGMENTATION)
    return tap


def carry(ports: dict[bytes, int], seconds: float) -> None:
    """Carry frames between the ports for ever; the keys are the hardware addresses behind them."""
    waiting: deque[tuple[float, list[int], bytes]] = deque()  # All wait equally long.
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, targets, frame = waiting.popleft()
            for port in targets:
                with contextlib.suppress(OSError):  # A full port loses the frame, as a switch does.
                    os.write(port, frame)
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select(list(ports.values()), [], [], left)[0]:
            for _ in range(FRAMES_AT_ONCE):
                try:
                    frame = os.read(port, LONGEST_FRAME)
                except BlockingIOError:
                    break
                target = ports.get(frame[HEADER_BYTES : HEADER_BYTES + MAC_BYTES])
                others = [other for other in ports.values() if other != port]
                targets = others if target is None else [target]
                waiting.append((time.monotonic() + seconds, targets, frame))


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
