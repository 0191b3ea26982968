"""`python -m tlt_jax.show RUN`: prints the best and the worst answers of a step. Imports no JAX."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tlt_jax import cli
from tlt_jax.errors import ConfigError
from tlt_jax.metrics.run import open_run

Answer = Mapping[str, Any]  # a line of the completions file


def main() -> int:
    """The command; exit code 0, or 2 for a folder or a step without answers."""
    parser = cli.Parser(prog="python -m tlt_jax.show", description=cli.COMMANDS["show"].about)
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("--step", type=int, help="the step (default: the last one)")
    for name, which in (("best", "highest"), ("worst", "lowest")):
        meaning = f"answers of the {which} rewards (default: 2)"
        parser.add_argument(f"--{name}", type=int, default=2, metavar="K", help=meaning)
    given = parser.parse_args()
    try:
        answers = open_run(given.run).completions(given.step)
        if min(given.best, given.worst) < 0:
            raise ConfigError(f"--best {given.best}, --worst {given.worst}: give 0 or more")
    except ConfigError as error:
        cli.stop(error)
    print(page(answers, given.best, given.worst))
    return 0


def page(answers: Sequence[Answer], best: int, worst: int) -> str:
    """The text about a step: a line about all answers, then the best and the worst ones, no answer twice."""
    ordered = sorted(answers, key=lambda one: (-one["reward"], one["uid"]))
    rewards = [one["reward"] for one in ordered]
    count = f"{len(answers)} answer{'s' if len(answers) > 1 else ''}"
    head = f"step {answers[0]['step']}: {count}, reward {statistics.fmean(rewards):.3f} on average"
    parts = [f"{head}, {rewards[-1]:g} to {rewards[0]:g}"]
    worst = min(worst, max(len(ordered) - best, 0))
    parts += [shown(f"best {i}", one) for i, one in enumerate(ordered[:best], 1)]
    lowest = ordered[: len(ordered) - worst - 1 : -1]
    parts += [shown(f"worst {i}", one) for i, one in enumerate(lowest, 1)]
    return "\n\n".join(parts)


def shown(title: str, answer: Answer) -> str:
    """An answer with its prompt and what is known of it."""
    facts = [f"reward {answer['reward']:g}"]
    facts += [f"{name} {value:g}" for name, value in answer["parts"].items()]
    if answer["failure"]:
        facts.append(f"no score: {answer['failure']}")
    facts.append(f"{answer['length']} tokens, {answer['finish']}")
    facts.append(f"{answer['accepted']} of them drafted")
    if turns := answer.get("turns"):
        facts.append(f"turns {', '.join(f'{reward:g}' for reward in turns)}")
    facts.append(f"advantage {answer['advantage']:.3g}")
    facts.append(f"log-prob {answer['logprob']:.4g}")
    facts.append(f"group {answer['group']}, row {printable(answer['id'])}")
    lines = [f"{title}: {' | '.join(facts)}", "prompt", indented(answer["prompt"])]
    lines += ["answer", indented(answer["completion"])]
    if answer["reference"]:
        lines += ["reference answer", indented(answer["reference"])]
    return "\n".join(lines)


def indented(text: str) -> str:
    """The text with every line indented."""
    return "\n".join(f"    {printable(line)}" for line in text.split("\n"))


def printable(text: str) -> str:
    """The text with escapes in place of what a terminal would obey."""
    return "".join(one if one.isprintable() or one == "\t" else repr(one)[1:-1] for one in text)


if __name__ == "__main__":
    sys.exit(main())
