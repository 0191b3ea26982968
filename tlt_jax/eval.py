"""`python -m tlt_jax.eval`: mean@k and pass@k of a policy on rows of data, and two evaluations row by row."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from tlt_jax import cli, run_folder
from tlt_jax.config import Config, load as configuration, validate
from tlt_jax.config.schema import ADAPTIVE, NGRAM
from tlt_jax.data import dataset as datasets, prompt_format
from tlt_jax.data.dataset import EVAL, TRAIN, Dataset
from tlt_jax.distributed import mesh as meshes
from tlt_jax.environments.pool import Environments
from tlt_jax.errors import ConfigError, UserError
from tlt_jax.metrics import evaluations
from tlt_jax.metrics.evaluations import KINDS, Record, Row
from tlt_jax.models import from_config, lora
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.rewards import Scorer
from tlt_jax.rollout.engine import Engine
from tlt_jax.train import run_state
from tlt_jax.train.environment import environments
from tlt_jax.train.evaluation import Evaluator

COMMAND = "python -m tlt_jax.eval"
OWN = {
    "[--config FILE]": "evaluates the model of a configuration: its start policy, or --model.path DIR",
    "[--run RUN]": "without --config: evaluates the policy of a run, on the run's data and with its knobs",
    "[--step N]": "the step of the run: a number, last (default), or best (by checkpoint.best_metric)",
    "[--split NAME]": "rows to evaluate: eval (default), train, or a file as in data.eval; may be given several times",
    "[--k 1,4]": "the k of mean@k and pass@k; as many answers per prompt as the largest, unless eval.samples is larger",
    "[--out FILE]": "file of the answers (default: evaluation/STEP.jsonl of the run; without a run none)",
    "[--compare A B]": "instead: compares two evaluations row by row, from their kept answers. A, B: a file, RUN (its last "
    "evaluation) or RUN:STEP. A row is right when at least half of its answers are correct",
    "[--rows KIND,...]": f"with --compare, lists the rows of these kinds: {', '.join(KINDS)} (B alone is right, A "
    "alone, both, none)",
}


@dataclass(frozen=True)
class Asked:
    """What is evaluated: a step of a run ("" for the model of the configuration), parts of the data, and the k."""

    step: str
    splits: list[str]
    ks: list[int]
    out: str


def main() -> int:
    """The command: prints the metrics of each split as one JSON object, or compares; exit code 0."""
    arguments = sys.argv[1:]
    try:
        if "--compare" in arguments:
            return compare(arguments)
        asked = take(arguments)
    except UserError as error:
        cli.stop(error)
    config = configuration.load(
        arguments, command=COMMAND, about=cli.COMMANDS["eval"].about, own=OWN
    )
    samples = max([config.eval.samples, *asked.ks])
    config = replace(config, eval=replace(config.eval, samples=samples))
    with cli.prepared(config):
        validate.validate_rewards(config)
        with Scorer(config) as scorer, environments(config) as pool:
            evaluate(config, asked, scorer, pool)
    return 0


def take(arguments: list[str]) -> Asked:
    """Removes the options that are no knobs. Raises ConfigError."""
    has_config = any(word.partition("=")[0] == "--config" for word in arguments)
    step = cli.take(arguments, "--step", "" if has_config else "last")
    splits, ks = [], []
    while "--split" in arguments:
        splits.append(cli.take(arguments, "--split"))
    if "--k" in arguments:
        words = cli.take(arguments, "--k").split(",")
        ks = [int(word) for word in words if word.strip().isdecimal() and int(word)]
        if len(ks) < len(words):
            raise ConfigError(f"--k {','.join(words)} are no numbers from 1: write --k 1,4")
    out = cli.take(arguments, "--out", "")
    if out and Path(out).is_dir():
        raise ConfigError(f"--out {out} is a directory: give the file of the answers")
    return Asked(step, splits or [EVAL], ks, out)


def evaluate(config: Config, asked: Asked, scorer: Scorer, pool: Environments | None) -> None:
    """Evaluates each split, after saying what is evaluated; prints the metrics, and keeps the answers."""
    tokenizer = prompt_format.tokenizer_of(config)
    dataset = datasets.load(config, tokenizer)
    model = from_config.model_config(config, tokenizer)
    from_config.warn_of_tokenizer(config, tokenizer)
    validate.validate_model(config, model, jax.device_count())
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.model)
    step, params, source = weights_of(config, asked, model, mesh)
    out = Path(asked.out) if asked.out else None
    if asked.step and not out:
        out = evaluations.path_of(config.run, step)
    if out and out.exists():
        evaluations.read(out)  # raises now what would lose the answers later
    say(config, dataset, asked, source)

    config = with_fixed_drafter(config)
    drafter, drafter_params = from_config.load_drafter(config, model, mesh)
    stops = datasets.stop_rules(config, tokenizer)
    # Of a step the adapters are those of the run; where a run starts they are merged.
    adapters = lora.chosen(config.model.lora, model) if asked.step else None
    engine = Engine(config, model, mesh, stops, drafter, lora=adapters)
    published = engine.publish(params, drafter_params)
    evaluator = Evaluator(config, engine, dataset, tokenizer, scorer, pool)
    for split in asked.splits:
        found = evaluator.evaluate(published, split=split, ks=asked.ks)
        named = {"split": split} if asked.splits != [EVAL] else {}
        print(json.dumps(named | found.metrics), flush=True)
        if out:
            evaluations.keep(out, step, found.answers)
    if out:
        print(f"answers: {out}", file=sys.stderr)


def weights_of(
    config: Config, asked: Asked, model: ModelConfig, mesh: Mesh
) -> tuple[int, Params, str]:
    """The step of the run (0 without one), its weights or those of the configuration, and where they are from.

    Raises UserError.
    """
    if not asked.step:
        source = config.model.path or "a new model with random weights (model.init)"
        source += ", where the configuration starts"
        if trained := run_folder.newest(config):
            source += f"; {config.run} has trained {trained} steps: --run {config.run} without --config evaluates them"
        return 0, from_config.load_policy(config, model, mesh), source
    step, params, place = run_state.policy_or_export(
        config, Path(config.run), asked.step, model, mesh
    )
    return step, params, f"step {step} of {config.run} ({place})"


def say(config: Config, dataset: Dataset, asked: Asked, source: str) -> None:
    """Prints to stderr which weights, data and prompt format are evaluated."""
    data = config.data
    sources = {EVAL: data.eval or data.train or data.task, TRAIN: data.train or data.task}
    parts = [
        f"{len(dataset.part(split)):,} rows of {split}"
        + (f" ({sources[split]})" if split in sources else "")
        for split in asked.splits
    ]
    answers = replace(config.rollout, **{
        name: getattr(config.eval, name) for name in ("samples", "temperature", "top_k", "top_p")
    })  # fmt: skip
    lines = [
        f"weights: {source}",
        dataset.describe(),
        f"evaluates: {', '.join(parts)}, {config.eval.samples} answers each",
        prompt_format.describe(replace(config, rollout=answers)),
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)


def with_fixed_drafter(config: Config) -> Config:
    """Replaces an adaptive drafter, which would need training, by the drafter in the run folder, else by n-grams."""
    if config.speculation.drafter != ADAPTIVE:
        return config
    trained = run_folder.drafter_export(config)
    drafter = str(trained) if trained.is_dir() else NGRAM
    print(f"evaluation trains no drafter: speculation.drafter is {drafter}", file=sys.stderr)
    return replace(config, speculation=replace(config.speculation, drafter=drafter))


def compare(arguments: list[str]) -> int:
    """Prints a comparison of two evaluations; exit code 0. Raises ConfigError or DataError."""
    kinds = cli.take(arguments, "--rows").split(",") if "--rows" in arguments else []
    if arguments[:1] != ["--compare"] or len(arguments) != 3:
        raise ConfigError("--compare takes two evaluations, and no knobs: write --compare A B")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ConfigError(f"--rows {unknown[0]!r} is not known: use {', '.join(KINDS)}")

    paths = [evaluations.find(name) for name in arguments[1:]]
    first, second = (evaluations.by_row(evaluations.read(path)) for path in paths)
    found = evaluations.compared(first, second)
    shared = [row for rows in found.rows.values() for row in rows]
    for name, path, rows in (("A", paths[0], first), ("B", paths[1], second)):
        rewards = [one.reward for row in shared for one in rows[row]]
        print(f"{name}: mean reward {sum(rewards) / len(rewards):.3f}  {path}")
    won, lost, right, wrong = (len(found.rows[kind]) for kind in KINDS)
    print(f"{len(shared)} rows: won {won} (only B is right), lost {lost} (only A is right)", end="")
    print(f", both right {right}, both wrong {wrong}")
    chance = evaluations.sign_test(won, lost)
    print(f"two equal policies would differ as much with probability {chance:.2g}")
    if any(found.only):
        print("left out: {} rows of A alone, {} of B alone".format(*found.only))
    for kind in kinds:
        for row in found.rows[kind]:
            print(f"\n--- {kind}: {' '.join(row)}\n{listed(row, first, second)}")
    return 0


def listed(row: Row, *both: dict[Row, list[Record]]) -> str:
    """A row with the first answers of both evaluations."""
    one = both[0][row][0]
    lines = [one.prompt, f"reference: {one.reference}"]
    for name, rows in zip("AB", both, strict=True):
        answers = rows[row]
        correct = sum(answer.is_correct for answer in answers)
        lines += [f"{name} ({correct} of {len(answers)} correct): {answers[0].completion}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
