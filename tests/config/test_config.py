"""The configuration: YAML, overrides, one-line errors, help without JAX, and JAX's environment."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tlt_jax.config import Config, __main__ as page, changes, parse as parsing, validate
from tlt_jax.config.knobs import knobs
from tlt_jax.config.load import (
    CONFIG,
    SHIPPED,
    from_python,
    load,
    parse,
    read,
    read_resolved,
    shipped_configurations,
    to_yaml,
)
from tlt_jax.config.parse import parse_text
from tlt_jax.config.schema import COMMON, Lora
from tlt_jax.distributed import process
from tlt_jax.errors import ConfigError
from tlt_jax.models.architecture import ModelConfig

TLT = [sys.executable, "-c", "from tlt_jax.cli import main; main()"]
MODEL = "model: {init: {model_type: qwen2, hidden_size: 32}}\n"


@pytest.fixture
def write(tmp_path):
    """Writes a configuration file and returns the arguments that name it."""

    def write(text: str = "") -> list[str]:
        path = tmp_path / "config.yaml"
        path.write_text(MODEL + text)
        return ["--config", str(path)]

    return write


@pytest.mark.parametrize(
    ("text", "value"), [("auto", "auto"), ("1", 1.0), ("0.25", 0.25), ("0", 0.0), ("1e-1", 0.1)]
)
def test_a_share_is_a_number_or_auto(write, text, value):
    for config in (
        parse([*write(), "--drafter_training.share", text]),
        parse(write(f"drafter_training: {{share: {text}}}")),
    ):
        share = config.drafter_training.share
        assert share == value and type(share) is type(value)


TAUGHT = "--algorithm.teacher.path t --algorithm.teacher.top_k 8 --algorithm.teacher.drafter 0.5 --drafter_training.share 0.5"


@pytest.mark.parametrize(
    ("words", "message", "is_of_rewards"),
    [
        ("--rollout.temperature 0", "rollout.temperature 0: all answers", False),
        ("--speculation.drafter ngram --drafter_training.share 0.5", "share 0.5 with", False),
        (
            f"{TAUGHT} --drafter_training.share auto",
            "drafter 0.5 with drafter_training.share auto",
            False,
        ),
        (
            f"{TAUGHT} --rollout.temperature 0.7",
            "temperature 0.7: a drafter learns those at 1",
            False,
        ),
        ("--data.train x.jsonl --model.tokenizer t", "reward 'task' scores", True),
        ("--reward.terms {}", "reward.terms is empty", True),
        ("--reward.terms.gsm8 1", "'gsm8', which is not a reward: .*did you mean gsm8k", True),
    ],
)
def test_only_what_a_training_run_cannot_have_is_refused_there(
    words, message, is_of_rewards, write
):
    config, checks = parse([*write(), *words.split()]), [validate.validate_rl]
    for check in [*checks, validate.validate_rewards][: 1 + is_of_rewards]:
        with pytest.raises(ConfigError, match=message):
            check(config)
    if not is_of_rewards:
        validate.validate_rewards(config)
    validate.validate_rl(parse(write()))


def test_a_bare_word_is_a_configuration_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in shipped_configurations():
        assert parse(["--config", name]) == read(SHIPPED / f"{name}.yaml")
    with pytest.raises(
        ConfigError, match="--config quickstrat: no such file, .*: use one of .*quickstart"
    ):
        parse(["--config", "quickstrat"])
    (tmp_path / "quickstart").write_text(MODEL + "run: mine")
    assert parse(["--config", "quickstart"]).run == "mine"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--help"], 0, "  export           Writes the policy or the drafter of a checkpoint"),
        (["--help"], 0, " A small new policy learns to fold lists of digits"),
        ([], 2, "usage: tlt NAME"),
        (["trian"], 2, "tlt has no command 'trian': use one of train,"),
        (["train"], 2, "--config is missing"),
        (["train", "--help"], 0, "--rollout.max_new_tokens"),
        (["generate", "--help"], 0, "usage: python -m tlt_jax.generate"),
    ],
)
def test_tlt_runs_the_commands(words, code, said):
    done = subprocess.run([*TLT, *words], capture_output=True, text=True)
    assert done.returncode == code and said in done.stdout + done.stderr


def test_a_command_shows_its_own_arguments_before_the_knobs(capsys):
    own = CONFIG | {"[--step N]": "the checkpoint"}
    with pytest.raises(SystemExit):
        load(["--help"], command="python -m it", about="It does.", own=own)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: python -m it --config FILE [--step N] [--section.knob VALUE ...]"
    assert lines[2] == "It does."
    places = [lines.index(f"  --step N       {own['[--step N]']}")]
    places += [at for at, line in enumerate(lines) if line.startswith("  quickstart ")]
    places += [at for at, line in enumerate(lines) if line.startswith("  --run ")]
    assert len(places) == 3 and places == sorted(places)


@pytest.mark.parametrize("words", [["--help"], ["train", "--help", "all"]], ids=" ".join)
def test_a_reader_of_the_help_that_has_gone_is_no_error(words):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*TLT, *words], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_tlt_finds_a_module_in_the_current_folder(tmp_path):
    """A console script has the folder of the script on its path, not the current one."""
    script, here = tmp_path / "bin" / "tlt", tmp_path / "here"
    for path in (script, here / "mine.py"):
        path.parent.mkdir()
    script.write_text(TLT[-1])
    (here / "mine.py").write_text("")
    words = ["train", "--config", "quickstart", "--run", "run", "--algorithm.loss", "mine:loss"]
    done = subprocess.run(
        [sys.executable, str(script), *words],
        cwd=here,
        env=os.environ | {"PYTHONPATH": str(SHIPPED.parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "module 'mine' has no function 'loss'" in done.stderr


def test_the_file_changes_defaults_and_the_command_line_changes_the_file(write):
    words = "--rollout.samples 2 --checkpoint.export=false".split()
    got = parse([*write("rollout: {temperature: 0.5, samples: 4}"), *words])
    rollout = got.rollout
    assert (rollout.temperature, rollout.samples, rollout.prompts) == (0.5, 2, 8)
    assert not got.checkpoint.export


def test_overrides_reach_lists_texts_and_keys_of_mappings(write):
    words = "--model.init.rope_scaling.factor 2.0 --reward.terms.my.module:score 1e-1 --run=on"
    stops = "--rollout.stop=['\\n\\n', 'yes']"
    got = parse([*write(), "--run", "0012", stops, *words.split()])
    assert got.rollout.stop == ["\\n\\n", "yes"] and got.run == "on"
    init = {"model_type": "qwen2", "hidden_size": 32, "rope_scaling": {"factor": 2.0}}
    assert got.model.init == init
    assert got.reward.terms == {"task": 1.0, "my.module:score": 0.1}
    assert parse([*write(), "--reward.terms", "{format: 1}"]).reward.terms == {"format": 1.0}
    assert parse([*write(), "--run", "0012"]).run == "0012"


@pytest.mark.parametrize(
    ("section", "mapping"),
    [
        ("model.lora", "{rank: 8, alpha: 1e2}"),
        ("model", "{lora: {rank: 8}, init: {model_type: qwen2, hidden_size: 3_2}}"),
        ("speculation", "{strategies: [6_4_16], tuner: 'threshold:9'}"),
        ("rollout", "{stop: ['1e3'], samples: 4}"),
        ("model.lora", "{}"),
    ],
)
def test_a_section_is_a_mapping_on_the_command_line_as_in_the_file(write, section, mapping):
    got = parse([*write(), f"--{section}", mapping])
    file = Path(write()[-1])
    assert got == from_python(file, {section: parse_text(section, mapping)})
    file.write_text(f"{MODEL if section != 'model' else ''}{section}: {mapping}")
    assert got == read(file)


def test_of_a_section_and_its_knobs_the_later_wins(write):
    words = ["--model.lora.alpha", "4", "--model.lora", "{rank: 8}"]
    assert parse([*write(), *words]).model.lora == Lora(rank=8, alpha=4.0)
    words = ["--model.lora", "{rank: 8, alpha: 2}", "--model.lora.alpha", "4"]
    assert parse([*write(), *words]).model.lora == Lora(rank=8, alpha=4.0)
    words = ["--model.lora.rank", "2", "--model.lora", "{rank: 8}"]
    assert parse([*write(), *words]).model.lora.rank == 8


def test_dotted_names_in_the_file_reach_knobs_and_keys_of_mappings(write):
    text = "rollout.samples: 4\nmodel.init.hidden_size: 64\nreward: {terms.format: 1}"
    got = parse(write(text))
    assert got.rollout.samples == 4 and got.reward.terms == {"task": 1.0, "format": 1.0}
    assert got.model.init == {"model_type": "qwen2", "hidden_size": 64}


def test_small_numbers_without_a_point_are_numbers(write):
    got = parse([*write("optim: {learning_rate: 1e-4}"), "--model.init", "{rms_norm_eps: 1e-6}"])
    assert got.optim.learning_rate == 1e-4 and got.model.init == {"rms_norm_eps": 1e-6}


def test_strategies_need_no_quotes_and_numbers_with_underscores_stay_numbers(write, tmp_path):
    wanted = ["2_2_4", "6_4_16", "0_8_1"]
    text = """
speculation: {strategies: [2_2_4, 6_4_16, 0_8_1]}
sft: {batch: 1_000}
rollout: {stop: ['a: b', '#']}
run: '1e3'
"""
    for value in ("[2_2_4, '6_4_16', 0_8_1]", "[2_2_4,6_4_16,0_8_1]", ""):
        words = [f"--speculation.strategies={value}"] if value else []
        words += ["--rollout.samples", "1_0", "--model.init.hidden_size", "3_2"]
        got = parse([*write(text), *words])
        assert got.speculation.strategies == wanted
        sizes = got.sft.batch, got.rollout.samples, got.model.init["hidden_size"]
        assert sizes == (1000, 10, 32)
        (tmp_path / "resolved.yaml").write_text(to_yaml(got))
        assert read(tmp_path / "resolved.yaml") == got


def test_the_run_of_another_version_is_refused_with_the_knobs_that_are_unknown(write, tmp_path):
    got, path = parse([*write(), "--drafter_training.steps", "7"]), tmp_path / "resolved.yaml"
    path.write_text(to_yaml(got))
    assert differing(got, read_resolved(path, ["--drafter_training.steps", "8"])) == [
        "drafter_training.steps"
    ]
    path.write_text(to_yaml(got).replace("\n  remat:", "\n  rematerialize: false\n  remat:"))
    path.write_text(path.read_text() + "pilot: {pace: 3}\n")
    wanted = "another version of tlt_jax, with model.rematerialize, pilot, .* continue it"
    with pytest.raises(ConfigError, match=wanted):
        read_resolved(path)


@pytest.mark.parametrize(("dtype", "level"), [("float32", "none"), ("bfloat16", "token")])
def test_importance_weights_are_on_in_bfloat16(write, dtype, level):
    got = parse([*write(), "--model.compute_dtype", dtype])
    assert validate.importance(got.algorithm, dtype) == level


WRONG = [
    ("--rollout.temprature 1", "did you mean rollout.temperature?"),
    ("--temperature 1", "unknown knob temperature: did you mean rollout.temperature?"),
    ("--rollout.unlike 1", "unknown knob rollout.unlike: --help all lists every knob"),
    ("--rollout 1", "rollout is a section"),
    ("--model.lora 8", "model.lora is a section: set one of its knobs, for example --model.lora."),
    ('--model.lora {"rnk":8}', "unknown knob model.lora.rnk: did you mean model.lora.rank?"),
    ('--model.lora {"rank":-1}', "model.lora.rank -1 is too small"),
    ('--model.lora {"rank":"8"}', "model.lora.rank '8' has the wrong type: write a whole number"),
    ('--model.lora {"rank":8,"rank":4}', "--model.lora: line 1: rank is given twice: remove one"),
    ('--model.init {"a":8,"a":4}', "--model.init: line 1: a is given twice: remove one"),
    ('--model.lora {"rank":8', "is not valid YAML"),
    ("--rollout.samples", "--rollout.samples has no value"),
    ("--rollout.samples --run x", "--rollout.samples has no value"),
    ("rollout.samples 4", "unexpected argument 'rollout.samples'"),
    ("--rollout.samples 2.5", "rollout.samples 2.5 has the wrong type: write a whole number"),
    ("--rollout.samples many", "rollout.samples 'many' has the wrong type"),
    ("--rollout.temperature warm", "'warm' has the wrong type: write a finite"),
    ("--rollout.temperature .nan", "a finite number"),
    ("--checkpoint.export 1", "checkpoint.export 1 has the wrong type: write true or false"),
    ("--reward.terms [task]", "reward.terms ['task'] has the wrong type: write a mapping"),
    ("--rollout.stop [1", "is not valid YAML"),
    ("--speculation.strategies 6_4_16", "strategies 6_4_16 has the wrong type"),
    ("--speculation.strategies [6.4]", "strategies[0] 6.4 has the wrong type"),
    ("--rollout.samples [6_4_16]", "rollout.samples [6416] has the wrong type"),
    ("--rollout.top_p 0", "rollout.top_p 0.0 is too small: use more than 0"),
    ("--rollout.top_p 1.5", "rollout.top_p 1.5 is too large: use at most 1"),
    ("--rollout.prompts 0", "rollout.prompts 0 is too small: use at least 1"),
    ("--algorithm.advantage gae", "'gae' is not known: use grpo | rloo | dr_grpo"),
    ("--algorithm.loss ppp", "'ppp' is not known: use ppo | gspo | cispo | dppo | sapo | module:"),
    ("--algorithm.kl_in reward", "algorithm.kl_in reward with algorithm.kl_coef 0: nothing is"),
    (
        "--algorithm.clip_dual 3 --algorithm.loss cispo",
        "with algorithm.loss 'cispo', which has no loss of this form to bound",
    ),
    ("--algorithm.clip_dual 3 --algorithm.loss a:b", "algorithm.loss 'a:b', which is yours: use"),
    ("--algorithm.clip_dual 1", "algorithm.clip_dual 1 is not above 1: use a larger one"),
    ("--algorithm.importance_cap 0", "is below 1: use at least 1, or algorithm.importance none"),
    ("--algorithm.importance_mask 1", "algorithm.importance_mask 1 is not above 1"),
    ("--algorithm.importance_veto 1", "algorithm.importance_veto 1 is not above 1"),
    ("--algorithm.importance_veto 2", "importance_veto 2 with algorithm.importance none"),
    ("--algorithm.importance_mask 2", "(auto, in model.compute_dtype float32)"),
    ("--algorithm.importance_mask 2 --algorithm.importance none", "none has no effect"),
    (
        "--algorithm.importance_mask_low 0.5",
        "importance_mask_low 0.5 with algorithm.importance none",
    ),
    (
        "--algorithm.importance_mask_level geometric",
        "importance_mask_level geometric without a mask has no effect",
    ),
    (
        "--algorithm.sapo_positive 2",
        "with algorithm.loss 'ppo' have no effect: set algorithm.loss sapo",
    ),
    ("--algorithm.loss dppo --algorithm.clip_dual 3", "has no loss of this form to bound"),
    ("--algorithm.importance_cap 3", "importance_cap 3 with algorithm.importance none"),
    ("--speculation.tuner a.b:", "'a.b:' is not known: use goodput | threshold"),
    ("--algorithm.advantage a:b", "algorithm.advantage 'a:b' is not known"),
    ("--model.init {}", "model.path and model.init are both empty"),
    ('--data.train x.jsonl --reward.terms {"gsm8k":1}', "data.train 'x.jsonl' needs a tokenizer"),
    ("--data.eval x.jsonl", "data.eval 'x.jsonl' without data.train"),
    ("--rollout.stop ['']", "rollout.stop holds an empty text"),
    ("--train.epochs 2", "train.steps 100 and train.epochs 2 are both set"),
    ("--train.steps 0", "train.steps 0 and train.epochs 0 are both 0"),
    ("--rollout.samples 1", "rollout.samples 1: grpo advantages compare"),
    ("--algorithm.minibatches 3", "minibatches 3: use one of [1, 2, 4, 8]"),
    ("--checkpoint.best_metric eval/pass@4", "use one of eval/mean@1"),
    ("--checkpoint.best_metric eval/mean@1 --eval.every 0", "eval.every is 0"),
    ("--mesh.data 2 --mesh.model 2 --mesh.fake_devices 2", "set mesh.fake_devices 4"),
    ("--mesh.data 2 --train.rows 3", "train.rows 3 does not divide by mesh.data 2"),
    ("--train.row_tokens 128", "use at least 768, or 0"),
    ("--profile.steps 5-3", "profile.steps '5-3' is not a range of steps"),
    ("--optim.beta1 1", "optim.beta1 1.0 is too large: use less than 1"),
    ("--train.seed 4294967296", "train.seed 4294967296 is too large: use at most 4294967295"),
    ("--model.param_dtype bfloat16", "'bfloat16' is not known"),
    ("--drafter_training.share some", "share 'some' is not known: use auto | a number"),
    ("--drafter_training.share 1.5", "share 1.5 is too large: use at most 1"),
    ("--drafter_training.share -1", "share -1.0 is too small: use at least 0"),
    ("--drafter_training.share true", "share True has the wrong type"),
    ("--model.init !include", "could not determine a constructor for the tag"),
    ("--config a.yaml", "--config is given 2 times"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_mistake_is_one_line_that_names_the_value_and_the_change(words, message, write, capsys):
    with pytest.raises(SystemExit) as stop:
        load([*write(), *words.split(" ")])
    error = capsys.readouterr().err
    assert (
        stop.value.code == 2
        and message in error
        and error.startswith("error: ")
        and error.count("\n") == 1
    )


FILES = [
    ("rollouts: {samples: 2}", "unknown knob rollouts"),
    ("rollout: {sample: 2}", "unknown knob rollout.sample: did you mean rollout.samples?"),
    ("rollout: 3", "rollout is a section, not 3"),
    ("rollout:\n  samples: 2\n  samples: 4", "line 4: rollout.samples is given twice"),
    ("rollout: [", "not valid YAML: line 2"),
    ("rollout: {compile_cache: off}", "compile_cache False has the wrong type: write text"),
    ("rollout: {samples: }", "rollout.samples None has the wrong type"),
    ("run: !!python/name:os.getcwd", "for the tag 'tag:yaml.org,2002:python/name:os.getcwd'"),
]


@pytest.mark.parametrize(("text", "message"), FILES)
def test_a_mistake_in_the_file_is_one_line(text, message, write):
    with pytest.raises(ConfigError) as error:
        parse(write(text))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1")
    (tmp_path / "latin.yaml").write_bytes(b"run: \xe9")
    found = {"none": "no such file", "list": "holds a list", "latin": "not UTF-8"}
    for name, message in found.items():
        with pytest.raises(ConfigError, match=message):
            parse(["--config", str(tmp_path / f"{name}.yaml")])
    with pytest.raises(ConfigError, match="--config is missing"):
        parse([])


def test_the_folder_of_a_run_alone_is_its_configuration(write, tmp_path):
    config = parse([*write("train: {steps: 7}"), "--run", str(tmp_path / "elsewhere")])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    words = ["--run", str(tmp_path / "run"), "--train.steps", "9"]
    found = parse(words)
    assert found.train == dataclasses.replace(config.train, steps=9)
    assert dataclasses.replace(found, run=config.run, train=config.train) == config
    assert parse([*write("train: {steps: 3}"), *words[:2]]).train.steps == 3
    with pytest.raises(ConfigError, match="no run is there .no config.yaml.: give the folder"):
        parse(["--run", str(tmp_path / "nowhere")])


def test_help_lists_the_most_used_knobs_a_section_or_all(capsys):
    names = list(knobs(Config))
    for words, shown in (
        (["--help"], set(COMMON)),
        (["--help", "rollout"], {name for name in names if name.startswith("rollout.")}),
        (["--config", "x.yaml", "--help", "--run", "y"], set(COMMON)),
        (["-h", "all"], set(names)),
    ):
        with pytest.raises(SystemExit) as stop:
            load(words)
        text = capsys.readouterr().out
        assert stop.value.code == 0
        assert {name for name in names if f"  --{name} " in text} == shown
    with pytest.raises(SystemExit) as stop:
        load(["--help", "rolout"])
    assert stop.value.code == 2 and "use --help all, or one of" in capsys.readouterr().err


def test_help_lists_every_knob_and_no_configuration_code_imports_jax():
    code = (
        "import sys, json\n"
        "from tlt_jax.config import load\n"
        "from tlt_jax.distributed import process\n"
        "try: load.load(['--help', 'all'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "print(json.dumps([name for name in sys.modules if name.split('.')[0] in ('jax', 'flax', 'orbax', 'torch')]))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *lines, modules = run.stdout.strip().splitlines()
    assert json.loads(modules) == []
    text = "\n".join(lines)
    for name, item in knobs(Config).items():
        assert f"--{name} " in text and item.help.split()[0] in text


@pytest.mark.parametrize(
    "path",
    sorted(
        path
        for folder in ("configs", "benchmarks")
        for path in (Path(__file__).parents[2] / folder).glob("*.yaml")
    ),
    ids=lambda p: p.stem,
)
def test_every_shipped_configuration_is_valid(path):
    assert read(path).run.startswith("runs/")


def differing(ours, theirs) -> list[str]:
    """The knobs that a resumed run may not change without --override."""
    return [one.name for one in changes.changes(ours, theirs)]


def test_differences_are_the_knobs_that_a_resumed_run_may_not_change(write):
    ours = parse(write())
    words = "--rollout.samples 4 --mesh.data 2 --log.trackers [] --train.seed 1"
    theirs = parse([*write(), *words.split()])
    assert differing(ours, theirs) == ["rollout.samples", "train.seed"]
    names = list(knobs(Config))
    for kind in (changes.FREE, changes.OVERRIDABLE):
        assert all(any(name.startswith(one) for name in names) for one in kind)
    both = {one for one in names if one.startswith(changes.FREE)}
    assert not [one for one in both if one.startswith(changes.OVERRIDABLE)]


def test_a_flag_of_true_or_false_needs_no_value(write):
    assert parse([*write(), "--override"]).override
    assert parse([*write(), "--override", "--train.seed", "1"]).override
    assert not parse([*write(), "--override", "false"]).override and not parse(write()).override


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rollout.max_new_tokens 2000", "= 2512, and the model has 2048 positions"),
        ("--eval.max_new_tokens 1600", "= 2112, and the model has 2048 positions"),
        ("--mesh.model 3", "mesh.model 3 does not divide the model .*use one of \\[1, 2, 4\\]"),
        (
            "--mesh.data 3 --mesh.model 3",
            "mesh 3 x 3 needs 9 devices, 8 are available: .* mesh.fake_devices 9",
        ),
        (
            "--mesh.data 5",
            "mesh.data 5 does not divide the model's width 32: use one of \\[1, 2, 4, 8\\]",
        ),
    ],
)
def test_meshes_that_do_not_fit_the_model_are_refused_with_valid_values(words, message, write):
    sizes = ModelConfig("qwen2", 32, 32, 1, 4, 2, 8, 64, max_positions=2048)
    validate.validate_model(parse(write()), sizes, 8)
    with pytest.raises(ConfigError, match=message):
        validate.validate_model(parse([*write(), *words.split()]), sizes, 8)


def test_fake_devices_and_flags_are_set_before_jax_starts(write):
    code = (
        "import sys\n"
        "from tlt_jax.config import load\n"
        "from tlt_jax.distributed import process\n"
        "process.set_environment(load.parse(sys.argv[1:]))\n"
        "assert 'jax' not in sys.modules\n"
        "import jax\n"
        "print(jax.device_count(), jax.default_backend(), jax.config.jax_enable_x64)"
    )
    words = "--mesh.fake_devices 3"
    arguments = [*write(), *words.split(), "--model.param_dtype", "float64"]
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert run.stdout.split() == ["3", "cpu", "True"], run.stderr


def test_a_deterministic_run_asks_xla_for_sums_in_a_fixed_order_and_no_timed_choices(
    write, monkeypatch
):
    """On accelerators; the user's flags take precedence. XLA here knows the flags: it aborts on unknown ones."""
    words, level = "--rollout.deterministic true".split(), "--xla_gpu_autotune_level=2"
    for arguments, expected in (([], set()), (words, {"--xla_gpu_deterministic_ops=true"})):
        monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "XLA_FLAGS": level})
        process.set_environment(parse([*write(), *arguments]))
        flags = os.environ["XLA_FLAGS"].split()
        assert {one for one in flags if "deterministic" in one} == expected
        assert [one for one in flags if "autotune" in one] == [level]
    assert_known(process.DETERMINISTIC_FLAGS)


def assert_known(flags):
    """XLA aborts on an unknown flag, also without accelerators."""
    code = "import jax; print(jax.numpy.ones(2).sum())"
    flags = {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=flags)
    assert run.stdout.split() == ["2.0"], run.stderr


def test_planning_for_a_gpu_compiles_with_the_flags_of_a_run_that_finds_one(write, monkeypatch):
    """Although it runs on a CPU; the user's flags take precedence."""
    name, own = process.ACCELERATOR_FLAGS[0].partition("=")[0], "=of_the_user"
    monkeypatch.setattr(os, "environ", {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": name + own})
    config = parse([*write(), "--rollout.deterministic", "true"])
    process.set_environment(config)
    assert os.environ["XLA_FLAGS"] == name + own
    process.set_accelerator_flags(config)
    flags = [*process.ACCELERATOR_FLAGS[1:], *process.DETERMINISTIC_FLAGS]
    assert os.environ["XLA_FLAGS"].split() == [name + own, *flags]


def test_loops_are_part_of_cuda_graphs_unless_the_user_says_which_commands_are(write, monkeypatch):
    """XLA here knows the flags: it aborts on unknown ones. A process for CPUs alone gets none."""
    name = "--xla_gpu_enable_command_buffer"
    ours, theirs = f"{name}=+WHILE", f"{name}=FUSION,CUBLAS"
    for before, words, expected in (
        ({}, [], [ours]),
        ({"XLA_FLAGS": theirs}, [], [theirs]),
        ({"JAX_PLATFORMS": "cpu"}, [], []),
    ):
        monkeypatch.setattr(os, "environ", before | {"PATH": os.environ["PATH"]})
        process.set_environment(parse([*write(), *words]))
        flags = os.environ.get("XLA_FLAGS", "").split()
        assert [one for one in flags if one.startswith(name)] == expected
    assert_known(process.ACCELERATOR_FLAGS)


def test_the_check_of_cudas_libraries_is_skipped_without_an_nvidia_gpu(tmp_path, monkeypatch):
    gpu, name = tmp_path / "nvidia0", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    monkeypatch.setattr(process, "NVIDIA", (str(tmp_path / "dxg"), str(gpu)))
    for is_there in (False, True):
        monkeypatch.setattr(os, "environ", {})
        process.skip_warnings()
        assert (name in os.environ) == (not is_there)
        gpu.touch()


def test_a_started_jax_with_too_few_devices_is_refused(write, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    process.set_environment(parse([*write(), "--mesh.fake_devices", "8"]))
    with pytest.raises(ConfigError, match="mesh.fake_devices 9, but JAX has made 8 devices"):
        process.set_environment(parse([*write(), "--mesh.fake_devices", "9"]))


def test_the_page_says_what_a_resumed_run_may_change():
    ours = Config()
    for name in knobs(Config):
        theirs = parsing.unflatten(Config, parsing.flatten(ours) | {name: "other"})
        found = changes.changes(ours, theirs)
        said = "yes" if not found else "override" if changes.is_overridable(found[0]) else "no"
        assert page.resume(name).split(";")[0] == said or name == "optim.schedule", name


def test_every_knob_has_a_meaning_and_is_frozen():
    for name, item in knobs(Config).items():
        assert item.help, name
        parsing.checked(name, item, item.default)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().run = "x"
