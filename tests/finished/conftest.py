"""A run of FedAvg on digits, shared by the tests of a file."""

import pytest
from exported_runs import run_at


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("digits")
        result, folder = run_at(
            place, patch, "task=digits", "strategy=fedavg", "task.class_names=[z,o,t,h,f,i,s,v,e,n]"
        )
        yield result, folder
