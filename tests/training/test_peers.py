"""A rank that leaves, and one that vanishes: rank 0 can tell them apart and says which."""

import pytest
import torch.distributed as dist

from training import peers
from training.failure import TrainingError
from training.peers import Peers

GLOO = RuntimeError("[…/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:3979")


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch):
    monkeypatch.setattr(peers, "SECONDS_FOR_LAST_WORDS", 0.2)


@pytest.fixture
def ranks():
    store = dist.HashStore()
    hosts = ("algo-1", "algo-1", "algo-2", "algo-2")
    return [Peers(rank, hosts, store) for rank in range(4)]


def test_a_host_that_left_without_a_word_is_named(ranks):
    ranks[1].tell(GLOO)
    cause = ranks[0].explained(GLOO)
    assert isinstance(cause, TrainingError)
    assert str(cause).startswith("host algo-2 vanished (rank 2, 3 left without a word)")


def test_a_rank_that_stopped_over_its_own_mistake_is_quoted(ranks):
    assert ranks[2].explained(ValueError("no such token")) is not None
    ranks[1].tell(GLOO)
    ranks[3].tell(GLOO)
    cause = ranks[0].explained(GLOO)
    assert str(cause) == "rank 2 on host algo-2 stopped: ValueError: no such token"


def test_a_mistake_of_its_own_is_left_as_it_is(ranks):
    mistake = ValueError("no such token")
    assert ranks[0].explained(mistake) is mistake


def test_other_ranks_leave_at_once(ranks, monkeypatch):
    monkeypatch.setattr(peers, "SECONDS_FOR_LAST_WORDS", 1e9)
    cause = ranks[3].explained(GLOO)
    assert "host algo-2 lost the connection to another rank, which is gone" in str(cause)


def test_when_all_answer_nobody_is_blamed(ranks):
    for one in ranks:
        one.tell(GLOO)
    assert "all still answer" in str(ranks[0].explained(GLOO))


class Dead(dist.HashStore):
    def set(self, *_):
        raise RuntimeError("the store is gone")

    check = get = set


def test_a_store_that_is_gone_does_not_hide_the_cause():
    assert "vanished" in str(Peers(0, ("a", "b"), Dead()).explained(GLOO))
    assert "lost the connection" in str(Peers(1, ("a", "b"), Dead()).explained(GLOO))


def test_nccl_and_the_store_count_as_peers_and_other_errors_do_not():
    assert peers.is_lost_peer(dist.DistBackendError("NCCL error: remote process exited"))
    assert peers.is_lost_peer(dist.DistNetworkError("broken pipe"))
    assert not peers.is_lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not peers.is_lost_peer(ValueError("gloo"))
