"""`python -m tlt_jax.eval`: mistakes that it says before it reads a policy."""

from __future__ import annotations

import sys

import pytest

from tlt_jax import eval


def test_a_drafter_that_learns_in_training_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("tlt_jax.cli.set_environment", lambda config: None)
    told = ["--config", "configs/quickstart.yaml", "--speculation.drafter", "adaptive"]
    monkeypatch.setattr(sys, "argv", ["eval", *told])
    with pytest.raises(SystemExit) as stopped:
        eval.main()
    assert stopped.value.code == 2
    assert "give the drafter's directory, or ngram" in capsys.readouterr().err
