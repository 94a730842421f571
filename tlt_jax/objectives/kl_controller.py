"""The adaptive weight of the KL to the reference (Ziegler et al. 2019). Pure Python."""

LARGEST_ERROR = 0.2  # relative, of one step


def adapted(beta: float, kl: float, target: float, sequences: int, horizon: int) -> float:
    """beta · (1 + clip(kl / target − 1, ±0.2) · sequences / horizon): it rises while the KL of a token lies above the target, and falls below it."""
    error = min(max(kl / target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return beta * (1 + error * sequences / horizon)
