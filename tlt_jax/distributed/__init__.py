"""Processes, the device mesh with its data groups, small facts that processes share, devices that are not here, collectives.

Public: process (set_environment, Preemption), mesh, board, topology, collectives, launches.
"""
