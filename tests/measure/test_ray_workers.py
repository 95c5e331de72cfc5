"""Workers as Ray actors; on one machine here, with the clocks compared as between machines."""

from __future__ import annotations

import numpy as np
import pytest
from fake_server import FakeServer, good

from bstar.measure import RunOptions, bench, parse_endpoint, prepare
from bstar.traffic import poisson

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, log_to_driver=False, include_dashboard=False, logging_level="ERROR")
    yield
    ray.shutdown()


def test_actors_send_the_load_on_one_clock(cluster):
    load = poisson(40, 10, 4, 40)
    with FakeServer(good) as server:
        ready = prepare(parse_endpoint(server.url, model="fake"))
        run = bench(ready, load, RunOptions(workers="ray"))
    assert run.summary.num_finished == 40, run.to_dict()["errors"]
    assert np.allclose(run.table.intended_s, load.arrival_s, atol=0.01)
    assert len(run.clocks) == 1
    assert abs(run.clocks[0]["offset_s"]) <= run.clocks[0]["uncertainty_s"] + 0.005
    assert run.health.loop_lag_s.count > 0
