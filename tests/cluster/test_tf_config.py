"""The rank and the addresses of a job from TF_CONFIG and Slurm's variables, with all mistakes; missing workers."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.ports import free_addresses
from tfpar.cluster import reachability, slurm, tf_config
from tfpar.cluster.tf_config import JobConfig

TWO_WORKERS = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}


def parse(described: object) -> JobConfig:
    return tf_config.parse(json.dumps(described))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A socket that listens on a port of this machine, as a worker does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def free_port() -> int:
    """Return a port on which nothing listens."""
    return int(free_addresses(1)[0].rpartition(":")[2])


# TF_CONFIG


@pytest.mark.parametrize(
    ("cluster", "task", "job"),
    [
        ({"worker": ["a:1", "b:1"]}, ("worker", 0), JobConfig(("a:1", "b:1"), 0, "chief")),
        ({"worker": ["a:1", "b:1"]}, ("worker", 1), JobConfig(("a:1", "b:1"), 1, "worker")),
        ({"worker": ["a:1"], "chief": ["c:1"]}, ("chief", 0), JobConfig(("c:1", "a:1"), 0, "chief")),
        ({"worker": ["a:1"], "chief": ["c:1"]}, ("worker", 0), JobConfig(("c:1", "a:1"), 1, "worker")),
        ({"chief": ["c:1"]}, ("chief", 0), JobConfig(("c:1",), 0, "chief")),
        ({"worker": ["a:1"]}, ("worker", 0), JobConfig(("a:1",), 0, "chief")),
        ({"worker": ["a:1", "b:1"]}, ("evaluator", 0), JobConfig(("a:1", "b:1"), 0, "evaluator")),
        ({"worker": ["a:1"], "evaluator": ["e:1"]}, ("evaluator", 0), JobConfig(("a:1",), 0, "evaluator")),
        (
            {"worker": ["[::1]:1", "1.0.0.1:65535"]},
            ("worker", 0),
            JobConfig(("[::1]:1", "1.0.0.1:65535"), 0, "chief"),
        ),
    ],
)
def test_ranks_follow_tensorflows_rule(cluster: dict[str, list[str]], task: tuple[str, int], job: JobConfig) -> None:
    assert parse({"cluster": cluster, "task": {"type": task[0], "index": task[1]}, "environment": "cloud"}) == job


def test_only_rank_0_that_trains_is_the_chief() -> None:
    chief, worker, evaluator = (
        JobConfig(("a:1", "b:1"), rank, role) for rank, role in [(0, "chief"), (1, "worker"), (0, "evaluator")]
    )
    assert [job.is_chief for job in (chief, worker, evaluator)] == [True, False, False]
    assert [job.peers for job in (chief, worker, evaluator)] == [("b:1",), ("a:1",), ("a:1", "b:1")]
    assert evaluator.num_workers == 2


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_written_tf_config_is_read_again(rank: int) -> None:
    addresses = ("a:1", "b:1", "c:1")
    job = tf_config.parse(tf_config.to_tf_config(addresses, rank))
    assert job == JobConfig(addresses, rank, "worker" if rank else "chief")


CLUSTER_MISTAKES = {
    "no cluster": (
        None,
        'TF_CONFIG must have a "cluster" that lists the addresses of all workers, received None; write',
    ),
    "ps": ({"worker": ["a:1"], "ps": ["b:1"]}, "received 'ps'; tfpar has no parameter servers, so leave it out."),
    "unknown": (
        {"worker": ["a:1"], "master": ["b:1"]},
        "\"cluster\" may have chief, worker, evaluator, received 'master'",
    ),
    "no list": (
        {"worker": "a:1"},
        "\"cluster\" must give each job type a list of addresses, received 'a:1' for 'worker'",
    ),
    "two chiefs": (
        {"chief": ["a:1", "b:1"], "worker": ["c:1"]},
        "must have at most one chief, received 2: ['a:1', 'b:1']",
    ),
    "nobody trains": ({"evaluator": ["a:1"]}, '"cluster" must have a worker or a chief, received evaluator only'),
    "twice": ({"chief": ["a:1"], "worker": ["b:1", "a:1"]}, "must name each address once, received 'a:1' 2 times"),
    "no port": ({"worker": ["a:1", "b"]}, "The address of worker 1 must be text as \"host:port\", received 'b'; write"),
    "port 0": ({"worker": ["a:0"]}, "The port of worker 0 must be from 1 to 65535, received 'a:0'; choose"),
}


@pytest.mark.parametrize(("cluster", "message"), CLUSTER_MISTAKES.values(), ids=CLUSTER_MISTAKES)
def test_a_mistake_in_the_cluster_is_named(cluster: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the whole message is compared below
        parse({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    assert message in str(caught.value)


TASK_MISTAKES = {
    "no task": (None, 'TF_CONFIG must have a "task" that says which worker this is, received None; write'),
    "unknown": (
        {"type": "ps", "index": 0},
        '"type" of "task" must be one of chief, worker, evaluator, received \'ps\'',
    ),
    "absent": (
        {"type": "chief", "index": 0},
        "must be in \"cluster\", received 'chief', and there are: worker; list",
    ),
    "no index": ({"type": "worker"}, 'The "index" of "task" must be a whole number, received none; write'),
    "high": ({"type": "worker", "index": 2}, 'must be from 0 to 1, as "cluster" has 2 worker(s), received 2; correct'),
    "evaluator": (
        {"type": "evaluator", "index": 1},
        'must be from 0 to 0, as "cluster" has 1 evaluator(s), received 1',
    ),
}


@pytest.mark.parametrize(("task", "message"), TASK_MISTAKES.values(), ids=TASK_MISTAKES)
def test_a_mistake_in_the_task_is_named(task: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the whole message is compared below
        parse({"cluster": {"worker": ["a:1", "b:1"]}, "task": task})
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_each_of_several_mistakes_has_a_separate_line() -> None:
    with pytest.raises(ValueError, match="must have at most one chief") as caught:
        parse({"cluster": {"chief": ["a:1", "a:1"], "ps": ["p"], "worker": ["b"]}, "task": {"type": "work"}})
    assert [line.split(",")[0] for line in str(caught.value).splitlines()] == [
        '"cluster" must have at most one chief',
        '"cluster" may have chief',
        'The address of worker 0 must be text as "host:port"',
        '"cluster" must name each address once',
        'The "type" of "task" must be one of chief',
        'The "index" of "task" must be a whole number',
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"cluster": }', "TF_CONFIG must be JSON, received '{\"cluster\": }': Expecting value at line 1, column 13; "),
        (
            "",
            "TF_CONFIG must be JSON, received '': Expecting value at line 1, column 1; correct it, or unset TF_CONFIG",
        ),
        ("{'cluster': 1}", "Expecting property name enclosed in double quotes at line 1, column 2; correct it"),
        ('["a:1"]', 'TF_CONFIG must be an object with "cluster" and "task", received ["a:1"]; write it so, or unset'),
    ],
)
def test_invalid_json_is_named_with_its_position(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the whole message is compared below
        tf_config.parse(text)
    assert message in str(caught.value)


# Slurm's variables


def step(**changes: str | None) -> dict[str, str]:
    """Variables of task 2 of a step of 3 tasks on 2 nodes, as Slurm 22.05 set them; None leaves one out."""
    variables = {
        "SLURM_JOB_ID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1",
        "SLURM_NTASKS": "3",
        "SLURM_PROCID": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "node[01-02]",
        "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
    }
    return {name: value for name, value in (variables | changes).items() if value is not None}


def test_a_task_of_a_slurm_step_knows_all_addresses() -> None:
    addresses = ("node01:20128", "node01:20129", "node02:20128")
    assert tf_config.from_environment(step()) == JobConfig(addresses, 2, "worker")
    first = step(SLURM_PROCID="0", SLURM_NODEID="0")
    assert tf_config.from_environment(first) == JobConfig(addresses, 0, "chief")


def test_tf_config_comes_before_slurm() -> None:
    assert tf_config.from_environment(step(TF_CONFIG=json.dumps(TWO_WORKERS))) == JobConfig(("a:1", "b:1"), 1, "worker")


def test_the_shell_of_a_batch_script_is_no_step() -> None:
    shell = {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert tf_config.from_environment(shell) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"SLURM_STEP_NODELIST": None},
            "must have SLURM_STEP_NODELIST, and it is not set. Keep the variables that srun",
        ),
        ({"SLURM_STEP_NODELIST": "node[01-"}, r"such as node\[01-03,7\],gpu1, received 'node\[01-'. Start the command"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2x"}, r"as Slurm writes them, such as 2\(x3\),1, received '2x'. Start"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, r"same tasks, received 2 node\(s\), tasks \[2\] and 3 task\(s\)"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, r"same tasks, received 2 node\(s\), tasks \[2, 1\] and 4 task\(s\)"),
        ({"SLURM_PROCID": "two"}, "SLURM_PROCID must be a whole number, received 'two'. Keep the variables"),
        ({"SLURM_PROCID": "1"}, "received task 1 as number 0 of node 1 .* Start them with srun --distribution=block"),
        ({"SLURM_PROCID": "3"}, "received task 3 as number 0 of node 1 .* Start them with srun --distribution=block"),
    ],
)
def test_slurm_variables_that_cannot_be_true_are_refused(changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tf_config.from_environment(step(**changes))


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("node[01-03,7],gpu1", ["node01", "node02", "node03", "node7", "gpu1"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("rack[1-2]node[1-2]", ["rack1node1", "rack1node2", "rack2node1", "rack2node2"]),
        ("b[2,1],a.example", ["b2", "b1", "a.example"]),
    ],
)
def test_lists_of_hosts_are_expanded(hostlist: str, hosts: list[str]) -> None:
    assert slurm.expand_hosts(hostlist) == hosts


@pytest.mark.parametrize("hostlist", ["", "a,", "a,,b", "n[1-2", "n1]", "n[]", "n[a-b]", "n[1-2-3]", "a b"])
def test_malformed_lists_of_hosts_are_refused(hostlist: str) -> None:
    with pytest.raises(ValueError, match="A list of hosts must be as Slurm writes it"):
        slurm.expand_hosts(hostlist)


@pytest.mark.parametrize(("text", "tasks"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2])])
def test_tasks_per_node_are_expanded(text: str, tasks: list[int]) -> None:
    assert slurm.expand_tasks(text) == tasks


def test_ports_of_near_jobs_and_their_steps_differ_and_are_never_given_to_others() -> None:
    ports = {slurm.first_port(job_id, step_id) for job_id in range(1000, 1020) for step_id in range(5)}
    assert len(ports) == 20 * 5
    every = [slurm.first_port(job_id, 0) for job_id in range(1000)]
    assert min(every) == 20000
    assert max(every) + slurm.PORTS_A_STEP <= 32768, "Linux hands out ports from 32768 on"


# Ports and missing workers


def test_a_taken_port_is_named(listener: socket.socket) -> None:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    message = rf"^The port of this worker must be free, and {address} \(rank 1\) is taken: Address already in use\. End"
    with pytest.raises(OSError, match=message):
        tf_config.check_port_free(JobConfig(("10.0.0.1:1", address), 1, "worker"))


def test_a_port_is_free_although_connections_of_an_ended_job_wait_on_it(free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)) as server:
        client = socket.create_connection(("127.0.0.1", free_port))
        served, _ = server.accept()
        served.close()  # the side that closes first keeps the port waiting
        client.close()
    tf_config.check_port_free(JobConfig((f"127.0.0.1:{free_port}",), 0, "chief"))


@pytest.mark.parametrize("host", ["192.0.2.1", "a" * 70])
def test_the_port_of_another_machines_address_is_not_tried(host: str, listener: socket.socket) -> None:
    tf_config.check_port_free(JobConfig((f"{host}:{listener.getsockname()[1]}",), 0, "chief"))


def test_an_evaluator_needs_no_port(listener: socket.socket) -> None:
    tf_config.check_port_free(JobConfig((f"127.0.0.1:{listener.getsockname()[1]}",), 0, "evaluator"))


def test_missing_workers_are_named(listener: socket.socket, free_port: int) -> None:
    here, missing = f"127.0.0.1:{listener.getsockname()[1]}", f"127.0.0.1:{free_port}"
    addresses = ("127.0.0.1:1", here, missing)
    assert reachability.unreachable(JobConfig(addresses, 0, "chief"), seconds=5) == (missing,)
    assert reachability.unreachable(JobConfig((missing, here), 0, "evaluator"), seconds=5) == (missing,)
    assert reachability.unreachable(JobConfig((missing,), 0, "chief"), seconds=5) == ()


def test_a_worker_whose_host_is_unknown_is_missing() -> None:
    addresses = ("127.0.0.1:1", "a" * 70 + ":1")
    assert reachability.unreachable(JobConfig(addresses, 0, "chief"), seconds=5) == (addresses[1],)


def test_a_worker_that_never_answers_is_missing_after_the_time_limit() -> None:
    with socket.socket() as bound:  # takes no connection, as it does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        assert reachability.unreachable(JobConfig(("127.0.0.1:1", address), 0, "chief"), seconds=0.5) == (address,)


@pytest.mark.parametrize("module", ["cluster.tf_config", "cluster.slurm", "launcher.manifests"])
def test_none_of_it_waits_for_tensorflow(module: str) -> None:
    code = f"import sys, tfpar.{module}; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
