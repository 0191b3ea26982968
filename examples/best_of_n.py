"""Supervised learning of the best of n own answers: `python examples/best_of_n.py [MODEL]`, by default the quickstart's policy.

In each step the policy learns its best answer to every prompt that it answered right at least once.
"""

import sys

import numpy as np

import tlt_jax
from tlt_jax.data import tasks

TASK = tasks.make("fold", {"min_length": 4, "max_length": 12})
PROMPTS, SAMPLES = 16, 8
KNOBS = {"rollout.prompts": PROMPTS, "rollout.samples": SAMPLES, "rollout.max_new_tokens": 96, "data.max_prompt_tokens": 16,
         "optim.learning_rate": 1e-4}  # fmt: skip


def train(model, steps, reward=TASK.verify, changes=None):
    """Yields the mean reward of every step."""
    with tlt_jax.open_engine(model, KNOBS | {"train.steps": steps} | (changes or {})) as engine:
        for step in range(steps):
            rows = TASK.rows(0, range(step * PROMPTS, (step + 1) * PROMPTS), "train")
            answers = engine.generate([row.prompt for row in rows])
            rewards = np.array([reward(one.text, rows[one.prompt].answer) for one in answers])
            groups = rewards.reshape(PROMPTS, SAMPLES)
            best = [answers[prompt * SAMPLES + sample] for prompt, sample in enumerate(groups.argmax(axis=1))
                    if groups[prompt].max() > 0]  # fmt: skip
            if best:
                engine.forward_backward(best, "cross_entropy")
                engine.optim_step()
            yield rewards.mean()


if __name__ == "__main__":
    for step, mean in enumerate(train((sys.argv[1:] or ["runs/quickstart/hf"])[0], 10), start=1):
        print(f"step {step}: reward {mean:.3f}")
