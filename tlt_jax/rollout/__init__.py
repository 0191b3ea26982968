"""The adaptive rollout engine, host side: schedules the decoding of data groups and compiles their programs.

Public: engine.Engine, request.RolloutRequest, events, recorder (Completion, RolloutResult); in scheduler:
driver (start, run, Rollout), state.GroupContext, planner.Planner and queue.WorkQueue. `scheduler.group`, the
programs and their executables are private to the package, except for the command `plan` and train.memory.
"""
