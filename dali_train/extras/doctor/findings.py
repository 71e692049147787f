"""A finding of `dali-train doctor`, and the table of all ranks' findings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["pass", "warn", "fail"]
_WORST: dict[Verdict, int] = {"pass": 0, "warn": 1, "fail": 2}


@dataclass(frozen=True)
class Finding:
    check: str
    verdict: Verdict
    text: str
    remedy: str = ""


def table(gathered: list[tuple[str, list[Finding]]]) -> Iterator[str]:
    """Yield a line for each check; if ranks differ, one line per finding worse than a pass, with its ranks."""
    names = list(dict.fromkeys(finding.check for _, findings in gathered for finding in findings))
    for name in names:
        owners: dict[Finding, list[str]] = {}
        for rank, findings in gathered:
            for finding in findings:
                if finding.check == name:
                    owners.setdefault(finding, []).append(rank)
        worst = max(_WORST[finding.verdict] for finding in owners)
        shown = [finding for finding in owners if _WORST[finding.verdict] > 0] if worst else list(owners)[:1]
        for finding in shown:
            whose = "" if len(owners[finding]) == len(gathered) or not worst else f" ({', '.join(owners[finding])})"
            yield f"{finding.verdict:<4}  {finding.check:<15} {finding.text}{whose}"
            if finding.remedy:
                yield f"      {'':<15} -> {finding.remedy}"
