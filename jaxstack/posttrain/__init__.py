"""Training after pretraining: the losses of preferences, reward models and policy gradients, as pure functions."""
