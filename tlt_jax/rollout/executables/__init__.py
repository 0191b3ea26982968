"""The rollout's programs: their definitions, compilation, caches and compile costs."""
