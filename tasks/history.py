"""What was spent and trained before."""

from dataclasses import dataclass

import pandas as pd


@dataclass(frozen=True)
class History:
    """blocks: columns block, spent_epsilon, spent_delta, cap_epsilon, cap_delta, retired. retrainings: columns
    period, outcome, run_id, epsilon, accuracy, blocks (a text); oldest first. Either may be empty.
    """

    blocks: pd.DataFrame
    retrainings: pd.DataFrame
