"""On-policy distillation in a loop of one's own: `python examples/distill_loop.py STUDENT [TEACHER]`.

The student answers, and the advantage of each of its tokens is the teacher's log-prob minus its own: the gradient is that of
the KL from the student to the teacher, token by token. Both have one tokenizer; the default teacher is the quickstart's policy.
"""

import sys

import numpy as np

import tlt_jax
from tlt_jax.data import tasks

TASK = tasks.make("fold", {"min_length": 4, "max_length": 12})
PROMPTS = 16
KNOBS = {"rollout.prompts": PROMPTS, "rollout.samples": 8, "rollout.max_new_tokens": 96, "data.max_prompt_tokens": 16,
         "optim.learning_rate": 1e-3}  # fmt: skip


def train(student, teacher, steps, changes=None):
    """Yields the mean of the student's log-prob minus the teacher's in every step."""
    knobs = KNOBS | {"train.steps": steps} | (changes or {})
    with (
        tlt_jax.open_engine(student, knobs) as policy,
        tlt_jax.open_engine(teacher, knobs) as judge,
    ):
        for step in range(steps):
            rows = TASK.rows(0, range(step * PROMPTS, (step + 1) * PROMPTS), "train")
            answers = policy.generate([row.prompt for row in rows])
            advantages = [
                wanted - one.logprobs
                for wanted, one in zip(judge.forward(answers), answers, strict=True)
            ]
            policy.forward_backward(answers, "ppo", advantages=advantages)
            policy.optim_step()
            yield -np.concatenate(advantages).mean()


if __name__ == "__main__":
    student, teacher = [*sys.argv[1:], "runs/quickstart/hf"][:2]
    for step, gap in enumerate(train(student, teacher, 20), start=1):
        print(f"step {step}: KL {gap:.3f}")
