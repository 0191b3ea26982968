"""The board, local and on JAX's coordination service, and the agreements of processes through it."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tlt_jax import cli
from tlt_jax.config import Config
from tlt_jax.config.schema import Processes
from tlt_jax.distributed import job as jobs, mesh as meshes, process, watch as watches_module
from tlt_jax.distributed.board import (
    FINISHED,
    INTERRUPTED,
    POLL_S,
    REPORT_S,
    Ending,
    LocalBoard,
    ServiceBoard,
)
from tlt_jax.distributed.job import Job, ProcessPlace
from tlt_jax.distributed.watch import BEAT_S, Watch
from tlt_jax.errors import ConfigError
from tlt_jax.rollout.scheduler.queue import WorkQueue
from tlt_jax.simulate.simulator import VirtualClock


@pytest.fixture(scope="module")
def service():
    """The address of a coordination service for one process."""
    from jax._src.lib import _jax

    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = f"localhost:{free.getsockname()[1]}"
    running = _jax.get_distributed_runtime_service(place, 1)
    yield place
    running.shutdown()


@pytest.fixture(scope="module")
def client(service):
    """The client of the service."""
    from jax._src.lib import _jax

    client = _jax.get_distributed_runtime_client(service, 0, init_timeout=30)
    client.connect()
    yield client
    client.shutdown()


@pytest.fixture(params=["local", "service"])
def board(request):
    """An empty board of each kind."""
    if request.param == "local":
        return LocalBoard()
    return ServiceBoard(request.getfixturevalue("client"), f"{request.node.name}/")


class Counted(LocalBoard):
    """A board that counts its calls, and the values and characters that are read."""

    def __init__(self):
        super().__init__()
        self.calls, self.read, self.characters = 0, 0, []

    def texts(self, prefix):
        found = super().texts(prefix)
        self.calls, self.read = self.calls + 1, self.read + len(found)
        self.characters.append(sum(map(len, found.values())))
        return found

    def increment(self, key, by=1):
        self.calls += 1
        return super().increment(key, by)


def together(*calls):
    """The results, or errors, of functions that run in separate threads."""
    found = [None] * len(calls)

    def keep(index, call):
        try:
            found[index] = call()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=keep, args=one) for one in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def test_counters_add_and_first_texts_stay(board):
    assert [board.increment("a/n", by) for by in (1, 5)] == [1, 6]
    assert board.counters("a/") == {"a/n": 6}
    assert board.first("a/t/x", "one") == board.first("a/t/x", "two") == "one"
    board.write("a/t/y", "")
    board.write("a/t/y", "new")
    assert board.texts("a/t/") == {"a/t/x": "one", "a/t/y": "new"} and board.texts("b/") == {}
    board.delete("a/t/")
    assert board.texts("a/") == {"a/n": "6"}


def test_every_increment_of_many_threads_counts(board):
    ends = together(*[lambda: [board.increment("a/n", 2) for _ in range(50)]] * 4)
    assert sorted(end for one in ends for end in one) == list(range(2, 401, 2))


def test_all_processes_do_what_the_first_wants(board):
    first, second = (Job(index, 2, board) for index in range(2))
    wanted = [True, False, False, True, True]
    ours, theirs = together(
        lambda: [first.decided(one) for one in wanted],
        lambda: [second.decided(not one) for one in wanted],
    )
    assert ours == theirs == wanted
    assert Job().decided(True) and not Job().decided(False)


def test_all_processes_stop_together_when_one_wants_to(board):
    jobs_ = [Job(index, 2, board) for index in range(2)]
    update = threading.Barrier(2)  # a collective of both

    def run(job):
        for step, want in enumerate([False, False, True, True, True]):
            if not job.meeting().goes_on(lambda want=want: job.index == 1 and want):
                return step
            update.wait(30)
        return None

    ours, theirs = together(*(lambda job=job: run(job) for job in jobs_))
    assert ours == theirs == 2, "both stop at the step of the signal"


def test_processes_continue_after_a_meeting_only_when_all_arrived_with_complete_scores(board):
    """One process is interrupted at a random time, also while others wait for it or after they arrived."""
    for seed in range(30):
        jobs_ = [Job(index, 3, board, met=10 * seed) for index in range(3)]  # other keys
        moments = np.random.default_rng(seed).uniform(0, 0.004, 3)
        told = threading.Event()

        def run(job, works=moments, told=told):
            def interrupted():
                return job.index == 1 and told.is_set()

            meeting, end = job.meeting(), time.monotonic() + works[job.index]
            while time.monotonic() < end:  # scores arrive
                if meeting.stops(interrupted()):
                    return "partial", meeting.goes_on(interrupted)
            return "whole", meeting.goes_on(interrupted)

        late = float(np.random.default_rng(seed + 99).uniform(0, 0.005))
        (signal := threading.Timer(late, told.set)).start()
        found = together(*(lambda job=job: run(job) for job in jobs_))
        signal.cancel()
        assert len({goes_on for _, goes_on in found}) == 1, "all decide the same"
        if found[0][1]:
            assert {kind for kind, _ in found} == {"whole"}, "none continues with partial scores"


def test_a_meeting_exchanges_the_texts_of_all(board):
    jobs_ = [Job(index, 3, board) for index in range(3)]
    texts = ["", "a shard is damaged", ""]
    calls = [lambda job=job: job.meeting().heard(texts[job.index]) for job in jobs_]
    assert together(*calls) == [{1: "a shard is damaged"}] * 3
    calls = [lambda job=job: job.meeting().heard(str(job.index)) for job in jobs_]
    assert together(*calls) == [{0: "0", 1: "1", 2: "2"}] * 3
    assert not board.texts("met/1/") and not board.texts("said/1/"), "all keys are deleted"
    assert Job().meeting().heard("alone") == {0: "alone"} and Job().meeting().heard("") == {}


def test_a_waiting_process_calls_alive(board):
    first, second = (Job(index, 2, board) for index in range(2))
    looks, enough = [], threading.Event()

    def alive():
        looks.append(0)
        if len(looks) > 3:
            enough.set()

    first.alive = second.alive = alive
    for waiting, late in (
        (lambda: second.decided(True), lambda: first.decided(True)),
        (lambda: first.meeting().goes_on(), lambda: second.meeting().goes_on()),
    ):
        looks.clear(), enough.clear()
        found = together(waiting, lambda late=late: enough.wait(30) and late())
        assert found == [True, True] and len(looks) > 3


def test_a_process_with_different_facts_is_named_in_every_process(board):
    facts = [{"seed": 0, "data": "x"}, {"seed": 0, "data": "x"}, {"seed": 1, "data": "x"}]
    calls = [lambda i=i: Job(i, 3, board).agree(facts[i]) for i in range(3)]
    expected = "process 2 has seed 1, process 0 has 0: start all with the same"
    assert [str(error) for error in together(*calls)] == [expected] * 3
    jobs_ = [Job(i, 3, board, met=10) for i in range(3)]  # other keys
    assert together(*(lambda job=job: job.agree(facts[0]) for job in jobs_)) == [None] * 3
    assert not board.texts("loaded/")


def test_a_process_that_has_not_loaded_is_logged_and_then_named_in_the_error(
    board, monkeypatch, caplog
):
    caplog.set_level("INFO")
    monkeypatch.setattr(jobs, "LOADED_S", 0.3)
    monkeypatch.setattr(jobs, "LOG_EVERY_S", 0.05)
    calls = [lambda i=i: Job(i, 9, board).agree({}) for i in (0, 2)]
    (one, two) = map(str, together(*calls))
    missing = "process 1, 3, 4, 5 and 3 more of 9 to load model and data"
    assert one == two == f"waited 0 s for {missing}: see their output"
    assert f"waiting since 0 s for {missing}" in caplog.text


def test_processes_with_the_same_facts_read_few_bytes_each():
    """40 processes with facts of 100 kB: the facts themselves are never read, and all keys are deleted."""
    board, facts = Counted(), {"knobs": "x" * 100_000}
    jobs_ = [Job(index, 40, board) for index in range(40)]
    assert together(*(lambda job=job: job.agree(facts) for job in jobs_)) == [None] * 40
    assert max(board.characters) < 100 and not board.texts("loaded/")


def test_decisions_are_deleted_from_the_board_once_all_have_met(board):
    jobs_ = [Job(index, 2, board) for index in range(2)]

    def run(job):
        for _ in range(3):
            assert job.decided(True)
            assert job.meeting().goes_on()
        return len(board.texts("decided/")) if job.is_first else None

    assert together(*(lambda job=job: run(job) for job in jobs_)) == [0, None]


class Devices:
    """process_allgather of `processes` threads; records the sizes of its calls, in bytes."""

    def __init__(self, processes: int):
        self.barrier, self.held, self.asked = threading.Barrier(processes), {}, []

    def __call__(self, array: np.ndarray) -> np.ndarray:
        index = int(threading.current_thread().name)
        self.held[index] = array
        self.barrier.wait(30)
        found = np.stack([self.held[one] for one in sorted(self.held)])
        self.asked.append(found.nbytes)
        self.barrier.wait(30)
        return found


def test_data_is_gathered_in_pieces_of_bounded_size(monkeypatch):
    """Parts of 0 bytes up to many pieces, and lengths of more than one word."""
    monkeypatch.setattr(jobs, "GATHERED_BYTES", 4096)
    monkeypatch.setattr(jobs, "LEAST_PIECE", 64)
    monkeypatch.setattr(jobs, "WORD", 1 << 10)
    devices, board = Devices(4), LocalBoard()
    monkeypatch.setattr(jobs.multihost_utils, "process_allgather", devices)
    random = np.random.default_rng(0)
    for sizes in ((0, 1, 5000, 1024), (0, 0, 0, 0), (2048, 2048, 2048, 2048), (3, 0, 0, 0)):
        parts, found = [random.bytes(size) for size in sizes], {}
        jobs_ = [Job(index, 4, board) for index in range(4)]

        def run(index, jobs_=jobs_, parts=parts, found=found):
            found[index] = jobs_[index].gather(parts[index])

        threads = [threading.Thread(target=run, args=(i,), name=str(i)) for i in range(4)]
        [one.start() for one in threads], [one.join(60) for one in threads]
        assert found == dict.fromkeys(range(4), parts), sizes
        board.delete("met/")
    assert max(devices.asked) == 4096


def test_the_parts_of_spans_within_a_piece_match_a_bytewise_reference():
    draw = np.random.default_rng(0)
    for _ in range(200):
        ends = np.unique(draw.integers(0, 60, 2 * draw.integers(0, 6)))
        spans = [(int(a), int(b)) for a, b in zip(ends[::2], ends[1::2], strict=False)]
        start, width = (int(n) for n in draw.integers(1, 30, 2))
        found = {
            start + at for a, b in jobs.within(spans, start, start + width) for at in range(a, b)
        }
        assert found == {at for a, b in spans for at in range(a, b) if start <= at < start + width}


def test_a_thousand_processes_gather_within_the_same_bound(monkeypatch):
    """64 answers of 16k tokens each, with log-probs: 8 MiB a process."""
    asked = []

    def allgather(array):
        if array.dtype == np.int32:
            return np.broadcast_to(array, (1000, 2))
        asked.append(array.nbytes * 1000)
        return [array[:1]] * 1000  # avoids 8 GiB of test memory

    monkeypatch.setattr(jobs.multihost_utils, "process_allgather", allgather)
    monkeypatch.setattr(jobs, "np", SimpleNamespace(**vars(np) | {"asarray": lambda found: found}))
    job = Job(1, 1000, LocalBoard())
    job.wait = lambda *_: True
    parts = job.gather(bytes(64 * 16_000 * 8))
    assert len(parts) == 1000 and max(asked) <= jobs.GATHERED_BYTES and sum(asked) >= 8e9


# The place of a process


NAMED = {jobs.ADDRESS: "host:1", jobs.COUNT: "4", jobs.INDEX: "3"}


@pytest.mark.parametrize("changes, expected", [
    ({}, ProcessPlace("host:1", 4, 3)),
    (dict.fromkeys(NAMED, ""), None),
    ({jobs.COUNT: "", jobs.INDEX: ""}, None),  # an address alone is for detected clusters
    ({jobs.COUNT: ""}, "but not JAX_NUM_PROCESSES: set all three"),
    ({jobs.ADDRESS: ""}, "but not JAX_COORDINATOR_ADDRESS: set all three"),
    ({jobs.INDEX: "4"}, "JAX_PROCESS_ID 4 is not below JAX_NUM_PROCESSES 4"),
    ({jobs.INDEX: "x"}, "JAX_PROCESS_ID 'x': write whole numbers"),
])  # fmt: skip
def test_the_environment_names_a_place_with_all_variables_or_none(changes, expected):
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            jobs.named(NAMED | changes)
    else:
        assert jobs.named(NAMED | changes) == expected


@pytest.mark.parametrize("environment, expected", [
    ({}, None), ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2), ({"SLURM_STEP_TASKS_PER_NODE": "8"}, 8),
    ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "1"}, 4),
    ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "2"}, 1),
])  # fmt: skip
def test_how_many_processes_share_a_machine(environment, expected):
    assert jobs.processes_of_this_machine(environment) == expected


def test_slurm_is_detected_and_a_single_process_of_a_machine_gets_all_devices(monkeypatch):
    slurm = {"SLURM_JOB_ID": "4099", "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
             "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODEID": "1"}  # fmt: skip
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    address = f"node07:{65535 - 2**12 + 1 + 4099 % 2**12}"
    for tasks, local in (("1(x2)", None), ("2", 0)):
        monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
        monkeypatch.setenv("SLURM_NODEID", "0")
        assert jobs.detected() == ProcessPlace(address, 2, 1, local)
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert jobs.detected() is None, "one process is no job"


@pytest.mark.parametrize("lost_s, expected", [(20.0, 100), (1000.0, 2000)])
def test_jaxs_heartbeat_timeout_is_longer_than_ours(lost_s, expected, monkeypatch):
    """Its default is 100 s for any processes.lost_s."""
    given = {}
    for name, value in ((jobs.ADDRESS, "here:1"), (jobs.COUNT, "2"), (jobs.INDEX, "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **knobs: given.update(knobs))
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    jobs.join(Config(processes=Processes(lost_s=lost_s)))
    assert given["heartbeat_timeout_seconds"] == expected


def test_fake_devices_are_divided_among_processes(monkeypatch):
    config = Config()
    config = config.__class__(mesh=config.mesh.__class__(fake_devices=4))
    monkeypatch.setenv("XLA_FLAGS", f"--a=b {process.COUNT}=4")
    process.share_devices(config, 2)
    assert os.environ["XLA_FLAGS"] == f"--a=b {process.COUNT}=2"
    with pytest.raises(ConfigError, match="fake_devices 4 cannot be shared by 3 processes"):
        process.share_devices(config, 3)


@pytest.mark.parametrize("name", ["JAX_NUM_PROCESSES", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])  # fmt: skip
def test_other_commands_reject_several_processes(name, monkeypatch, capsys):
    monkeypatch.setattr("tlt_jax.cli.set_environment", lambda config: None)
    monkeypatch.setenv(name, "1")
    with cli.prepared(Config()):
        pass
    monkeypatch.setenv(name, "2")
    with cli.prepared(Config(), is_one_of_many=True):
        pass
    with pytest.raises(SystemExit) as stopped, cli.prepared(Config()):
        pass
    assert stopped.value.code == cli.MISTAKE
    assert f"error: {name} is 2: this command runs as one process" in capsys.readouterr().err


def mesh_of(owners: list[list[int]]) -> SimpleNamespace:
    """A mesh whose devices belong to these processes."""
    devices = np.array([[SimpleNamespace(process_index=one) for one in row] for row in owners])
    data, model = devices.shape
    return SimpleNamespace(devices=devices, shape={"data": data, "model": model})


@pytest.mark.parametrize("owners, expected", [
    ([[0, 0], [0, 0], [1, 1]], [2]),
    ([[0, 0], [0, 1], [1, 1]], "mesh.model 2: data group 1 lies on the devices of processes 0, 1: .* set mesh.model to 3"),
    ([[0, 0], [0, 0]], "mesh.data 2 x mesh.model 2 leaves process 1 without a data group: use all 6 devices"),
])  # fmt: skip
def test_a_data_group_belongs_to_one_process(owners, expected, monkeypatch):
    counts = {"process_count": 2, "process_index": 1, "local_device_count": 3, "device_count": 6}
    for name, value in counts.items():
        monkeypatch.setattr(jax, name, lambda value=value: value)
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            meshes.local_groups(mesh_of(owners))
    else:
        assert meshes.local_groups(mesh_of(owners)) == expected


# The end of a rollout


def test_a_rollout_is_finished_once_all_groups_are_idle_and_then_not_interrupted(board):
    one, two = (Ending(3, board, "s", index, 2) for index in range(2))
    one.is_idle(0)
    two.is_idle(2)
    two.is_idle(2)
    assert (one.poll(0.0), two.poll(0.0)) == ("", "")
    two.is_idle(1)
    assert two.how == FINISHED
    assert one.poll(POLL_S / 2) == "", "not every poll reads the board"
    assert one.poll(POLL_S) == FINISHED
    two.interrupt()
    assert two.how == FINISHED


def test_an_interruption_before_the_end_interrupts_all(board):
    one, two = (Ending(2, board, "s", index, 2) for index in range(2))
    one.is_idle(0)
    one.interrupt()
    two.is_idle(1)
    assert (one.how, two.how) == (INTERRUPTED, INTERRUPTED)
    alone = Ending(1)
    alone.is_idle(0)
    assert alone.poll(0.0) == FINISHED


def test_processes_read_the_expected_seconds_of_others_which_decrease_with_time(board):
    one, two, three = (Ending(3, board, "s", index, 3) for index in range(3))
    one.tell(8.0, now=0.0)
    one.tell(5.0, now=REPORT_S / 2)  # too soon
    two.tell(2.0, now=0.0), three.tell(6.0, now=0.0)
    one.poll(now=0.0)
    for other in (two, three):
        other.poll(now=10.0)
        assert other.others(now=10.0) == 8 and other.others(now=13.0) == 5
    assert one.others(now=0.0) == 6, "of the others, without its own"
    one.tell(4.0, now=REPORT_S)
    one.poll(now=REPORT_S)
    two.poll(now=20.0)
    assert two.others(now=20.0) == pytest.approx(6.0 - REPORT_S)


def test_a_poll_of_the_end_reads_two_values_for_any_number_of_processes():
    board = Counted()
    endings = [Ending(1000, board, "s", index, 1000) for index in range(1000)]
    for index, ending in enumerate(endings):
        ending.tell(float(index), now=0.0)
    polls = [POLL_S * (1 + number) for number in range(10)]  # within half a second
    for now in polls:
        for ending in endings:
            ending.poll(now)
    assert board.read <= 1000 + 2 * 1000 * len(polls)
    assert endings[5].others(polls[-1]) == pytest.approx(999 - (polls[-1] - POLL_S), abs=0.1)
    assert endings[999].others(polls[-1]) == pytest.approx(998 - (polls[-1] - POLL_S), abs=0.1)


def test_a_queue_of_whole_prompts_costs_a_message_and_stealing_one_more():
    board = Counted()
    one, two = (WorkQueue(board, "s", prompts=64, samples=4) for _ in range(2))
    assert len(one.take(4 * 32).samples) == 4 * 32 and board.calls == 1
    assert len(two.take(4 * 31).samples) == 4 * 31 and board.calls == 2
    taken = two.take(8)
    assert taken.samples == [(63, sample) for sample in range(4)] and taken.is_exhausted
    assert board.calls == 4, "a claim, and a read of the waiting samples"


def test_a_process_takes_samples_that_wait_for_rows_of_another():
    board = LocalBoard()
    one, two = (WorkQueue(board, "s", prompts=1, samples=4) for _ in range(2))
    assert one.take(1).samples == [(0, 0)]
    assert two.take(2)[:3] == ([(0, 1), (0, 2)], frozenset(), False)
    assert two.take(2)[:3] == ([(0, 3)], frozenset(), True)
    assert one.take(1, prefilled=[0])[:3] == ([], frozenset([0]), True)


def test_queues_give_no_prompt_beyond_their_bound_and_every_sample_below_it_once(board):
    """Processes that claim at once may claim prompts beyond the bound: these wait for any of them until it rises."""
    for seed in range(5):
        order, bound = random.Random(seed), SimpleNamespace(now=1)
        queues = [
            WorkQueue(board, f"s{seed}", 9, 3, partial(getattr, bound, "now")) for _ in range(3)
        ]
        found, held = [], [set() for _ in queues]
        for limit in (1, 3, 4, 9):
            bound.now = limit
            is_last = [False] * 3
            while not all(is_last):
                which = order.randrange(3)
                taken = queues[which].take(order.randrange(1, 8), held[which])
                assert all(prompt < limit for prompt, _ in taken.samples)
                assert not (taken.may_get_more and taken.is_exhausted)
                found += taken.samples
                held[which] |= {prompt for prompt, _ in taken.samples}
                held[which] -= taken.started
                is_last[which] = taken.may_get_more or taken.is_exhausted
                assert taken.is_exhausted <= (limit == 9)
            assert sorted(found) == [(p, s) for p in range(limit) for s in range(3)]


# Dead and hanging processes


def watches(board, count=3, **limits):
    """A watch of each process, on one clock; what they leave with is kept."""
    clock, left = VirtualClock(), []
    return clock, left, [
        Watch(Job(index, count, board), leave=lambda *told: left.append(told), clock=clock.now, **limits)
        for index in range(count)
    ]  # fmt: skip


def test_a_process_without_heartbeats_is_named_with_its_phase(board):
    clock, _, (one, two, three) = watches(board, lost_s=20, stuck_s=100)
    two.alive("rollout")
    for watch in (one, two, three):
        watch.beat()
    for clock.time in range(1, 21):
        three.beat()
        assert one.find_failure() is None
        one.beat()
    clock.time = 22
    found = one.find_failure()
    lost = "process 1 was last heard of 21 s ago in phase rollout: it died, or its machine did"
    assert (str(found), found.code) == (lost, 1)
    assert three.find_failure() == found, "the same everywhere, though only process 0 watches all"


def test_a_process_without_any_heartbeat_counts_from_the_start(board):
    clock, _, (one, *_) = watches(board, lost_s=20, stuck_s=100)
    one.beat()
    clock.time = 21
    assert str(one.find_failure()).startswith("process 1 was last heard of 21 s ago in phase start")


def test_a_process_that_beats_but_makes_no_progress_hangs(board):
    clock, _, (one, two, three) = watches(board, lost_s=20, stuck_s=100)
    three.alive("update")
    for clock.time in range(0, 110, 10):
        for watch in (one, two, three):
            if watch is not three:
                watch.alive("update")
            watch.beat()
        assert one.find_failure() is None
    clock.time = 111
    assert str(one.find_failure()) == "process 2 has hung for 111 s in phase update"
    assert three.find_failure() == one.find_failure(), "its own thread ends it"


def test_the_others_notice_that_process_0_is_dead_or_hangs(board):
    for stays_away, reason in ((True, "was last heard of 21 s ago"), (False, "has hung for 101 s")):
        board.delete("watch/")
        clock, _, (one, two, _) = watches(board, lost_s=20, stuck_s=100)
        one.alive("save_checkpoint"), one.beat()
        assert two.find_failure() is None
        for clock.time in range(1, 22 if stays_away else 102):
            if not stays_away:
                one.beat()
            last = two.find_failure()
        assert str(last).startswith(f"process 0 {reason} in phase save_checkpoint")


def test_the_messages_per_second_are_linear_in_the_number_of_processes():
    board = Counted()
    _, _, all_of_them = watches(board, count=100, lost_s=20, stuck_s=100)
    for watch in all_of_them:
        watch.beat()
    board.read = 0
    for watch in all_of_them:
        watch.find_failure()
    assert 0 < board.read <= 3 * 100


def test_a_process_that_raised_is_named_with_its_error(board):
    _, left, (one, two, three) = watches(board)
    recorded = []
    one.record = two.record = three.record = recorded.append
    two.alive("reward")
    with pytest.raises(ZeroDivisionError):
        two.fail(ZeroDivisionError("no\nmore"))
    assert left == [("ZeroDivisionError: no\nmore", 1, 0.0)]
    assert two.find_failure() is None, "not for its own failure"
    failure = one.find_failure()
    assert str(failure) == "process 1 failed in phase reward: ZeroDivisionError: no"
    assert failure == three.find_failure()
    one.end(failure), three.end(failure)
    assert left[1] == (str(failure), 1, 2 * BEAT_S)
    assert left[2] == ("process 1 failed in phase reward: process 0 and log.txt say why", 1, 0.0)
    assert len(recorded) == 1 and recorded[0].startswith(str(failure)), "once, by process 0"
    assert "Traceback" in recorded[0] or "ZeroDivisionError: no\nmore" in recorded[0]


def test_what_others_raise_after_the_first_failure_is_not_the_reason(board, capsys):
    _, left, (one, two, three) = watches(board)
    with pytest.raises(ConfigError):
        three.fail(ConfigError("train.rows 3: use 2"))
    with pytest.raises(RuntimeError):
        one.fail(RuntimeError("a collective was broken off"))
    with pytest.raises(RuntimeError):
        two.fail(RuntimeError("a collective was broken off"))
    reason = "process 2 failed in phase start: train.rows 3: use 2"
    assert "Traceback" not in capsys.readouterr().err, "no traceback of a later error"
    assert [(said, code) for said, code, _ in left[:2]] == [("train.rows 3: use 2", 2), (reason, 2)]


def test_a_broken_collective_is_not_the_reason_when_a_process_was_killed(monkeypatch):
    """The others' collective fails at once; the dead process is found `lost_s` later."""
    monkeypatch.setattr(watches_module, "BEAT_S", 0.02)
    board, left, gone = LocalBoard(), [], threading.Event()

    def leave(said, code, _):
        left.append((said, code))
        gone.set()
        threading.Event().wait(1)  # like an exit, it does not return

    broken = jax.errors.JaxRuntimeError("UNKNOWN: Gloo AllGather failed: connection closed by peer")
    watch = Watch(Job(0, 2, board), lost_s=0.3, leave=leave)
    watch.alive("update")
    board.write("beat/1", '[1, 1, "update"]')
    watch.thread.start()
    failing = threading.Thread(target=lambda: together(lambda: watch.fail(broken)), daemon=True)
    failing.start()
    assert gone.wait(30)
    assert "process 1 was last heard of 0 s ago in phase update: it died" in left[0][0]
    for own in ("RESOURCE_EXHAUSTED: Out of memory", "INVALID_ARGUMENT: shapes"):
        assert not watches_module.is_consequence(jax.errors.JaxRuntimeError(own))
    assert not watches_module.is_consequence(RuntimeError("UNKNOWN: x"))


# The port of process 0


def test_a_port_of_another_program_is_reported_by_all_processes(monkeypatch):
    with socket.create_server(("localhost", 0)) as other:
        taken = f"localhost:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"of process 0 .{taken}. is taken by another"):
            jobs.check_free(taken)
        for name, value in (("ANSWER_S", 0.3), ("PREFACE", b"?"), ("RETRY_S", 0.01)):
            monkeypatch.setattr(jobs, name, value)
        answers = partial(list, (other.accept()[0].sendall(b"SSH-2.0 ") for _ in range(99)))
        threading.Thread(target=answers, daemon=True).start()
        with pytest.raises(ConfigError, match=f"another program than process 0 answers at {taken}"):
            jobs.await_service(taken, 60)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = f"localhost:{free.getsockname()[1]}"
    jobs.check_free(place)
    jobs.await_service(place, 0.1)  # nothing listens: JAX reports its own timeout
    for wrong in ("localhost", "localhost:", "localhost:99999999", ":1"):
        with pytest.raises(ConfigError, match="write HOST:PORT"):
            jobs.split(wrong)
    assert jobs.split("[::1]:80") == ("::1", 80)


def test_a_coordination_service_is_recognized_by_its_answer(service):
    began = time.monotonic()
    jobs.await_service(service, 30)
    assert time.monotonic() - began < 20
