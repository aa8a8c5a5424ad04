"""A run outlives its processes: killed at random and started again by torchrun, also with other numbers of ranks."""

import os

import pytest
import soak
import torch

pytestmark = [
    pytest.mark.timeout(240),
    # torch's own start of a process group fails now and then when torchrun starts ranks again on a busy machine.
    pytest.mark.skipif("SHARDSTEP_SLOW_TESTS" not in os.environ, reason="starts torchrun many times: SHARDSTEP_SLOW_TESTS=1"),
]

#: A death is noticed within a second; the rest is for a machine with fewer cores than processes.
NOTICED = 2.5


@pytest.fixture(scope="module")
def survived(tmp_path_factory):
    return soak.soak(tmp_path_factory.mktemp("soak"), kills=5, seed=3, noticed=NOTICED)


def test_killed_run_ends_with_the_bits_of_one_that_was_left_alone(survived):
    _, _, longest = survived
    assert longest > 0.0


def test_run_goes_on_with_more_and_fewer_ranks(survived, tmp_path):
    alone, steps, _ = survived
    folder = tmp_path / "elastic"
    plan = [[3, 3, "update", 0, False], [0, 6, "sync save", 0, False]]
    for attempt, world in enumerate([4, 2, 3]):
        status = soak.train(folder, world, steps, plan, first_attempt=attempt)
        assert (status == 0) == (attempt == 2), (folder / "output").read_text()[-5000:]
    log = soak.read_log(folder)
    assert [line["killed"] for line in log if "killed" in line] == ["update", "sync save"]
    assert len([line for line in log if "finished" in line]) == 3
    expected, got = soak.final_state(alone, steps), soak.final_state(folder, steps)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.allclose(got[key], value, rtol=1e-4, atol=1e-6), key
