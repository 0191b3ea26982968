"""The knobs of the task: what the policy is asked, what replies, what answers earn, and evaluation. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tlt_jax.config.knobs import knob

REWARDS = (
    "task", "environment", "math", "math_flexible", "gsm8k", "gsm8k_flexible", "exact", "format"
)  # fmt: skip
DROP = "drop"  # value of data.duplicates
SUM, LAST = "sum", "last"  # values of environment.reward
OPENINGS = "environment"  # value of data.task
# Values of environment.path, before a colon, that are no modules: libraries with an adapter.
TEXTARENA, REASONING_GYM = "textarena", "reasoning_gym"
# Rewards, and metrics of them, that differ by less are equal: their sums are rounded.
TOLERANCE = 1e-9


def is_at_least(value: Any, limit: float) -> Any:
    """Whether a reward or metric, or each of an array of them, reaches a limit, within TOLERANCE."""
    return value >= limit - TOLERANCE


@dataclass(frozen=True)
class Data:
    task: str = knob(
        "fold",
        "generated task, used when data.train is empty: fold: digits, for a new policy | guess: numbers to guess in several "
        "turns, for a new policy | word_problems: arithmetic in sentences, for any tokenizer | environment: what the "
        "environment says first | module:function, which returns your Task",
        or_own=True,
    )
    task_args: dict[str, Any] = knob({}, "arguments of the generated task (difficulty)")
    train: str = knob(
        "",
        "JSONL, JSON (a list), CSV or Parquet file, directory of such files, or hub data set (owner/name); with several splits "
        "directory:SPLIT or owner/name:SUBSET/SPLIT; owner/name@REVISION for a revision; $NAME and ${NAME} are environment "
        "variables. Or module:function, which returns dicts",
        or_own=True,
    )
    eval: str = knob(
        "",
        "evaluation data, like data.train; empty: data.eval_size of the training rows",
        or_own=True,
    )
    eval_size: int = knob(128, "rows of the evaluation split", at_least=0)
    split_seed: int = knob(
        0,
        "without data.eval, the rows with the smallest hashes of this and their prompt are held out (a generated task draws "
        "them with this seed), whatever train.seed is",
        at_least=0,
    )
    prompt_column: str = knob(
        "prompt",
        "column with the prompt: text, or a list of chat messages, which do not end with an assistant's",
    )
    answer_column: str = knob(
        "answer",
        "column with the reference answer. In every name of a column dots lead into nested objects: reward_model.ground_truth",
    )
    id_column: str = knob(
        "", "column with a unique id; empty: the file's path in the source, and the row's line"
    )
    chat_template: bool = knob(False, "wrap the prompt with the tokenizer's chat template")
    chat_template_kwargs: dict[str, Any] = knob(
        {}, "keyword arguments of the chat template (for example enable_thinking)"
    )
    system: str = knob("", "system message, with the chat template")
    prompt_suffix: str = knob(
        "", "text appended to each prompt; of chat messages to the last one of the user"
    )
    max_prompt_tokens: int = knob(512, "longer prompts are dropped and counted", at_least=1)
    duplicates: str = knob(
        DROP,
        "rows of data.train with a repeated prompt, or with a prompt of data.eval. drop: dropped and counted, but a warm start "
        "learns every solution of a prompt | keep",
        one_of=(DROP, "keep"),
    )
    shuffle: bool = knob(True, "shuffle the rows in every epoch")


@dataclass(frozen=True)
class Reward:
    terms: dict[str, float] = knob(
        {"task": 1.0},
        f"reward name -> weight. Names: {', '.join(REWARDS)}, or module:function",
        or_own=True,
    )
    overlong_buffer: int = knob(
        0,
        "in training, answers that end in the last so many tokens before rollout.max_new_tokens lose a part of the reward that "
        "grows with their length; 0: none",
        at_least=0,
    )
    overlong_factor: float = knob(
        1.0,
        "reward that an answer of rollout.max_new_tokens tokens loses with overlong_buffer",
        above=0,
    )
    length_penalty: float = knob(
        0.0,
        "in training, reward that the longest of the right answers to a prompt loses (eval.correct_at), the shortest none, "
        "others by their length; 0: none",
        at_least=0,
    )
    workers: int = knob(
        0,
        "scoring processes; 0: one for each core of the host, at least 2 and at most 4",
        at_least=0,
    )
    timeout_s: float = knob(
        10.0, "time limit of one score in seconds; the scoring process is killed after it", above=0
    )
    failure_score: float = knob(
        0.0, "score of an answer whose reward timed out, crashed or raised an error"
    )
    environment: list[str] = knob(
        [],
        "environment variables to pass to processes that score or run environments, in addition to PATH, HOME, PYTHON*, LC_* "
        "and similar",
    )


@dataclass(frozen=True)
class Environment:
    """What answers the policy's turns; without `path` and `tools` an answer is one turn."""

    path: str = knob(
        "",
        "module:name of a class, of a function that makes one environment, or of an agent (a function with the parameter "
        "base_url); textarena:GAME-ID (extra games), reasoning_gym:NAME (extra reasoning); empty: none",
        or_own=True,
    )
    args: dict[str, Any] = knob({}, "keyword arguments of environment.path")
    tools: list[str] = knob(
        [],
        "module:function of functions that the policy may call, with type hints and a docstring that describes the arguments",
        or_own=True,
    )
    turns: int = knob(8, "most turns of an answer", at_least=1)
    turn_tokens: int = knob(
        0, "most tokens of a turn of the policy; 0: no limit but rollout.max_new_tokens", at_least=0
    )
    timeout_s: float = knob(
        30.0, "time limit in seconds of each start and step of an environment", above=0
    )
    workers: int = knob(
        0,
        "processes that run environments; 0: one for each core of the host, at least 2 and at most 4",
        at_least=0,
    )
    reward: str = knob(
        SUM,
        "reward of an answer. sum: of the rewards of its turns | last: that of its last turn",
        one_of=(SUM, LAST),
    )


@dataclass(frozen=True)
class Eval:
    every: int = knob(
        20, "evaluate before step 0, then every n steps and at the end; 0: never", at_least=0
    )
    prompts: int = knob(0, "evaluation prompts; 0: all of the split", at_least=0)
    samples: int = knob(1, "answers per evaluation prompt", at_least=1)
    temperature: float = knob(1.0, "sampling temperature of the evaluation", at_least=0)
    top_k: int = knob(0, "top-k of the evaluation", at_least=0)
    top_p: float = knob(1.0, "top-p of the evaluation", above=0, at_most=1)
    max_new_tokens: int = knob(0, "longest answer; 0: rollout.max_new_tokens", at_least=0)
    correct_at: float = knob(1.0, "minimum reward of a correct answer (for pass@k)")
