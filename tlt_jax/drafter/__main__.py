"""`tlt drafters`: the drafters that earlier runs left, and the published ones that `drafter_training.start hub` knows."""

from __future__ import annotations

import sys
import time

from tlt_jax import cli
from tlt_jax.errors import MISTAKE
from tlt_jax.models import from_config, published, shelf
from tlt_jax.models.published import Published
from tlt_jax.models.shelf import Shelved

HINT = """
--drafter_training.start hub takes the first of model.path whose layout is read here, if possible of drafter_training.kind;
--drafter_training.start ID takes any other. Ids and layouts are from public pages; none was downloaded for this list."""


def main() -> int:
    """The command; exit code 0, or 2 when no drafter of the base is known."""
    parser = cli.Parser(prog="tlt drafters", description=cli.COMMANDS["drafters"].about)
    parser.add_argument(
        "base", nargs="?", help="hub id or path of a policy, or a part of it (default: all)"
    )
    parser.add_argument("--shelf", default="", help="as drafter_training.shelf")
    args = parser.parse_args()
    base, folder = (args.base or "").lower(), shelf.folder_of(args.shelf)
    left = [one for one in shelf.entries(folder) if base in one.policy.lower()] if folder else []
    rows = [one for one in published.table() if base in one.base.lower()]
    if not rows and not left:
        print(f"no drafter of {base} is known", file=sys.stderr)
        return MISTAKE
    for policy in dict.fromkeys(one.policy for one in left):
        print(f"{policy}, left in {folder}:")
        for one in left:
            if one.policy == policy:
                print(f"  {one.directory.name}  {of_shelf(one)}")
    for policy in dict.fromkeys(one.base for one in rows):
        print(f"{policy}, published:")
        for one in rows:
            if one.base == policy:
                print(f"  {one.drafter:<56} {one.kind:<7} {of_table(one)}")
    if rows:
        print(HINT)
    return 0


def of_shelf(one: Shelved) -> str:
    """The day of an entry of the shelf, its run, and what it learned."""
    day = time.strftime("%Y-%m-%d", time.localtime(one.at))
    return f"{day}  {one.run}: {one.describe()}"


def of_table(one: Published) -> str:
    """Whether its layout is read, its licence, and what else is known of a drafter."""
    words = "layout is read" if from_config.is_read(one) else f"layout {one.layout} is not read"
    return "; ".join([words, one.terms, *([one.note] if one.note else [])])


if __name__ == "__main__":
    sys.exit(main())
