"""The acceptor keeps the connection of a rank when strangers come in numbers."""

from __future__ import annotations

import selectors
import socket
from contextlib import ExitStack

import pytest

from hvdlite.rendezvous import acceptor
from hvdlite.rendezvous.handshake import ClientHandshake, Job, Role, ServerHandshake
from patience import HANG

JOB = Job(token=b"t" * 32, job_id=b"j" * 16, epoch=3)


def test_strangers_do_not_push_out_a_rank_that_has_named_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor, "_LEAST_ROOM", 2)
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        listener = socket.create_server(("127.0.0.1", 0))
        welcomed: list[int] = []

        def welcome(connection: socket.socket, handshake: ServerHandshake) -> None:
            stack.enter_context(connection)
            welcomed.append(handshake.rank)

        door = acceptor.Acceptor(listener, JOB, 1, selector, welcome)
        stack.callback(door.close)

        def dial() -> socket.socket:
            dialled = socket.create_connection(listener.getsockname(), HANG)
            return stack.enter_context(dialled)

        def serve() -> None:
            for key, _ in selector.select(HANG):
                key.data()

        client, rank = ClientHandshake(JOB, 0, Role.STORE), dial()
        serve()
        rank.sendall(client.hello)
        serve()
        for _ in range(4):
            dial()
            serve()
        rank.sendall(client.feed(rank.recv(client.wanted())))
        serve()
    assert welcomed == [0]
