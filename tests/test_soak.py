"""A run outlives its processes: killed at random and started again, also with other numbers of ranks. ``make soak`` does the
same thirty times; here ranks are started by the tests' own pool, which is quicker than torchrun."""

import pytest
import ranks
import soak
import soak_rank

pytestmark = pytest.mark.timeout(120)


def trains(rank, world, description, attempt, arguments):
    soak_rank.train(description, attempt, rank, arguments)


def killed_and_started_again(folder, worlds, steps, plan):
    """One start for each of ``worlds``; the last is not killed."""
    folder.mkdir()
    for attempt, world in enumerate(worlds):
        arguments = soak.arguments(folder, world, steps)
        outcomes = ranks.outcomes(world, trains, soak.description(folder, plan), attempt, arguments)
        if attempt == len(plan):
            assert [outcome[0] for outcome in outcomes] == ["ok"] * world, outcomes
            continue
        victim = plan[attempt][0]
        assert outcomes[victim][:2] == ("died", 9), (attempt, outcomes)
        others = [outcome[:2] for r, outcome in enumerate(outcomes) if r != victim]
        assert others == [("error", "PeerLostError")] * (world - 1), (attempt, outcomes)


#: Every phase of a step, and a moment after it.
PLAN = soak.plan_of(len(soak.PHASES), world=2, seed=4)
STEPS = soak.steps_for(PLAN)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak") / "alone"
    killed_and_started_again(folder, [2], STEPS, [])
    return folder


def test_killed_run_ends_with_the_bits_of_one_that_was_left_alone(alone, tmp_path):
    folder, shared = tmp_path / "killed", soak.shared_memory()
    worlds = [2] * (len(PLAN) + 1)
    killed_and_started_again(folder, worlds, STEPS, PLAN)
    soak.assert_survivors_named_the_rank(folder, PLAN, worlds)
    soak.assert_same_end(alone, folder, STEPS)
    soak.assert_only_checkpoints_left(folder)
    assert soak.shared_memory() <= shared


def test_run_goes_on_with_fewer_and_with_more_ranks(alone, tmp_path):
    plan = [[3, 2, "update", 0, False], [0, 3, "sync save", 0, False]]
    killed_and_started_again(tmp_path / "elastic", [4, 2, 3], STEPS, plan)
    soak.assert_survivors_named_the_rank(tmp_path / "elastic", plan, [4, 2])
    soak.assert_same_end(alone, tmp_path / "elastic", STEPS, exactly=False)


def test_torchrun_starts_it_again_and_nothing_is_left(alone, tmp_path):
    plan = [[1, 1, "async save", 0.01, True]]
    status = soak.train(tmp_path / "run", 2, STEPS, plan)
    assert status == 0, (tmp_path / "run" / "output").read_text()[-5000:]
    soak.assert_survivors_named_the_rank(tmp_path / "run", plan, [2], noticed=2.0)
    soak.assert_same_end(alone, tmp_path / "run", STEPS)
    soak.assert_only_checkpoints_left(tmp_path / "run", "output", "tmp", "torchrun")
