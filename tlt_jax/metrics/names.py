"""The closed list of metric names, in the vocabulary of verl and TRL; knows no values."""

from __future__ import annotations

import difflib
import re
from typing import NamedTuple


class MetricError(ValueError):
    """A metric name that is not in the list."""


class Metric(NamedTuple):
    """The name, meaning and kind of a metric. See HOLES for the placeholders in braces."""

    name: str
    help: str
    kind: str = "scalar"  # | histogram | text


ROWS = [
    # rewards and groups
    ("reward/mean", "mean reward of the step's answers"),
    ("reward/std", "standard deviation of the rewards over the step"),
    ("reward/min", "lowest reward of the step"),
    ("reward/max", "highest reward of the step"),
    ("reward/histogram", "rewards of the step", "histogram"),
    ("reward/terms/{term}", "mean of one reward term, or of a number that a reward reports, unweighted"),
    ("reward/terms/overlong_reward", "mean penalty of long answers, part of the reward; with reward.overlong_buffer"),
    ("reward/terms/length_penalty", "mean penalty of right answers by length, part of the reward; with reward.length_penalty"),
    ("reward/terms/overlong", "share of answers with such a penalty; only with reward.overlong_buffer"),
    ("reward/failures/timeout", "answers of the step whose score took longer than reward.timeout_s"),
    ("reward/failures/crash", "answers of the step whose scoring process died"),
    ("reward/failures/error", "answers of the step whose reward raised"),
    ("groups/zero_variance",
     "share of prompts whose answers all got the same reward: no gradient, except with algorithm.advantage reinforce_pp"),
    ("groups/tried", "prompts that the step's choice looked at; it and the next six only with rollout.max_prompts"),
    ("train/num_gen_batches", "the same in batches of rollout.prompts"),
    ("groups/replaced", "share of these prompts that were replaced, since their answers all got the same reward"),
    ("groups/filled", "prompts without a gradient that the step trained on, since too few others were found"),
    ("groups/unused", "further prompts that were begun and not needed"),
    ("perf/wasted_ratio", "share of the rollout's answer tokens that the step did not train on"),
    ("perf/score_wait_s",
     "seconds of the rollout in which a process decoded nothing and waited for rewards; of the process that waited longest"),
    ("advantages/mean", "mean advantage over the step's answers"),
    ("advantages/max", "largest advantage of the step"),
    ("advantages/min", "smallest advantage of the step"),
    # lengths
    ("prompt_length/mean", "mean prompt length in tokens"),
    ("prompt_length/max", "longest prompt in tokens"),
    ("response_length/mean", "mean answer length in tokens, EOS included"),
    ("response_length/min", "shortest answer"),
    ("response_length/max", "longest answer"),
    ("response_length/p50", "median answer length"),
    ("response_length/p75", "75th percentile of the answer length"),
    ("response_length/p90", "90th percentile of the answer length"),
    ("response_length/p99", "99th percentile of the answer length"),
    ("response_length/clip_ratio", "share of answers cut at rollout.max_new_tokens"),
    ("response_length/nonfinite", "answers that ended because the policy's logits were not finite; the loss leaves them out"),
    ("response_length/histogram", "answer lengths of the step", "histogram"),
    # policy update
    ("actor/loss", "loss of the policy update, all terms; it, pg_loss and grad_norm: means over minibatches"),
    ("actor/pg_loss", "policy-gradient term of the loss"),
    ("actor/kl", "k3 estimate of KL(policy, reference) per token; only with a reference"),
    ("actor/entropy", "mean entropy of the policy per token"),
    ("actor/reward_kl_penalty", "mean over answers of log-prob - reference per token; only with algorithm.kl_in reward"),
    ("actor/ppo_kl", "mean of old log-prob - log-prob per token"),
    ("actor/ratio_mean", "mean probability ratio of a token, new over old policy"),
    ("actor/ratio_max", "largest probability ratio of a token"),
    ("actor/sequence_ratio_mean",
     "mean over answers of exp(mean log-ratio of its tokens); it and the next only where the loss needs whole answers"),
    ("actor/sequence_ratio_max", "largest of these ratios"),
    ("actor/pg_clipfrac",
     "share of tokens with a clipped ratio, with gspo that of their answer; it and the next two not with a loss of one's own"),
    ("actor/pg_clipfrac_low", "share of tokens clipped at 1 - algorithm.clip_low (negative advantage; with cispo any)"),
    ("actor/pg_clipfrac_high", "share of tokens clipped at 1 + algorithm.clip_high (positive advantage; with cispo any)"),
    ("actor/pg_clipfrac_lower", "share of tokens at the dual clip; only with algorithm.clip_dual"),
    ("actor/grad_norm", "global gradient norm before clipping"),
    ("actor/lr", "learning rate"),
    ("actor/nonfinite", "non-finite updates skipped since the start of the run"),
    ("actor/empty_updates", "optimizer steps that changed nothing: no answer counts in the loss, or its gradient is 0"),
    ("actor/packed_ratio", "share of the packed rows' slots that hold tokens instead of padding"),
    ("actor/rollout_logprob_diff_mean", "mean over tokens of |log-prob in the rollout - old log-prob|"),
    ("actor/rollout_logprob_diff_max", "largest |log-prob in the rollout - old log-prob|"),
    # routers of a mixture of experts, over the tokens of the update, prompts included
    ("experts/changed", "share of tokens and layers whose router would have chosen other experts than those of the rollout"),
    ("experts/entropy", "mean entropy of a router's probabilities, in nats"),
    ("experts/load_max", "most tokens that an expert of a layer had, relative to the layer's mean"),
    ("experts/load_min", "fewest, likewise; 0: an expert had none"),
    ("experts/load@{k}", "tokens of one expert, likewise, mean over layers; of up to 16 experts"),
    ("experts/balance_loss", "load-balancing loss: experts of a token where loads are equal, larger where not"),
    ("actor/teacher_kl", "mean of log-prob - log-prob of the teacher, or their KL with algorithm.teacher.top_k"),
    # importance weights between rollout and update: algorithm.importance
    ("rollout_corr/kl", "mean of log-prob in the rollout - old log-prob; with importance weights, as all rollout_corr"),
    ("rollout_corr/rollout_is_mean",
     "mean over tokens of the ratio, before it is capped; with importance sequence or geometric that of the answer"),
    ("rollout_corr/rollout_is_max", "largest of these ratios"),
    ("rollout_corr/rollout_is_ratio_fraction_high", "share of tokens whose ratio is capped at algorithm.importance_cap"),
    ("rollout_corr/rollout_is_seq_mean",
     "mean over answers of the mean ratio; it and the next only where the loss needs whole answers"),
    ("rollout_corr/rollout_is_seq_max", "largest mean ratio of an answer"),
    ("rollout_corr/rollout_rs_masked_fraction",
     "share of masked tokens; it and the next only with algorithm.importance_mask, importance_mask_low or importance_veto"),
    ("rollout_corr/rollout_rs_seq_masked_fraction",
     "share of answers with a masked token; only where the loss needs whole answers"),
    # time and speed
    ("timing_s/step", "seconds of the step, from the metrics of the step before to its own; the sum of the other timing_s"),
    ("timing_s/update_weights", "seconds to publish the policy's weights to the rollout"),
    ("timing_s/rollout", "seconds of the rollout"),
    ("timing_s/reward", "seconds spent waiting for rewards after the rollout"),
    ("timing_s/old_log_prob", "seconds of the trainer's pass for old (and reference) log-probs"),
    ("timing_s/drafter", "seconds of drafter work between rollout and update: paid micro-steps and the merge"),
    ("timing_s/update", "seconds of the policy update, packing its rows included"),
    ("timing_s/eval", "seconds of the evaluation before the step"),
    ("timing_s/save_checkpoint", "seconds that the run waited for saving"),
    ("timing_s/metrics", "seconds to compute the step's metrics and to write those of the step before"),
    ("timing_s/other", "seconds of the step outside all other phases"),
    ("perf/tokens_per_second", "answer tokens per second of rollout, all data groups"),
    ("perf/throughput", "prompt and answer tokens per second of the whole step, without its evaluation"),
    ("perf/total_num_tokens", "prompt and answer tokens of the step"),
    ("perf/idle_ratio", "share of the data groups' rollout time without work and without waiting for compilations"),
    ("group/busy_s@{k}", "seconds of the rollout in which data group k had work"),
    ("group/compile_wait_s@{k}", "seconds in which the host of data group k waited for a compilation"),
    ("group/idle_s@{k}", "the other seconds of the rollout, in which data group k was idle"),
    ("group/busy_s/{statistic}", "the same over all data groups; replaces the values by group when there are more than 16"),
    ("group/compile_wait_s/{statistic}", "the same over all data groups"),
    ("group/idle_s/{statistic}", "the same over all data groups"),
    ("group/latest", "index of the data group that finished decoding last; only with more than 16 groups"),
    ("perf/rounds", "decoding rounds of the step, all data groups"),
    ("perf/row_rounds", "rows of the batch summed over the decoding rounds of the step"),
    ("perf/padding_ratio", "share of these rows that held no live sequence"),
    ("perf/compiles", "programs compiled or read from the cache in the step, by the process that spent most time on it"),
    ("perf/compile_s", "seconds in which the loop of this process waited for programs to be traced, lowered, compiled or read"),
    ("perf/compile_s/{phase}", "the same by phase; included in timing_s/{phase}"),
    ("perf/taken_ratio", "share of the processors that other work took in the rollout while none was idle; 0 on accelerators"),
    ("perf/programs", "compiled rollout programs in memory"),
    ("perf/max_memory_gib", "peak memory of the process (on CPU) or of one device so far"),
    # speculation
    ("speculation/accept_length", "mean tokens per sequence and drafting round: the accepted draft tokens and one more"),
    ("speculation/accept_length/{drafter}", "the same by drafter: its kind or ngram; if adaptive ngram, learned or merged"),
    ("speculation/accepted/histogram", "accepted draft tokens per sequence and drafting round", "histogram"),
    ("speculation/accept_rate@{k}", "share of drafting rounds that accepted the draft to depth k"),
    ("speculation/share", "share of the answers' tokens from drafting rounds"),
    ("speculation/declined", "share of drafting rounds in which the drafter proposed nothing"),
    ("speculation/nodes@{k}", "mean tree nodes of a round in batch bucket k; 1 is plain decoding"),
    ("speculation/prediction_error", "median |log(predicted / measured tokens per second)| of the chunks with reliable times"),
    ("speculation/round_ms@{k}", "milliseconds of a drafting round in batch bucket k, median of the chunks"),
    ("speculation/plain_round_ms@{k}", "milliseconds of a plain round in batch bucket k, median of the chunks"),
    ("speculation/switches", "chunks with another strategy than the chunk before of the same data group"),
    ("speculation/catch_up_s", "seconds in which the drafter read what was decoded without it, all data groups"),
    ("speculation/explored_s", "seconds of chunks that were decoded to measure their strategy, all data groups"),
    ("speculation/pool_programs", "compiled drafting programs in memory, all data groups"),
    ("speculation/pool_mib", "MiB of a data group's drafting programs: their code, and the temporaries of the largest one"),
    ("training/epoch", "passes over the training rows so far"),
    ("training/rows_dropped", "rows of data.train dropped because they are too long, duplicates or evaluation prompts"),
    # evaluation
    ("eval/mean@{k}", "mean reward on the evaluation split, k answers per prompt"),
    ("eval/pass@{k}", "unbiased share of evaluation prompts that one of k answers solves"),
    ("eval/response_length/mean", "mean answer length of the evaluation"),
    ("eval/response_length/max", "longest answer of the evaluation"),
    ("eval/response_length/clip_ratio", "share of evaluation answers cut at the length limit"),
    # supervised warm start
    ("sft/loss", "loss per token of the supervised warm start"),
    ("sft/grad_norm", "global gradient norm of the warm start before clipping"),
    ("sft/lr", "learning rate of the warm start"),
    ("sft/tokens_per_second", "target tokens per second of the warm start"),
    # drafter training
    ("drafter/loss", "loss of the drafter, all draft steps or positions of a block"),
    ("drafter/token_loss",
     "cross-entropy per token: of eagle and eagle3 to the policy, first step; of block drafters to the texts, a block"),
    ("drafter/feature_loss", "smooth-L1 distance to the policy's features, first draft step; only eagle"),
    ("drafter/variation",
     "L1 distance of the drafter's distribution and the policy's, all positions of a block; only block drafters"),
    ("drafter/confidence_loss", "cross-entropy of dspark's confidence to the acceptance probability"),
    ("drafter/agreement@{k}", "share of tokens where drafter and policy have the same likeliest, draft token k"),
    ("drafter/acceptance@{k}", "mean of sum min(policy, drafter) over the vocabulary, draft token k given the text before it"),
    ("drafter/grad_norm", "global gradient norm of the drafter before clipping"),
    ("drafter/lr", "learning rate of the drafter"),
    ("drafter/nonfinite", "non-finite drafter updates skipped since the start of its training"),
    ("drafter/tokens_per_second", "answer tokens per second of drafter training"),
    # drafter training in idle time: speculation.drafter adaptive
    ("idle/ratio", "share of the data groups' rollout time without decoding, idle training included"),
    ("idle/environment", "share of the data groups' rollout time in which all that a group had left waited for replies"),
    ("idle/used_ratio", "share of that time spent training the drafter"),
    ("idle/delay_s", "seconds that the end of the rollout waited for the last micro-step"),
    ("drafter/steps", "micro-steps of the step, all data groups"),
    ("drafter/tokens", "answer tokens of these micro-steps"),
    ("drafter/acceptance", "expected acceptance of the first draft token on held-out windows, the step's last measurement"),
    ("drafter/replay_tokens", "tokens in the replay buffers, all data groups"),
    ("drafter/replay_bytes", "bytes of their features, all data groups"),
    ("drafter/replay_age", "mean age of the training tokens, in RL steps"),
    ("drafter/merge_weight_max", "largest weight of one data group in the merge"),
    ("drafter/failures", "consecutive steps in which idle training failed; the drafter stays unchanged"),
    ("drafter/failed_groups", "data groups whose idle training failed; their copies are left out of the merge"),
    # drafter training on the packed rows of the policy's update: drafter_training.share
    ("drafter/update_steps", "optimizer steps of the drafter on packed rows of the RL step"),
    ("drafter/update_tokens", "answer tokens of these optimizer steps"),
    ("drafter/share", "share of the step's packed rows used for these optimizer steps"),
    # texts
    ("rollout/samples", "sample prompts and answers with their rewards", "text"),
    ("config", "the resolved configuration", "text"),
]  # fmt: skip
NAMES = tuple(Metric(*row) for row in ROWS)

# Placeholders in names: a number, a statistic over data groups,
# the name of a reward, a kind of drafter, the <phase> of a timing_s/<phase>.
HOLES = {
    "{k}": r"\d+",
    "{statistic}": "min|mean|max",
    "{term}": r"[\w.:/<>-]+",
    "{drafter}": "eagle3?|dflash2?|dspark|ngram|learned|merged",
    "{phase}": r"\w+",
}


def pattern(name: str) -> re.Pattern[str]:
    """Regular expression that a name with placeholders matches."""
    parts = re.split("(" + "|".join(map(re.escape, HOLES)) + ")", name)
    return re.compile(
        "".join(f"(?:{HOLES[part]})" if part in HOLES else re.escape(part) for part in parts)
    )


PATTERNS = [(metric, pattern(metric.name)) for metric in NAMES]


def find(name: str, kind: str) -> Metric:
    """The metric of this name and kind. Raises MetricError, with the closest name, when none matches."""
    for metric, allowed in PATTERNS:
        if metric.kind == kind and allowed.fullmatch(name):
            return metric

    close = difflib.get_close_matches(
        name, [metric.name for metric in NAMES if metric.kind == kind], n=1
    )
    hint = f"did you mean {close[0]}?" if close else "add it to tlt_jax/metrics/names.py"
    raise MetricError(f"no {kind} is called {name!r}: {hint}")


def page() -> str:
    """The text of the page of all metrics, as the site has it."""
    lines = [
        "# Metrics",
        "",
        "Every name that a run writes to TensorBoard and Weights & Biases (`log.trackers`), close to the vocabulary of verl",
        "and TRL. [metrics.jsonl](run_folder.md#metrics) has all scalars; TensorBoard shows these meanings with them.",
        "",
        "| name | kind | meaning |",
        "| --- | --- | --- |",
    ]

    escaped = ((metric.name, metric.kind, metric.help.replace("|", "\\|")) for metric in NAMES)
    lines += [f"| `{name}` | {kind} | {help} |" for name, kind, help in escaped]
    return "\n".join(lines) + "\n"
