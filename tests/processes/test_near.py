"""Messages between processes of one host, through a socket and shared memory."""

from __future__ import annotations

import gc
import os
import socket
import threading

import pytest
import torch

from hvd_ckpt.processes.near import INLINE_BYTES, NearLink, PeerEnded


@pytest.fixture
def links():
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = NearLink({1: first}), NearLink({0: second})
    yield ends
    for link in ends:
        link.close()


def some_bytes(size, seed=0):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def received(link, size, tag, source=0):
    memory = torch.zeros(size, dtype=torch.uint8)
    link.receive(memory, source, tag).wait()
    return memory


@pytest.mark.parametrize("size", [0, 1, INLINE_BYTES, INLINE_BYTES + 1, 4096, 4097, 5_000_000])
def test_messages_have_any_size_and_arrive_by_their_tags(links, size):
    first, second = links
    ahead = torch.zeros(size, dtype=torch.uint8)
    request = second.receive(ahead, 0, tag=7)
    memory = some_bytes(size)
    for tag in (5, 7, 6, 5):
        first.send(memory + tag, 1, tag)
    memory.zero_()  # what was sent may be changed
    assert torch.equal(received(second, size, 6), some_bytes(size) + 6)
    assert torch.equal(received(second, size, 5), some_bytes(size) + 5)
    request.wait()
    assert torch.equal(ahead, some_bytes(size) + 7)
    assert torch.equal(received(second, size, 5), some_bytes(size) + 5)


def test_memory_is_used_again(links):
    first, second = links
    open_files = []
    for number in range(20):
        first.send(some_bytes(100_000, number), 1, 0)
        assert torch.equal(received(second, 100_000, 0), some_bytes(100_000, number))
        open_files.append(len(os.listdir("/proc/self/fd")))
    assert open_files == open_files[:1] * 20


@pytest.mark.parametrize("size", [8, INLINE_BYTES + 1])
def test_two_that_send_many_messages_before_they_receive_any_do_not_wait_for_each_other(links, size):
    wrong = []

    def work(link, other):
        for number in range(1000):
            link.send(torch.full((size,), number % 251, dtype=torch.uint8), other, 0)
        values = [received(link, size, 0, other) for _ in range(1000)]
        wrong.extend(number for number, value in enumerate(values) if not value.eq(number % 251).all())

    threads = [threading.Thread(target=work, args=(link, other)) for link, other in zip(links, (1, 0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []


def test_the_end_of_a_process_is_an_error_after_its_last_message(links):
    first, second = links
    first.send(some_bytes(10_000), 1, 0)
    first.close()
    assert torch.equal(received(second, 10_000, 0), some_bytes(10_000))
    with pytest.raises(PeerEnded):
        received(second, 10_000, 0)
    with pytest.raises(PeerEnded):
        second.send(some_bytes(10), 0, 0)


def test_a_link_that_nobody_has_any_more_and_one_in_a_forked_process_are_closed():
    """After another start of Horovod, whose grid has another link."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = NearLink({1: first})
    child = os.fork()
    if child == 0:
        os._exit(0 if first.fileno() == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    del link, first
    gc.collect()
    second.settimeout(10)
    assert second.recv(1) == b""
