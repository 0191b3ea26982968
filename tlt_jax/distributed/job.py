"""The processes of a run: how they find each other, what they must agree on, what they exchange."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
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
START_S = 300  # seconds that processes may take to start, and to say what they run
JAX_LOST_S = 100  # what JAX's coordination service waits for a heartbeat, at least
# From one look at the board to the next of a process that waits for others: soon at first, and no more than this.
SOONEST_S, LATEST_S = 0.002, 0.5

T = TypeVar("T")


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
    asked: int = 0  # calls of `decided` so far
    met: int = 0  # meetings so far

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's files."""
        return self.index == 0

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of every process, in order of its index: a collective over all devices."""
        if self.count == 1:
            return [data]
        self.meeting().goes_on()  # what waits in a collective cannot say that it is alive
        sizes = multihost_utils.process_allgather(np.int32(len(data))).reshape(-1)
        width = 1 << max(int(sizes.max()) - 1, 1).bit_length()  # few shapes, each a program
        padded = np.zeros(width, np.uint8)
        padded[: len(data)] = np.frombuffer(data, np.uint8)
        found = np.asarray(multihost_utils.process_allgather(padded))
        return [row[:size].tobytes() for row, size in zip(found, sizes, strict=True)]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError, in every process, that names the first process with other facts, and which.

        `facts` are JSON-able.
        """
        self.board.write(f"facts/{self.index:06d}", json.dumps(facts, default=str))

        def all_facts() -> list[dict[str, Any]] | None:
            texts = self.board.texts("facts/")
            return (
                [json.loads(texts[key]) for key in sorted(texts)]
                if len(texts) == self.count
                else None
            )

        first, *others = self.wait(all_facts, START_S, "said what they run")
        for index, other in enumerate(others, 1):
            for name in {**first, **other}:
                theirs, ours = other.get(name), first.get(name)
                if theirs != ours:
                    raise ConfigError(
                        f"process {index} has {name} {spell(theirs)}, process 0 has {spell(ours)}: "
                        "start all with the same"
                    )

    def decided(self, wanted: bool) -> bool:
        """What process 0 wants, for all; by the board, with no program on a device."""
        if self.count == 1:
            return wanted
        self.asked += 1
        key = f"decided/{self.asked}/"
        if self.is_first:
            self.board.write(key + "is", str(int(wanted)))
            return wanted
        return self.wait(lambda: self.board.texts(key) or None)[key + "is"] == "1"

    def meeting(self) -> Meeting:
        """The next point at which all processes meet; each of them makes it."""
        return Meeting(self)

    def wait(self, look: Callable[[], T | None], seconds: float = math.inf, what: str = "") -> T:
        """What `look` finds, asked until it is something. Raises ConfigError after so many seconds.

        Looks less often the longer it takes, and is `alive` at each.
        """
        begin = time.monotonic()
        while (found := look()) is None:
            self.alive()
            if (waited := time.monotonic() - begin) > seconds:
                raise ConfigError(
                    f"not all of {self.count} processes have {what} in {seconds:.0f} s: see their output"
                )
            time.sleep(min(max(waited / 10, SOONEST_S), LATEST_S))
        return found


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
