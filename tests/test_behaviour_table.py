"""README's table of behaviours is what comes out when its cases are run."""

import os

import behaviour_table
import pytest


# Peers are made to hang and to fail in the middle of collectives, and torch does not always survive that.
@pytest.mark.skipif("SHARDSTEP_SLOW_TESTS" not in os.environ, reason="runs peers into the ground: SHARDSTEP_SLOW_TESTS=1")
def test_table_in_the_readme_is_what_the_cases_give():
    assert behaviour_table.table() == behaviour_table.in_readme()


def test_shardstep_is_right_in_every_case():
    cells = [line.split("|")[-2].strip() for line in behaviour_table.in_readme().splitlines()[2:]]
    assert len(cells) == len(behaviour_table.CASES) and set(cells) == {"right", "1"}
