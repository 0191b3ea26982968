"""Makes a tokenizer from a text file and a small random model, as one Hugging Face directory: the model of a dry run.

python -m tlt_jax.make_tiny_model --data train.jsonl --columns question,answer --vocab-size 2048 --out DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tlt_jax import cli
from tlt_jax.config import parse
from tlt_jax.data import files
from tlt_jax.data.files import Problems
from tlt_jax.distributed import process
from tlt_jax.errors import DataError

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Qwen2's pre-tokenizer: AutoTokenizer uses it for any tokenizer next to a Qwen2 config.json.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SMALLEST_VOCAB = 256 + 3  # bytes and special tokens
# Of types whose layers differ: sizes at which two layers have both kinds. Of mixtures: few experts.
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
LIKE = {
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "qwen2_moe": {**EXPERTS, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "olmoe": EXPERTS,
    "mixtral": {"num_local_experts": 4},
    "mistral": {"sliding_window": 32},
    "smollm3": {"no_rope_layer_interval": 2},
    "granite": {
        "embedding_multiplier": 12.0, "logits_scaling": 4.0, "residual_multiplier": 0.22, "attention_multiplier": 0.125,
    },
    "olmo3": {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"sliding_window": 32, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "gemma4_text": {
        "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
    },
}  # fmt: skip
OPTIONS = {  # option -> default, meaning
    "like": ("qwen2", "model_type: that of config.json files of the models to try"),
    "columns": ("question,answer", "text columns of the data, separated by commas"),
    "vocab-size": (2048, "largest vocabulary of the tokenizer"),
    "hidden-size": (64, "model width"),
    "layers": (2, "layers"),
    "heads": (4, "query heads"),
    "kv-heads": (2, "key and value heads"),
    "mlp-size": (176, "mlp width"),
    "max-positions": (2048, "longest prompt and answer"),
    "seed": (0, "seed of the weights"),
}


def main(argv: list[str] | None = None) -> int:
    """The command; exit code 0 when the directory is written, 2 for a user error."""
    args = _parser().parse_args(argv)
    process.skip_warnings()
    try:
        tokenizer = train_tokenizer(read_texts(args.data, args.columns.split(",")), args.vocab_size)
        save_model(tokenizer, args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {len(tokenizer)} tokens, {args.layers} layers of width {args.hidden_size}")
    return 0


def read_texts(source: str, columns: list[str]) -> list[str]:
    """The texts in these columns of all rows of data files. Raises DataError."""
    problems, texts = Problems(), []
    for path in files.locate(parse.expand(source, "--data"), "--data", problems):
        rows = files.read_file(path, problems)
        for column in columns:
            found = [(line, files.cell(row, column)) for line, row in rows]
            texts += [text for _, text in found if isinstance(text, str)]
            if wrong := [line for line, text in found if not isinstance(text, str)]:
                known = ", ".join(map(repr, files.columns(row for _, row in rows)))
                for line in wrong:
                    what = f"no text in column {column!r}"
                    problems.add(str(path), line, what, f"choose --columns among {known}")
    problems.stop_if_any()
    return texts


def train_tokenizer(texts: list[str] | Iterator[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer with Qwen2's pre-tokenizer and the ChatML template.

    Deterministic. Raises DataError for a vocabulary below 256 bytes and 3 special tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < SMALLEST_VOCAB:
        raise DataError(
            f"--vocab-size {vocab_size} is below {SMALLEST_VOCAB}: 256 bytes and 3 special tokens"
        )

    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    backend.decoder = decoders.ByteLevel()

    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_model(tokenizer: Any, args: argparse.Namespace) -> None:
    """Writes config, generation config, random float32 weights and the tokenizer to --out."""
    import jax

    from tlt_jax.distributed.mesh import make_mesh
    from tlt_jax.models import architecture, hf, hf_config

    layers, kinds = args.layers, LIKE.get(args.like, {})
    if "layer_types" in kinds:
        kinds = kinds | {"layer_types": (kinds["layer_types"] * layers)[:layers]}
    sizes = kinds | {
        "model_type": args.like,
        "head_dim": args.hidden_size // args.heads,
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "intermediate_size": args.mlp_size,
        "max_position_embeddings": args.max_positions,
        "tie_word_embeddings": True,
    }

    eos_ids = tuple(tokenizer.convert_tokens_to_ids([END, PAD]))
    config = hf_config.new_config(sizes, len(tokenizer), eos_ids)
    mesh = make_mesh(1, 1)
    params = architecture.init(config, mesh, jax.random.key(args.seed), "float32")
    hf.save(params, config, Path(args.out), mesh, tokenizer, "float32")


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m tlt_jax.make_tiny_model", description=__doc__.splitlines()[0]
    )
    source = "JSONL, JSON, CSV or Parquet file, folder, glob or hub data set that the tokenizer learns from"
    parser.add_argument("--data", required=True, help=source)
    parser.add_argument("--out", required=True, help="directory to write")
    for name, (default, meaning) in OPTIONS.items():
        meaning += " (default: %(default)s)"
        parser.add_argument(f"--{name}", type=type(default), default=default, help=meaning)
    return parser


if __name__ == "__main__":
    sys.exit(main())
