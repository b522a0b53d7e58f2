"""A network's last linear layer, its head, the features that it takes, and heads in closed form.

`B` batch, `F` features, `C` classes.
"""

from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_replay.config.sections import require
from flwr_replay.models.frozen import Frozen
from flwr_replay.models.layers import NORM, Centred

__all__ = ["OF_ALL", "discriminants", "features_of", "linear_head", "nearest_means", "norm_of", "ridge", "variances"]

MARGIN = 4  # by which, on average, a class mean's own logit is above another
OF_NOISE, OF_ALL = 0.25, 0.3  # what is added to each variance: of the noise's norm, and of the mean variance
OF_RIDGE = 0.01  # the latter of ridge regression


def linear_head(model: nn.Module) -> tuple[str, nn.Linear]:
    """Return the last layer of a model, and its name; a ConfigError if that is not linear, or has no bias."""
    name, layer = list(model.named_modules())[-1]
    require(
        isinstance(layer, nn.Linear) and layer.bias is not None,
        f"the head must be a torch.nn.Linear with a bias, the model's last layer; got {type(layer).__name__}: choose "
        "model=gabor, lite0, timm or another with such a head",
    )
    assert isinstance(layer, nn.Linear)
    return name, layer


def features_of(model: nn.Module, x: Tensor, first: bool = False) -> Tensor:
    """Return what a model's head takes, or its first layer with weights, (B, F), of inputs (B, ...).

    The model is in evaluation mode afterwards.
    """
    taken: list[Tensor] = []
    with_weights = (layer for layer in model.modules() if [*layer.parameters(recurse=False)])
    layer = next(with_weights) if first else linear_head(model)[1]
    handle = layer.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    try:
        with torch.inference_mode():
            model.eval()(x)
    finally:
        handle.remove()
    return taken[0]


def norm_of(model: nn.Module) -> float:
    """Return the norm of what a head takes that alone trains, where it is public: `centred` features; else infinity."""
    layers = [layer for layer in model.modules() if not isinstance(layer, nn.Sequential)][:-1]
    fixed = not any(parameter.requires_grad for layer in layers for parameter in layer.parameters())
    inner = [one for layer in layers for one in (layer.stages.modules() if isinstance(layer, Frozen) else [layer])]
    return NORM if fixed and inner and isinstance(inner[-1], Centred) else inf


def nearest_means(mu_CF: NDArray[Any], noise_C: NDArray[Any], least: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the head by which an image is of the class whose mean is nearest (Mensink et al. 2013).

    Parameters
    ----------
    mu_CF : NDArray
        Means of features.
    noise_C : NDArray
        Standard deviation of the noise in each number of a mean. What it adds to squares on average is taken off.
    least : float
        The least mean squared distance of the means from their own mean that logits are scaled by.

    Returns
    -------
    tuple of NDArray
        Weights, (C, F), and biases, (C,).
    """
    by_noise_C = mu_CF.shape[1] * noise_C**2
    squares_C = np.square(mu_CF).sum(1) - by_noise_C
    apart = (squares_C - np.square(mu_CF.mean(0)).sum() + by_noise_C.mean() / len(mu_CF)).mean()
    scale = max(apart, least) / MARGIN
    return mu_CF / scale, -squares_C / 2 / scale


def discriminants(
    mu_CF: NDArray[Any], n_C: NDArray[Any], noise_C: NDArray[Any], products_FF: NDArray[Any], noise: float, least: float
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the head of linear discriminants, with one covariance in all classes, which are equally frequent.

    To each variance 0.3 times their mean is added (`variances`): chosen by validation images of MNIST and CIFAR-10,
    seeds 0 to 2.

    Parameters
    ----------
    mu_CF, noise_C : NDArray
        As of `nearest_means`.
    n_C : NDArray
        Numbers of examples.
    products_FF : NDArray
        Sums of f fᵀ over all examples.
    noise : float
        σ, standard deviation of the noise on their diagonal; beside it there is √2 less.
    least : float
        The least variance.

    Returns
    -------
    tuple of NDArray
        Weights, (C, F), and biases, (C,).
    """
    variance_F, axes_FF = variances(mu_CF, n_C, noise_C, products_FF, noise, least, OF_ALL)
    mu_CF = mu_CF @ axes_FF
    weight_CF = mu_CF / variance_F
    squares_C = (weight_CF * mu_CF).sum(1) - noise_C**2 * (1 / variance_F).sum()
    return weight_CF @ axes_FF.T, -squares_C / 2


def variances(
    mu_CF: NDArray[Any],
    n_C: NDArray[Any],
    noise_C: NDArray[Any],
    products_FF: NDArray[Any],
    noise: float,
    least: float,
    of_all: float,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the variances, (F,), and their axes, (F, F), one a column, of the covariance that all classes share.

    They are its eigenvalues, at least 0. Added to each are 0.25 times the norm of the noise, a symmetric matrix's of
    this size, about √(2F) σ, and a share of the mean variance, `of_all`. Other arguments are as of `discriminants`.
    """
    n, features = n_C.sum(), mu_CF.shape[1]
    within_FF = (products_FF - (mu_CF.T * n_C) @ mu_CF) / n
    variance_F, axes_FF = np.linalg.eigh(within_FF)
    variance_F = np.maximum(variance_F + (n_C * noise_C**2).sum() / n, 0)
    return variance_F + max(OF_NOISE * noise * (2 * features) ** 0.5 / n + of_all * variance_F.mean(), least), axes_FF


def ridge(
    mu_F: NDArray[Any],
    n: float,
    noise_of_mean: float,
    products_FF: NDArray[Any],
    noise: float,
    least: float,
    shared_CF: NDArray[Any],
    mean_C: NDArray[Any],
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the head of ridge regression: of all W and b, that of the least Σ ‖W f + b - y‖² + λ ‖W‖².

    λ / n is what `variances` adds, with 0.01 of the mean variance: as in AdaSSP (Wang 2018, arXiv 1803.02596) it grows
    with the noise's norm, and no noisy eigenvalue is negative. AdaSSP spends ε / 3 on the smallest; this does not.

    Parameters
    ----------
    mu_F, n, noise_of_mean : NDArray, float, float
        Mean of the features of all n examples, and the noise in each of its numbers.
    products_FF, noise, least
        As of `discriminants`.
    shared_CF, mean_C : NDArray
        Covariances of features and targets y, and the targets' means, which the mean features get.

    Returns
    -------
    tuple of NDArray
        W, (C, F), and b, (C,).
    """
    about_all = mu_F[None], np.array([n]), np.array([noise_of_mean])
    variance_F, axes_FF = variances(*about_all, products_FF, noise, least, OF_RIDGE)
    weight_CF = (shared_CF @ axes_FF / variance_F) @ axes_FF.T
    return weight_CF, mean_C - weight_CF @ mu_F
