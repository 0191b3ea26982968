"""Which architecture and objective makes the drafter whose drafts are accepted most often, after the same updates?

python benchmarks/drafter_kinds.py --config FILE --checkpoints-of RUN [--section.knob VALUE ...]

Held-out acceptance for the policy of the last checkpoint of RUN, after learning from its answers, and the milliseconds of an
update.
"""

from __future__ import annotations

from drafter_learning import COLUMNS, Answers, learning_arguments, read
from result_table import ResultTable

from tlt_jax.drafter.recipe import Objective


def main() -> None:
    """The command; prints the table as it fills."""
    args, config = read(learning_arguments(__doc__))
    answers = Answers(config, args.checkpoints_of, [], args.updates)
    source = [(answers.texts[answers.last], answers.last, 1.0)]
    plainer = {"fc_norm": False, "norm_output": False}
    cases = {
        "eagle": answers.recipe("eagle"),
        "eagle, HASS": answers.recipe("eagle", Objective(3, 1.0, top_loss=1.0, detach=True)),
        "eagle3, 3.1": answers.recipe("eagle3"),
        "eagle3, 3.0": answers.recipe("eagle3", **plainer),
        "eagle3, 3.1, unroll 2": answers.recipe("eagle3", Objective(2)),
        "eagle3, 3.1, acceptance loss": answers.recipe("eagle3", Objective(5, loss="acceptance")),
    }
    table = ResultTable(("drafter", *COLUMNS), args.csv)
    for name, recipe in cases.items():
        table.row(name, *answers.learned(recipe, source))


if __name__ == "__main__":
    main()
