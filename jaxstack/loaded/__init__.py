"""A trained run in Python: `jaxstack.load` opens it, and `TrainedRun` generates, scores and evaluates."""
