"""`python -m tfpar.launch` on machines with GPUs, which a program `nvidia-smi` of the tests describes."""

from pathlib import Path

import pytest

from tests.support import stand_ins
from tests.support.launching import ranked, run
from tests.support.leaks import leaves_nothing_behind  # noqa: F401  (a fixture, known by its name)

pytestmark = [pytest.mark.multi_process, pytest.mark.usefixtures("leaves_nothing_behind")]

SHOWS = 'print(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))'


def test_each_worker_sees_its_own_gpus_and_the_plan_names_them(tmp_path: Path) -> None:
    path = stand_ins.nvidia_smi(tmp_path, stand_ins.table(5))
    code, out, err = run(tmp_path, SHOWS, gpus_of=path)
    assert code == 0, err
    assert [ranked(out, rank) for rank in range(2)] == [["0,1 PCI_BUS_ID"], ["2,3 PCI_BUS_ID"]]
    assert err.splitlines() == [
        "[launch] worker 0: GPUs 0, 1",
        "[launch] worker 1: GPUs 2, 3",
        "[launch] given to no worker: GPU 4",
    ]


def test_the_users_own_list_is_divided_also_after_a_restart(tmp_path: Path) -> None:
    path = stand_ins.nvidia_smi(tmp_path, stand_ins.table(4, used_mib=70_000))
    script = f'{SHOWS}\nfirst = not Path("again").exists()\nPath("again").touch()\nsys.exit(int(first))'
    variables = {"CUDA_VISIBLE_DEVICES": f"3,{stand_ins.uuid(0)}"}
    code, out, err = run(
        tmp_path, script, "--max_restarts=1", "--gpus_per_worker=2", num_workers=1, variables=variables, gpus_of=path
    )
    assert code == 0, err
    assert ranked(out, 0) == [f"3,{stand_ins.uuid(0)} None"] * 2
    assert err.count("warning: other processes use the memory of") == 2, "one for each GPU, at the first start"
    assert max(map(len, err.splitlines())) <= 80
