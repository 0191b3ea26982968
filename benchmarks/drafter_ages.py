"""What are answers and features of an older policy worth to a drafter?

python benchmarks/drafter_ages.py --config FILE --checkpoints-of RUN --steps 39,20 [--section.knob VALUE ...]

Held-out acceptance for the policy of the last checkpoint of RUN, after learning from its short answers alone, and from these
with the long answers of the policies of earlier checkpoints: with the features of then, drawn half as often, and with features
made again; and with its own long answers, which a run does not have in time.
"""

from __future__ import annotations

import statistics

from drafter_learning import COLUMNS, Answers, learning_arguments, read
from result_table import ResultTable

from tlt_jax.data.packing import Example


def main() -> None:
    """The command; prints the table as it fills."""
    parser = learning_arguments(__doc__)
    parser.add_argument("--steps", required=True, help="earlier checkpoints, as 39,20")
    args, config = read(parser)
    steps = [int(step) for step in args.steps.split(",")]
    answers = Answers(config, args.checkpoints_of, steps, args.updates)
    last, now, recipe = answers.last, answers.texts[answers.last], answers.recipe()
    middle = statistics.median(len(one.answer) for one in now)

    def part(step: int, is_long: bool) -> list[Example]:
        return [one for one in answers.texts[step] if (len(one.answer) > middle) == is_long]

    short, own = (part(last, False), last, 1.0), part(last, True)
    table = ResultTable(("policy_after_step", "learned_from", *COLUMNS), args.csv)
    table.row(last, "short answers alone", *answers.learned(recipe, [short]))
    table.row(last, "and its own long ones", *answers.learned(recipe, [short, (own, last, 1.0)]))
    for step in steps:
        old = part(step, True)[: len(own)]
        for name, source, weight in (
            ("and older long ones, features of then", step, 1.0),
            ("the same, half as often", step, 0.5),
            ("the same, features made again", last, 1.0),
        ):
            table.row(step, name, *answers.learned(recipe, [short, (old, source, weight)]))


if __name__ == "__main__":
    main()
