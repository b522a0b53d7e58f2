"""Who is served where on a cluster, what a worker gets, what travels, and what happens when machines or actors die."""

import socket
import threading

import pytest
import ray
from flwr.app import Message, RecordDict
from ray.exceptions import ActorDiedError, GetTimeoutError

from flwr_replay.api import Where, start
from flwr_replay.config.compose import compose
from flwr_replay.engines.cluster import grid as cluster
from flwr_replay.engines.cluster import machines
from flwr_replay.engines.cluster.grid import ClusterGrid
from flwr_replay.engines.cluster.machines import Machine, Share, connected, place, share
from flwr_replay.engines.cluster.on_cluster import LARGEST, ship
from flwr_replay.engines.simulate import Simulation, run_inline, run_ray
from flwr_replay.engines.workers import TRIES
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.report.progress import Display

A, B = Machine("a", "10.0.0.1", 16, 4), Machine("b", "10.0.0.2", 16, 4)


@pytest.mark.parametrize(
    ("nodes", "options", "gpus"),
    [
        (4, [], 1),  # as many GPUs as there are, one each
        (8, [], 1),
        (12, [], 0.5),  # two workers on a GPU
        (100, [], 0.25),  # no more workers than cores
        (12, ["device=cpu"], 0),
        (12, ["client-gpus=2"], 2),
    ],
)
def test_gpus_are_shared_out(nodes, options, gpus):
    assert share(compose([f"nodes={nodes}", *options]), [A, B]) == Share(1, gpus)


def test_a_worker_never_gets_parts_of_two_gpus():
    assert [Share(1, gpus).fits(A) for gpus in (0, 0.25, 0.3, 0.6, 1, 2, 3)] == [16, 16, 12, 4, 4, 2, 1]
    assert Share(0.5, 0).fits(A) == 32
    assert Share(1, 0.1).fits(Machine("c", "", 99, 1)) == 10  # in floating point, too


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["client-gpus=5"], "client-cpus=1 and client-gpus=5; there are 10.0.0.1 .16 CPUs, 4 GPUs., 10.0.0.2"),
        (["threads=17"], "client-cpus=17"),
        (["device=cuda:1"], "device is auto, cpu or cuda; got cuda:1"),
        (["device=cpu", "client-gpus=1"], "client-gpus must be 0 with device=cpu; got 1"),
    ],
)
def test_what_no_machine_has_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        share(compose(["nodes=4", *options]), [A, B])


def test_cuda_needs_a_gpu():
    with pytest.raises(ConfigError, match="device=cuda needs machines with GPUs"):
        share(compose(["nodes=4", "device=cuda"]), [Machine("a", "10.0.0.1", 16, 0)])


@pytest.mark.parametrize(
    "option",
    ["client-gpus=1.5", "client-gpus=-1", "client-gpus=inf", "client-cpus=-1", "client-gpus=1e-5", "client-cpus=1e-5"],
)
def test_impossible_shares_are_refused(option):
    with pytest.raises(ConfigError, match=option.partition("=")[0]):
        compose([option])


def test_institutions_stay_where_their_state_lies_and_the_others_even_the_load():
    assert place(6, {"a": 2, "b": 4}, {}) == ["b", "a", "b", "b", "a", "b"]
    assert place(6, {"a": 2, "b": 4}, {0: "a", 1: "a", 2: "a"}) == ["a", "a", "a", "b", "b", "b"]


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("10.0.0.1", "--ray-address, else RAY_ADDRESS, is auto or HOST:PORT; got '10.0.0.1'"),
        ("ray://10.0.0.1:10001", "is auto or HOST:PORT; got 'ray://10.0.0.1:10001'"),
        ("127.0.0.1:1", "a Ray cluster must run at 127.0.0.1:1; it does not answer"),
    ],
)
def test_an_address_without_a_cluster_is_one_line(address, reason):
    with pytest.raises((ConfigError, RunError), match=reason), connected(address, {}):
        pass


def test_an_address_where_something_else_answers_is_one_line_before_ray_tries_for_minutes(monkeypatch):
    monkeypatch.setattr(machines, "PATIENCE", 0.5)
    monkeypatch.setattr(ray, "init", lambda *given, **options: pytest.fail("Ray was asked"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RunError, match=f"at {address}; something else answers there"), connected(address, {}):
            pass


def test_an_address_belongs_to_ray(monkeypatch):
    with pytest.raises(ConfigError, match="--ray-address belongs to --engine ray; got auto with inline"):
        Where(ray_address="auto")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert Where("ray").address == "10.0.0.1:6379"
    assert Where("ray", ray_address="auto").address == "auto"
    assert not Where("inline").address


def test_shares_belong_to_ray(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    options = ["strategy=fedavg", "nodes=2", "rounds=1", f"runs_dir='{tmp_path / 'runs'}'"]
    with pytest.raises(ConfigError, match="belong to --engine ray; got client-cpus=2 and client-gpus=0"):
        run_inline([*options, "client-cpus=2"], Display())
    with pytest.raises(ConfigError, match="belong to --engine ray; got client-gpus=1: leave them out"):
        start(["client-gpus=1"], Where(workers=2), "runs", str(tmp_path / "begun"), Display())
    options = [*options, "client-cpus=9999"]
    with pytest.raises(ConfigError, match="this machine must have client-cpus=9999"):
        run_ray(Simulation.of(compose(options)), options)
    options = [*options[:-1], "client-cpus=0.5"]
    with pytest.raises(ConfigError, match=r"must be whole on this machine, .*; got 0.5: a share needs a"):
        run_ray(Simulation.of(compose(options)), options)
    assert not list(tmp_path.iterdir())


# --- what travels -----------------------------------------------------------------------------------------------------


def test_the_package_travels_as_in_a_wheel_and_code_of_ones_own_without_what_is_none(tmp_path, monkeypatch):
    work, scratch = tmp_path / "work", tmp_path / "scratch"
    for name in ("mine/nets.py", "mine/data.csv", "mine/words.json", ".git/x.py", "env/pyvenv.cfg", "env/a.py"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("")
    (work / "runs" / "one").mkdir(parents=True)
    (work / "runs" / "one" / "run-id").write_text("")
    (work / "runs" / "one" / "config.yaml").write_text("")
    scratch.mkdir()
    monkeypatch.chdir(work)
    environment = ship(scratch, own=True)
    assert environment == {"py_modules": [str(scratch / "flwr_replay")], "working_dir": str(scratch / "own")}
    for name in ("strategies/cwt.py", "clients/cwt.py", "conf/config.yaml", "engines/cluster/grid.py"):
        assert (scratch / "flwr_replay" / name).exists()
    paths = sorted(str(path.relative_to(scratch / "own")) for path in (scratch / "own").rglob("*") if path.is_file())
    assert paths == ["mine/nets.py", "mine/words.json"]


def test_too_much_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open(tmp_path / "large.json", "wb") as file:
        file.truncate(LARGEST + 1)
    (tmp_path / "scratch").mkdir()
    with pytest.raises(ConfigError, match=r"at most 10 MB; .* has more: start in a folder that holds your code alone"):
        ship(tmp_path / "scratch", own=True)


# --- deaths -----------------------------------------------------------------------------------------------------------


def grid_of(machines, monkeypatch, pinned=False):
    """Return a grid of four institutions, with a worker on each GPU, and the machines that live."""
    alive = list(dict.fromkeys(machines))
    monkeypatch.setattr(cluster, "living", lambda: alive)
    names = [f"institution-{k + 1}" for k in range(len(machines))]
    grid = ClusterGrid(
        {}, names, machines, Share(1, 1), own_code=(), wait=7, pinned=pinned, engine="", advice="resume it"
    )
    return grid, alive


def message_to(grid, node_id):
    message = grid.create_message(RecordDict(), "train", node_id, "1")
    message.metadata.__dict__["_message_id"] = f"message-{node_id}"
    return message


def test_a_dead_machines_workers_go_where_there_is_room(monkeypatch):
    grid, alive = grid_of([A, B, A, B], monkeypatch)
    assert len(grid.actors) == 4
    alive.remove(B)
    orphan = grid.serving[3]
    assert grid.moved(orphan, message_to(grid, 3))
    assert orphan.machine == A
    assert grid.serving[3] is orphan


def test_without_room_the_others_serve_a_dead_machines_institutions(monkeypatch):
    a, b = Machine("a", "10.0.0.1", 16, 1), Machine("b", "10.0.0.2", 16, 2)
    grid, alive = grid_of([a, b, a, b], monkeypatch)
    assert [len(actor.names) for actor in grid.actors] == [2, 1, 1]
    alive.remove(b)
    orphan, waiting = grid.serving[3], message_to(grid, 3)
    orphan.queue.put(later := message_to(grid, 3))
    assert not grid.moved(orphan, waiting)
    other = grid.serving[3]
    assert other.machine == a
    assert [other.queue.get(), other.queue.get()] == [waiting, later]
    alive.clear()
    assert not grid.moved(other, waiting)
    with pytest.raises(RunError, match="must have a machine with room for a worker; all have died; resume it"):
        grid.pull_messages([])


def test_institutions_that_are_pinned_go_nowhere(monkeypatch):
    grid, alive = grid_of([A, B, A, B], monkeypatch, pinned=True)
    alive.remove(B)
    assert not grid.moved(grid.serving[3], message_to(grid, 3))
    with pytest.raises(
        RunError, match=r"machine 10\.0\.0\.2, which has the state of institution-2, must live; it has died"
    ):
        grid.pull_messages([])


@pytest.mark.parametrize("gone", [False, True])
def test_a_head_that_answers_no_more_ends_the_run_in_one_line_before_ray_ends_the_process(monkeypatch, gone):
    monkeypatch.setattr(cluster, "LOOK", 0.02)
    monkeypatch.setattr(cluster, "SILENT", 0.1)
    monkeypatch.setattr(ray, "kill", lambda actor: pytest.fail("Ray was asked, which waits for the head"))
    grid, _ = grid_of([A, B], monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        if not gone:
            threading.Timer(0.5, grid.over.set).start()
            grid.watch(address)
            assert not grid.headless
            assert grid.pull_messages([]) == []
            return
    grid.watch(address)
    with pytest.raises(RunError, match=f"the head of the Ray cluster must live; {address} has not .*; resume it"):
        grid.pull_messages([])
    for actor in grid.actors:
        actor.end(at_once=True)


class Dying:
    """Stands in for Ray: every actor dies, so many of them with a message."""

    def __init__(self, actor, monkeypatch, with_message, fault=ActorDiedError):
        self.actor, self.left, self.started, self.fault = actor, with_message, 0, fault
        monkeypatch.setattr(actor, "start", self.start)
        monkeypatch.setattr(actor, "kill", lambda: None)
        monkeypatch.setattr(actor, "ask", self.ask)

    def start(self):
        self.started += 1
        self.actor.ready = False

    def ask(self, message):
        if self.left is None:
            raise self.fault
        self.actor.ready = True
        if self.left:
            self.left -= 1
            raise self.fault
        return Message(RecordDict(), reply_to=message)


@pytest.mark.parametrize("deaths", [1, TRIES, TRIES + 1])
def test_a_message_with_which_several_actors_die_is_an_error_of_its_node(monkeypatch, deaths):
    grid, _ = grid_of([A, B], monkeypatch)
    actor, message = grid.serving[2], message_to(grid, 2)
    ray = Dying(actor, monkeypatch, deaths)
    actor.start()
    with pytest.raises(ActorDiedError) as died:
        actor.ask(message)
    reply = actor.lost(message, died.value)
    assert reply.has_error() == (deaths > TRIES)
    assert ray.started == deaths + 1  # the last one serves on


def test_a_worker_that_cannot_start_ends_the_run(monkeypatch):
    grid, _ = grid_of([A, B], monkeypatch)
    actor, message = grid.serving[2], message_to(grid, 2)
    Dying(actor, monkeypatch, None)
    actor.start()
    assert actor.lost(message, ActorDiedError()) is None
    with pytest.raises(RunError, match=r"a worker must start on 10\.0\.0\.1; it ended: .*; resume it"):
        grid.pull_messages([])


def test_a_worker_that_finds_no_room_ends_the_run(monkeypatch):
    grid, _ = grid_of([A, B], monkeypatch)
    actor, message = grid.serving[2], message_to(grid, 2)
    Dying(actor, monkeypatch, None)
    actor.start()
    assert actor.lost(message, GetTimeoutError("late")) is None
    with pytest.raises(RunError, match=r"must start within wait=7 s; the one on 10\.0\.0\.1 has not"):
        grid.pull_messages([])
