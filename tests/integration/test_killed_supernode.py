"""A SuperNode that is killed while a sum under masks is made, on a real deployment: the others' sum is read."""

import pytest
from deployed import CLINICS, REFUSES, deployed, until

from flwr_replay.files.atomic import read_json
from flwr_replay.files.lines import read_lines
from flwr_replay.report.run_files import read_run_id

FOUR = (*CLINICS, REFUSES, "clinic-d")
SHARED = ("masked=true", "noise=shared", "colluders=0", "dropouts=1", "privacy.sigma=2", "delta=0.001")
SUMS = {  # options, the request, in which exchange one is killed, and how many there are
    "gradients": (("strategy=fedsgd", "dp=gradient"), "differentiate", 2, 3),
    "features": (("strategy=fedstats", "dp=statistics"), "summarise", 1, 1),
}

pytestmark = [pytest.mark.deployment, pytest.mark.xdist_group("deployment")]


@pytest.mark.sampled(1, of="deployments that end")
@pytest.mark.parametrize("sums", SUMS)
def test_a_killed_supernode_costs_no_sum(tmp_path, sums):
    method, stage, exchange, sums_made = SUMS[sums]
    study = (*method, *SHARED, "model.norm=group")
    with deployed(tmp_path, refusing=False, taking_part=FOUR, study=study) as deployment:
        for clinic in FOUR:
            (deployment.place / clinic / "policy.yaml").write_text("masked: true\n")
        ledger = deployment.runs / "killed" / "ledger.jsonl"

        def asked():
            rows = read_lines(ledger) if ledger.exists() else []
            return any(
                (row["institution"], row["stage"], row["round"]) == ("clinic-d", stage, exchange) for row in rows
            )

        with deployment.begun("killed", *study, f"rounds={sums_made}", "evaluate_every=3") as run:
            until(lambda: asked() or run.poll() is not None, 400, deployment.logs)
            deployment.kill("clinic-d")
            output = run.communicate(timeout=500)[0]
        line = f"the sum of exchange {exchange} is read though clinic-d did not answer"
        assert line in output, f"{output}\n{deployment.logs()}"
        assert "no sum can be read" not in output
        result = read_json(deployment.runs / "killed" / "result.json")
        assert (result["rounds"], {failure["institution"] for failure in result["failures"]}) == (
            sums_made,
            {"clinic-d"},
        )
        run_id = read_run_id(deployment.runs / "killed")
        for clinic in FOUR[:3]:
            folder = deployment.state(clinic) / "runs" / run_id
            assert sum(charge["steps"] for charge in read_lines(folder / "privacy.jsonl")) == sums_made
            own = [row["round"] for row in deployment.own_ledger(clinic) if row["field"] == "shares"]
            assert own == [*range(1, exchange + 1)]  # of three nobody may be missing, so no keys are told
