"""The tests' own pools of ranks: what they promise when a rank fails."""

import os
import signal
import time

import pytest
import ranks
import torch
import torch.distributed as dist

pytestmark = pytest.mark.timeout(60)


def sum_of_ranks(rank, world, factor=1.0):
    value = torch.tensor([float(rank + 1)]) * factor
    dist.all_reduce(value)
    return value.item(), os.getpid()


def fails_on_rank_1(rank, world):
    if rank == 1:
        raise ValueError("this rank is wrong")
    dist.barrier()


def dies_on_rank_1(rank, world):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def sleeps_on_rank_0(rank, world):
    if rank == 0:
        time.sleep(100)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_pool_reduces_and_is_used_again(world):
    first = ranks.run(world, sum_of_ranks, 2.0)
    second = ranks.run(world, sum_of_ranks, factor=3.0)
    assert [value for value, _ in first] == [world * (world + 1.0)] * world
    assert [value for value, _ in second] == [world * (world + 1.0) * 1.5] * world
    assert [pid for _, pid in first] == [pid for _, pid in second]
    assert len({pid for _, pid in first}) == world


def test_failure_shows_the_rank_and_the_next_call_works():
    with pytest.raises(AssertionError, match="rank 1: ValueError(.|\n)*this rank is wrong"):
        ranks.run(2, fails_on_rank_1)
    assert ranks.run(2, sum_of_ranks)[0][0] == 3.0


def test_death_names_the_signal():
    with pytest.raises(AssertionError, match="rank 1: died of SIGKILL"):
        ranks.run(2, dies_on_rank_1)
    kinds = [outcome[:2] for outcome in ranks.outcomes(2, dies_on_rank_1)]
    assert kinds == [("ok", "survived"), ("died", signal.SIGKILL)]


def test_timeout_shows_where_the_rank_is():
    with pytest.raises(AssertionError, match="rank 0: still running(.|\n)*sleeps_on_rank_0"):
        ranks.run(2, sleeps_on_rank_0, timeout=1.0)


def test_fresh_ranks_are_gone_afterwards():
    for _, pid in ranks.run(2, sum_of_ranks, fresh=True):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
