"""flwr-replay run --dry-run --study DIR --policy FILE: the data-protection officer's page."""

from collections.abc import Sequence

from flwr_replay.cli.places import absolute, answer
from flwr_replay.config.compose import named_code
from flwr_replay.config.own_code import allow
from flwr_replay.files.atomic import private_folder
from flwr_replay.forecast.officer import findings, planned, study_options
from flwr_replay.report.officer_page import sums, verdict, write_officer_page

__all__ = ["page"]


def page(options: Sequence[str], study: str, policy: str, clinics: str, out: str, as_json: bool) -> int:
    """Write the page, print its verdict, and return the exit code: 1 if the policy refuses something."""
    chosen = study_options(absolute(study)) if study else []
    allow(named_code(options))  # typed here; what a study names came by mail
    simulation, names = planned([*chosen, *options], [name for name in clinics.split(",") if name])
    report = findings(simulation, names, absolute(policy) if policy else None)
    folder = private_folder(absolute(out))
    earlier = " (the earlier one is replaced)" * any(folder.glob("officer.*"))
    html, data = write_officer_page(folder, report)
    reasons = [f"refused: {rule['reason']}" for rule in report["rules"] if rule["reason"]]
    reasons += [f"{field['verdict']}: {field['reason']}" for field in report["fields"] if field["reason"]]
    lines = [verdict(report), *dict.fromkeys(reasons), *sums(report), *report["planned"], report["claim"]]
    lines += [f"the page: {html}{earlier}", f"the same as JSON: {data}"]
    answer(report, "\n".join(lines), as_json)
    return 0 if report["allowed"] else 1
