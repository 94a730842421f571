"""How long the answers that are still written will take, judged by the lengths of earlier ones. Pure."""

import bisect
import statistics
from collections.abc import Sequence


def remaining_tokens(written: int, limit: int, earlier: Sequence[int]) -> float:
    """Tokens that an answer of `written` tokens still has to come: the median over the longer ones of `earlier` (sorted lengths), at most up to `limit`.

    Where no earlier answer was longer, as many again as are written: of what has lasted long, nothing else is known.
    """
    longer = earlier[bisect.bisect_right(earlier, written) :]
    more = statistics.median(longer) - written if longer else max(written, 1)
    return min(more, limit - written)
