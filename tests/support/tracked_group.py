"""Tracks a comparison's group and the winner of a search, in a process of its own."""

import json
import logging
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd

from tasks.config.params import Tracking
from tasks.tracking.runs import GroupMember, log_group, log_winner

GROUP = "digits by method"
TABLE = pd.DataFrame({"method": ["dp_sgd", "gep"], "accuracy": [0.75, None]})


def main() -> None:
    """`python -m tests.support.tracked_group ROOT MODE`; writes what each part returned as JSON."""
    root, settings = Path(sys.argv[1]), Tracking.model_validate({"mode": sys.argv[2]})
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    image, table = root / "accuracy.png", root / "table.csv"
    matplotlib.image.imsave(image, np.zeros((4, 4)))
    TABLE.to_csv(table, index=False)
    members = [
        GroupMember("dp_sgd", {"epsilon": 1.0}, {"accuracy": 0.75}, {}),
        GroupMember("summary", {"seeds": 3}, {}, {"methods": TABLE}, {"accuracy": image}, [table]),
    ]
    logged = log_group(GROUP, members, settings, root=root)
    log_winner(root / "artifacts", settings, root=root)
    sys.stdout.write(json.dumps(logged))


if __name__ == "__main__":
    main()
