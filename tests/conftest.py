import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks outnumber cores; before torch is imported

import ranks  # noqa: E402


def pytest_sessionfinish():
    ranks.shutdown()
