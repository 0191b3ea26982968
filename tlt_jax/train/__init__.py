"""The RL trainer: training loop, run state, policy update, evaluation, supervised warm start.

Public: loop.train, run_state.RunState, evaluation.evaluate, policy_update, memory.budget; the commands
`python -m tlt_jax.train`, `tlt_jax.train.drafter` and `tlt_jax.train.sft`. Importing it starts nothing.
"""
