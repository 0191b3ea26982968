"""`tlt drafters`: the published drafters that `drafter_training.start hub` knows."""

from __future__ import annotations

import sys

from tlt_jax import cli
from tlt_jax.errors import MISTAKE
from tlt_jax.models import from_config, published
from tlt_jax.models.published import Published

HINT = """
--drafter_training.start hub takes the first of model.path whose layout is read here, if possible of drafter_training.kind;
--drafter_training.start ID takes any other. Ids and layouts are from public pages; none was downloaded for this list."""


def main() -> int:
    """The command; exit code 0, or 2 when no drafter of the base is known."""
    parser = cli.Parser(prog="tlt drafters", description=cli.COMMANDS["drafters"].about)
    parser.add_argument(
        "base", nargs="?", help="hub id of a policy, or a part of it (default: all)"
    )
    base = (parser.parse_args().base or "").lower()
    rows = [one for one in published.table() if base in one.base.lower()]
    if not rows:
        print(f"no published drafter of {base} is known", file=sys.stderr)
        return MISTAKE
    for policy in dict.fromkeys(one.base for one in rows):
        print(policy)
        for one in rows:
            if one.base == policy:
                print(f"  {one.drafter:<56} {one.kind:<7} {said(one)}")
    print(HINT)
    return 0


def said(one: Published) -> str:
    """Whether its layout is read, its licence, and what else is known of a drafter."""
    words = "layout is read" if from_config.is_read(one) else f"layout {one.layout} is not read"
    return "; ".join([words, one.terms, *([one.note] if one.note else [])])


if __name__ == "__main__":
    sys.exit(main())
