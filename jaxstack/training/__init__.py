"""The train state, losses, optimizers and the training step; the first parameters of a run, and the run itself."""
