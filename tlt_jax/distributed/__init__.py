"""Processes, the device mesh with its data groups, small facts that processes share, collectives in programs.

Public: process (set_environment, Preemption), mesh, board, collectives.
"""
