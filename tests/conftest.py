import ranks


def pytest_sessionfinish():
    ranks.shutdown()
