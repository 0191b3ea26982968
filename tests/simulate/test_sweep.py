"""--sweep and --plot: the values of groups and of any knob, and a picture whose lines are where the numbers are."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from tlt_jax.errors import ConfigError
from tlt_jax.simulate import __main__ as command, parallel, plot, sweep
from tlt_jax.simulate.run import Step

SMALL = """
run: runs/none
mesh: {data: 2, model: 1}
rollout: {prompts: 4, samples: 2, max_new_tokens: 300, chunk: 16}
model: {init: {model_type: qwen2, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 512,
        num_key_value_heads: 2, intermediate_size: 128, max_position_embeddings: 512}}
data: {task: fold}
"""


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("groups=1..6", "groups", ["1", "2", "4", "6"]), ("groups=3,12", "groups", ["3", "12"]),
        ("mesh.data=2..2", "groups", ["2"]), ("rollout.samples=4..16", "rollout.samples", ["4", "8", "16"]),
        ("optim.schedule=a,b,a", "optim.schedule", ["a", "b"]),
    ],
)  # fmt: skip
def test_a_sweep_doubles_between_two_numbers_or_takes_a_list(text, name, values):
    found = sweep.parse(text)
    assert (found.name, found.values) == (name, values)
    assert found.words("8") == ([] if name == "groups" else [f"--{name}", "8"])
    assert found.groups(values[0]) == (int(values[0]) if name == "groups" else 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout.sample=1..4", "unknown knob 'rollout.sample'"), ("groups=0..4", "write groups=A..B"),
        ("groups=1,x", "write groups=A..B or groups=A,B,C"), ("rollout.samples=", "write groups=A..B, or KNOB"),
        ("rollout.samples=4..", "write rollout.samples=A..B"), ("rollout.samples=4,,8", "write rollout.samples=A..B"),
    ],
)  # fmt: skip
def test_a_sweep_that_is_none_is_refused_by_name(text, message):
    with pytest.raises(ConfigError, match=message):
        sweep.parse(text)


def run(tmp_path, *words):
    (tmp_path / "small.yaml").write_text(SMALL)
    return command.main(
        ["--config", str(tmp_path / "small.yaml"), "--steps", "1", "--warm", *words]
    )


def test_a_sweep_over_a_knob_has_a_line_for_each_value_and_a_picture(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(parallel, "cores", lambda: 1)
    png = tmp_path / "pictures/sweep.png"
    words = [
        "--arms",
        "plain,partial",
        "--sweep",
        "rollout.max_new_tokens=100,300",
        "--plot",
        str(png),
    ]
    assert run(tmp_path, *words) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert lines[0] == ["rollout.max_new_tokens", "plain", "s", "gain", "partial", "s", "gain"]
    assert [line[0] for line in lines[1:]] == ["100", "300"]
    assert float(lines[2][1]) > 1.2 * float(lines[1][1]), "longer answers take longer"
    assert Image.open(png).size == (2 * plot.WIDTH // plot.FINE, plot.HEIGHT // plot.FINE)


def test_a_sweep_writes_and_explains_every_value(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(parallel, "cores", lambda: 1)
    path = tmp_path / "out.json"
    words = ["--arms", "plain", "--sweep", "rollout.max_new_tokens=100,300", "--explain"]
    assert run(tmp_path, *words, "--json", str(path)) == 0
    text, found = capsys.readouterr().out, json.loads(path.read_text())
    assert found["inputs"]["sweep"] == "rollout.max_new_tokens" and found["values"].keys() == {
        "100",
        "300",
    }
    table = [line.split() for line in text.splitlines() if line.split()[:1] in (["100"], ["300"])]
    for value, seconds, _ in table:
        mean = found["values"][value]["plain"]["second_half"]["step"]
        assert float(seconds) == pytest.approx(mean, abs=0.006), value
        assert f"rollout.max_new_tokens {value}: where the seconds of a step go" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plot", "x.png"], "--plot x.png is of a sweep: add --sweep"), (["--ahead", "-1"], "--ahead -1: give 0 or more"),
        (["--arms", "async", "--groups", "1"], "use --groups 2 or more"),
        (["--sweep", "rollout.samples=0,1"], "rollout.samples"),
        (["--sweep", "groups=1..4", "--timeline", "x.png"], "--timeline x.png draws one run, and --sweep makes many"),
    ],
)  # fmt: skip
def test_a_mistake_ends_with_one_line_that_names_it(tmp_path, words, message, capsys, monkeypatch):
    monkeypatch.setattr(parallel, "cores", lambda: 1)
    with pytest.raises(SystemExit) as end:
        run(tmp_path, *words)
    error = capsys.readouterr().err
    assert end.value.code == 2 and message in error and error.count("\n") == 1


def step(seconds):
    return Step({"rollout": seconds}, 1, 0.0, 0.0, 0.0, 0.0, {}, 0.0)


def test_a_line_of_the_picture_is_at_its_numbers():
    """Seconds 8, 4 and 2 of plain decoding; each point is in the colour of its arm, at its share of the axis."""
    numbers = [8.0, 4.0, 2.0]
    found = {
        str(at): {"plain": [step(one)], "ngram": [step(one / 2)]} for at, one in enumerate(numbers)
    }
    pixels = plot.draw("groups", found)
    seconds, gains = plot.panels_of(found)
    assert (
        seconds.lines == {"plain": numbers, "ngram": [4.0, 2.0, 1.0]}
        and gains.lines["ngram"] == [2.0] * 3
    )
    low, high, left = (one / plot.FINE for one in (plot.HEIGHT - plot.BOTTOM, plot.TOP, plot.LEFT))
    right = (plot.WIDTH - plot.GAP) / plot.FINE
    for arm, color in zip(("plain", "ngram"), plot.COLORS, strict=False):
        for at, value in enumerate(seconds.lines[arm]):
            x = left + (right - left) * (at + 0.5) / 3
            y = low + (high - low) * value / (1.05 * 8)
            assert np.abs(pixels[round(y), round(x)].astype(int) - color).max() < 40, (arm, at)
    assert len(plot.panels_of({"1": {"ngram": [step(1.0)]}})) == 1, "no gain without plain decoding"
