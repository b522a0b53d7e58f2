"""The partition keeps the contract of every partition."""

from flwr_replay.check import check_partition


def test_it_keeps_the_contract():
    check_partition("mypartition:deal")
