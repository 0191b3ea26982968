"""GRPO in a loop of one's own: `python examples/grpo_loop.py [MODEL]`, by default on the policy of the quickstart.

The engine decodes and updates; prompts, rewards and advantages are the loop's.
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
            spread = groups.std(axis=1, keepdims=True) + 1e-6
            advantages = (groups - groups.mean(axis=1, keepdims=True)) / spread
            engine.forward_backward(answers, "ppo", advantages=advantages.ravel())
            engine.optim_step()
            yield rewards.mean()


if __name__ == "__main__":
    for step, mean in enumerate(train((sys.argv[1:] or ["runs/quickstart/hf"])[0], 10), start=1):
        print(f"step {step}: reward {mean:.3f}")
