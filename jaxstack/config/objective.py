"""What a model is trained for: its losses, and their names and units in logs and reports."""

from typing import NamedTuple


class Term(NamedTuple):
    """One of the losses that an objective adds up: a mean over the tokens of its own weights.

    Attributes:
      name: name of the sum, among the sums that the family's `loss` returns.
      weights: name of the array of a batch that has the weight of each token [B, S].
      scale: factor of the mean in the objective. With 0 the mean is only logged, under its own name.
    """

    name: str = "loss"
    weights: str = "loss_weights"
    scale: float = 1.0


class Objective(NamedTuple):
    """What a model is trained for. Steps, evaluations, plans, logs and reports read it.

    Attributes:
      loss: name of the held-out loss.
      unit: unit of the loss; losses with different units cannot be compared.
      accuracy: what the share of right predictions is called, or `None` if it is not computed.
      terms: the losses whose sum is the objective. The weights of the first one count a step's tokens.
    """

    loss: str
    unit: str
    accuracy: str | None = None
    terms: tuple[Term, ...] = (Term(),)

    @property
    def logged_terms(self) -> list[Term]:
        """The terms whose means are logged: all but the only part of a loss, which is the loss itself."""
        several = sum(term.scale > 0 for term in self.terms) > 1
        return [term for term in self.terms if several or not term.scale]


OBJECTIVES = {
    "decoder": Objective("held-out loss", "nats per token"),
    "encoder_decoder": Objective("held-out loss", "nats per token"),
    "diffusion": Objective("held-out denoising loss", "squared error per value"),
}
"""The objectives by the value of `model.family`, but for encoders, which may have labels."""


def contrastive_objective(captions: bool, weight: float = 1.0, caption_weight: float = 1.0) -> Objective:
    """Returns the objective of a contrastive model, with factors of its losses, by whether it learns captions."""
    pairs = Term("contrastive", "pair_weights", weight)
    words = Term("caption", "loss_weights", caption_weight)
    terms, unit = ((pairs, words), "nats") if captions else ((pairs,), "nats per pair")
    return Objective("held-out loss", unit, "recall@1 among the texts of a batch", terms)


def objective_of(family: str, labels: bool, label_each: str, sentences: tuple[Term, ...] = ()) -> Objective:
    """Returns the objective of a model by its keys `family`, `labels` and `label_each`, and the terms of sentences."""
    if family != "encoder":
        return OBJECTIVES.get(family, OBJECTIVES["decoder"])
    if not labels:
        right = "accuracy on hidden tokens"
        if sentences:
            return Objective("held-out loss", "nats", right, (Term("masked"), *sentences))
        return Objective("held-out masked-LM loss", "nats per hidden token", right)
    each = {"sequence": "sequence", "token": "word"}[label_each]
    return Objective("held-out classification loss", f"nats per {each}", f"accuracy per {each}")
