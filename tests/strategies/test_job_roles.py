"""What a process does by its role in a job: workers that another launcher started train alone, with a warning."""

import warnings

import pytest

import tfpar
from tfpar.strategies.job_roles import warn_of_other_launcher

VARIABLES = ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]


@pytest.mark.parametrize("name", VARIABLES)
def test_the_processes_of_another_launcher_are_counted(name: str) -> None:
    with pytest.warns(UserWarning, match=rf"a model of its own: {name}='4' counts several .*python -m tfpar\.launch"):
        warn_of_other_launcher({name: "4"})


@pytest.mark.parametrize("name", VARIABLES)
def test_one_process_is_not(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_launcher({name: "1"})


@pytest.mark.parametrize("shard", [None, "weights"])
def test_several_workers_without_a_job_are_warned_of(
    shard: str | None, monkeypatch: pytest.MonkeyPatch, logical_cpus: list[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="WORLD_SIZE='2' counts several processes"):
        tfpar.MultiWorker(devices=logical_cpus[:1], shard=shard)
