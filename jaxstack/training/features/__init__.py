"""Features of a training step: each takes the gradients, the objective or the step, and returns one that does more."""
