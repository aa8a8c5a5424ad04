import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks outnumber cores; before torch is imported

import pytest  # noqa: E402
import ranks  # noqa: E402
import torch  # noqa: E402


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU: make test-gpu")  # from here, so that the summary counts them in one line


def pytest_sessionfinish():
    ranks.shutdown()
