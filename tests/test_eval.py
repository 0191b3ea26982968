"""`python -m tlt_jax.eval`: what drafts where nothing is trained."""

from __future__ import annotations

from dataclasses import replace

from tlt_jax import eval, run_folder
from tlt_jax.config import load as configuration


def test_of_an_adaptive_drafter_the_run_s_last_one_drafts_and_before_it_n_grams(tmp_path, capsys):
    told = ["--config", "configs/quickstart.yaml", "--run", str(tmp_path)]
    config = configuration.parse([*told, "--speculation.drafter", "adaptive"])

    def drafter() -> str:
        return eval.with_fixed_drafter(config).speculation.drafter

    assert drafter() == "ngram" and "speculation.drafter is ngram" in capsys.readouterr().err
    run_folder.drafter_export(config).mkdir(parents=True)
    assert drafter() == str(run_folder.drafter_export(config)) in capsys.readouterr().err
    for other in ("none", "a directory"):
        fixed = replace(config, speculation=replace(config.speculation, drafter=other))
        assert eval.with_fixed_drafter(fixed) == fixed
