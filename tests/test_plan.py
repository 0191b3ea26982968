"""Plans: the arithmetic against hand-worked numbers, the preflight, the collectives of a rollout, the TPU topologies."""

from __future__ import annotations

import io
import json
import re
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.config import load as configuration, schema
from tlt_jax.data import packing
from tlt_jax.distributed.mesh import make_mesh, sharding
from tlt_jax.errors import ConfigError
from tlt_jax.models import drafter as drafters, from_config, hf, hf_drafter
from tlt_jax.plan import __main__ as command, programs as planned_programs, report
from tlt_jax.plan.launches import collectives
from tlt_jax.rollout import ngram_memory
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables.programs import (
    Admit,
    Append,
    CatchUp,
    Decode,
    Prefill,
    StateShape,
)
from tlt_jax.rollout.request import admission_size
from tlt_jax.spec_decode import tree_drafter
from tlt_jax.spec_decode.interface import DecodingParams
from tlt_jax.spec_decode.strategy import PLAIN
from tlt_jax.train import memory
from tlt_jax.train.policy_update import Recipe
from tlt_jax.tuner import make
from tlt_jax.tuner.baselines import parse_arms
from tlt_jax.tuner.interface import Measurement

TINY = [
    "--config", "configs/quickstart.yaml", "--mesh.fake_devices", "0", "--rollout.compile_cache", "off",
    "--model.init.hidden_size", "32", "--model.init.intermediate_size", "64", "--model.init.vocab_size", "128",
    "--rollout.prompts", "4", "--rollout.samples", "2", "--speculation.drafter", "none",
]  # fmt: skip
NEW = "--speculation.drafter", "runs/nowhere", "--drafter_training.kind"
DRAFTERS = {
    "ngram": ("--speculation.drafter", "ngram"),
    "eagle": (*NEW, "eagle"),
    "eagle3": (*NEW, "eagle3", "--drafter_training.vocab", "64"),
    "dspark": (*NEW, "dspark", "--drafter_training.vocab", "64"),
}


def save_config(path, drafter) -> str:
    """A directory with the config.json of a drafter, which is all that plan reads."""
    path.mkdir()
    raw = hf_drafter.to_raw(drafter, np.dtype("float32"))
    (path / "config.json").write_text(json.dumps(raw))
    return str(path)


def plan_of(*overrides, captures_states=False):
    """A tiny configuration on a (2, 2) mesh, its recipe and its engine."""
    settings = configuration.parse([*TINY, "--mesh.model", "2", *overrides])
    model, mesh = planned_programs.sizes(settings), make_mesh(2, 2)
    drafter = from_config.drafter_config(settings, model)
    engine = Engine(settings, model, mesh, drafter=drafter, captures_states=captures_states)
    recipe = Recipe.of(settings, model, mesh, 1)
    return settings, memory.within(settings, recipe, drafter, memory.device_memory(mesh)), engine


def budget(settings, recipe, engine) -> dict[str, int]:
    """The memory budget of a run of the engine."""
    return memory.budget(
        settings, recipe, engine.programs.shapes[0], engine.capacity, engine.drafter
    )


def preflight(settings, recipe, engine) -> None:
    """Raises when a run of the engine does not fit."""
    memory.preflight(settings, recipe, engine.programs.shapes[0], engine.capacity, engine.drafter)


@pytest.fixture
def planned():
    return plan_of()


@pytest.mark.parametrize("start", ["hub", "Tengyunw/qwen3_8b_eagle3"])
def test_a_published_drafter_is_planned_without_its_files(start, monkeypatch, capsys):
    """As wide as the policy's layers, with the usual draft vocabulary of published ones."""
    monkeypatch.setattr(hf, "resolve", lambda path: pytest.fail(f"{path} was to be downloaded"))
    words = ["--config", "math_qwen3_8b_h100x8", "--drafter_training.start", start]
    settings = configuration.parse(words)
    model = planned_programs.sizes(settings)
    found = planned_programs.drafter(settings, model)
    assert (found.kind, found.layers.hidden_size, found.draft_vocab_size) == (
        "eagle3",
        4096,
        32_000,
    )
    assert "qwen3" in (said := capsys.readouterr().out).lower() and "a new eagle3 drafter" in said


DRAFTING = "rollout chunk learned:3_2_6 of 4"


class Command(NamedTuple):
    """A run of the command: what it printed, and the programs that it compiled, by name."""

    printed: str
    progress: str
    compiled: dict[str, jax.stages.Compiled]
    plan: tuple


LONG = (
    *("--model.init.head_dim", "32", "--model.init.max_position_embeddings", "4096"),
    *("--train.row_tokens", "0"),
    *("--rollout.max_new_tokens", "4080", "--speculation.strategies", "['3_2_6']"),
)


@pytest.fixture(
    scope="module",
    params=[
        "eagle3",
        *(pytest.param(one, marks=pytest.mark.matrix) for one in ("eagle", "dspark")),
    ],
)
def ran(request):
    """The command on an adaptive drafter and long answers."""
    adaptive = "--speculation.drafter", "adaptive", "--drafter_training.kind", request.param
    unroll = "0" if request.param == "dspark" else "1"
    short = "--drafter_training.unroll", unroll, "--speculation.strategies", "['learned:3_2_6']"
    words, found, compiled = [*LONG, *adaptive, *short], [], {}
    compile_one, print_one = jax.stages.Lowered.compile, report.print_report

    def kept(lowered, *given, **options):
        found.append(compile_one(lowered, *given, **options))
        return found[-1]

    def print_report(program, *given):
        outcome = print_one(program, *given)
        compiled[program.name] = found[-1]
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["plan", *TINY, "--mesh.model", "2", *words])
        patch.setattr(jax.stages.Lowered, "compile", kept)
        patch.setattr(report, "print_report", print_report)
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as progress:
            assert command.main() == 0
    plan = plan_of(*words, captures_states=True)
    return Command(out.getvalue(), progress.getvalue(), compiled, plan)


def crossed(compiled, mesh) -> set[str]:
    """The axes that the collectives of a program cross."""
    return {name.split(" over ")[1] for name in collectives(compiled.as_text(), mesh)}


def test_bytes_of_one_device_are_those_of_its_shards():
    mesh = make_mesh(2, 4)
    leaf = jax.ShapeDtypeStruct(
        (8, 16), jnp.bfloat16, sharding=sharding(mesh, ("embed", "mlp"), "train")
    )
    assert memory.device_bytes({"a": leaf, "b": leaf}) == 2 * (8 // 2) * (16 // 4) * 2


def test_the_optimizer_is_twice_the_weights_and_the_cache_is_worked_by_hand(planned):
    settings, recipe, engine = planned
    kinds = budget(settings, recipe, engine)
    assert kinds["optimizer"] == pytest.approx(2 * kinds["weights"], rel=0.01)
    layers, heads_each, width = 2, 1, 8
    slots = memory.cache_slots(settings) + 8
    assert kinds["cache"] == 2 * layers * engine.capacity * heads_each * slots * width * 4
    assert engine.capacity == 4 * 2 // 2


def test_a_reference_policy_and_longer_evaluations_are_counted_and_their_programs_planned():
    more = "--algorithm.kl_coef", "0.1", "--eval.every", "5", "--eval.max_new_tokens", "120"
    (settings, recipe, engine), plain = plan_of(*more), plan_of()
    kinds, without = budget(settings, recipe, engine), budget(*plain)
    assert kinds["reference"] == kinds["weights"] and "reference" not in without
    assert all("reference" in phase for phase in memory.phases(kinds).values())
    longest = settings.data.max_prompt_tokens + 120
    assert memory.cache_slots(settings) == longest > memory.cache_slots(plain[0])
    assert kinds["cache"] * (memory.cache_slots(plain[0]) + 8) == without["cache"] * (longest + 8)
    names = [program.name for program in planned_programs.lower(settings, recipe, engine, kinds)]
    assert "log-probs" in names
    assert "log-probs" not in [one.name for one in planned_programs.lower(*plain, without)]


def test_a_teacher_is_planned_and_the_drafter_that_learns_from_it_reads_its_tokens(tmp_path):
    plain = plan_of()
    raw = plain[0].model.init | {"architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    more = "--algorithm.teacher.path", str(tmp_path), "--algorithm.teacher.top_k", "8"
    adaptive = "--speculation.drafter", "adaptive", "--drafter_training.share", "0.5"
    for share in (0.0, 0.5):
        whole = plan_of(*more, *adaptive, "--algorithm.teacher.drafter", str(share))
        found = {one.name: one for one in planned_programs.lower(*whole, budget(*whole))}
        assert "log-probs of the teacher" in found
        ids = found["drafter update"].lower.args[2].teacher_ids
        assert (ids is not None and ids.shape[-1]) == (8 if share else False)
    assert "log-probs of the teacher" not in [
        one.name for one in planned_programs.lower(*plain, budget(*plain))
    ]


def test_answers_of_several_turns_plan_whole_conversations_and_the_widest_reply():
    long = "--rollout.max_new_tokens", "470"
    settings, recipe, engine = plan_of(*long, "--environment.path", "module:World")
    lowered = planned_programs.lower(settings, recipe, engine, budget(settings, recipe, engine))
    programs = {one.name: one.lower.args[0] for one in lowered if not one.lower.keywords}
    slots = memory.cache_slots(settings)
    assert slots == 512 and programs["prefill"] == Prefill(0, 4, slots)
    assert programs["append"] == Append(StateShape(0, engine.capacity, slots), 4, 256)
    memory_of = engine.programs.lower(programs["append"]).compile().memory_analysis()
    assert memory_of.alias_size_in_bytes > 0, "the state is donated"
    plain = plan_of(*long)
    assert "append" not in [one.name for one in planned_programs.lower(*plain, budget(*plain))]


def test_a_drafter_has_its_own_lines_worked_by_hand():
    settings, recipe, engine = plan_of(*DRAFTERS["eagle3"])
    kinds, plain = budget(settings, recipe, engine), budget(*plan_of())
    slots, batch, bytes_each = memory.cache_slots(settings) + 8, engine.capacity, 4
    # Two layers, both read; halved over `model`.
    assert kinds["features"] == batch * slots * 2 * 32 * bytes_each // 2
    history, built, hidden = batch * slots * 4, batch * 4, batch * 32 * bytes_each
    assert (
        kinds["drafter cache"]
        == 2 * 1 * batch * 1 * slots * 8 * bytes_each + history + built + hidden
    )
    # fc, q, k, v, o, gate, up, down and head are halved over `model` where heads, mlp or vocabulary lie on it
    matrices = 32 * 64 + (32 * 64 + 2 * 16 * 64 + 32 * 32 + 3 * 64 * 32 + 64 * 32) // 2
    norms = 2 * 32 + 4 * 32
    assert kinds["drafter copy"] == (matrices + norms + 64) * bytes_each
    assert {kind: kinds[kind] for kind in plain} == plain
    assert set(kinds) - set(plain) == {
        "features",
        "drafter",
        "drafter copy",
        "drafter cache",
    }


@pytest.mark.parametrize("drafter", [*DRAFTERS, None])
def test_captured_states_are_a_line_of_their_own_and_of_eagle_they_are_the_features(drafter):
    overrides = DRAFTERS.get(drafter, ())
    plain = budget(*plan_of(*overrides))
    settings, recipe, engine = plan_of(*overrides, captures_states=True)
    states = engine.capacity * (memory.cache_slots(settings) + 8) * 32 * 4 // 2  # over `model`
    expected = plain | ({} if drafter == "eagle" else {"states": states})
    kinds = budget(settings, recipe, engine)
    assert kinds == expected and "states" not in plain
    assert ("states" in memory.phases(kinds)["rollout"]) == (drafter != "eagle")


def test_n_grams_hold_texts_only():
    settings, recipe, engine = plan_of(*DRAFTERS["ngram"])
    kinds = budget(settings, recipe, engine)
    texts = engine.capacity * (memory.cache_slots(settings) + 8 + ngram_memory.POOL) * 4
    assert kinds == budget(*plan_of()) | {"drafter cache": texts}


def test_a_drafters_arrays_count_before_a_run_starts(monkeypatch):
    settings, recipe, engine = plan_of(*DRAFTERS["eagle3"])
    rollout, update = memory.phases(budget(settings, recipe, engine)).values()
    assert {"drafter", "drafter copy", "drafter cache", "features"} <= set(rollout)
    monkeypatch.setattr(memory, "device_memory", lambda mesh: sum(rollout.values()))
    preflight(settings, recipe, engine)
    monkeypatch.setattr(memory, "device_memory", lambda mesh: sum(rollout.values()) - 1)
    with pytest.raises(ConfigError, match="the rollout does not fit.*drafter cache"):
        preflight(settings, recipe, engine)


def test_a_config_json_is_enough_to_plan_and_without_one_drafter_training_decides(tmp_path):
    path = str(tmp_path / "drafter")
    knobs = (
        "--speculation.drafter",
        path,
        "--drafter_training.kind",
        "eagle3",
        "--drafter_training.vocab",
    )
    drafter = plan_of(*knobs, "50")[2].drafter
    assert (drafter.kind, drafter.draft_vocab_size) == ("eagle3", 50)
    assert save_config(tmp_path / "drafter", drafter) == path
    assert plan_of(*knobs, "60")[2].drafter == drafter
    started = "--speculation.drafter", "runs/nowhere", "--drafter_training.start", path
    assert plan_of(*started)[2].drafter == drafter
    with pytest.raises(ConfigError, match="vocab 60: an eagle drafter proposes every token"):
        plan_of(*DRAFTERS["eagle"], "--drafter_training.vocab", "60")
    with pytest.raises(ConfigError, match="'adaptve' is not a directory: did you mean adaptive"):
        plan_of("--speculation.drafter", "adaptve")


def test_a_directory_of_a_drafter_may_have_any_name(tmp_path, monkeypatch):
    (tmp_path / "ngrams").mkdir()
    monkeypatch.chdir(tmp_path)
    named = schema.Config(speculation=schema.Speculation("ngrams"))
    assert from_config.drafter_directory(named) == Path("ngrams")


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_a_block_drafter_is_drafted_with_and_trained_further(tmp_path, kind):
    model = planned_programs.sizes(configuration.parse(TINY))
    path = save_config(tmp_path / "own", drafters.for_policy(model, kind))
    engine = plan_of("--speculation.drafter", path)[2]
    assert engine.drafter.kind == kind
    start = "--speculation.drafter", "adaptive", "--drafter_training.start", path
    assert plan_of(*start)[2].drafter == engine.drafter
    with pytest.raises(ConfigError, match=f"unroll 3: a {kind} drafter drafts all positions"):
        plan_of(*start, "--drafter_training.unroll", "3")


def test_a_new_drafter_is_of_eagle_3_1_or_has_two_layers_and_a_block_of_eight():
    drafter = plan_of("--speculation.drafter", "adaptive")[2].drafter
    assert drafter.kind == "eagle3" and drafter.fc_norm and drafter.norm_output
    new = "--speculation.drafter", "adaptive", "--drafter_training.kind", "dspark"
    found = plan_of(*new)[2].drafter
    assert (found.kind, found.layers.num_layers, found.block_size) == ("dspark", 2, 8)


@pytest.mark.parametrize("wanted, policy, expected", [
    (0, 128, 128), (0, 49_152, 32_000), (49_152, 49_152, 49_152), (60_000, 49_152, 49_152), (50, 128, 50),
])  # fmt: skip
def test_a_new_eagle3_drafter_proposes_as_many_tokens_as_published_ones_by_default(
    wanted, policy, expected
):
    settings = configuration.parse([*TINY, "--drafter_training.vocab", str(wanted)])
    model = replace(planned_programs.sizes(settings), vocab_size=policy)
    assert from_config.new_drafter_config(settings, model).draft_vocab_size == expected


def test_an_adaptive_drafter_is_planned_as_training_begins_it(tmp_path):
    adaptive = ("--speculation.drafter", "adaptive")
    kind = ("--drafter_training.kind", "eagle3", "--drafter_training.vocab", "50")
    settings, recipe, engine = plan_of(*adaptive, *kind)
    assert (engine.drafter.kind, engine.drafter.draft_vocab_size) == ("eagle3", 50)
    loaded = from_config.load_drafter(settings, recipe.model, recipe.mesh)
    assert loaded == (engine.drafter, None) and engine.basis["drafter"] == "eagle3"

    path = save_config(tmp_path / "begun", engine.drafter)
    begun = plan_of(*adaptive, "--drafter_training.start", path)[2]
    assert begun.drafter == engine.drafter

    kinds, alone = budget(settings, recipe, engine), plan_of(*DRAFTERS["eagle3"], *kind[2:])
    learned = budget(*alone)
    pool = 4 * ngram_memory.POOL * engine.capacity  # bytes that n-grams are given
    assert kinds.pop("drafter cache") == learned.pop("drafter cache") + pool
    assert all("drafter optimizer" in held for held in memory.phases(kinds).values())
    moments = kinds.pop("drafter optimizer")
    assert moments == pytest.approx(2 * kinds["drafter"], rel=0.1)
    state = kinds["drafter"] + moments  # sharded over two data groups; a copy is not
    assert state < kinds.pop("drafter in training") <= 2 * state
    # One of each data group; two layers are read, and the last state.
    row = packing.row_tokens(settings)
    assert kinds.pop("drafter features") == row * (2 + 1) * 32 * 4
    assert kinds == learned
    preflight(settings, recipe, engine)


def test_strategies_reach_the_batches_that_the_tuners_use_them_for():
    """Worked by hand for fixed rules; no tuner leaves it when measured speeds make every arm the best one in turn."""
    names, batches = ["2_2_4", "4_2_8", "6_4_16", "8_4_48"], [1, 4, 16, 64, 256]
    arms = parse_arms(names)
    expected = {
        "fixed": [256, None, None, None],
        "goodput": [256, 64, 64, 16],
        "threshold:30": [64, 16, 4, 1],
        "beg_mab": [256, 16, 4, 1],
    }
    for name, largest in expected.items():
        settings = schema.Speculation(drafter="ngram", tuner=name, strategies=names)
        tuner = make.make_tuner(settings, arms, is_cpu=False)
        reach = make.largest_batches(tuner, batches)
        assert [reach.get(arm) for arm in arms] == largest, name
        used: dict = {}
        for best in arms:
            state = tuner.init()
            for live in np.repeat([*range(1, 80), *range(80, 257, 8)], 3).tolist():
                batch = next(size for size in batches if size >= live)
                state, choice = tuner.choose(state, live, batch, 512)
                used[choice.strategy] = max(used.get(choice.strategy, 0), batch)
                arm, tokens = choice.strategy, 5 * live if choice.strategy == best else live
                hits = np.zeros((max(arm.depth, 1), arm.nodes, max(arm.topk, 1)))
                hits[:, 1:2, :1] = tokens / live - 1
                state = tuner.observe(
                    state, Measurement(0, batch, live, 512, arm, 1, live, tokens, 0.1, hits)
                )
        used.pop(PLAIN, None)
        assert all(batch <= reach.get(arm, 0) for arm, batch in used.items()), name
        assert name == "goodput" or used == reach, name


def test_plain_decoding_only_reduces_over_model_whatever_a_drafter_wants_to_see(ran):
    """Features are sharded over `model`, the states they copy are not; a drafter gathers only its windows."""
    _, _, engine = plan_of(*LONG)
    key = Decode(StateShape(0, 4, 4096), 4, params=DecodingParams(eos_ids=(1,)))
    plain = engine.programs.lower(key).compile()
    counted = [
        Counter(collectives(one.as_text(), engine.groups[0]))
        for one in (plain, ran.compiled["rollout chunk"], ran.compiled[DRAFTING])
    ]
    assert counted[0] == counted[1]
    kinds = [{name.split(" over ")[0] for name in one} for one in counted[1:]]
    assert kinds == [{"all-reduce"}, {"all-reduce", "all-gather"}]


def test_the_largest_kind_names_the_knob():
    for kind, knob in (
        ("cache", "rollout.slots"),
        ("logits chunk", "mesh.model"),
        ("optimizer", "mesh.data"),
    ):
        assert knob in memory.advice({"weights": 1, kind: 2})


def assert_stays_in_its_group(name, compiled, engine) -> None:
    assert crossed(compiled, engine.groups[0]) <= {"model"}, name
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = set().union(*(one.device_set for one in shardings))
    assert devices == set(engine.groups[0].devices.flat), name


def assert_no_cache_is_copied(chunk, kinds, nodes: int) -> None:
    """Apart from the caches, a chunk needs the memory of attention to many slots, twice."""
    heads, batch, slots = 2, 4, 4096 + 8
    attention, leaf = 2 * batch * heads * nodes * slots * 4, kinds["cache"] / 4  # of two layers
    assert chunk.memory_analysis().temp_size_in_bytes < attention + 0.75 * leaf


def test_a_rollout_with_a_learned_drafter_stays_in_its_data_group_and_copies_no_cache(ran):
    *_, engine = ran.plan
    for name in ("prefill", "admission", "catching up of 4", DRAFTING):
        assert_stays_in_its_group(name, ran.compiled[name], engine)
    nodes = 8 if engine.drafter.kind == "dspark" else 6
    assert_no_cache_is_copied(ran.compiled[DRAFTING], budget(*ran.plan), nodes)


@pytest.mark.parametrize("drafter", ["ngram", "dspark"])
def test_other_drafters_stay_in_their_data_group_and_copy_no_cache(drafter, tmp_path):
    drafting = DRAFTERS[drafter]
    if drafter == "dspark":
        model = planned_programs.sizes(configuration.parse([*TINY, *LONG]))
        own = drafters.for_policy(model, "dspark")
        drafting = "--speculation.drafter", save_config(tmp_path / "own", own)
    settings, recipe, engine = plan_of(*LONG, *drafting)
    kinds = budget(settings, recipe, engine)
    _, _, _, *behind, chunk = planned_programs.lower_rollout(settings, recipe, engine, kinds)
    assert [one.name for one in behind] == ["catching up of 4"] * (drafter != "ngram")
    assert chunk.name == "rollout chunk 3_2_6 of 4"
    for program in (*behind, chunk):
        assert_stays_in_its_group(program.name, compiled := program.lower().compile(), engine)
    assert_no_cache_is_copied(compiled, kinds, 8 if drafter == "dspark" else 6)


def test_catching_up_takes_a_bounded_number_of_tokens_at_a_time():
    """Beyond that its temporaries do not grow with the sequences, and it copies no cache."""
    sizes = {}
    for slots in (16, 64):
        settings, _, engine = plan_of(
            *DRAFTERS["eagle"], "--rollout.prompts", "64", "--rollout.slots", str(slots)
        )
        key = CatchUp(StateShape(0, slots, 1024))
        sizes[slots] = engine.programs.lower(key).compile().memory_analysis().temp_size_in_bytes
    assert sizes[64] < 1.5 * sizes[16]


def test_an_admission_holds_the_prompts_that_join_and_no_cache():
    _, _, engine = plan_of(*DRAFTERS["eagle"], "--rollout.prompts", "64", "--rollout.slots", "64")
    lowered = engine.programs.lower(Admit(StateShape(0, 64, 1024), Prefill(0, 1, 128)))
    held = lowered.compile().memory_analysis()
    joining = held.argument_size_in_bytes * admission_size(64) / 64 * 128 / 1024
    assert joining < held.argument_size_in_bytes / 30 and held.temp_size_in_bytes < 1.5 * joining


def test_the_best_of_a_sharded_axis_are_those_of_the_whole_and_ties_go_to_the_first():
    group = make_mesh(1, 4)
    values = np.random.RandomState(0).randint(0, 6, (3, 2, 24)).astype(np.float32)
    values[0, 0] = -np.inf
    placed = jax.device_put(values, sharding(group, (None, None, "vocab"), "rollout"))
    for k in (1, 3, 6, 7):
        found = jax.jit(lambda values, k=k: tree_drafter.top_k(values, k, group))(placed)
        jax.tree.map(np.testing.assert_array_equal, tuple(found), tuple(jax.lax.top_k(values, k)))


def test_the_command_compiles_every_program_and_says_that_it_fits(ran):
    names = list(ran.compiled)
    assert names == [
        "prefill", "admission", "rollout chunk", "catching up of 4", DRAFTING, "harvest", "rollout reshard",
        "policy gradients", "policy update", "drafter reshard", "drafter copies",
        "drafter micro-step", "drafter merge", "drafter update",
    ]  # fmt: skip
    assert ran.printed.count("\n  fits") == len(names) and "DOES NOT FIT" not in ran.printed
    count = len(names)
    assert re.findall(r"^compiling (.*), (\d+) of (\d+) programs left$", ran.progress, re.M) == [
        (name, str(count - done), str(count)) for done, name in enumerate(names)
    ]
    head, *rows = ran.printed.partition("\nprogram ")[2].splitlines()
    capacity = float(re.search(r"GiB of ([\d.]+) ", head)[1])
    for name, row in zip(names, rows, strict=True):
        assert row.startswith(f"{name} ")
        needed = float(re.search(rf"^{name}: .*?= ([\d.]+) GiB", ran.printed, re.M | re.S)[1])
        shown, margin = re.search(r"([\d.]+) +([\d.]+)%  -$", row).groups()
        assert float(shown) == needed
        assert float(margin) / 100 == pytest.approx(1 - needed / capacity, abs=0.01)


def test_the_seconds_by_bytes_are_those_of_the_bytes_that_a_program_moves():
    """Worked by hand: a sum reads two arrays and writes one; a loop of ten passes counts as one."""
    numbers = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)

    def shown(function, *arrays, layers=0) -> str:
        lowered = jax.jit(function).lower(*arrays)
        program = report.PlannedProgram("it", lambda: lowered, make_mesh(1, 1), {}, layers)
        compiled = lowered.compile()
        return report.by_bytes(program, compiled, compiled.as_text(), 3 * 4 * 2.0**20)

    assert shown(jnp.add, numbers, numbers) == "1.00000"
    assert shown(jnp.add, numbers, numbers, layers=2) == "1.00000 a round"
    looped = shown(lambda x: jax.lax.fori_loop(0, 10, lambda _, y: jnp.sin(y) * 2, x), numbers)
    assert looped.startswith("> ") and 0.5 < float(looped[2:]) < 2


def test_idle_training_is_planned_and_no_collective_of_it_crosses_data_groups(ran):
    """Except those of the copies and the merge, which are programs of the whole mesh."""
    (_, recipe, engine), kinds = ran.plan, budget(*ran.plan)
    assert kinds["drafter in training"] > kinds["drafter"]
    assert "drafter in training" in memory.phases(kinds)["rollout"]
    for name in ("harvest", "drafter micro-step"):
        assert crossed(ran.compiled[name], engine.groups[0]) <= {"model"}, name
    for name in ("drafter update", "drafter merge"):
        assert any("data" in axes for axes in crossed(ran.compiled[name], recipe.mesh)), name


def test_a_program_that_does_not_fit_is_reported_with_the_knob(planned, capsys):
    settings, recipe, engine = planned
    kinds = budget(settings, recipe, engine)
    program = next(planned_programs.lower(settings, recipe, engine, kinds))
    assert not report.print_report(program, limit=10).fits
    assert "DOES NOT FIT: the largest are the" in capsys.readouterr().out
