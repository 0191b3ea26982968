"""The adaptive rollout engine, host side: who decodes what, when, with which programs.

Public: engine.Engine, request.RolloutRequest, driver (start, run, Rollout), events, state.GroupContext,
planner.Planner, queue.WorkQueue, recorder (Completion, RolloutResult). The machine of one group (group), its
programs and their executables are private to the package, but for the command `plan` and train.memory.
"""
