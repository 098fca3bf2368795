"""Which devices a command runs on."""

import jax
import pytest

from echo_jax.devices import Cluster


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_processes_that_do_not_meet_are_one_clear_error(monkeypatch, error):
    """In every command that takes a cluster, not in ``train`` alone."""

    def initialize(*place, **options):
        assert place == ("host:1", 2, 0)
        raise error("DEADLINE_EXCEEDED")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    cluster = Cluster(coordinator="host:1", processes=2, process=0)
    with pytest.raises(ValueError, match="did not come together: DEADLINE") as caught:
        cluster.join()
    assert caught.value.__cause__ is not None


def test_a_process_that_is_alone_joins_nobody(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", None)
    Cluster().join()


@pytest.mark.parametrize(
    "parts",
    [
        {"processes": 2},
        {"coordinator": "auto", "process": 0},
        {"coordinator": "host:1", "processes": 2},
        {"coordinator": "host:1", "processes": 2, "process": 2},
    ],
)
def test_a_part_of_a_cluster_is_refused(parts):
    with pytest.raises(ValueError, match="processes"):
        Cluster(**parts)
