import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks outnumber cores; before torch is imported

import fakes  # noqa: E402
import pytest  # noqa: E402
import ranks  # noqa: E402
import torch  # noqa: E402


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU: make test-gpu")  # from here, so that the summary counts them in one line


def pytest_collection_finish(session):
    if any("nccl" in item.nodeid for item in session.items) and not session.config.option.collectonly:
        fakes.library()  # not while a test's time runs and ranks wait for each other


def pytest_sessionfinish():
    ranks.shutdown()


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """``once(world, body, *args)``: the folder that ``body(rank, world, folder, *args)`` has written, and what it returned on
    each rank. For all tests of a module it is called once."""
    made = {}

    def get(world, body, *args):
        key = world, body, repr(args)
        if key not in made:
            folder = tmp_path_factory.mktemp(body.__name__)
            made[key] = folder, ranks.run(world, body, folder, *args)
        return made[key]

    return get
