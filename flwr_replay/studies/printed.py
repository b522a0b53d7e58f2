"""What a paper prints of a study's section, beside what its runs found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from flwr_replay.report.charts import Row
from flwr_replay.report.comparison import interval, markdown_table
from flwr_replay.report.forgetting import after_last_visits

__all__ = ["Printed"]


@dataclass(frozen=True, kw_only=True)
class Printed:
    """Numbers that a paper prints of a section, in the unit of ours."""

    source: str  # Qu et al. 2022, Table 2
    values: Mapping[str, str]  # by method, with the paper's digits: 7.60 ± 0.03
    of: str = "metric"  # or an attack: its PSNR, in dB; or "forgetting": by data and visit, "a after b"

    def beside(self, report: Mapping[str, Any], attacks: Sequence[Mapping[str, Any]]) -> dict[str, Row]:
        """Return what the section's runs found, by seed, each with the paper's mean as its mark.

        `report` is the section's comparison, `attacks` are what `flwr_replay.studies.leakage.attacked` returns of it.
        """
        measured: dict[str, dict[str, float]] = {}
        if self.of == "metric":
            known = [
                (label, seed, value)
                for label, row in report["strategies"].items()
                for seed, value in row["values"].items()
            ]
        elif self.of == "forgetting":
            known = [
                (f"{data} after {visit}", cell["seed"], value)
                for cell in report["cells"]
                for (data, visit), value in after_last_visits(cell.get("result", {}).get("forgetting")).items()
            ]
        else:
            lines = [line for line in attacks if line["attack"] == self.of and line.get("scores")]
            known = [(line["label"], line["seed"], line["scores"]["psnr"]) for line in lines]
        for name, seed, value in known:
            if isinstance(value, float):  # not of an institution that was away, nor of an exact image
                measured.setdefault(name, {})[str(seed)] = value
        return {
            name: Row(measured[name], fmean(own := [*measured[name].values()]), interval(own), _mean(printed))
            for name, printed in self.values.items()
            if name in measured
        }

    def table(self, rows: Mapping[str, Row]) -> list[str]:
        """Write the paper's numbers, ours and their differences as a Markdown table; `rows` are of `beside`."""
        lines = []
        for name, printed in self.values.items():
            ours = ["–", "–"]
            if row := rows.get(name):
                values = [*row.values.values()]
                spread = f" ± {stdev(values):.4f}" if values[1:] else ""
                ours = [f"{row.mean:.4f}{spread}", f"{row.mean - _mean(printed):+.4f}"]
            lines.append([name, printed, *ours])
        return markdown_table(["of", "paper", "ours", "difference"], lines)


def _mean(printed: str) -> float:
    return float(printed.partition(" ")[0])
