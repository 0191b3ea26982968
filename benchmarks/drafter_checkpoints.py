"""How long does saving the drafter of a 135M policy hold up the run?

python benchmarks/drafter_checkpoints.py

Saved is all that it uses, its frozen copies of the policy's embedding and LM head included, waited for; the same in the
background; in the background what is trained alone, as the product does.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from drafter_setup import arguments, new_drafter
from result_table import ResultTable

from tlt_jax.checkpoint.store import Store
from tlt_jax.models import eagle, transformer
from tlt_jax.models.transformer import ModelConfig

SMOLLM2 = ModelConfig(
    "llama", 49152, 576, 30, 9, 3, 64, 1536, 8192, qkv_bias=False, tied=True, init_std=0.04
)
COLUMNS = ("saved", "mib", "median_ms", "least_ms", "most_ms")


def held_up(modes: Mapping[str, tuple[dict, bool]], repeats: int) -> dict[str, list[float]]:
    """Seconds that a save of these items takes from the run, which waits for it or not; the first one is not for use."""
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(1 + repeats):
            for name, (items, waits) in modes.items():
                with Store(Path(folder) / name.replace(" ", "_"), keep=1) as store:
                    begin = time.perf_counter()
                    store.save(turn, items)
                    if waits:
                        store.wait()
                    seconds[name].append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    """The command; prints the table."""
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=6)
    args = parser.parse_args()
    recipe, state = new_drafter(SMOLLM2, 8192)
    params = transformer.init(SMOLLM2, recipe.mesh, jax.random.key(1), "float32")
    frozen = {name: jnp.copy(getattr(eagle.shared(params), name)) for name in ("embed", "head")}
    whole, trained = {"drafter": state, "frozen": frozen}, {"drafter": state}
    modes = {
        "all that it uses, waited for": (whole, True),
        "all that it uses, in the background": (whole, False),
        "what is trained, in the background": (trained, False),
    }
    seconds, table = held_up(modes, args.repeats), ResultTable(COLUMNS, args.csv)
    for name, each in seconds.items():
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(modes[name][0])) / 2**20
        table.row(name, size, *(1e3 * of(each[1:]) for of in (statistics.median, min, max)))


if __name__ == "__main__":
    main()
