"""Which records a block holds, in a few keyed digests: enough to see that two blocks share many of them.

Kept are the distinct records with the lowest digests, and how often each occurs, so that two sketches under one key
sample the same of what both blocks have (bottom-k sketches; Cohen and Kaplan 2007).
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SIZE = 2048
"""Distinct records that a sketch keeps."""
SHARE = 0.1
"""Of the smaller block's records, how many may be in the other one beyond chance."""
CERTAINTY = 4.0
"""By how many standard deviations that must exceed chance; 16 records that are all different and in both do."""
OFTEN = 8
"""How often a record must be expected in the smaller block, for the agreement of counts to be judged by it."""


@dataclass
class Sketch:
    """counts: how often a record occurs, by its hex digest; all of it for the lowest digests, as many as SIZE."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, digest: str) -> None:
        """Counts one more record; digests are all of one length."""
        self.counts[digest] += 1
        if len(self.counts) >= 4 * SIZE:
            self.counts = _lowest(self.counts)

    @property
    def kept(self) -> Counter[str]:
        """The counts of the lowest digests, at most SIZE."""
        return _lowest(self.counts)

    @property
    def whole(self) -> Counter[str]:
        """The same in any order: not sorted again where nothing is left out, since each block meets all others."""
        return self.counts if len(self.counts) <= SIZE else self.kept

    def joined(self, other: "Sketch") -> "Sketch":
        """The sketch of one block at two times, with what it ever held."""
        return Sketch(_lowest(self.kept | other.kept))

    def shares_many(self, *others: "Sketch") -> bool:
        """Whether a block and others, taken as one, have a tenth of the smaller's records in common beyond chance.

        Or whether their counts agree far better than those of blocks drawn apart, as where a block of few kinds of
        records comes again with some left out; see `_agree_too_well`.

        Records of few columns are often equal without being of one person, within a block as between two. A record
        that comes n times here and m times there has n m equal pairs between the blocks, against r m (m - 1) / 2 +
        n (n - 1) / (2 r) within them, where r is the ratio of their sizes. Of blocks drawn apart, whatever their
        distributions are, the difference is at most 0 on average given t = n + m, with a variance of t (t - 1) / 2
        where these are the same. Weights of 1 / (t - 1) keep frequent records from hiding the others.

        Where one side is much smaller, records that come twice on both weigh against what is shared. Given t = 2 the
        average is the same: so the records that come twice at most, in all, are looked at by themselves as well.
        """
        mine, *each = _common_range([sketch.whole for sketch in (self, *others)])
        theirs = sum(each, Counter[str]())
        if not mine or not theirs:
            return False
        smaller, larger = sorted((mine, theirs), key=Counter.total)
        ratio = smaller.total() / larger.total()
        pairs = [(smaller[record], larger[record]) for record in mine.keys() | theirs.keys()]
        rare = [(n, m) for n, m in pairs if n + m <= 2]
        return _share_many(pairs, ratio) or _share_many(rare, ratio) or _agree_too_well(mine, theirs)


def _share_many(pairs: Iterable[tuple[int, int]], ratio: float) -> bool:
    """Of how often each record comes in the smaller block and in the larger; see `shares_many`."""
    beyond, variance, base = 0.0, 0.0, 0.0
    for n, m in pairs:
        weight = 1 / max(n + m - 1, 1)
        beyond += weight * (n * m - (ratio * m * (m - 1) + n * (n - 1) / ratio) / 2)
        variance += weight**2 * (n + m) * (n + m - 1) / 2
        base += weight * n
    return base > 0 and beyond >= max(SHARE * base, CERTAINTY * math.sqrt(variance))


def _common_range(each: Sequence[Counter[str]]) -> list[Counter[str]]:
    """Of each, the digests up to which all are whole."""
    ends = [max(counts) for counts in each if len(counts) >= SIZE]
    return [_up_to(min(ends), counts) for counts in each] if ends else list(each)


def _up_to(end: str, counts: Counter[str]) -> Counter[str]:
    return Counter({digest: count for digest, count in counts.items() if digest <= end})


def _lowest(counts: Counter[str]) -> Counter[str]:
    return Counter({digest: counts[digest] for digest in sorted(counts)[:SIZE]})


def _agree_too_well(mine: Counter[str], theirs: Counter[str]) -> bool:
    """Whether two blocks differ by far less than chance would have it.

    Of blocks drawn apart from one distribution the sum of (n sqrt(1/r) - m sqrt(r))^2 / (n + m) over k records, with r
    the ratio of their sizes, is chi-squared with k - 1 degrees of freedom, and larger where the distributions differ.
    Counts are whole: each point stands for the cell around it, by whose half diagonal the root of the sum is raised.
    """
    share = min(mine.total(), theirs.total()) / (mine.total() + theirs.total())
    pairs = [(mine[record], theirs[record]) for record in mine.keys() | theirs.keys()]
    counts = [(n, m) for n, m in pairs if (n + m) * share >= OFTEN]
    mine_often, theirs_often = sum(n for n, _ in counts), sum(m for _, m in counts)
    if len(counts) < 2 or not mine_often or not theirs_often:
        return False
    root = math.sqrt(mine_often / theirs_often)
    differ = sum((n / root - m * root) ** 2 / (n + m) for n, m in counts)
    cell = sum((root + 1 / root) ** 2 / 4 / (n + m) for n, m in counts)
    by_chance = _chi_squared((math.sqrt(differ) + math.sqrt(cell)) ** 2, freedom=len(counts) - 1)
    return by_chance < math.erfc(CERTAINTY / math.sqrt(2)) / 2


def _chi_squared(value: float, *, freedom: int) -> float:
    """How probable a value or less is, by the series of the incomplete gamma function; 1 beyond the mean, roughly."""
    half, x = freedom / 2, value / 2
    if x >= half:
        return 1.0
    term = total = 1.0
    for place in itertools.count(1):
        term *= x / (half + place)
        total += term
        if term < 1e-12 * total:
            break
    return math.exp(half * math.log(x) - x - math.lgamma(half + 1)) * total
