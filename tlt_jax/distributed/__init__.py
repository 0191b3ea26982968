"""The processes of a job, the device mesh with its data groups, the board, and descriptions of absent devices.

Public: process (set_environment, Preemption), mesh, job, watch, board, topology.
"""
