"""The adaptive rollout engine, host side: schedules the decoding of data groups and compiles their programs.

Public: engine.Engine, request.RolloutRequest, recorder (events, Completion, RolloutResult), executables.programs; in
scheduler: driver (LocalGroups, run), state.GroupContext, planner.Planner and queue. `scheduler.group` and
executables.compilation are private to the package and its simulation.
"""
