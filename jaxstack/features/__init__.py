"""The features of a model: each is a function that takes a family and returns a family, see `models.family`."""
