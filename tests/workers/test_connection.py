"""Messages come through whole, in order, however they are cut on the way; what cannot be one ends the connection."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.workers.connection import LARGEST_MESSAGE, Place, Worker
from sluice.workers.serving import HEADER, _receive, pack_job

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20), lambda inner: st.lists(inner, max_size=3), max_leaves=8
)


def framed(message: object) -> bytes:
    payload = json.dumps(message).encode()
    return HEADER.pack(len(payload)) + payload


@contextmanager
def connected() -> Iterator[tuple[Worker[object], socket.socket]]:
    ours, theirs = socket.socketpair()
    loop = asyncio.new_event_loop()
    worker: Worker[object] = Worker(1, Place(), ours, loop)
    try:
        with theirs:
            yield worker, theirs
    finally:
        worker.hang_up()
        loop.close()


@given(st.lists(VALUES, max_size=5), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_messages_come_whole_and_in_order_however_they_are_cut(messages: list[object], cuts: list[int]) -> None:
    sent = b"".join(map(framed, messages))
    with connected() as (worker, theirs):
        came = []
        at = turn = 0
        while at < len(sent):
            size = cuts[turn % len(cuts)]
            theirs.sendall(sent[at : at + size])
            at, turn = at + size, turn + 1
            came += worker.read()
        assert came == messages
        assert not worker.hung_up


@pytest.mark.parametrize(
    "said",
    [HEADER.pack(LARGEST_MESSAGE + 1), HEADER.pack(3) + b"{x}", HEADER.pack(2) + b"\xff\xff"],
    ids=["too long", "no JSON", "no text"],
)
def test_after_what_is_no_message_nothing_is_read_any_more(said: bytes) -> None:
    with connected() as (worker, theirs):
        theirs.sendall(framed("fine") + said + framed("too late"))
        assert worker.read() == ["fine"]
        assert worker.hung_up
        assert worker.read() == []


def test_a_message_larger_than_the_socket_goes_out_as_it_is_taken() -> None:
    async def play() -> None:
        ours, theirs = socket.socketpair()
        worker: Worker[object] = Worker(1, Place(), ours, asyncio.get_running_loop())
        theirs.setblocking(False)
        message = pack_job(7, bytes(range(256)) * 20_000)
        worker.send(message)
        came = bytearray()
        while len(came) < len(message):
            came += await asyncio.get_running_loop().sock_recv(theirs, 1 << 16)
        assert bytes(came) == message
        worker.hang_up()
        theirs.close()

    asyncio.run(asyncio.wait_for(play(), 60.0))


@given(st.integers(0, 2**63), st.binary(max_size=100), st.integers(0, 200))
def test_a_job_is_received_as_it_was_packed_and_a_part_of_one_not_at_all(number: int, payload: bytes, cut: int) -> None:
    packed = pack_job(number, payload)
    assert _receive(io.BytesIO(packed)) == (number, payload)
    if cut < len(packed):
        assert _receive(io.BytesIO(packed[:cut])) is None
