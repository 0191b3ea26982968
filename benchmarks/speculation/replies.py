"""How much faster is it to append a reply to a sequence than to prefill the whole conversation again?

python -m benchmarks.speculation.replies --policy DIR [--rows 1,4] [--conversations 192,384,768,1536] [--replies 16,64,256]
    [--turns 9] [--csv FILE]

Random weights of the policy's shape, in float32. Appends and prefills with admissions take turns, in a cache of 8 rows that
holds the conversation; figures are medians over the turns. Compiling is measured once, without a cache on disk; "-": it was
compiled before.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.common import engines, results
from benchmarks.common.results import ResultTable, listed
from benchmarks.common.timing import clocked, interleaved
from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import hf_config
from tlt_jax.rollout.executables.programs import Admit, Append, Prefill, Program, Start, StateShape
from tlt_jax.rollout.request import admission_size, bucket_width
from tlt_jax.spec_decode.decode_state import Admission, Appended

BATCH = 8
COLUMNS = (
    "rows", "conversation", "reply", "append_ms", "prefill_ms", "prefill_over_append", "append_compile_s",
    "prefill_compile_s", "append_temporary_mib", "prefill_temporary_mib",
)  # fmt: skip


class Race:
    """Both ways to let `rows` sequences go on after a reply, which ends their conversation of `tokens` tokens."""

    def __init__(self, engine, weights, rows: int, tokens: int, reply: int):
        self.programs, self.weights = engine.programs, weights
        shape = StateShape(0, BATCH, bucket_width(tokens))
        prefill = Prefill(0, rows, bucket_width(tokens))
        self.append, self.prefill = [Append(shape, rows, reply)], [prefill, Admit(shape, prefill)]
        self.state = Start(shape)(engine.programs)
        full, size = np.full(BATCH, tokens - reply, np.int32), admission_size(BATCH)
        self.lengths, places = full, np.arange(rows, dtype=np.int32)
        text, lengths = np.ones((rows, reply), np.int32), np.full(rows, reply, np.int32)
        self.new = Appended(places, text, lengths, lengths)
        self.prompts = np.ones((rows, prefill.width), np.int32), np.full(rows, tokens - 1, np.int32)
        zeros, seats = (
            np.zeros(size, np.int32),
            np.where(np.arange(size) < rows, np.arange(size), BATCH),
        )
        history = np.zeros((size, 0), np.int32)
        self.admission = Admission(
            seats.astype(np.int32), zeros, zeros, zeros, zeros, np.zeros((size, 2), np.uint32), history
        )  # fmt: skip

    def compile_seconds(self, programs: list[Program]) -> float | str:
        if not any(map(self.programs.compile_cost, programs)):
            return "-"
        began = time.perf_counter()
        for program in programs:
            self.programs.get(program)
        return time.perf_counter() - began

    def temporaries(self, programs: list[Program]) -> float:
        """MiB of the temporaries of the one with most."""
        sizes = [self.programs.get(one).memory_analysis().temp_size_in_bytes for one in programs]
        return max(sizes) / 2**20

    def appended(self) -> jax.Array:
        where = self.programs.shapes[0].replicated
        lengths = jax.device_put(self.lengths, where)
        state = self.state.replace(lengths=lengths)
        self.state, _ = self.append[0](self.programs, state, self.weights, self.new)
        return self.state.lengths

    def prefilled(self) -> jax.Array:
        prefill, admit = self.prefill
        values, _ = prefill(self.programs, self.weights.target, *self.prompts)
        self.state = admit(self.programs, self.state, values, self.admission)
        return self.state.lengths


def main() -> None:
    parser = results.arguments(__doc__)
    parser.add_argument("--policy", type=Path, required=True)
    parser.add_argument("--rows", default="1,4")
    parser.add_argument("--conversations", default="192,384,768,1536")
    parser.add_argument("--replies", default="16,64,256")
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    table = ResultTable(COLUMNS, args.csv)
    model, mesh = hf_config.read_config(args.policy), meshes.make_mesh(1, 1)
    engine, weights = engines.random_engine(model, mesh, BATCH)
    numbers = (
        [int(one) for one in listed(text)] for text in (args.rows, args.conversations, args.replies)
    )
    rows, conversations, replies = numbers
    for count, tokens, reply in ((r, t, w) for r in rows for t in conversations for w in replies):
        if 2 * reply > tokens:
            continue
        race = Race(engine, weights, count, tokens, reply)
        compiled = [race.compile_seconds(ones) for ones in (race.append, race.prefill)]
        calls = {"append": race.appended, "prefill": race.prefilled}
        calls = {name: lambda call=call: clocked(call)[0] for name, call in calls.items()}
        seconds = interleaved(calls, args.turns, 1)
        append, prefill = (1e3 * statistics.median(seconds[name]) for name in calls)
        ratio = statistics.median(np.divide(seconds["prefill"], seconds["append"]))
        used = [race.temporaries(ones) for ones in (race.append, race.prefill)]
        table.row(count, tokens, reply, append, prefill, float(ratio), *compiled, *used)


if __name__ == "__main__":
    main()
