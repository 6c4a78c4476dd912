"""ExpertFlow's batch-level accuracy (section 5.2, formula 7): how well the experts of a whole batch were foretold."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def batch_accuracy(true: npt.NDArray[np.bool_], predicted: npt.NDArray[np.bool_]) -> float:
    """Experts both used and predicted, over those used or predicted, in [0, 1]; 1 where there are neither.

    true, predicted: (..., n_layer, n_expert), each matrix the OR over the routing paths of a batch's tokens; the mean
    over leading axes. The formula itself is missing from the text we have, so this is a reading. Element-wise agreement
    is ruled out by the paper's table 1: with 8 tokens on 128 experts, predicting nothing would reach 93 %, and 3 to 6 %
    are reported for the baselines. The share of the used experts that were predicted is unlikely: everything predicted
    would reach 100 %, and the paper's previous-token baseline would be below blind chance in 8 of its 9 settings with
    WMT16. Intersection over union counts both mistakes the paper names (section 3.2.2), mis-prefetched and missed.
    """
    either = np.count_nonzero(true | predicted, axis=(-2, -1))
    both = np.count_nonzero(true & predicted, axis=(-2, -1))
    return float(np.mean(np.where(either > 0, both / np.maximum(either, 1), 1.0)))
