"""The processes of a run: how they find each other, what they must agree on, what they exchange."""

from __future__ import annotations

import bisect
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from tlt_jax.config import Config
from tlt_jax.distributed import address, process
from tlt_jax.distributed.board import Board, LocalBoard, ServiceBoard
from tlt_jax.distributed.meeting import Meeting
from tlt_jax.errors import ConfigError

ADDRESS, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
START_S = 300  # seconds that processes may take to start
LOADED_S = 1800.0  # seconds that the others may take to load model and data once the first has
SAY_S = 20.0  # from one line about who is waited for to the next
SHOWN = 4  # processes that it names
# Of what is gathered: bytes on a device at a time, at least so many of a process, and numbers of one of two words.
GATHERED_BYTES, LEAST_PIECE, WORD = 256 << 20, 64 << 10, 1 << 30
JAX_LOST_S = 100  # what JAX's coordination service waits for a heartbeat, at least
# From one look at the board to the next of a process that waits for others: soon at first, and no more than this.
SOONEST_S, LATEST_S = 0.002, 0.5

T = TypeVar("T")

log = logging.getLogger(__name__)


class Place(NamedTuple):
    """A process among those of its job; `local`: of the devices of its machine it may use one alone, this one."""

    address: str
    count: int
    index: int
    local: int | None = None


@dataclass
class Job:
    """The processes that run this command together. Every method but `is_first` is called by all of them.

    `index` of `count`: this process. Process 0 alone writes files and prints.
    """

    index: int = 0
    count: int = 1
    board: Board = field(default_factory=LocalBoard)
    alive: Callable[[], None] = lambda: None  # told at every look while this process waits
    asked: int = 0  # calls of `told` so far
    met: int = 0  # meetings so far

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's files."""
        return self.index == 0

    def gather(
        self, data: bytes, wanted: Sequence[Sequence[tuple[int, int]]] | None = None
    ) -> list[bytes]:
        """The bytes of every process, in order of its index: a collective over all devices.

        `wanted`: of each process, from where to where its bytes are kept here, in order; None: all.
        In pieces, of which a device holds GATHERED_BYTES at a time, all processes' together; a CPU device
        is memory of the host.
        """
        if self.count == 1:
            return [data] if wanted is None else [b"".join(data[a:b] for a, b in wanted[0])]
        self.meeting().goes_on()  # what waits in a collective cannot say that it is alive
        # Two words: JAX's integers are of 32 bits, and a step may be more than 2 GiB.
        words = multihost_utils.process_allgather(np.array(divmod(len(data), WORD), np.int32))
        sizes = [int(high) * WORD + int(low) for high, low in words.reshape(-1, 2)]
        kept = [[(0, size)] for size in sizes] if wanted is None else wanted
        most, parts = max(LEAST_PIECE, GATHERED_BYTES // self.count), [[] for _ in sizes]
        for start in range(0, max(sizes), most):
            left = min(max(sizes) - start, most)
            width = min(1 << max(left - 1, 1).bit_length(), most)  # few shapes, each a program
            padded, own = np.zeros(width, np.uint8), data[start : start + width]
            padded[: len(own)] = np.frombuffer(own, np.uint8)
            found = np.asarray(multihost_utils.process_allgather(padded))
            for part, row, spans in zip(parts, found, kept, strict=True):
                part += [row[a:b].tobytes() for a, b in within(spans, start, start + width)]
            self.alive()
        return [b"".join(part) for part in parts]

    def to_first(self, data: bytes) -> list[bytes]:
        """As `gather`, for process 0 alone; the others keep nothing."""
        return self.gather(data) if self.is_first else self.gather(data, [()] * self.count)[:0]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError, in every process, that names the first process with other facts, and which.

        `facts` are JSON-able. They are compared by a digest, and told where that differs. Raises ConfigError, too, with the
        processes that have not come LOADED_S after the first one.
        """
        if self.count == 1:
            return
        text = json.dumps(facts, default=str, sort_keys=True)
        own = hashlib.sha256(text.encode()).hexdigest()
        self.board.write(f"loaded/by/{self.index:06d}", "")
        if self.is_first:
            self.board.write("loaded/all/digest", own)
        self.board.increment("loaded/all/processes")
        first = self.wait(self.all_loaded, LOADED_S, self.missing)
        said = self.meeting().heard("" if own == first else text)
        if self.is_first:
            self.board.delete("loaded/")
        if said:
            others = {index: json.loads(other) for index, other in said.items()}
            (reference,) = self.meeting().heard(text if self.is_first else "").values()
            raise ConfigError(difference(json.loads(reference), others))

    def all_loaded(self) -> str | None:
        """The digest of process 0's facts, once all processes have come; asks for two keys, however many these are."""
        found = self.board.texts("loaded/all/")
        is_whole = int(found.get("loaded/all/processes", 0)) == self.count
        return found["loaded/all/digest"] if is_whole else None

    def missing(self) -> str:
        """Who has not loaded yet."""
        come = {int(key.rpartition("/")[2]) for key in self.board.texts("loaded/by/")}
        late = [index for index in range(self.count) if index not in come]
        shown = ", ".join(map(str, late[:SHOWN]))
        more = f" and {len(late) - SHOWN} more" if len(late) > SHOWN else ""
        return f"process {shown}{more} of {self.count} to load model and data"

    def decided(self, wanted: bool) -> bool:
        """What process 0 wants, for all; by the board, with no program on a device."""
        return bool(self.told(wanted))

    def told(self, number: float) -> float:
        """The number that process 0 has, for all; by the board, with no program on a device."""
        if self.count == 1:
            return number
        self.asked += 1
        key = f"decided/{self.asked}/"
        if self.is_first:
            self.board.write(key + "is", repr(float(number)))
            return number
        return float(self.wait(lambda: self.board.texts(key) or None)[key + "is"])

    def meeting(self) -> Meeting:
        """The next point at which all processes meet; each of them makes it."""
        return Meeting(self)

    def wait(
        self,
        look: Callable[[], T | None],
        seconds: float = math.inf,
        whom: Callable[[], str] | None = None,
    ) -> T:
        """What `look` finds, asked until it is something. Raises ConfigError after so many seconds.

        Looks less often the longer it takes, and is `alive` at each. Process 0 says now and then for `whom` it waits.
        """
        begin, said = time.monotonic(), 0.0
        while (found := look()) is None:
            self.alive()
            if (waited := time.monotonic() - begin) > seconds:
                raise ConfigError(f"waited {seconds:.0f} s for {whom()}: see their output")
            if whom and self.is_first and waited > said + SAY_S:
                said = waited
                log.info("waiting since %.0f s for %s", waited, whom())
            time.sleep(min(max(waited / 10, SOONEST_S), LATEST_S))
        return found


def within(spans: Sequence[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """The parts of ascending spans that lie between start and end, from there on."""
    found = []
    for a, b in spans[bisect.bisect_right(spans, start, key=lambda span: span[1]) :]:
        if a >= end:
            break
        found.append((max(a, start) - start, min(b, end) - start))
    return found


def difference(first: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]) -> str:
    """The first process whose facts are others than those of process 0, and the first of these."""
    index, other = min(others.items())
    name = next(name for name in {**first, **other} if other.get(name) != first.get(name))
    return (
        f"process {index} has {name} {spell(other.get(name))}, process 0 has {spell(first.get(name))}: "
        "start all with the same"
    )


def join(config: Config) -> Job:
    """Joins the processes of this command, when it was started as many; before JAX makes its devices.

    They are named by the environment (JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID),
    or found by JAX: Slurm, Open MPI, Kubernetes, Cloud TPU. Raises ConfigError when the environment
    names a part of it.
    """
    place = named(os.environ) or detected()
    if place is None or place.count == 1:
        return Job()
    process.share_devices(config, place.count)
    if place.index == 0:
        address.check_free(place.address)
    else:
        address.await_service(place.address, START_S)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    try:
        jax.distributed.initialize(
            place.address,
            place.count,
            place.index,
            None if place.local is None else [place.local],
            cluster_detection_method="deactivate",
            initialization_timeout=START_S,
            heartbeat_timeout_seconds=heartbeat_timeout(config.processes.lost_s),
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigError(
            f"process {place.index} of {place.count} cannot join the others at {place.address}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    from jax._src.distributed import global_state  # the only way to the service's client

    return Job(place.index, place.count, ServiceBoard(global_state.client))


def heartbeat_timeout(lost_s: float) -> int:
    """Seconds after which JAX's service counts a process as dead: later than Watch, which says which one, and where it was."""
    return max(JAX_LOST_S, round(2 * lost_s))


def named(environment: Mapping[str, str]) -> Place | None:
    """The place that the environment names, if it does. Raises ConfigError for a part of one."""
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
    return Place(found[ADDRESS], count, index)


def detected() -> Place | None:
    """The place that JAX finds: of Slurm, Open MPI, Kubernetes or Cloud TPU.

    Several processes on a machine get a device each; a single one all of its devices, where JAX
    alone would give it one.
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
    return Place(where, count, index, None if is_alone or not local else local[0])


def processes_of_this_machine(environment: Mapping[str, str]) -> int | None:
    """Of the job's, as Slurm ("4", "4(x2)", "2,1") or Open MPI say; None when neither does."""
    if size := environment.get("OMPI_COMM_WORLD_LOCAL_SIZE"):
        return int(size)
    counts: list[int] = []
    for part in filter(None, environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(",")):
        size, _, times = part.rstrip(")").partition("(x")
        counts += [int(size)] * int(times or 1)
    node = int(environment.get("SLURM_NODEID", 0))
    return counts[node] if node < len(counts) else None


def spell(value: Any) -> str:
    """A fact as text; None: it is not there."""
    return "none" if value is None else repr(value)
