import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks outnumber cores; before torch is imported

import pytest  # noqa: E402
import ranks  # noqa: E402
import torch  # noqa: E402


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        no_gpu = pytest.mark.skip(reason="needs a GPU: make test-gpu")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(no_gpu)


def pytest_sessionfinish():
    ranks.shutdown()
