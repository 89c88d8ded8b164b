"""Two ranks for the tests in this folder, started at the first test that needs them."""

import pytest

from tests.gradbalance.distributed.two_ranks import TwoRanks


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory):
    ranks = TwoRanks(lambda: tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()
