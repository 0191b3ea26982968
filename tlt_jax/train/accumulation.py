"""The accumulation steps of a run, whose layers keep what fits: the compiled program says what it needs. It knows no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tlt_jax.config import Config
from tlt_jax.config.schema import AUTO
from tlt_jax.train import policy_update
from tlt_jax.train.policy_update import UpdatePrograms
from tlt_jax.train.recipe import Recipe

# A recipe, and the bytes of temporaries on a device of its compiled accumulation step, to the recipe to use instead.
Correct = Callable[[Recipe, int], Recipe]


class Accumulation:
    """`policy_update.accumulate` of `recipe`, which the first call corrects until it stays as it is.

    Where a corrected recipe differs, it compiles again; else it costs nothing, since the call needs the compiled program.
    """

    __name__ = "accumulate"  # in what is logged

    def __init__(self, recipe: Recipe, correct: Correct):
        self.recipe, self.correct, self.is_checked = recipe, correct, False

    @property
    def program(self) -> jax.stages.Wrapped:
        """The jitted function of the recipe."""
        return policy_update.programs(self.recipe).accumulate

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """That of the program."""
        return self.program.lower(*arguments)

    def __call__(self, *arguments: Any) -> Any:
        while not self.is_checked:
            compiled = self.lower(*arguments).compile()  # the call finds it in JAX's memory
            needed = compiled.memory_analysis().temp_size_in_bytes
            corrected = self.correct(self.recipe, needed)
            self.recipe, self.is_checked = corrected, corrected == self.recipe
        return self.program(*arguments)


def programs(config: Config, recipe: Recipe, correct: Correct) -> UpdatePrograms:
    """`policy_update.programs` of a run; with model.remat auto, the first accumulation step corrects what layers keep."""
    plain = policy_update.programs(recipe)
    if config.model.remat != AUTO:
        return plain
    return plain._replace(accumulate=Accumulation(recipe, correct))
