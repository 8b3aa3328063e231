"""The training step: losses, optimizers, the train state, and what a run begins with."""
