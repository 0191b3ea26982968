"""`python -m tlt_jax.eval`: the drafter that an evaluation uses."""

from __future__ import annotations

from dataclasses import replace

from tlt_jax import eval, run_folder
from tlt_jax.config import load as configuration


def test_evaluation_drafts_with_the_drafter_of_the_run_else_with_n_grams(tmp_path, capsys):
    arguments = ["--config", "configs/quickstart.yaml", "--run", str(tmp_path)]
    config = configuration.parse([*arguments, "--speculation.drafter", "adaptive"])

    def drafter() -> str:
        return eval.with_fixed_drafter(config).speculation.drafter

    assert drafter() == "ngram" and "speculation.drafter is ngram" in capsys.readouterr().err
    run_folder.drafter_export(config).mkdir(parents=True)
    assert drafter() == str(run_folder.drafter_export(config)) in capsys.readouterr().err
    for other in ("none", "a directory"):
        fixed = replace(config, speculation=replace(config.speculation, drafter=other))
        assert eval.with_fixed_drafter(fixed) == fixed
