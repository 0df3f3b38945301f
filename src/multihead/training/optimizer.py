"""AdamW, and the course of the learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

LEAST_RATE = 0.1  # what the rate falls to, as a share of its highest


def make_optimizer(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) whose weight decay acts on matrices and tables alone.

    Biases and the gains of norms have one axis: they are few, and there is no reason to draw them to 0.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95))


def rate_at(step: int, steps: int, warm_up: int) -> float:
    """The learning rate of a step (counted from 0) as a share of its highest.

    It rises evenly over the first `warm_up` steps, then falls as a half cosine (Loshchilov & Hutter 2017) to a tenth.
    """
    if step < warm_up:
        return (step + 1) / warm_up
    share = min(1.0, (step - warm_up) / max(1, steps - warm_up))
    return LEAST_RATE + (1 - LEAST_RATE) * (1 + math.cos(math.pi * share)) / 2
