"""The processes of a run: joins them, checks that they agree, lets them meet, and exchanges data between them."""

from __future__ import annotations

import bisect
import errno
import hashlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from tlt_jax.config import Config
from tlt_jax.distributed import process
from tlt_jax.distributed.board import Board, LocalBoard, ServiceBoard
from tlt_jax.errors import ConfigError

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
START_S = 300  # seconds that processes may take to start
LOADED_S = 1800.0  # seconds within which the others must load model and data after the first
LOG_EVERY_S = 20.0  # seconds between two lines about the awaited processes
SHOWN = 4  # most processes that such a line names
# Of `gather`: bytes on a device at a time, least bytes of a process at a time, and the base of the two words of a size.
GATHERED_BYTES, LEAST_PIECE, WORD = 256 << 20, 64 << 10, 1 << 30
JAX_LOST_S = 100  # least heartbeat timeout of JAX's service; it is later than Watch, which names the process and its phase
# Seconds between two polls of the board by a waiting process: at first, and at most.
SOONEST_S, LATEST_S = 0.002, 0.5

T = TypeVar("T")

log = logging.getLogger(__name__)


class ProcessPlace(NamedTuple):
    """The place of a process in its job; `local`: the only device of its machine that it may use (None: all)."""

    address: str
    count: int
    index: int
    local: int | None = None


@dataclass
class Job:
    """The processes that run this command together. All of them call every method except `is_first`.

    `index` of `count`: this process. Process 0 alone writes files and prints.
    """

    index: int = 0
    count: int = 1
    board: Board = field(default_factory=LocalBoard)
    alive: Callable[[], None] = lambda: None  # called at every poll while this process waits
    broadcasts: int = 0  # calls of `told` so far
    met: int = 0  # meetings so far

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's files."""
        return self.index == 0

    def gather(
        self, data: bytes, wanted: Sequence[Sequence[tuple[int, int]]] | None = None
    ) -> list[bytes]:
        """The bytes of every process, in order of its index: a collective over all devices.

        `wanted`: for each process, the ascending (start, end) spans of its bytes to return here; None: all.
        Gathers in pieces, so that a device holds at most GATHERED_BYTES at a time for all processes
        together; a CPU device's memory is the host's.
        """
        if self.count == 1:
            return [data] if wanted is None else [b"".join(data[a:b] for a, b in wanted[0])]
        self.meeting().goes_on()  # a process that waits in a collective cannot call `alive`
        # Two words: JAX's integers have 32 bits, and a step's data may exceed 2 GiB.
        words = multihost_utils.process_allgather(np.array(divmod(len(data), WORD), np.int32))
        sizes = [int(high) * WORD + int(low) for high, low in words.reshape(-1, 2)]
        spans_of = [[(0, size)] for size in sizes] if wanted is None else wanted
        most, parts = max(LEAST_PIECE, GATHERED_BYTES // self.count), [[] for _ in sizes]
        for start in range(0, max(sizes), most):
            left = min(max(sizes) - start, most)
            # Few shapes, since each compiles a program.
            width = min(1 << max(left - 1, 1).bit_length(), most)
            padded, local = np.zeros(width, np.uint8), data[start : start + width]
            padded[: len(local)] = np.frombuffer(local, np.uint8)
            found = np.asarray(multihost_utils.process_allgather(padded))
            for part, row, spans in zip(parts, found, spans_of, strict=True):
                part += [row[a:b].tobytes() for a, b in within(spans, start, start + width)]
            self.alive()
        return [b"".join(part) for part in parts]

    def to_first(self, data: bytes) -> list[bytes]:
        """As `gather`, but only process 0 gets the bytes; the others get an empty list."""
        return self.gather(data) if self.is_first else self.gather(data, [()] * self.count)[:0]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError in every process when facts differ, with the first other process and its first other fact.

        `facts` are JSON-able. Digests are compared; the facts are exchanged only when these differ. Also raises ConfigError
        with the processes that have not called this LOADED_S after the first one.
        """
        if self.count == 1:
            return
        text = json.dumps(facts, default=str, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        self.board.write(f"loaded/by/{self.index:06d}", "")
        if self.is_first:
            self.board.write("loaded/all/digest", digest)
        self.board.increment("loaded/all/processes")
        first = self.wait(self.all_loaded, LOADED_S, self.missing)
        said = self.meeting().heard("" if digest == first else text)
        if self.is_first:
            self.board.delete("loaded/")
        if said:
            others = {index: json.loads(other) for index, other in said.items()}
            (reference,) = self.meeting().heard(text if self.is_first else "").values()
            raise ConfigError(difference(json.loads(reference), others))

    def all_loaded(self) -> str | None:
        """The digest of process 0's facts once all processes have loaded, else None; reads two keys."""
        found = self.board.texts("loaded/all/")
        is_whole = int(found.get("loaded/all/processes", 0)) == self.count
        return found["loaded/all/digest"] if is_whole else None

    def missing(self) -> str:
        """Text that names the processes that have not loaded yet."""
        loaded = {int(key.rpartition("/")[2]) for key in self.board.texts("loaded/by/")}
        late = [index for index in range(self.count) if index not in loaded]
        shown = ", ".join(map(str, late[:SHOWN]))
        more = f" and {len(late) - SHOWN} more" if len(late) > SHOWN else ""
        return f"process {shown}{more} of {self.count} to load model and data"

    def decided(self, wanted: bool) -> bool:
        """Process 0's `wanted`, in all processes; through the board, without a device program."""
        return bool(self.told(wanted))

    def told(self, number: float) -> float:
        """Process 0's `number`, in all processes; through the board, without a device program."""
        if self.count == 1:
            return number
        self.broadcasts += 1
        key = f"decided/{self.broadcasts}/"
        if self.is_first:
            self.board.write(key + "is", repr(float(number)))
            return number
        return float(self.wait(lambda: self.board.texts(key) or None)[key + "is"])

    def meeting(self) -> Meeting:
        """The next meeting of all processes; every process calls this."""
        return Meeting(self)

    def wait(
        self,
        look: Callable[[], T | None],
        seconds: float = math.inf,
        whom: Callable[[], str] | None = None,
    ) -> T:
        """Calls `look` until it returns something, and returns that. Raises ConfigError after `seconds`.

        Polls less often the longer it waits, and calls `alive` at each poll. Process 0 logs `whom` it waits for.
        """
        begin, logged = time.monotonic(), 0.0
        while (found := look()) is None:
            self.alive()
            if (waited := time.monotonic() - begin) > seconds:
                raise ConfigError(f"waited {seconds:.0f} s for {whom()}: see their output")
            if whom and self.is_first and waited > logged + LOG_EVERY_S:
                logged = waited
                log.info("waiting since %.0f s for %s", waited, whom())
            time.sleep(min(max(waited / 10, SOONEST_S), LATEST_S))
        return found


def within(spans: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The parts of ascending spans between start and end, relative to start."""
    found = []
    for a, b in spans[bisect.bisect_right(spans, start, key=lambda span: span[1]) :]:
        if a >= end:
            break
        found.append((max(a, start) - start, min(b, end) - start))
    return found


def difference(first: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]) -> str:
    """Error text: the first process whose facts differ from those of process 0, and its first other fact."""
    index, other = min(others.items())
    name = next(name for name in {**first, **other} if other.get(name) != first.get(name))
    theirs, ours = (repr(one[name]) if name in one else "none" for one in (other, first))
    return f"process {index} has {name} {theirs}, process 0 has {ours}: start all with the same"


def join(config: Config) -> Job:
    """Joins the processes of this command when it was started as several; call before JAX makes its devices.

    The environment names them (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID), or JAX
    detects them: Slurm, Open MPI, Kubernetes, Cloud TPU. Raises ConfigError when only some of the
    environment variables are set.
    """
    place = named(os.environ) or detected()
    if place is None or place.count == 1:
        return Job()
    process.share_devices(config, place.count)
    if place.index == 0:
        check_free(place.address)
    else:
        await_service(place.address, START_S)
    # It would handle SIGTERM instead of us.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            place.address,
            place.count,
            place.index,
            None if place.local is None else [place.local],
            cluster_detection_method="deactivate",
            initialization_timeout=START_S,
            heartbeat_timeout_seconds=max(JAX_LOST_S, round(2 * config.processes.lost_s)),
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"process {place.index} of {place.count} cannot join the others at {place.address}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    return Job(place.index, place.count, ServiceBoard(service()))


def of_caller(config: Config) -> Job:
    """The processes that the caller has joined by jax.distributed.initialize, else those that `join` joins.

    Each call has a board of its own. All processes call it equally often. Raises ConfigError as `join` does.
    """
    if not jax.distributed.is_initialized():
        join(config)
    if jax.process_count() == 1:
        return Job()
    index, client = jax.process_index(), service()
    number = ServiceBoard(client).increment(f"jobs/{index}")
    return Job(index, jax.process_count(), ServiceBoard(client, f"job/{number}/"))


def service() -> Any:
    """The client of jax.distributed's coordination service."""
    from jax._src.distributed import global_state  # there is no public access

    return global_state.client


def named(environment: Mapping[str, str]) -> ProcessPlace | None:
    """The place that the environment names, or None. Raises ConfigError when only some variables are set."""
    found = {name: environment.get(name, "") for name in (ADDRESS, COUNT, INDEX)}
    if not (found[COUNT] or found[INDEX]):
        return None
    if missing := [name for name, value in found.items() if not value]:
        raise ConfigError(
            f"{' and '.join(found.keys() - missing)} is set, but not {' and '.join(missing)}: set all three"
        )
    try:
        count, index = int(found[COUNT]), int(found[INDEX])
    except ValueError as error:
        raise ConfigError(
            f"{COUNT} {found[COUNT]!r}, {INDEX} {found[INDEX]!r}: write whole numbers"
        ) from error
    if not 0 <= index < count:
        raise ConfigError(
            f"{INDEX} {index} is not below {COUNT} {count}: processes are numbered from 0"
        )
    return ProcessPlace(found[ADDRESS], count, index)


def detected() -> ProcessPlace | None:
    """The place that JAX detects under Slurm, Open MPI, Kubernetes or Cloud TPU, or None.

    Of several processes on a machine, each gets one device; a single process gets all devices, where
    JAX's default would give it one.
    """
    from jax._src.clusters import ClusterEnv

    kinds = [kind for kind in ClusterEnv._cluster_types if not kind.opt_in_only_method]
    kind = next((kind for kind in kinds if kind.is_env_present()), None)
    if kind is None or kind.get_process_count() == 1:
        return None
    where, count, index, local = ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, START_S
    )
    is_alone = processes_of_this_machine(os.environ) == 1
    return ProcessPlace(where, count, index, None if is_alone or not local else local[0])


def processes_of_this_machine(environment: Mapping[str, str]) -> int | None:
    """The job's processes on this machine, from Slurm ("4", "4(x2)", "2,1") or Open MPI; None without either."""
    if size := environment.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
        return int(size)
    counts: list[int] = []
    for part in filter(None, environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")):
        size, _, times = part.rstrip(")").partition("(x")
        counts += [int(size)] * int(times or 1)
    node = int(environment.get("SLURM_NODEID", 0))
    return counts[node] if node < len(counts) else None


class Meeting:
    """The next barrier of the processes of a job; every process makes its meetings in the same order.

    The processes continue when all have arrived, and stop when one of them stops before; process 0
    decides once, so that the answer is the same for all. A poll costs one message for any number of
    processes.
    """

    def __init__(self, job: Job):
        self.job = job
        job.met += 1
        self.scope, self.said = f"met/{job.met}/", f"said/{job.met}/"
        self.is_marked = False

    def stops(self, wanted: bool) -> bool:
        """Whether this process (`wanted`) or another one stops before the meeting."""
        if self.job.count == 1:
            return wanted
        if wanted and not self.is_marked:
            self.is_marked = True
            self.job.board.first(f"{self.scope}stop", "")
        return wanted or f"{self.scope}stop" in self.read()

    def goes_on(self, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Waits until all have arrived, or one is `interrupted` before; whether all have arrived."""
        if self.job.count == 1:
            return not interrupted()
        if not self.stops(interrupted()):
            self.job.board.increment(f"{self.scope}come")
        goes_on = self.job.wait(lambda: self.decision(interrupted))
        if goes_on and self.job.is_first and self.job.met > 1:
            # All have arrived here, so all have left the last meeting and read its decisions.
            for left in (f"met/{self.job.met - 1}/", f"said/{self.job.met - 1}/", "decided/"):
                self.job.board.delete(left)
        return goes_on

    def decision(self, interrupted: Callable[[], bool]) -> bool | None:
        """The decision of process 0, which takes it here; None until then."""
        wants = interrupted()
        found = self.read()
        decided = found.get(f"{self.scope}goes_on")
        if decided is None and self.job.is_first:
            if self.stops(wants):
                decided = "0"
            elif int(found.get(f"{self.scope}come", 0)) == self.job.count:
                decided = "1"
            if decided:
                self.job.board.write(f"{self.scope}goes_on", decided)
        elif decided is None:
            self.stops(wants)
        return None if decided is None else decided == "1"

    def read(self) -> dict[str, str]:
        """The board's texts of this meeting."""
        return self.job.board.texts(self.scope)

    def heard(self, text: str) -> dict[int, str]:
        """The texts of all processes by index, without empty ones; waits for all processes."""
        if self.job.count == 1:
            return {0: text} if text else {}
        if text:
            self.job.board.write(f"{self.said}{self.job.index}", text)
        self.goes_on()
        found = self.job.board.texts(self.said)
        return {int(key.rpartition("/")[2]): found[key] for key in sorted(found)}


RETRY_S = 0.2  # seconds between two attempts to reach process 0
ANSWER_S = 20.0  # seconds within which a coordination service answers on its port
# An HTTP/2 (gRPC) client starts with this preface and empty settings; a server answers with its settings.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
SETTINGS = 4  # type of a settings frame, in its fourth byte


def split(address: str) -> tuple[str, int]:
    """Splits HOST:PORT. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f"the coordinator's address is {address!r}: write HOST:PORT")
    return host.strip("[]"), int(port)


def check_free(address: str) -> None:
    """Raises ConfigError when process 0 cannot listen on the port, where JAX's service would abort the process."""
    _, port = split(address)
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                trial.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            trial.bind(("", port))
            trial.listen(1)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            return  # not a question of the port, such as a missing address family: left to JAX
        reason = "is taken by another program" if error.errno == errno.EADDRINUSE else "needs root"
        raise ConfigError(
            f"port {port} of process 0 ({address}) {reason}: name another one for all processes"
        ) from error


def await_service(address: str, seconds: float) -> None:
    """Returns once a coordination service answers at the address; also after `seconds`, when JAX reports the timeout.

    Raises ConfigError when another program answers, or accepts connections without an answer, for ANSWER_S seconds: then
    process 0 did not get its port.
    """
    end, since = time.monotonic() + seconds, None
    while time.monotonic() < end:
        try:
            with socket.create_connection(split(address), timeout=5.0) as connection:
                since = since or time.monotonic()
                connection.sendall(PREFACE)
                if is_settings(connection):
                    return
        except OSError:
            pass  # nothing listens yet, or the connection was closed
        if since and time.monotonic() - since > ANSWER_S:
            raise ConfigError(
                f"another program than process 0 answers at {address}: name another port for all processes"
            )
        time.sleep(RETRY_S)


def is_settings(connection: socket.socket) -> bool:
    """Whether the first received frame is the settings of an HTTP/2 server."""
    head = b""
    while len(head) < 4 and (more := connection.recv(4 - len(head))):
        head += more
    return len(head) == 4 and head[3] == SETTINGS
