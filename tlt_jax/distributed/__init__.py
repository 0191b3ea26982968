"""The processes of a job, the device mesh with its data groups, the board, device descriptions, and collectives.

Public: process (set_environment, Preemption), mesh, board, topology, collectives, launches, traffic.
"""
