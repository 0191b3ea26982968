"""`python tests/compare_commits.py BASE HEAD`: do two commits give the same answers and weights?

Both run the same, each from a worktree of its own: the quickstart made short, a drafter trained on
it, and the quickstart with that drafter and with n-grams. Compared bit for bit: all completions,
the exported models, and the checksums in the final checkpoints (optimizers too; leaves may have
other names in HEAD, and more may be there). Exits 1 when anything differs. Arguments that this
script does not know go to the runs of both.

In float32 a tie within rounding, about one in a million tokens, may fall as the machine's speed
has it: when few answers differ, run again, or with --model.param_dtype float64
--model.compute_dtype float64.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

SHORT = (
    "--config configs/quickstart.yaml --sft.steps 40 --train.steps 3 --train.row_tokens 256"
    " --rollout.prompts 16 --eval.every 0 --checkpoint.every 0"
    " --drafter_training.rollouts 1 --drafter_training.steps 20"
).split()
DRAFTED = "--train.steps 2 --speculation.tuner fixed --speculation.drafter".split()
RUNS = {  # module, and more arguments; DIRECTORY is of the trained drafter
    "plain": ["tlt_jax.train"],
    "drafter": ["tlt_jax.train.drafter"],
    "drafted": ["tlt_jax.train", *DRAFTED, "DIRECTORY", "--speculation.strategies", "[2_2_4]"],
    "ngram": ["tlt_jax.train", *DRAFTED, "ngram", "--speculation.strategies", "[3_1_4]"],
}
TOLD = ("step", "uid", "prompt", "completion", "reward", "length", "finish")  # not the clock's


def renamed(word: str, old: str, new: str) -> str:
    """An argument under BASE's name of a knob, of a section (`--NEW.knob`), or of a module."""
    if word.startswith(f"--{new}."):
        return f"--{old}{word[len(new) + 2 :]}"
    return {new: old, f"--{new}": f"--{old}"}.get(word, word)


def play(python: str, tree: Path, folder: Path, renames: list[str], more: list[str]) -> None:
    """Runs everything from the worktree; each run has a folder below `folder`."""
    env = os.environ | {"PYTHONPATH": str(tree), "HOME": str(folder)}  # no drafter of another run
    where = [python, "-c", "import tlt_jax; print(tlt_jax.__file__)"]
    found = subprocess.run(where, cwd=tree, env=env, check=True, stdout=subprocess.PIPE, text=True)
    if tree.resolve() not in Path(found.stdout.strip()).resolve().parents:
        sys.exit(f"{found.stdout.strip()} would run, and nothing of {tree}: use another --python")
    own = ["--rollout.compile_cache", f"{folder.parent}/xla", "--sft.cache", f"{folder}/sft"]
    for name, run in RUNS.items():
        drafter = str(next(folder.glob("drafter/**/hf"), ""))
        words = [drafter if word == "DIRECTORY" else word for word in run[1:]]
        command = ["-m", run[0], *SHORT, *words, *own, "--run", str(folder / name), *more]
        for rename in renames:
            command = [renamed(word, *rename.split("=", 1)) for word in command]
        begin = time.perf_counter()
        done = subprocess.run([python, *command], cwd=tree, env=env, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}\nfailed: {' '.join(command)}")
        print(f"{folder.name} {name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)


def lines(run: Path, folder: str) -> list[dict]:
    """What all steps of a run wrote to a folder."""
    paths = sorted(run.glob(f"{folder}/*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_bytes().split(b"\n") if line]


def compare_answers(base: Path, head: Path) -> str:
    """The first difference, or "equal"."""
    ours, theirs = lines(base, "completions"), lines(head, "completions")
    for one, other in zip(ours, theirs, strict=False):
        for name in TOLD:
            if one[name] != other[name]:
                place = f"step {one['step']} uid {one['uid']} {name}"
                return f"{place}: {one[name]!r:.50} != {other[name]!r:.50}"
    return "equal" if len(ours) == len(theirs) else f"{len(ours)} != {len(theirs)} answers"


def compare_models(base: Path, head: Path) -> str:
    """The largest difference of the exported tensors, or "equal"."""
    ours, theirs = (load_file(next(run.glob("**/hf/*.safetensors"))) for run in (base, head))
    form = [{name: (one.dtype, one.shape) for name, one in side.items()} for side in (ours, theirs)]
    if form[0] != form[1]:
        return "other names, shapes or dtypes"
    odd = [name for name in ours if ours[name].tobytes() != theirs[name].tobytes()]
    apart = [np.abs(ours[name].astype(np.float64) - theirs[name]).max() for name in odd]
    return f"{len(odd)} of {len(ours)} differ by up to {max(apart):.2g}" if odd else "equal"


def compare_checkpoints(base: Path, head: Path) -> str:
    """How many leaves of BASE's final checkpoint are not in HEAD's, or "equal"."""
    found = []
    for run in (base, head):
        metas = run.glob("**/checkpoints/*/meta/metadata")
        items = json.loads(max(metas, key=lambda path: int(path.parts[-3])).read_text())["items"]
        leaves = [leaf for item in items.values() for leaf in item.values()]
        kept = ("dtype", "shape", "checksum")
        found.append(Counter(str([leaf[name] for name in kept]) for leaf in leaves))
    missing = (found[0] - found[1]).total()
    return f"{missing} of {found[0].total()} leaves differ" if missing else "equal"


def main() -> int:
    """Prints the table; 0 when all is equal."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("base")
    parser.add_argument("head")
    parser.add_argument("--python", default=sys.executable, help="interpreter for both")
    named = "knob, section or module with another name in BASE (may be given again)"
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW", help=named)
    options, more = parser.parse_known_args()
    git, is_equal = ["git", "-C", str(Path(__file__).parent), "worktree"], True
    with tempfile.TemporaryDirectory(prefix="compare_commits_") as made:
        for side, renames in (("base", options.rename), ("head", [])):
            tree, commit = f"{made}/trees/{side}", vars(options)[side]
            subprocess.run([*git, "add", "--quiet", "--detach", tree, commit], check=True)
            try:
                play(options.python, Path(tree), Path(made, side), renames, more)
            finally:
                subprocess.run([*git, "remove", "--force", tree], check=True)
        print("run       answers  drafted chunks  completions | exported model | checkpoint")
        for name in RUNS:
            pair = Path(made, "base", name), Path(made, "head", name)
            chunks = [lines(run, "speculation") for run in pair]
            drafted = [sum(one["strategy"] != "off" for one in side) for side in chunks]
            said = [one(*pair) for one in (compare_answers, compare_models, compare_checkpoints)]
            count = len(lines(pair[0], "completions"))
            print(f"{name:8}  {count:7}  {str(drafted):>14}  {' | '.join(said)}")
            speculates = "--speculation.drafter" in RUNS[name]
            is_equal &= set(said) == {"equal"} and (min(drafted) > 0) == speculates
            is_equal &= (count > 0) == (name != "drafter")
    print("equal" if is_equal else "DIFFERENT")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
