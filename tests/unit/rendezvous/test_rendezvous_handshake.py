"""The handshake, without sockets: ranks get in, and strangers do not and learn nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.errors import BootstrapError
from hvdlite.rendezvous.handshake import (
    PROTOCOL_VERSION,
    ClientHandshake,
    FrameReader,
    FrameWriter,
    Job,
    RefusedError,
    Role,
    ServerHandshake,
    session_keys,
)

JOB = Job(token=b"t" * 32, job_id=b"j" * 16, epoch=3)


def run(client: ClientHandshake, server: ServerHandshake) -> None:
    """Carry messages until both are done, or one of them refuses."""
    to_server, to_client = client.hello, b""
    while not (client.done and server.done):
        to_client += server.feed(to_server)
        to_server = client.feed(to_client)
        to_client = b""


def test_both_sides_prove_themselves_and_agree_on_keys() -> None:
    client, server = ClientHandshake(JOB, 2, Role.DATA), ServerHandshake(JOB, size=4)
    run(client, server)
    assert (server.rank, server.role) == (2, Role.DATA)
    assert session_keys(JOB, client.transcript) == session_keys(JOB, server.transcript)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Job(b"x" * 32, JOB.job_id, JOB.epoch), "does not know the secret"),
        (Job(JOB.token, b"x" * 16, JOB.epoch), "another job"),
        (Job(JOB.token, JOB.job_id, 4), "epoch 4 from rank 1"),
    ],
)
def test_server_refuses_what_is_not_of_its_job(other: Job, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        run(ClientHandshake(other, 1, Role.STORE), ServerHandshake(JOB, size=4))


def test_client_refuses_a_server_that_does_not_know_the_secret() -> None:
    client = ClientHandshake(JOB, 0, Role.STORE)
    server = ServerHandshake(JOB, size=4)
    client.feed(server.feed(client.hello))
    with pytest.raises(RefusedError, match="does not know the secret"):
        client.feed(bytes(32))


def test_other_version_is_told_both_versions_and_its_rank() -> None:
    client = ClientHandshake(JOB, 1, Role.CONTROL)
    server = ServerHandshake(JOB, size=4)
    with pytest.raises(RefusedError, match="version 77"):
        server.feed(client.hello[:4] + (77).to_bytes(2, "little") + client.hello[6:])
    refusal = bytearray(server.refusal or b"")
    refusal[2:4] = (77).to_bytes(2, "little")
    with pytest.raises(
        RefusedError, match=f"rank 1 speaks version {PROTOCOL_VERSION} .* version 77"
    ):
        client.feed(bytes(refusal))


def test_replayed_hello_and_proof_do_not_get_in_again() -> None:
    client, server = ClientHandshake(JOB, 1, Role.CONTROL), ServerHandshake(JOB, size=4)
    proof = client.feed(server.feed(client.hello))
    server.feed(proof)
    assert server.done
    again = ServerHandshake(JOB, size=4)
    again.feed(client.hello)
    with pytest.raises(RefusedError, match="secret"):
        again.feed(proof)


def test_reflected_proof_does_not_get_in() -> None:
    client, server = ClientHandshake(JOB, 1, Role.CONTROL), ServerHandshake(JOB, size=4)
    proof = client.feed(server.feed(client.hello))
    with pytest.raises(RefusedError, match="secret"):
        client.feed(proof)


def test_ranks_beyond_the_job_are_refused() -> None:
    with pytest.raises(RefusedError, match="does not exist"):
        ServerHandshake(JOB, size=4).feed(ClientHandshake(JOB, 4, Role.DATA).hello)


def test_byte_at_a_time_is_the_same_handshake() -> None:
    client, server = ClientHandshake(JOB, 1, Role.CONTROL), ServerHandshake(JOB, size=4)
    reply = b"".join(server.feed(bytes([byte])) for byte in client.hello)
    proof = b"".join(client.feed(bytes([byte])) for byte in reply)
    client.feed(b"".join(server.feed(bytes([byte])) for byte in proof))
    assert client.done and server.done


@given(st.binary(min_size=64, max_size=64))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(RefusedError):
        ServerHandshake(JOB, size=4).feed(garbage)


def test_repr_of_a_job_hides_its_secret() -> None:
    assert "746474" not in repr(JOB) and JOB.token.hex() not in repr(JOB)
    assert "tttt" not in repr(JOB)


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 50))
def test_frames_arrive_whatever_the_pieces(bodies: list[bytes], piece: int) -> None:
    writer, reader = FrameWriter(b"k"), FrameReader(b"k")
    stream = b"".join(writer.wrap(body) for body in bodies)
    received: list[bytes] = []
    for at in range(0, len(stream), piece):
        received += reader.feed(stream[at : at + piece])
    assert received == bodies


@given(st.integers(0, 59), st.integers(1, 255))
def test_tampered_frame_is_refused(position: int, change: int) -> None:
    frame = bytearray(FrameWriter(b"k").wrap(b"x" * 32))
    frame[position] ^= change
    reader = FrameReader(b"k")
    try:
        assert reader.feed(bytes(frame)) == []  # With a greater length, the reader waits for more.
    except BootstrapError:
        pass


def test_replayed_frame_is_refused() -> None:
    frame = FrameWriter(b"k").wrap(b"once")
    reader = FrameReader(b"k")
    assert reader.feed(frame) == [b"once"]
    with pytest.raises(BootstrapError, match="out of order"):
        reader.feed(frame)
