"""Masked language modelling: some tokens of a window are hidden, and they are the targets of the loss.

Which tokens, and what replaces them, depends on the seed and the number of the sequence alone. So it depends neither on
the mesh, nor on gradient accumulation, nor on the sequences that were read before.
"""

from dataclasses import dataclass

import numpy as np

Batch = dict[str, np.ndarray]

_STREAM = 1  # keeps these draws apart from those of an epoch's order, which are seeded with two numbers


@dataclass(frozen=True)
class Masking:
    """The masking of BERT (Devlin et al. 2018, arXiv:1810.04805, section 3.1 and appendix A).

    Each token is chosen with the probability `share`. Of the chosen tokens, 80% become `mask_id`, 10% a random token
    below `vocab_size`, and 10% stay as they are. Only chosen tokens count in the loss.
    """

    share: float
    mask_id: int
    vocab_size: int

    def apply(self, batch: Batch, sequences_B: np.ndarray, seed: int) -> Batch:
        """Returns a batch of windows with masked `tokens`, the original ones as `targets`, and their `loss_weights`.

        Args:
          batch: from `windows.batches`; arrays other than these three stay as they are.
          sequences_B: number of the sequence of each row.
          seed: 0 or more.
        """
        targets = batch["tokens"]
        generators = [np.random.default_rng([seed, number, _STREAM]) for number in sequences_B.tolist()]
        draw_BS = np.stack([rng.random(targets.shape[1]) for rng in generators])
        random_BS = np.stack(
            [rng.integers(self.vocab_size, size=targets.shape[1], dtype=np.int32) for rng in generators]
        )
        tokens = np.where(draw_BS < 0.9 * self.share, random_BS, targets)
        tokens[draw_BS < 0.8 * self.share] = self.mask_id
        return batch | {
            "tokens": tokens,
            "targets": targets,
            "loss_weights": (draw_BS < self.share).astype(np.float32),
        }
