"""google-tunix's own sampler on a Qwen2 directory, for --peer of speculation_race.py: a request a line in, a result a line out.

Run by the python of a virtual environment with google-tunix; knows nothing of tlt_jax. A request is a JSON object with
`prompts` (texts), `limit` (tokens) and `seed`; the result has `seconds` and `tokens` (end tokens too, padding not).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax
from transformers import AutoTokenizer
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen2 import model as qwen2, params as weights


def main() -> None:
    """Serves requests until the input ends."""
    directory, limit = Path(sys.argv[1]), int(sys.argv[2])
    sizes = json.loads((directory / "config.json").read_text())
    heads = sizes["num_attention_heads"]
    config = qwen2.ModelConfig(
        num_layers=sizes["num_hidden_layers"],
        vocab_size=sizes["vocab_size"],
        embed_dim=sizes["hidden_size"],
        hidden_dim=sizes["intermediate_size"],
        num_heads=heads,
        head_dim=sizes.get("head_dim") or sizes["hidden_size"] // heads,
        num_kv_heads=sizes["num_key_value_heads"],
        rope_theta=sizes.get("rope_theta") or sizes["rope_parameters"]["rope_theta"],
        norm_eps=sizes["rms_norm_eps"],
        use_tied_embedding=sizes["tie_word_embeddings"],
    )
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = weights.create_model_from_safe_tensors(str(directory), config, mesh)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    sampler = None
    for line in sys.stdin:
        request = json.loads(line)
        width = max(len(tokenizer(text).input_ids) for text in request["prompts"])
        width = 1 << (width - 1).bit_length()
        if sampler is None:
            cache = CacheConfig(
                max(width, 32) + limit + 1, config.num_layers, config.num_kv_heads, config.head_dim
            )
            sampler = Sampler(model, tokenizer, cache)
        begin = time.perf_counter()
        output = sampler(
            request["prompts"], limit, max_prompt_length=width, temperature=1.0, top_p=1.0, seed=request["seed"],
            eos_tokens=[tokenizer.eos_token_id],
        )  # fmt: skip
        seconds = time.perf_counter() - begin
        tokens = sum(
            min(len(one) + 1, limit) for one in output.tokens
        )  # an end token is not among them
        print(json.dumps({"seconds": seconds, "tokens": tokens, "texts": output.text}), flush=True)


if __name__ == "__main__":
    main()
