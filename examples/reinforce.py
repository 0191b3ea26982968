"""REINFORCE in a loop of one's own, with the rollout of tlt_jax: `python examples/reinforce.py [none|ngram|adaptive]`.

The loop owns the weights, the optimizer and the loss; the engine answers prompts, and its drafter learns from the answers.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tlt_jax
from tlt_jax.data import tasks
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.models import architecture, hf_config, transformer

TASK = tasks.make("fold", {"min_length": 3, "max_length": 3, "modulus": 5})
SIZES = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 64}  # fmt: skip
PROMPTS, SAMPLES, LIMIT, WIDTH = 8, 8, 16, 32


def reward(text, row):
    """How much of the longest answer the digits of the prompt fill."""
    return sum(one in row.prompt for one in text) / LIMIT


def batch(answers, rewards):
    """Token ids [B, T], 1 where there is one, 1 where an answer has one, and advantages [B]."""
    tokens, real, learns = (np.zeros((len(answers), WIDTH), np.int32) for _ in range(3))
    for i, answer in enumerate(answers):
        start, end = len(answer.prompt_tokens), len(answer.prompt_tokens) + len(answer.tokens)
        tokens[i, :end] = [*answer.prompt_tokens, *answer.tokens]
        real[i, :end], learns[i, start:end] = 1, 1
    groups = rewards.reshape(PROMPTS, SAMPLES)
    return tokens, real, learns, (groups - groups.mean(axis=1, keepdims=True)).ravel()


def loss(params, model, tokens, real, learns, advantages):
    """REINFORCE with the group's mean reward as baseline."""
    positions = jnp.broadcast_to(jnp.arange(WIDTH), tokens.shape)
    states, _ = transformer.hidden(
        params, model, tokens, positions, real, compute_dtype=jnp.float32
    )
    logprobs = jax.nn.log_softmax(transformer.logits(params, model, states[:, :-1]))
    logprobs = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    return -jnp.sum(advantages[:, None] * learns[:, 1:] * logprobs) / jnp.sum(learns)


def train(drafter, steps, changes=None):
    """Yields the answers' token ids, their mean reward and the accept length of every step."""
    tokenizer, optimizer = TASK.tokenizer(), optax.adam(3e-3)
    model = hf_config.new_config(SIZES, len(tokenizer), [tokenizer.eos_token_id])
    params = architecture.init(model, make_mesh(1, 1), jax.random.key(0), jnp.float32)
    state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params, state, *rows):
        updates, state = optimizer.update(jax.grad(loss)(params, model, *rows), state)
        return optax.apply_updates(params, updates), state

    knobs = {"speculation.drafter": drafter, "rollout.prompts": PROMPTS, "rollout.samples": SAMPLES,
             "rollout.max_new_tokens": LIMIT, "train.steps": steps} | (changes or {})  # fmt: skip
    with tlt_jax.open_engine((model, params), knobs) as engine:
        for step in range(steps):
            rows = TASK.rows(0, range(step * PROMPTS, (step + 1) * PROMPTS), "train")
            answers = engine.generate([tokenizer.encode(row.prompt) for row in rows])
            texts = [tokenizer.decode(one.tokens, skip_special_tokens=True) for one in answers]
            rewards = np.array(
                [reward(text, rows[one.prompt]) for text, one in zip(texts, answers, strict=True)]
            )
            if drafter == "adaptive":
                engine.learn(answers)  # before the update, which donates the weights
            params, state = update(params, state, *batch(answers, rewards))
            engine.update_weights(params)
            yield [one.tokens.tolist() for one in answers], rewards.mean(), answers.accept_length


if __name__ == "__main__":
    # So small a policy is fastest without drafts: this tuner drafts all the same. Leave it out for a real one.
    shown = {"speculation.tuner": "fixed", "speculation.strategies": ["3_2_4"]}
    drafter = (sys.argv[1:] or ["adaptive"])[0]
    for step, (_, mean, accepted) in enumerate(train(drafter, 30, shown), start=1):
        print(f"step {step}: reward {mean:.3f}, accept length {accepted:.2f}")
