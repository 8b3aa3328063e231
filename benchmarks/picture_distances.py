"""Measures how far drawn pictures are from pictures of the data."""

import numpy as np


def frechet_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the Frechet distance of two sets of vectors [N, D], by their means and covariances.

    |m - n|^2 + trace(A + B - 2 (A B)^(1/2)) is the squared Wasserstein distance of two normal distributions (Dowson and
    Landau 1982). FID (Heusel et al. 2017, arXiv:1706.08500) takes it of a network's features; here the vectors are
    pixels from 0 to 1.
    """
    (m, a), (n, b) = ((x.mean(0), np.cov(x, rowvar=False)) for x in (one.astype(np.float64), other.astype(np.float64)))
    values, vectors = np.linalg.eigh(a)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    product = np.linalg.eigvalsh(root @ b @ root)  # has the eigenvalues of A B, and is symmetric
    return float(((m - n) ** 2).sum() + np.trace(a) + np.trace(b) - 2 * np.sqrt(product.clip(0)).sum())


def nearest_distances(of: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Returns for each vector [N, D] the Euclidean distance to the nearest one of other vectors [M, D]."""
    of = of.astype(np.float64)
    among = among.astype(np.float64)
    squares = (of**2).sum(1)[:, None] + (among**2).sum(1) - 2 * of @ among.T
    return np.sqrt(squares.min(1).clip(0))


def to_unit(pixels: np.ndarray) -> np.ndarray:
    """Returns pictures [N, H, W, C] from -1 to 1 as vectors [N, H W C] from 0 to 1, clipped to that range."""
    return (pixels.reshape(len(pixels), -1) / 2 + 0.5).clip(0, 1)
