"""The sections model, mesh, data and reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tlt_jax.config.knobs import knob, section

DTYPES = ("float32", "float64", "bfloat16")
REWARDS = ("task", "math", "math_flexible", "gsm8k", "gsm8k_flexible", "exact", "format")
DROP = "drop"  # value of data.duplicates
OLDER = -1  # value of data.split_seed: the split of older versions
AUTO_REMAT = "auto"  # value of model.remat
# Values of model.lora.targets: peft's names of a layer's matrices, in the order of a layer, and all of them.
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class Lora:
    rank: int = knob(
        0,
        "LoRA: adapters of this rank are trained, and every other weight of the start policy stays as it is; 0: all weights "
        "are trained",
        at_least=0,
    )
    alpha: float = knob(
        16.0, "an adapter's change is multiplied with alpha / rank (peft's lora_alpha)", above=0
    )
    targets: list[str] = knob(
        [ALL_LINEAR],
        f"matrices with an adapter, in every layer (peft's target_modules): {', '.join(LORA_TARGETS)}, or {ALL_LINEAR}: all "
        "of them",
        one_of=(*LORA_TARGETS, ALL_LINEAR),
    )


@dataclass(frozen=True)
class Model:
    path: str = knob(
        "",
        "HF model directory or hub id, or that of adapters (peft), which are merged into the base that they name unless "
        "model.lora trains them further; empty: a new model with the sizes in model.init",
    )
    tokenizer: str = knob(
        "", "tokenizer directory or hub id; empty: model.path, or the task's own tokenizer"
    )
    init: dict[str, Any] = knob(
        {},
        "fields of an HF config.json (model_type, hidden_size, ...) for a new model; vocabulary and EOS default to those "
        "of the tokenizer. With model.path: the sizes that `plan` uses when the model's files are missing",
    )
    param_dtype: str = knob(
        "float32",
        "dtype of the master weights: float32 | float64; bfloat16 would lose small updates",
        one_of=("float32", "float64"),
    )
    compute_dtype: str = knob(
        "float32",
        f"dtype of matrix products, rollout weights and KV cache: {' | '.join(DTYPES)}",
        one_of=DTYPES,
    )
    matmul_precision: str = knob(
        "default",
        "jax_default_matmul_precision: default | high | highest",
        one_of=("default", "high", "highest"),
    )
    remat: str = knob(
        AUTO_REMAT,
        "gradient checkpointing: what a layer computes again in the backward pass of the policy update. none: nothing | full: "
        "everything (least memory, up to a third more time) | auto: layer by layer as little as the memory of the devices "
        "allows",
        one_of=("none", "full", AUTO_REMAT),
    )
    lora: Lora = section(Lora)


@dataclass(frozen=True)
class Mesh:
    data: int = knob(
        1,
        "data parallelism: rollout replicas (data groups), and FSDP shards of the update",
        at_least=1,
    )
    model: int = knob(1, "tensor parallelism: devices of one data group", at_least=1)
    fake_devices: int = knob(
        0,
        "split the host CPU into this many devices; 0: use the available devices",
        at_least=0,
    )
    xla_flags: str = knob("", "appended to XLA_FLAGS before JAX starts")


@dataclass(frozen=True)
class Data:
    task: str = knob(
        "fold",
        "generated task, used when data.train is empty: fold | scan | ledger: digits, for a new policy | "
        "word_problems: arithmetic in sentences, for any tokenizer | module:function, which returns your Task",
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
        f"them with this seed), whatever train.seed is; {OLDER}: train.seed draws them, as in run folders of older versions",
        at_least=OLDER,
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
    max_too_long: float = knob(
        0.2,
        "maximum share of rows dropped as too long; a larger share is an error",
        at_least=0,
        at_most=1,
    )
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
    memory_mib: int = knob(
        8192,
        "memory limit of a scoring process, in MiB; a score beyond it fails; 0: no limit",
        at_least=0,
    )
    environment: list[str] = knob(
        [],
        "environment variables to pass to scoring processes, in addition to PATH, HOME, PYTHON*, LC_* and similar",
    )
